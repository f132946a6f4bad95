"""Which splits of a job fit into devices' memory, and which of them are fastest."""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from titan_npu_train.failures import UserError
from titan_npu_train.plan.bounds import least_memory
from titan_npu_train.plan.cost import ATLAS_A3, Cost, Machine, cost
from titan_npu_train.plan.memory import Estimate, estimate
from titan_npu_train.plan.split import Checkpointing, Split, global_rows, split_of

__all__ = ["Candidate", "Found", "candidate_of", "candidates", "gib", "in_words", "search"]

MOST_TENSOR_RANKS = 16
"""Tensor parallelism beyond the devices of one host is not looked at."""

_CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Candidate:
    """A split that could run, what it needs and what it costs."""

    split: Split
    estimate: Estimate
    cost: Cost
    device_memory: int

    @property
    def size(self) -> int:
        """Bytes of the fullest device."""
        return self.estimate.largest.total

    @property
    def fits(self) -> bool:
        return self.size <= self.device_memory

    @property
    def why_not(self) -> str:
        """In words, what is too large; empty if it fits."""
        if self.fits:
            return ""
        largest = self.estimate.largest
        where = f" on pipeline rank {largest.pipeline_rank}" if self.split.pipeline > 1 else ""
        return (
            f"needs {gib(self.size)} GiB of {self.device_memory / 2**30:.3g}{where}: "
            f"{in_words(largest.parts)}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "split": dataclasses.asdict(self.split),
            "name": self.split.name(),
            "fits": self.fits,
            "why_not": self.why_not,
            "options": self.split.options(),
            "memory": self.estimate.to_dict(),
            "cost": self.cost.to_dict(),
        }


@dataclass(frozen=True)
class Found:
    """What a search saw.

    Attributes:
        fitting: fastest first, one a set of degrees.
        too_large: splits that do not fit, each with as little memory as checkpointing and swapping
            leave it.
        hopeless: splits whose least memory (see :mod:`.bounds`) does not fit, by part, however they
            are checkpointed and swapped.
        refused: why splits could not run at all, and which.
        unseen: combinations that would have been slower than those found, and were not looked at.
    """

    fitting: list[Candidate]
    too_large: list[Candidate]
    hopeless: dict[Split, dict[str, float]]
    refused: dict[str, list[Split]]
    unseen: int


def in_words(parts: Mapping[str, float]) -> str:
    """The largest parts, GiB."""
    largest = sorted(parts.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{part.replace('_', ' ')} {gib(size)}" for part, size in largest if size)


def gib(size: float) -> str:
    """Bytes as GiB, with as many digits as a small model needs."""
    return f"{size / 2**30:.{1 if size >= 2**30 else 3}f}"


def candidates(config: Any, world: int, *, swap: bool = True) -> Iterator[Split]:
    """Every split of ``world`` devices for the batch of ``config``, whether it can run or not.

    Degrees are divisors; data parallelism is FSDP; the batch stays as large as it is.
    """
    parallelism, training = config.parallelism, config.training
    model = config.model_spec.model
    batch = global_rows(config, world)
    at_once = training.local_batch_size
    if parallelism.pipeline_parallel_degree > 1:
        at_once = parallelism.pipeline_parallel_microbatch_size
    experts = next((layer.moe.num_experts for layer in model.layers if layer.moe is not None), 1)
    heads = model.layers[0].attention.n_heads
    for pipeline in _divisors(world):
        if pipeline > len(model.layers):
            continue
        for tensor in _divisors(world // pipeline):
            if tensor > MOST_TENSOR_RANKS or heads % tensor:
                continue
            for context in _divisors(world // pipeline // tensor):
                data = world // pipeline // tensor // context
                if batch % data or training.seq_len % (2 * tensor * context):
                    continue
                rows = at_once if batch // data % at_once == 0 else 1
                stage = data * context * tensor
                for expert in _divisors(stage):
                    if experts % expert:
                        continue
                    for policy, swaps in itertools.product(_CHECKPOINTING, (False, True)):
                        if swaps and not swap:
                            continue
                        yield Split(
                            pipeline=pipeline,
                            tensor=tensor,
                            context=context,
                            data=data,
                            expert=expert,
                            rows=rows,
                            microbatches=batch // data // rows,
                            checkpointing=policy,
                            swap=swaps,
                        )


def search(
    config: Any,
    world: int,
    device_memory: int,
    *,
    machine: Machine = ATLAS_A3,
    device: str = "npu",
    wanted: int | None = 8,
    only: Callable[[Split], bool] = lambda split: True,
    progress: Callable[[Split, int, int], None] = lambda split, fitting, seen: None,
) -> Found:
    """Look at splits from the fastest to the slowest, until ``wanted`` of them fit.

    Args:
        config: what is to be trained; its batch is kept, its degrees are not.
        world: devices.
        device_memory: bytes of each.
        machine: what times are of; see :mod:`.cost`.
        device: "npu", "cuda" or "cpu"; swapping gains nothing on "cpu" and is left out.
        wanted: sets of degrees to find, each with the fastest checkpointing and swapping that fits;
            None looks at all.
        only: leaves out splits for which it is false.
        progress: called before a split's memory is estimated, with how many fit and were seen.

    Raises:
        UserError: not a single split could run.
    """
    splits = [s for s in candidates(config, world, swap=device != "cpu") if only(s)]
    costs = {split: cost(config, split, machine) for split in splits}
    # Of two that cost the same (FSDP's communication may be all there is), what recomputes less.
    splits.sort(key=lambda s: (costs[s].total, _CHECKPOINTING.index(s.checkpointing), s.swap, s))
    fitting: dict[tuple, Candidate] = {}
    too_large: dict[tuple, Candidate] = {}
    hopeless: dict[tuple, tuple[Split, dict[str, float]]] = {}
    refused: dict[str, list[Split]] = defaultdict(list)
    problems: dict[tuple, str] = {}
    ended: set[tuple] = set()
    seen = unseen = 0
    for split in splits:
        degrees = _degrees(split)
        if degrees in fitting or degrees in ended:
            continue
        least = least_memory(config, split)
        if sum(least.values()) > device_memory:
            other = hopeless.get(degrees)
            if other is None or sum(least.values()) < sum(other[1].values()):
                hopeless[degrees] = split, least
            continue
        if wanted is not None and len(fitting) >= wanted:
            unseen += 1
            continue
        key = (degrees, split.checkpointing == "none")
        if key not in problems:
            problems[key] = next(iter(split.problems(config)), "")
            if problems[key]:
                refused[problems[key]].append(split)
        if problems[key]:
            continue
        progress(split, len(fitting), seen)
        seen += 1
        try:
            needs = estimate(split.apply(config), world, device=device, exact=False)
        except (RuntimeError, ValueError) as error:  # as a run of it would
            refused[f"{type(error).__name__}: {error}"].append(split)
            ended.add(degrees)
            continue
        candidate = Candidate(split, needs, costs[split], device_memory)
        if candidate.fits:
            fitting[degrees] = candidate
            too_large.pop(degrees, None)
            continue
        other_size = too_large[degrees].size if degrees in too_large else float("inf")
        if candidate.size < other_size:
            too_large[degrees] = candidate
    if not fitting and not too_large and not hopeless:
        reasons = "; ".join(refused) or (
            f"no division of {world} devices divides the batch of {global_rows(config, world)} rows"
        )
        raise UserError(f"no split of {world} devices can run this configuration: {reasons}")
    return Found(
        fitting=list(fitting.values()),
        too_large=list(too_large.values()),
        hopeless={
            split: least
            for degrees, (split, least) in hopeless.items()
            if degrees not in fitting and degrees not in too_large
        },
        refused=dict(refused),
        unseen=unseen,
    )


def candidate_of(
    config: Any, world: int, device_memory: int, machine: Machine, device: str
) -> Candidate:
    """The configuration's own split, exactly.

    Raises:
        UserError: it does not fit the number of devices.
    """
    split = split_of(config, world)
    needs = estimate(config, world, device=device, exact=True)
    return Candidate(split, needs, cost(config, split, machine), device_memory)


def _degrees(split: Split) -> tuple:
    return (split.pipeline, split.tensor, split.context, split.data, split.expert)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]

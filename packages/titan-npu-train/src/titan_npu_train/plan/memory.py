"""Memory that every kind of rank needs at its worst moment, part by part.

A step is replayed block by block in the order in which FSDP2, the pipeline schedule, the loss and
the optimizer do it: what a block keeps and needs comes from running it without data
(:mod:`.simulate`), what ranks hold of parameters from the real parallelization (:mod:`.layout`).
The parts of an estimate are those of one moment, the one with the largest sum.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.components.optimizer import OptimizersContainer

from swap_optimizer import peak_bytes
from titan_npu_train import platform
from titan_npu_train.optimizer import SwapOptions, SwappedOptimizers
from titan_npu_train.plan.layout import Block, Group, Layout, Parameter, as_trained
from titan_npu_train.plan.layout import layout as layout_of
from titan_npu_train.plan.simulate import LayerMemory, Need, Storages, layer_memory

__all__ = ["PARTS", "Estimate", "RankEstimate", "estimate"]

PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "gathered",
    "activations",
    "transient",
    "logits",
    "moe_imbalance",
    "communication",
    "runtime",
)
"""What memory is used for.

parameters: this rank's shards, with FSDP2's padding.
gradients: of these shards, reduced.
optimizer: its states, and what its step needs besides.
gathered: whole parameters and gradients: FSDP2's copies and its communication buffers.
activations: kept for backward passes to come, of all microbatches under way.
transient: what the block that computes needs besides.
logits: the same of the last projection and the loss.
moe_imbalance: what one MoE layer needs more if all tokens come to this rank's experts.
communication: buffers of the backend, and what pipeline stages receive into.
runtime: the process itself.
"""

_COMMUNICATOR_BYTES = {"cpu": 0, "cuda": 0, "npu": 2 * 200 * 2**20}
_RUNTIME_BYTES = {"cuda": 512 * 2**20, "npu": 1024 * 2**20}


@dataclass(frozen=True)
class RankEstimate:
    """Of all ranks of one pipeline rank.

    Attributes:
        pipeline_rank: 0 without a pipeline.
        rank: one of them that has most parameters.
        parts: bytes by :data:`PARTS`, at the moment when their sum is largest.
        moment: when that is, in words.
    """

    pipeline_rank: int
    rank: int
    parts: dict[str, int]
    moment: str = ""

    @property
    def total(self) -> int:
        """Predicted peak in bytes."""
        return sum(self.parts.values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "pipeline_rank": self.pipeline_rank,
            "rank": self.rank,
            "parts": dict(self.parts),
            "total": self.total,
            "moment": self.moment,
        }


@dataclass(frozen=True)
class Estimate:
    """Of a run: one :class:`RankEstimate` a pipeline rank. ``notes`` are assumptions in words."""

    world: int
    ranks: tuple[RankEstimate, ...]
    notes: tuple[str, ...]

    @property
    def largest(self) -> RankEstimate:
        return max(self.ranks, key=lambda rank: rank.total)

    def to_dict(self) -> dict[str, Any]:
        return {
            "world": self.world,
            "ranks": [rank.to_dict() for rank in self.ranks],
            "largest": self.ranks.index(self.largest),
            "notes": list(self.notes),
        }


def estimate(config: Any, world: int, *, device: str | None = None, exact: bool = True) -> Estimate:
    """What every rank of ``config`` on ``world`` ranks needs.

    Args:
        config: a ``Trainer.Config`` of a DeepSeek-V3.2; it is not changed.
        world: number of ranks.
        device: "cpu", "cuda" or "npu", where the run will be; None for the chosen platform's.
        exact: build every layer, not one of each kind.

    Raises:
        ValueError: not a DeepSeek-V3.2, an unknown device, or a configuration that could not run.
        RuntimeError: inside of a process group.
    """
    device = device or platform.current().name
    if device not in _COMMUNICATOR_BYTES:
        raise ValueError(f"device must be cpu, cuda or npu, got {device!r}")
    runtime = _RUNTIME_BYTES.get(device) or _resident_bytes()
    plan = layout_of(config, world, exact=exact)
    config = as_trained(config)
    # Where shards are makes no difference to a layer, and those without data cannot be pinned.
    resident = as_trained(config)
    resident.training = replace(config.training, enable_cpu_offload=False)
    needs = layer_memory(resident)
    ranks = tuple(
        _Replay(config, plan, pipeline_rank, needs, device, runtime).run()
        for pipeline_rank in range(plan.pipeline)
    )
    return Estimate(world, ranks, tuple(_notes(config, plan, needs, device)))


@cache
def _resident_bytes() -> int:
    """Of this process before it plans anything: ranks import the same."""
    return int(platform.current().device_module.memory_stats()["reserved_bytes.all.current"])


def _notes(config: Any, plan: Layout, needs: LayerMemory, device: str) -> Iterator[str]:
    yield (
        "activations and transient memory: the layers of this configuration, run without data; "
        "what kernels use inside of themselves is not in it"
    )
    if needs.crowded_rows > needs.rows:
        yield (
            f"MoE imbalance: the worst case in one layer, {needs.crowded_rows:,} tokens at its "
            f"experts on one rank instead of {needs.rows:,}; the other layers are balanced"
        )
    if device == "cpu":
        yield (
            "runtime: this process before it planned; the allocator may keep more than is used, "
            "and pages of the dataset's file count too"
        )
        return
    yield f"runtime: {_RUNTIME_BYTES[device] / 2**30:.1f} GiB a device for its context, assumed"
    if size := _COMMUNICATOR_BYTES[device]:
        yield (
            f"communication: {len(_communicators(plan))} groups with "
            f"{size / 2**20:.0f} MiB each (HCCL_BUFFSIZE 200 MB, sent and received), assumed"
        )


def _communicators(plan: Layout) -> set[str]:
    groups = set(plan.meshes) | {"world"}
    return groups if plan.world > 1 else set()


class _GroupSizes:
    """Bytes of the parameters of one FSDP group: on one rank, gathered, and of their gradients."""

    def __init__(self, group: Group, rank: int) -> None:
        whole = {p: p.padded_numel(rank) * group.ranks for p in group.parameters}
        trained = [p for p in group.parameters if p.trained]
        self.keeps = group.keeps
        self.gathered = sum(whole.values()) * group.param_dtype.itemsize
        # Gathered into one buffer, and copied out; alone, there is nothing to gather.
        self.buffer = self.gathered if group.ranks > 1 else 0
        self.gradients = sum(whole[p] for p in trained) * group.param_dtype.itemsize
        self.accumulated = sum(whole[p] for p in trained) * group.reduce_dtype.itemsize
        self.reduced = sum(p.storage_bytes(rank) for p in trained)
        # One rank alone divides into a buffer more before it copies.
        self.divided = self.accumulated if group.ranks == 1 else 0


class _Sizes:
    """Bytes of the groups of one block."""

    def __init__(self, block: Block, rank: int) -> None:
        self.block = block
        self.groups = [_GroupSizes(g, rank) for g in block.groups]
        self.gathered = sum(g.gathered for g in self.groups if not g.keeps)
        self.kept = sum(g.gathered for g in self.groups if g.keeps)
        self.buffers = [g.buffer for g in self.groups if not g.keeps]
        self.gradients = sum(g.gradients for g in self.groups)
        self.accumulated = sum(g.accumulated for g in self.groups)
        self.reduced = sum(g.reduced for g in self.groups)


class _Running:
    """A block of this rank, and what FSDP has in memory for it."""

    def __init__(self, sizes: _Sizes, need: Need, crowded: Need, frees: bool) -> None:
        self.sizes, self.need, self.crowded = sizes, need, crowded
        self.frees = frees
        """Whether its parameters are freed after forward."""
        self.whole = self.coming = self.kept = False
        self.accumulates = False
        """Whether gradients wait for their reduction."""
        self.has_gradients = False


class _Replay:
    """One step of one pipeline rank."""

    def __init__(
        self,
        config: Any,
        plan: Layout,
        pipeline_rank: int,
        needs: LayerMemory,
        device: str,
        runtime: int,
    ) -> None:
        self.config, self.plan, self.needs, self.device = config, plan, needs, device
        self.pipeline_rank = pipeline_rank
        self.rank = plan.ranks(pipeline_rank)[0]  # first ranks have the larger parts
        self.live: Counter[str] = Counter(runtime=runtime)
        self.best: tuple[int, dict[str, int], str] = (-1, {}, "")
        self.pipelined = plan.pipeline > 1
        options = config.fsdp
        self.each = not self.pipelined or options.pipeline_reduction == "each"
        self.ahead = options.prefetch_forward or (device != "cpu")
        self.behind = options.prefetch_backward or (device != "cpu")
        self.chunked = isinstance(config.loss, ChunkedLossWrapper.Config)
        self.held = 0  # the last gathered buffer, until the next is waited for
        self.scattering = 0  # the last reduction's input, until the next begins
        self.stages = {i: self._blocks_of(i) for i in plan.stages_of[pipeline_rank]}
        self.crowdable: Counter[int] = Counter()
        """How often a block is under way that would keep so many bytes more."""

    def _blocks_of(self, stage: int) -> list[_Running]:
        blocks = self.plan.stages[stage].blocks
        policy = self.config.parallelism.fsdp_reshard_after_forward
        none = Need(0, 0, 0, 0)
        found = []
        for i, block in enumerate(blocks):
            frees = policy == "always"
            if policy == "default" and self.each:
                frees = i < len(blocks) - 1
            need = self.needs.blocks.get(block.kind, none)
            crowded = self.needs.crowded.get(block.kind, need)
            found.append(_Running(_Sizes(block, self.rank), need, crowded, frees))
        return found

    @property
    def blocks(self) -> Iterator[_Running]:
        for blocks in self.stages.values():
            yield from blocks

    def run(self) -> RankEstimate:
        training = self.config.training
        parameters = list(self.plan.parameters(self.rank))
        on_device = not training.enable_cpu_offload or self.device == "cpu"
        optimizer = _OptimizerNeeds(self.config.optimizer, parameters, self.rank, self.device)
        if on_device:
            self.live["parameters"] = sum(p.storage_bytes(self.rank) for p in parameters)
            self.live["optimizer"] = optimizer.between_steps
        self.live["communication"] = self._communication()
        accumulation = self._accumulation()
        if not training.disable_cuda_graphs:  # gradients are zeroed, not dropped
            for block in self.blocks:
                self._has_reduced(block)
        for _ in range(min(accumulation, 2)):
            self._forward_backward()
        if on_device:
            self.live["optimizer"] = optimizer.in_step
        self._record("the optimizer's step")
        _, parts, moment = self.best
        parts = {part: parts.get(part, 0) for part in PARTS}
        return RankEstimate(self.pipeline_rank, self.rank, parts, moment)

    def _communication(self) -> int:
        size = _COMMUNICATOR_BYTES[self.device] * len(_communicators(self.plan))
        last = len(self.plan.stages) - 1
        for index in self.stages:
            # Buffers for every microbatch, of activations and of gradients.
            received = (index > 0) + (index < last)
            size += received * self.plan.microbatches * self.needs.output
        return size

    def _accumulation(self) -> int:
        training, parallelism = self.config.training, self.config.parallelism
        if training.global_batch_size <= 0:
            return 1
        inner = (
            parallelism.pipeline_parallel_degree
            * parallelism.tensor_parallel_degree
            * parallelism.context_parallel_degree
        )
        rows = training.local_batch_size * max(1, self.plan.world // inner)
        return max(1, training.global_batch_size // rows)

    def _forward_backward(self) -> None:
        if not self.pipelined:
            (blocks,) = self.stages.values()
            self._forward(blocks)
            self._backward(blocks)
            self._end_of_backward()
            return
        for action in self.plan.actions[self.pipeline_rank]:
            blocks = self.stages[action.stage]
            match action.kind:
                case "FORWARD":
                    self._wait_for(blocks)
                    self._forward(blocks)
                case "FULL_BACKWARD":
                    self._wait_for(blocks)
                    self._backward(blocks)
                    if self.each:
                        self._end_of_backward()
                case "BACKWARD_INPUT":
                    # What it keeps for the gradients of weights is what it had saved.
                    self._wait_for(blocks)
                    self._inputs_backward(blocks)
                case "BACKWARD_WEIGHT":
                    self._wait_for(blocks)
                    self._backward(blocks)
                case "UNSHARD" if self.each:
                    pass
                case "UNSHARD":
                    for block in blocks:
                        self._start_gather(block)
                case "RESHARD":
                    for block in blocks:
                        self._free(block)
                case "REDUCE_GRAD":
                    if not self.each:
                        for block in blocks:
                            self._free(block)
                            self._reduce(block)
                    self._end_of_backward()
        for block in self.blocks:
            self._free(block)
            self._free_kept(block)

    # What FSDP does.

    def _start_gather(self, block: _Running) -> None:
        if not block.whole and not block.coming:
            block.coming = True
            self.live["gathered"] += sum(block.sizes.buffers)
            self._record("parameters are gathered")

    def _finish_gather(self, block: _Running, *, forward: bool) -> None:
        if block.whole:
            return
        self._start_gather(block)
        block.coming, block.whole = False, True
        if forward:
            self.live["gathered"] -= self.held
            self.held = 0
        self.live["gathered"] += block.sizes.gathered
        self._record("gathered parameters are copied")
        self.live["gathered"] -= sum(block.sizes.buffers)
        if forward and self.device != "cpu" and block.sizes.buffers:
            self.held = block.sizes.buffers[-1]
            self.live["gathered"] += self.held

    def _wait_for(self, blocks: list[_Running]) -> None:
        for block in blocks:
            if block.coming and not self.each:
                self._finish_gather(block, forward=False)

    def _keep(self, block: _Running) -> None:
        if not block.kept:
            block.kept = True
            self.live["gathered"] += block.sizes.kept

    def _free_kept(self, block: _Running) -> None:
        if block.kept:
            block.kept = False
            self.live["gathered"] -= block.sizes.kept

    def _free(self, block: _Running) -> None:
        if block.whole:
            block.whole = False
            self.live["gathered"] -= block.sizes.gathered

    def _accumulate(self, block: _Running) -> None:
        """The gradients of a backward, which ``gathered`` has, join those that wait."""
        sizes = block.sizes
        if not block.accumulates:
            block.accumulates = True
            self.live["gathered"] += sizes.accumulated
            self._record("gradients are converted")
        self.live["gathered"] -= sizes.gradients

    def _reduce(self, block: _Running) -> None:
        """Of gradients that ``gathered`` has."""
        self.live["gathered"] -= self.scattering
        self.scattering = 0
        for group in reversed(block.sizes.groups):
            self.live["gathered"] += group.accumulated
            self.scattering += group.accumulated
            self._record("gradients are copied to be reduced")
            self.live["gathered"] -= group.accumulated if block.accumulates else group.gradients
            # Added to what is there, if there is any.
            beside = group.divided + (group.reduced if block.has_gradients else 0)
            self.live["gradients"] += 0 if block.has_gradients else group.reduced
            self._record("gradients are reduced", gathered=beside)
        block.accumulates, block.has_gradients = False, True

    def _has_reduced(self, block: _Running) -> None:
        if not block.has_gradients:
            block.has_gradients = True
            self.live["gradients"] += block.sizes.reduced

    def _end_of_backward(self) -> None:
        self.live["gathered"] -= self.scattering + self.held
        self.scattering = self.held = 0

    # What the model does.

    def _forward(self, blocks: list[_Running]) -> None:
        for block in blocks[: self.ahead]:
            self._start_gather(block)
        for i, block in enumerate(blocks):
            self._finish_gather(block, forward=True)
            self._keep(block)
            for following in blocks[i + 1 : i + 1 + self.ahead]:
                self._start_gather(following)
            if block.sizes.block.kind == "head":
                self._loss(block)
                break
            self._record(
                f"forward of {block.sizes.block.name}",
                transient=block.need.forward,
                moe_imbalance=block.crowded.forward - block.need.forward,
            )
            self.live["activations"] += block.need.saved
            self.crowdable[block.crowded.saved - block.need.saved] += 1
            if block.frees:
                self._free(block)

    def _loss(self, head: _Running) -> None:
        """The loss, and as much of its backward as comes before that of the last layer."""
        sizes = head.sizes
        waiting = sizes.gradients
        if self.chunked:  # the gradients of chunks are added up as they will be reduced
            waiting = sizes.accumulated
        self._record("the loss", logits=head.need.forward, gathered=waiting)
        if self.chunked:
            self.live["gathered"] += waiting
            head.accumulates = True
            self._reduce(head)
            if self.each:
                self._free(head)

    def _backward(self, blocks: list[_Running]) -> None:
        order = list(reversed(blocks))
        for block in order[: self.behind]:
            if not (block.sizes.block.kind == "head" and self.chunked):
                self._start_gather(block)
        for i, block in enumerate(order):
            if block.sizes.block.kind == "head" and self.chunked:
                continue  # with the loss
            need, crowded = block.need, block.crowded
            self._finish_gather(block, forward=False)
            for following in order[i + 1 : i + 1 + self.behind]:
                self._start_gather(following)
            self._record(
                f"backward of {block.sizes.block.name}",
                transient=max(0, need.backward - need.saved - need.gradients),
                gathered=need.gradients,
                moe_imbalance=(crowded.backward - crowded.gradients)
                - (need.backward - need.gradients),
            )
            self.live["activations"] -= need.saved
            self.crowdable[crowded.saved - need.saved] -= 1
            self.live["gathered"] += block.sizes.gradients
            self._record(f"end of backward of {block.sizes.block.name}")
            if self.each:
                self._free(block)
                self._reduce(block)
                self._free_kept(block)
            else:
                self._accumulate(block)

    def _inputs_backward(self, blocks: list[_Running]) -> None:
        for block in reversed(blocks):
            need = block.need
            self._record(
                f"backward of {block.sizes.block.name}",
                transient=max(0, need.backward - need.saved - need.gradients),
            )

    def _record(self, moment: str, **extra: int) -> None:
        # One layer at a time is crowded: the one that computes, or one that has computed.
        kept = max((size for size, n in self.crowdable.items() if n), default=0)
        extra["moe_imbalance"] = max(kept, extra.get("moe_imbalance", 0), 0)
        total = sum(self.live.values()) + sum(extra.values())
        if total > self.best[0]:
            self.best = (total, dict(self.live + Counter(extra)), moment)


class _OptimizerNeeds:
    """Bytes of an optimizer's states, from a step of the real one on tensors without data.

    Attributes:
        between_steps: while the model computes.
        in_step: during its step.
    """

    def __init__(
        self,
        config: OptimizersContainer.Config,
        parameters: Sequence[Parameter],
        rank: int,
        device: str,
    ) -> None:
        trained = [p for p in parameters if p.trained]
        swap = config.swap if isinstance(config, SwappedOptimizers.Config) else SwapOptions()
        storage = swap.storage
        states, kept, extra = _optimizer_states(config, trained, rank)
        total = sum(states) + kept
        self.between_steps, self.in_step = total, total + extra
        if storage is None or (storage == "host" and device == "cpu"):
            return
        if storage == "npu_swapped":
            self.between_steps, self.in_step = kept, kept + extra
            return
        self.between_steps = kept
        self.in_step = kept + peak_bytes(states, min(swap.slices, len(states))) + extra


def _optimizer_states(
    config: OptimizersContainer.Config, parameters: Sequence[Parameter], rank: int
) -> tuple[list[int], int, int]:
    """States of each parameter, in the optimizer's order; states that are scalars; and what a step
    needs besides."""
    patterns = [re.compile(group.pattern) for group in config.param_groups]

    def kind(p: Parameter) -> tuple:
        group = next((i for i, pattern in enumerate(patterns) if pattern.search(p.name)), -1)
        return group, p.local_shape(rank), p.dtype

    kinds = [kind(p) for p in parameters]
    named = dict(zip(reversed(kinds), reversed(parameters), strict=True))
    if isinstance(config, SwappedOptimizers.Config):
        config = replace(config, swap=SwapOptions())
    with FakeTensorMode():
        model = nn.Module()
        tensors = {}
        for (_, shape, dtype), parameter in named.items():
            tensor = nn.Parameter(torch.empty(shape, dtype=dtype))
            tensor.grad = torch.empty_like(tensor)
            tensors[parameter.name] = tensor
            _place(model, parameter.name, tensor)
        optimizers = config.build(model_parts=[model])
        optimizers.step()
        with Storages() as count:
            optimizers.step()
        state = {id(p): s for o in optimizers for p, s in o.state.items()}
        tensors_of = {
            k: [x for x in state.get(id(tensors[p.name]), {}).values() if torch.is_tensor(x)]
            for k, p in named.items()
        }
        sizes, scalars = (
            {
                k: sum(x.nbytes for x in xs if (x.dim() > 0) == wanted)
                for k, xs in tensors_of.items()
            }
            for wanted in (True, False)
        )
        together = any(group.get("foreach") for o in optimizers for group in o.param_groups)
    peak = now = 0
    for _, size in count.events:
        now += size
        peak = max(peak, now)
    if together and tensors:
        # The temporaries of all parameters at once, not of one after the other.
        shown = sum(t.numel() for t in tensors.values())
        numel = sum(p.local_bytes(rank) // p.dtype.itemsize for p in parameters)
        peak = peak * numel // max(shown, 1)
    in_groups = sorted(kinds, key=lambda k: k[0])
    return [sizes[k] for k in in_groups], sum(scalars[k] for k in kinds), peak


def _place(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    *path, last = name.split(".")
    for part in path:
        if not hasattr(model, part):
            model.add_module(part, nn.Module())
        model = getattr(model, part)
    model.register_parameter(last, parameter)

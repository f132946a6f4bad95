"""A way to divide a job over devices, and the configuration that does it."""

import copy
import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal

from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    get_schedule_class,
)
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from titan_npu_train import preflight
from titan_npu_train.failures import UserError
from titan_npu_train.optimizer import SwapOptions, SwappedOptimizers, swappable

__all__ = ["Checkpointing", "Split", "global_rows", "split_of", "stages_of"]

Checkpointing = Literal["none", "selective", "full"]
_POLICIES: dict[Checkpointing, Any] = {"none": None, "selective": SelectiveAC, "full": FullAC}


@dataclasses.dataclass(frozen=True, order=True)
class Split:
    """Degrees of parallelism, and what is given up in time for memory.

    ``rows`` sequences go through the model at once; ``microbatches`` such groups make up a
    data-parallel rank's part of the batch, one after the other or through a pipeline.
    """

    pipeline: int
    tensor: int
    context: int
    data: int
    expert: int
    rows: int
    microbatches: int
    checkpointing: Checkpointing
    swap: bool

    @property
    def world(self) -> int:
        return self.pipeline * self.tensor * self.context * self.data

    @property
    def expert_shards(self) -> int:
        """Ranks that share an expert's weights: FSDP inside of expert parallelism."""
        return self.data * self.context * self.tensor // self.expert

    def name(self) -> str:
        """Like ``PP2 TP4 CP16 FSDP1 EP64``, without degrees of 1 other than FSDP."""
        degrees = {
            "PP": self.pipeline,
            "TP": self.tensor,
            "CP": self.context,
            "FSDP": self.data,
            "EP": self.expert,
        }
        return " ".join(f"{k}{v}" for k, v in degrees.items() if v > 1 or k == "FSDP")

    def options(self) -> list[str]:
        """The command-line options that make a run of it."""
        options = [
            *("--parallelism.pipeline_parallel_degree", str(self.pipeline)),
            *("--parallelism.tensor_parallel_degree", str(self.tensor)),
            *("--parallelism.context_parallel_degree", str(self.context)),
            *("--parallelism.data_parallel_shard_degree", str(self.data)),
            *("--parallelism.expert_parallel_degree", str(self.expert)),
        ]
        if self.pipeline > 1:
            options += ["--training.local_batch_size", str(self.rows * self.microbatches)]
            options += ["--parallelism.pipeline_parallel_microbatch_size", str(self.rows)]
        else:
            options += ["--training.local_batch_size", str(self.rows)]
            if self.microbatches > 1:
                total = self.rows * self.microbatches * self.data
                options += ["--training.global_batch_size", str(total)]
        # Said in both cases: the configuration may have it otherwise.
        options += ["--optimizer.swap.storage", "host" if self.swap else "None"]
        return [*options, f"activation_checkpoint:{self.checkpointing}"]

    def apply(self, config: Any) -> Any:
        """A copy of ``config`` that is split this way; they share what is not changed."""
        config = copy.copy(config)
        config.parallelism = parallelism = copy.copy(config.parallelism)
        config.training = training = copy.copy(config.training)
        parallelism.pipeline_parallel_degree = self.pipeline
        parallelism.tensor_parallel_degree = self.tensor
        parallelism.context_parallel_degree = self.context
        parallelism.data_parallel_replicate_degree = 1
        parallelism.data_parallel_shard_degree = self.data
        parallelism.expert_parallel_degree = self.expert
        training.local_batch_size = self.rows
        training.global_batch_size = self.rows * self.microbatches * self.data
        if self.pipeline > 1:
            training.local_batch_size *= self.microbatches
            parallelism.pipeline_parallel_microbatch_size = self.rows
        policy = _POLICIES[self.checkpointing]
        if policy is None or not isinstance(config.activation_checkpoint, policy.Config):
            config.activation_checkpoint = None if policy is None else policy.Config()
        if self.swap != _swaps(config):
            swap = getattr(config.optimizer, "swap", None) or SwapOptions()
            swap = dataclasses.replace(swap, storage="host" if self.swap else None, path=None)
            config.optimizer = swappable(config.optimizer, swap)
        return config

    def problems(self, config: Any) -> Iterator[str]:
        """Why ``config``, split this way, could not run; see :meth:`apply`."""
        stages = stages_of(config, self.pipeline)
        if self.pipeline > 1 and self.microbatches < stages:
            yield (
                f"{self.microbatches} microbatch(es) for {stages} pipeline stages: the schedule "
                "takes no fewer than stages"
            )
            return
        config = self.apply(config)
        problems = list(preflight.world_problems(config, self.world))
        yield from problems or preflight.model_problems(config)


def split_of(config: Any, world: int) -> Split:
    """How ``config`` itself divides ``world`` devices.

    Raises:
        UserError: it does not, or has replicas, of which a split knows nothing.
    """
    preflight.check_layout(config, world)
    parallelism, training = config.parallelism, config.training
    if (replicas := parallelism.data_parallel_replicate_degree) > 1:
        raise UserError(
            f"parallelism.data_parallel_replicate_degree is {replicas}: a plan is for weights that "
            "are sharded over all data-parallel ranks. Plan one replica, with "
            f"--world {world // replicas}; it needs the same memory"
        )
    pipeline = parallelism.pipeline_parallel_degree
    tensor = parallelism.tensor_parallel_degree
    context = parallelism.context_parallel_degree
    data = world // (pipeline * tensor * context)
    rows = training.local_batch_size
    if pipeline > 1:
        rows = parallelism.pipeline_parallel_microbatch_size
    policy = config.activation_checkpoint
    names = {SelectiveAC.Config: "selective", FullAC.Config: "full", type(None): "none"}
    return Split(
        pipeline=pipeline,
        tensor=tensor,
        context=context,
        data=data,
        expert=parallelism.expert_parallel_degree,
        rows=rows,
        microbatches=global_rows(config, world) // (data * rows),
        checkpointing=names.get(type(policy), "selective"),  # type: ignore[arg-type]
        swap=_swaps(config),
    )


def _swaps(config: Any) -> bool:
    optimizer = config.optimizer
    return isinstance(optimizer, SwappedOptimizers.Config) and optimizer.swap.storage is not None


def global_rows(config: Any, world: int) -> int:
    """Sequences in one optimizer step of ``config`` on ``world`` devices."""
    parallelism, training = config.parallelism, config.training
    if training.global_batch_size > 0:
        return training.global_batch_size
    model_ranks = (
        parallelism.pipeline_parallel_degree
        * parallelism.tensor_parallel_degree
        * parallelism.context_parallel_degree
    )
    return training.local_batch_size * max(1, world // model_ranks)


def stages_of(config: Any, ranks: int | None = None) -> int:
    """Pipeline stages, several of them on a rank where the schedule wants that.

    Args:
        config: its schedule, and layers of a stage, are those that count.
        ranks: of a pipeline; the configuration's own if not given.
    """
    parallelism = config.parallelism
    ranks = ranks or parallelism.pipeline_parallel_degree
    if ranks == 1:
        return 1
    if (most := parallelism.pipeline_parallel_layers_per_stage) is not None:
        weights = parallelism.pipeline_parallel_first_stage_less_layers
        weights += parallelism.pipeline_parallel_last_stage_less_layers
        return math.ceil((len(config.model_spec.model.layers) + weights) / most)
    schedule = get_schedule_class(parallelism.pipeline_parallel_schedule)
    return 2 * ranks if issubclass(schedule, PipelineScheduleMulti) else ranks

"""torchtitan's optimizers, their states off the device between steps (``--optimizer.swap``)."""

from dataclasses import dataclass, field, fields
from typing import Literal

from torch import nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.tools.logging import logger

from swap_optimizer import SwapOptimizer

__all__ = ["SwapOptions", "SwappedOptimizers", "swappable"]


@dataclass(kw_only=True, slots=True)
class SwapOptions:
    storage: Literal["host", "disk", "npu_swapped"] | None = None
    """
    Where optimizer states are between steps. "host": the host's memory, pinned. "disk": files, for
    hosts that lack the memory, and on CPU. "npu_swapped": host memory that an NPU kernel updates
    where it is (fp32 AdamW, with that kernel's rounding). None: on the device, as always.
    """

    slices: int = 16
    """Parts in which they are loaded and updated; two of them are on the device at once."""

    path: str | None = None
    """Folder for the files of "disk". None: swap/ in the dump folder, removed at the end."""

    def __post_init__(self) -> None:
        if self.slices < 1:
            raise ValueError(f"optimizer.swap.slices must be 1 or more, got {self.slices}")
        if self.path is not None and self.storage != "disk":
            raise ValueError(
                f"optimizer.swap.path is '{self.path}', but only optimizer.swap.storage disk has "
                f"files; it is {self.storage}"
            )


class SwappedOptimizers(OptimizersContainer):
    """An OptimizersContainer whose optimizers may each be a :class:`swap_optimizer.SwapOptimizer`.

    Nothing else changes: the same steps bit for bit, the same checkpoints, which either kind of run
    resumes from.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        swap: SwapOptions = field(default_factory=SwapOptions)

        def __post_init__(self) -> None:
            if self.swap.storage and self.implementation == "fused_opt_states_bf16":
                raise ValueError(
                    "optimizer.implementation fused_opt_states_bf16 makes all states at once, on "
                    "the device, which optimizer.swap.storage is to avoid: use fused"
                )

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        super().__init__(config, model_parts=model_parts)
        swap = config.swap
        if swap.storage is None:
            return
        wrapped = []
        try:
            for optimizer in self.optimizers:
                wrapped.append(
                    SwapOptimizer(
                        optimizer,
                        slices=min(swap.slices, _parameters(optimizer)),
                        storage=swap.storage,
                        path=swap.path,
                    )
                )
                stats = wrapped[-1].stats()
                logger.info(
                    f"SwapOptimizer: states in storage {swap.storage}, {stats.slices} slices"
                )
        except BaseException:
            for optimizer in wrapped:
                optimizer.close()
            raise
        self.optimizers = wrapped

    def close(self) -> None:
        """Give back what the swapped states occupy; the optimizers are of no use after it."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, SwapOptimizer):
                optimizer.close()


def swappable(
    config: OptimizersContainer.Config, swap: SwapOptions | None = None
) -> SwappedOptimizers.Config:
    """The same configuration, with swapping to be chosen."""
    values = {f.name: getattr(config, f.name) for f in fields(OptimizersContainer.Config)}
    return SwappedOptimizers.Config(**values, swap=swap or SwapOptions())


def _parameters(optimizer) -> int:
    # Of a pipeline stage's few, or of a group of its own, there may be fewer than slices.
    return sum(len(group["params"]) for group in optimizer.param_groups)

"""What a user may set about FSDP beyond torchtitan's own options (``--fsdp.*``)."""

from dataclasses import dataclass
from typing import Literal

from fsdp2_npu import Prefetch

__all__ = ["FSDPOptions"]


@dataclass(kw_only=True, slots=True)
class FSDPOptions:
    pipeline_reduction: Literal["last", "each"] = "last"
    """
    What happens between the microbatches of a pipeline. "last" is torch's way: gradients stay whole
    until the last microbatch, and parameters too once a backward has gathered them. "each" frees
    parameters and reduces gradients after every microbatch, as the published run does: less memory,
    more communication. Without a pipeline every backward frees and reduces anyway.
    """

    prefetch_forward: int = 1
    """Blocks whose parameters are gathered ahead in forward. 0 leaves it to FSDP2."""

    prefetch_backward: int = 1
    """Blocks whose parameters are gathered ahead in backward. 0 leaves it to FSDP2."""

    def __post_init__(self) -> None:
        if self.pipeline_reduction not in ("last", "each"):
            raise ValueError(
                f"fsdp.pipeline_reduction must be 'last' or 'each', got {self.pipeline_reduction!r}"
            )
        for name in ("prefetch_forward", "prefetch_backward"):
            value = getattr(self, name)
            if value < 0:
                raise ValueError(f"fsdp.{name} is a number of blocks, 0 or more, got {value}")

    def prefetch(self) -> Prefetch:
        return Prefetch(forward=self.prefetch_forward, backward=self.prefetch_backward)

    def refuse_if_set(self, why: str) -> None:
        """Refuse a choice that nothing would use.

        Raises:
            ValueError: any option other than the default.
        """
        default = FSDPOptions()
        for name in ("pipeline_reduction", "prefetch_forward", "prefetch_backward"):
            value = getattr(self, name)
            if value != getattr(default, name):
                raise ValueError(f"fsdp.{name} is {value!r}, but {why}")

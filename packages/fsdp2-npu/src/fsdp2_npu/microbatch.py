"""When gradients are reduced and parameters freed between microbatches."""

from typing import Any, Literal, get_args

from torch import nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

MicrobatchReduction = Literal["last", "each"]


class ReducesEachMicrobatch:
    """Mixed into an FSDPModule: every backward frees parameters and reduces gradients.

    Pipeline stages ask FSDP to keep parameters and gradients whole until the last microbatch, by
    the public methods below, with no option to say otherwise. Here these requests are declined.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # As FSDPModule does: to index into a container makes one of the original class.
        return FSDPModule.__new__(cls.__mro__[2], *args, **kwargs)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Does nothing: gradients are reduced in each backward."""

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Does nothing: parameters are freed in each backward."""

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers if ``async_op`` is false.

        Asynchronously it gathers nothing: schedules with several stages a rank gather all blocks of
        all of them this way before they begin. Here each block gathers its own, prefetched.
        """
        if async_op:
            return UnshardHandle()
        return super().unshard()  # pyrefly: ignore[missing-attribute]


def set_microbatch_reduction(model: nn.Module, reduction: MicrobatchReduction) -> None:
    """Make FSDP modules what the policy wants; once, right after ``fully_shard``."""
    if reduction == "last":
        return
    classes: dict[type, type] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            sharded = type(module)
            if sharded not in classes:
                classes[sharded] = type(sharded.__name__, (ReducesEachMicrobatch, sharded), {})
            module.__class__ = classes[sharded]


def check_microbatch_reduction(value: Any) -> None:
    if value not in get_args(MicrobatchReduction):
        raise ValueError(f"microbatch_reduction must be 'last' or 'each', got {value!r}")

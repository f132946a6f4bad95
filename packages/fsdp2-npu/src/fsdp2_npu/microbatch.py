"""When gradients are reduced and parameters freed between microbatches."""

from typing import Any, Literal, get_args

from torch import nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

MicrobatchReduction = Literal["last", "each"]


class GathersInTurn:
    """Mixed into an FSDPModule: it is gathered when it runs or the block before it, no earlier."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # As FSDPModule does: to index into a container makes one of the original class.
        sharded = next(c for c in cls.__mro__ if c.__mro__[1] is FSDPModule)
        return FSDPModule.__new__(sharded, *args, **kwargs)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers if ``async_op`` is false.

        Asynchronously it gathers nothing: schedules with several stages a rank gather all blocks of
        all of them this way before they begin. Here each block gathers its own, prefetched.
        """
        if async_op:
            return UnshardHandle()
        return super().unshard()  # pyrefly: ignore[missing-attribute]


class ReducesEachMicrobatch(GathersInTurn):
    """Mixed into the root: every backward frees parameters and reduces gradients.

    Pipeline stages ask their root to keep parameters and gradients whole until the last microbatch,
    by the public methods below, with no option to say otherwise. Here these requests are declined.
    Those to a module inside are not: a loss in chunks keeps the head whole until its last chunk.
    """

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Does nothing: gradients are reduced in each backward."""

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Does nothing: parameters are freed in each backward."""


def set_microbatch_reduction(model: nn.Module, reduction: MicrobatchReduction) -> None:
    """Make FSDP modules what the policy wants; once, right after ``fully_shard``."""
    if reduction == "last":
        return
    classes: dict[tuple[type, type], type] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            bases = (ReducesEachMicrobatch if module is model else GathersInTurn, type(module))
            if bases not in classes:
                classes[bases] = type(bases[1].__name__, bases, {})
            module.__class__ = classes[bases]


def check_microbatch_reduction(value: Any) -> None:
    if value not in get_args(MicrobatchReduction):
        raise ValueError(f"microbatch_reduction must be 'last' or 'each', got {value!r}")

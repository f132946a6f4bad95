"""Explicit prefetch: which all-gathers a block starts while it computes."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.fsdp import FSDPModule

# The FSDP modules of one block in the order in which they need their parameters: the block itself,
# then the modules inside it that have a group of their own.
Block = Sequence[FSDPModule]


@dataclass(frozen=True)
class Prefetch:
    """How many blocks ahead parameters are gathered.

    Attributes:
        forward: while block i computes, blocks i+1 ... i+forward are gathered. 0 leaves it to
            FSDP2, which then starts a block's all-gather only when the block itself begins.
        backward: while block i runs backward, blocks i-1 ... i-backward are gathered. 0 leaves it
            to FSDP2, which prefetches one, in the reverse of the order seen in forward.

    Each step costs the memory of one more block's full parameters.
    """

    forward: int = 1
    backward: int = 1

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"Prefetch.{name} is a number of blocks, 0 or more, got {value!r}")


def set_prefetch(root: FSDPModule, blocks: Sequence[Block], prefetch: Prefetch) -> None:
    """Fix the all-gather order of forward and backward.

    Args:
        root: the root FSDP module; it starts the first blocks in forward, the last in backward.
        blocks: the blocks in execution order.
        prefetch: the depth in each direction.
    """
    if prefetch.forward:
        for i, owner in enumerate([root, *(block[0] for block in blocks)]):
            ahead = blocks[i : i + prefetch.forward]
            owner.set_modules_to_forward_prefetch([module for block in ahead for module in block])
    if prefetch.backward:
        # Modules inside a block are kept from forward (see shard.py): only blocks are gathered.
        heads = [block[0] for block in reversed(blocks)]
        for i, owner in enumerate([root, *heads]):
            # The first block names itself, which gathers nothing. An empty list would leave it to
            # FSDP2, which in a pipeline gathers for another microbatch's backward, far too early.
            owner.set_modules_to_backward_prefetch(heads[i : i + prefetch.backward] or [owner])

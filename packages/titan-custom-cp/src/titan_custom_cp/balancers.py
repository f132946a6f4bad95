"""Which rows of the sequence each rank holds."""

from typing import Protocol

import torch
from torch import Tensor


class LoadBalancer(Protocol):
    """An order of the sequence; rank r holds the r-th of as many equal parts of it as ranks."""

    def order(self, length: int, ranks: int) -> Tensor:
        """Rows of the sequence in the order of the ranks that hold them: int64 [length].

        Raises:
            ValueError: the sequence cannot be shared out this way.
        """
        ...


class Contiguous:
    """Rank r holds the r-th part. With causal attention the last rank has the most to do."""

    def order(self, length: int, ranks: int) -> Tensor:
        _divisible(self, length, ranks)
        return torch.arange(length)


class HeadTail:
    """Of 2 R equal parts, rank r holds the r-th from the front and the r-th from the back.

    A causal query sees as many keys as there are before it; a part from the front and its mirror
    image from the back see the same number together, whatever the rank.
    """

    def order(self, length: int, ranks: int) -> Tensor:
        _divisible(self, length, 2 * ranks)
        part_PL = torch.arange(length).view(2 * ranks, -1)
        return torch.stack([part_PL[:ranks], part_PL.flip(0)[:ranks]], 1).flatten()


def _divisible(balancer: LoadBalancer, length: int, parts: int) -> None:
    if length % parts:
        name = type(balancer).__name__
        below, above = length // parts * parts, (length // parts + 1) * parts
        near = f"{above}" if below == 0 else f"{below} or {above}"
        raise ValueError(
            f"buffers: got a sequence of {length}; load_balancer {name} needs a multiple of "
            f"{parts} (pad to {near})"
        )

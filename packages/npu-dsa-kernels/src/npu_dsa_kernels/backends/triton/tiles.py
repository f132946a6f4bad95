"""How much of the work a kernel takes at a time, by kernel, target and element size.

The limits behind the numbers, per core: Ascend A3 has 192 KB of unified buffer for the vector cores
and 128 KB of L0C for products; the `ascend` session records what every entry takes of them, and
that twice the rows does not fit. CUDA's are 227 KB of shared memory and 64 K registers. The
interpreter has no limits; its small tiles make small inputs cross their borders.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tiles:
    """One step of a kernel: `rows` (heads, queries or tokens) by `columns` (keys or features)."""

    rows: int
    columns: int
    warps: int = 4
    """CUDA: warps of a program."""
    stages: int = 1
    """CUDA: loads in flight in a loop."""


# kernel -> target -> bytes of an element of the inputs
_TABLE: dict[str, dict[str, dict[int, Tiles]]] = {
    "sparse_attention": {
        "ascend": {2: Tiles(16, 64), 4: Tiles(16, 32)},
        "cuda": {2: Tiles(64, 32, warps=8, stages=2), 4: Tiles(16, 16, warps=8)},
        "interpreter": {4: Tiles(16, 16)},
    },
}


def tiles(kernel: str, target: str, dtype: torch.dtype) -> Tiles:
    """The entry of the table.

    Raises:
        KeyError: the kernel is not offered on the target, or not for the dtype.
    """
    return _TABLE[kernel][target][dtype.itemsize]


def entries(target: str) -> list[tuple[str, int, Tiles]]:
    """Every (kernel, bytes of an element, tiles) of a target."""
    return [
        (kernel, size, entry)
        for kernel, targets in _TABLE.items()
        for size, entry in targets.get(target, {}).items()
    ]

"""How much of the work a kernel takes at a time, by kernel, target and element size.

The limits behind the numbers, per core: Ascend A3 has 192 KB of unified buffer for the vector cores
and 128 KB of L0C for products; the `ascend` session records what every entry takes of them, and
tries the next larger tiles of the attention. CUDA's are those of sm_90, 227 KB of shared memory a
program and 64 K registers; the `cuda` session records what is taken of them. The interpreter has no
limits; its small tiles make small inputs cross their borders.
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
    """CUDA: steps of a loop at once, to have loads in flight. A gather takes two of them for one,
    since its indices are loads, too."""


# Rows: slots of a block, which both kernels must see alike; columns: experts.
_SLOTS = {
    "ascend": {4: Tiles(64, 128)},
    "cuda": {4: Tiles(128, 64)},
    "interpreter": {4: Tiles(8, 4)},
}

# kernel -> target -> bytes of an element of the inputs
_TABLE: dict[str, dict[str, dict[int, Tiles]]] = {
    "sparse_attention": {
        "ascend": {2: Tiles(32, 128), 4: Tiles(32, 64)},
        "cuda": {2: Tiles(64, 64, warps=8, stages=3), 4: Tiles(16, 16, warps=8)},
        "interpreter": {4: Tiles(16, 16)},
    },
    "sparse_attention_backward": {
        "ascend": {2: Tiles(16, 32), 4: Tiles(16, 32)},
        "cuda": {2: Tiles(64, 32, warps=8), 4: Tiles(16, 16, warps=8)},
        "interpreter": {4: Tiles(16, 16)},
    },
    "attention_target": {
        "ascend": {2: Tiles(128, 128), 4: Tiles(64, 64)},
        "cuda": {2: Tiles(64, 64, warps=8, stages=2), 4: Tiles(16, 32, warps=8)},
        "interpreter": {4: Tiles(16, 16)},
    },
    # Rows: slots. Where these have tiles, the attention reads keys that were gathered before.
    "gather_slots": {"ascend": {2: Tiles(64, 1), 4: Tiles(32, 1)}},
    "scatter_slots": {"ascend": {2: Tiles(32, 1), 4: Tiles(32, 1)}},
    "index_scores": {  # rows: all heads of a query, whatever their number
        "ascend": {2: Tiles(64, 256), 4: Tiles(64, 256)},
        "cuda": {2: Tiles(64, 128, stages=2), 4: Tiles(64, 32, warps=8)},
        "interpreter": {4: Tiles(64, 32)},
    },
    "select_topk": {  # rows: keys packed at a time, columns: keys counted at a time
        "ascend": {2: Tiles(64, 2048), 4: Tiles(64, 2048)},
        "cuda": {2: Tiles(64, 1024), 4: Tiles(64, 1024)},
        "interpreter": {4: Tiles(16, 32)},
    },
    "order_topk": {  # rows: keys placed at a time, against as many
        "ascend": {2: Tiles(64, 64), 4: Tiles(64, 64)},
        "cuda": {2: Tiles(64, 64), 4: Tiles(64, 64)},
        "interpreter": {4: Tiles(16, 16)},
    },
    "indexer_kl_loss": {
        "ascend": {2: Tiles(64, 128), 4: Tiles(64, 128)},
        "cuda": {2: Tiles(64, 64, stages=3), 4: Tiles(64, 32, warps=8)},
        "interpreter": {4: Tiles(64, 16)},
    },
    "indexer_kl_loss_backward": {
        "ascend": {2: Tiles(64, 64), 4: Tiles(64, 64)},
        "cuda": {2: Tiles(64, 64, stages=3), 4: Tiles(64, 16, warps=8)},
        "interpreter": {4: Tiles(64, 16)},
    },
    "rms_norm": {  # columns: elements of whole rows at a time, or one row; rows: of them at most
        "ascend": {2: Tiles(32, 8192), 4: Tiles(32, 8192)},
        "cuda": {2: Tiles(32, 8192, warps=8), 4: Tiles(32, 8192, warps=8)},
        "interpreter": {4: Tiles(4, 64)},
    },
    "rms_norm_backward": {  # as rms_norm
        "ascend": {2: Tiles(32, 4096), 4: Tiles(32, 4096)},
        "cuda": {2: Tiles(32, 8192, warps=8), 4: Tiles(32, 8192, warps=8)},
        "interpreter": {4: Tiles(4, 64)},
    },
    "rotary_mul": {  # columns: elements of whole heads at a time; rows: of them at most
        "ascend": {2: Tiles(64, 4096), 4: Tiles(64, 4096)},
        "cuda": {2: Tiles(64, 4096), 4: Tiles(64, 4096)},
        "interpreter": {4: Tiles(16, 4096)},
    },
    "count_slots": _SLOTS,
    "place_slots": _SLOTS,
    "invert_rows": {  # rows: slots
        "ascend": {4: Tiles(1024, 1)},
        "cuda": {4: Tiles(1024, 1)},
        "interpreter": {4: Tiles(8, 1)},
    },
    "take": {  # rows: indices
        "ascend": {4: Tiles(1024, 1)},
        "cuda": {4: Tiles(1024, 1)},
        "interpreter": {4: Tiles(8, 1)},
    },
    "gather_tokens": {
        "ascend": {2: Tiles(1, 8192), 4: Tiles(1, 8192)},
        "cuda": {2: Tiles(1, 8192, warps=8), 4: Tiles(1, 8192, warps=8)},
        "interpreter": {4: Tiles(1, 4)},
    },
    "sum_rows": {
        "ascend": {2: Tiles(1, 8192), 4: Tiles(1, 4096)},
        "cuda": {2: Tiles(1, 8192, warps=8), 4: Tiles(1, 8192, warps=8)},
        "interpreter": {4: Tiles(1, 4)},
    },
    "dot_rows": {
        "ascend": {2: Tiles(1, 8192), 4: Tiles(1, 8192)},
        "cuda": {2: Tiles(1, 8192, warps=8), 4: Tiles(1, 8192, warps=8)},
        "interpreter": {4: Tiles(1, 4)},
    },
}


@dataclass(frozen=True)
class Widths:
    """The widest that the kernels take, each rounded up to a power of two."""

    value: int
    rest: int
    """Of a key, after its value."""
    index_heads: int
    index_dim: int


_WIDEST = {
    "ascend": Widths(value=512, rest=64, index_heads=64, index_dim=128),
    "cuda": Widths(value=512, rest=64, index_heads=64, index_dim=128),
    "interpreter": Widths(value=4096, rest=4096, index_heads=512, index_dim=4096),
}


def widest(target: str) -> Widths:
    """What fits with the table's tiles: the memories of a core hold whole rows."""
    return _WIDEST[target]


_DTYPES = {2: ("bfloat16", "float16"), 4: ("float32",)}


def find(kernel: str, target: str, dtype: torch.dtype) -> Tiles | None:
    """The entry of the table, or None where the kernel is not offered."""
    return _TABLE[kernel].get(target, {}).get(dtype.itemsize)


def dtypes(kernel: str, target: str) -> list[str]:
    """The dtypes for which a kernel is offered on a target."""
    return [name for size in sorted(_TABLE[kernel].get(target, {})) for name in _DTYPES[size]]


def entries(target: str) -> list[tuple[str, int, Tiles]]:
    """Every (kernel, bytes of an element, tiles) of a target."""
    return [
        (kernel, size, entry)
        for kernel, targets in _TABLE.items()
        for size, entry in targets.get(target, {}).items()
    ]

"""What cannot pass on this target, and the smallest input that shows it.

Kernels are not offered where they cannot pass, so nothing here is in the table of tiles: these are
the reasons for its numbers. A new compiler may take them, and then the session says so.
"""

from dataclasses import dataclass

from npu_dsa_kernels.backends.triton.tiles import Tiles


@dataclass(frozen=True)
class Known:
    """A case that fails with other tiles than the table's."""

    operator: str
    inputs: str
    """The case of `cases.CASES`."""
    dtype: str
    kernel: str
    tiles: Tiles
    message: str
    """What the error contains; the docs have all of it."""
    consequence: str


_BACKWARD = "sparse_attention_backward"
_H16, _H32, _H64 = (
    f"H {H}, D 576, K 2048, T {T}, indices outside, an empty row"
    for H, T in ((16, 32768), (32, 2304), (64, 2304))
)
_PACKED = "packed documents, rows without keys, ties, H 3, D 5, K 4"

KNOWN: tuple[Known, ...] = (
    Known(
        "sparse_attention", _H64, "bfloat16", "sparse_attention", Tiles(64, 128),
        "ub overflow",
        "32 heads at a time",
    ),
    Known(
        "sparse_attention", _H64, "float32", "sparse_attention", Tiles(64, 64),
        "ub overflow",
        "32 heads at a time",
    ),
    *(
        known
        for dtype in ("bfloat16", "float32")
        for known in (
            Known(
                _BACKWARD, _H32, dtype, _BACKWARD, Tiles(32, 32),
                "cc overflow",
                "16 heads at a time",
            ),
            Known(
                _BACKWARD, _H16, dtype, _BACKWARD, Tiles(16, 64),
                "'hivm.hir.copy' op Unsupported copy from cc to cc!",
                "32 keys at a time",
            ),
        )
    ),
    Known(
        "lightning_indexer", _PACKED, "float32", "select_topk", Tiles(128, 2048),
        "ub overflow",
        "64 keys packed at a time",
    ),
    Known(
        "lightning_indexer", _PACKED, "float32", "order_topk", Tiles(128, 64),
        "ub overflow",
        "64 keys put in order at a time",
    ),
)  # fmt: skip

"""What cannot pass on this target, with the compiler's words and the smallest input that shows it.

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
    """What the error contains."""
    consequence: str


KNOWN: tuple[Known, ...] = ()

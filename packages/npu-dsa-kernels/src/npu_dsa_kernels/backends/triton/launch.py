"""Where kernels start, and on what.

Operators call `launch`; what that runs is up to a launcher. `use` puts another one in place of the
device's: the Ascend gate of the tests runs every kernel as the code it was lowered to.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from npu_dsa_kernels import checks
from npu_dsa_kernels.backends.triton import tiles as table
from npu_dsa_kernels.backends.triton.tiles import Tiles


class Launcher(Protocol):
    """Runs a kernel's programs. Kernels loop, so that any number of programs does all the work."""

    target: str
    """The column of the table of tiles."""
    programs: int
    """How many programs fill the device."""

    def __call__(
        self,
        kernel: Any,
        programs: int,
        arguments: tuple[Any, ...],
        constants: dict[str, Any],
        tiles: Tiles,
    ) -> None:
        """Run `kernel` over a grid of one dimension.

        `arguments` are the tensors and numbers of the run, in order; `constants` are those of the
        compilation, by name.
        """
        ...


class _Interpreter:
    """Triton's interpreter, on CPU. Two programs: both loop, and they share what they write."""

    target = "interpreter"
    programs = 2

    def __call__(self, kernel, programs, arguments, constants, tiles) -> None:
        kernel[(programs,)](*arguments, **constants)


class _Cuda:
    target = "cuda"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.programs = 4 * torch.cuda.get_device_properties(device).multi_processor_count

    def __call__(self, kernel, programs, arguments, constants, tiles) -> None:
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        with torch.cuda.device(self.device):  # Triton starts kernels on the current one
            kernel[(programs,)](*arguments, **constants, **options)


class _Ascend:
    """Atlas A3: as many programs as a die has vector cores; those with products take two turns."""

    target = "ascend"
    programs = 48

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, kernel, programs, arguments, constants, tiles) -> None:
        with torch.get_device_module("npu").device(self.device):
            kernel[(programs,)](*arguments, **constants)


_replacement: Launcher | None = None


@contextmanager
def use(launcher: Launcher) -> Generator[None]:
    """Run kernels with `launcher`, whatever the tensors' device."""
    global _replacement
    before, _replacement = _replacement, launcher
    try:
        yield
    finally:
        _replacement = before


def launcher(device: torch.device) -> Launcher:
    """What runs kernels on tensors of `device`."""
    if _replacement is not None:
        return _replacement
    if device.type == "cuda":
        return _Cuda(device)
    return _Ascend(device) if device.type == "npu" else _Interpreter()


def find_tiles(kernel: Any, x: torch.Tensor) -> Tiles | None:
    """The table's entry for `kernel`, on the device and of the dtype of `x`, or None."""
    return table.find(kernel.__name__, launcher(x.device).target, x.dtype)


def tiles(kernel: Any, x: torch.Tensor, name: str) -> Tiles:
    """The same where there must be one; `name` is the argument that `x` is.

    Raises:
        ValueError: there is none.
    """
    found = find_tiles(kernel, x)
    if found is None:
        target = launcher(x.device).target
        names = " or ".join(table.dtypes(kernel.__name__, target)) or "nothing"
        want = f"backend 'triton' takes {names} on {target}; backend='torch' takes others"
        raise checks.bad(name, x.dtype, want)
    return found


def check_width(name: str, what: str, size: int, limit: str, x: torch.Tensor) -> None:
    """Refuse what no tile holds; `limit` is a field of `tiles.Widths`.

    Raises:
        ValueError: `size`, rounded up to a power of two, is wider.
    """
    target = launcher(x.device).target
    most = getattr(table.widest(target), limit)
    if wide(size, 1) > most:
        want = f"backend 'triton' takes at most {most} on {target}; backend='torch' takes more"
        raise checks.bad(name, f"{what} {size}", want)


def launch(kernel: Any, work: int, *arguments: Any, tile: Tiles, **constants: Any) -> None:
    """Run `kernel` over `work` items, which its programs share.

    `arguments` are given at run time, `constants` at compilation.
    """
    if work > 0:
        device = next(x.device for x in arguments if isinstance(x, torch.Tensor))
        run = launcher(device)
        run(kernel, min(work, run.programs), arguments, constants, tile)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def wide(size: int, least: int = 16) -> int:
    """The power of two that holds `size`. Products take at least 16 of everything."""
    return max(least, 1 << (size - 1).bit_length())

"""Launches of Triton kernels, compiled for a CUDA device that is not there.

Triton's wheel brings all it takes: its compiler, and NVIDIA's assembler. A launch is bound,
specialised and compiled by the code that does so on a device; only the driver, which is asked what
the device is, is ours.
"""

import contextlib
import io
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

from npu_dsa_kernels.backends.triton import launch
from npu_dsa_kernels.backends.triton import tiles as table
from npu_dsa_kernels.backends.triton.tiles import Tiles

TARGET = "cuda"


@dataclass(frozen=True)
class Architecture:
    capability: int
    card: str
    shared_bytes: int
    """Shared memory that a program may have."""
    multiprocessor_shared_bytes: int
    """That of a multiprocessor; of each program's share, 1 KB is the system's."""


# CUDA C++ Programming Guide, technical specifications per compute capability.
ARCHITECTURES = {
    x.capability: x
    for x in (
        Architecture(80, "A100", 163 * 1024, 164 * 1024),
        Architecture(90, "H100, H200, H800", 227 * 1024, 228 * 1024),
        Architecture(100, "B200", 227 * 1024, 228 * 1024),
    )
}
REGISTERS, WARPS, PROGRAMS = 64 * 1024, 64, 32
"""What a multiprocessor of any of them has: registers, and places for warps and programs."""


class _Absent(DriverBase):
    """Of the device, only what compiling takes."""

    def __init__(self, capability: int) -> None:
        super().__init__()
        self._target = GPUTarget("cuda", capability, 32)

    @classmethod
    def is_active(cls) -> bool:
        return False

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return f"absent sm_{self._target.arch}"  # Triton keeps what it compiled by device

    def get_current_stream(self, device: Any) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        raise NotImplementedError("there is no device")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("there is no device")

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("there is no device")


def compile_for(capability: int) -> None:
    """Let Triton, in this process, compile for a device of this compute capability."""
    driver.set_active(_Absent(capability))


@dataclass(frozen=True)
class Launch:
    """A kernel that was started: what it is compiled for."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    tiles: Tiles
    dtype: torch.dtype
    """By which its tiles were found."""

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.tiles.warps, "num_stages": self.tiles.stages}


class Recorder:
    """Keeps launches in place of running them. Tensors may be on the device "meta"."""

    target = TARGET
    programs = 4 * 132  # an H100's, as the backend has it there

    def __init__(self) -> None:
        self._found: dict[str, torch.dtype] = {}
        self._launches: dict[Any, Launch] = {}

    @contextmanager
    def use(self, other_tiles: dict[str, Tiles] | None = None) -> Iterator[None]:
        """Start all kernels here. `other_tiles` by kernel, in place of the table's."""
        find = table.find

        def found(kernel: str, target: str, dtype: torch.dtype) -> Tiles | None:
            self._found[kernel] = dtype
            return (other_tiles or {}).get(kernel) or find(kernel, target, dtype)

        with launch.use(self), mock.patch.object(table, "find", found):
            yield

    def __call__(
        self,
        kernel: Any,
        programs: int,
        arguments: tuple[Any, ...],
        constants: dict[str, Any],
        tiles: Tiles,
    ) -> None:
        # Two kernels share the tiles that were looked up for one of them.
        first = next(x for x in arguments if isinstance(x, torch.Tensor))
        dtype = self._found.get(kernel.__name__, first.dtype)
        one = Launch(kernel, arguments, constants, tiles, dtype)
        self._launches.setdefault((kernel.__name__, dtype, tiles, _key(one)), one)

    @property
    def launches(self) -> list[Launch]:
        """The first of all that are the same program, for the same entry of the table."""
        return list(self._launches.values())


def _key(one: Launch) -> str:
    """Triton's own, asked for where compiling would start, which it then does not."""
    keys: list[str] = []

    def stop(*, key: Any, **_: Any) -> bool:
        keys.append(str(key))
        return True

    with knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = stop
        _compile(one)
    (key,) = keys
    return key


def _compile(one: Launch) -> Any:
    return one.kernel.warmup(*one.arguments, grid=(1,), **one.constants, **one.options)


@dataclass(frozen=True)
class Compiled:
    """What a program takes of the device."""

    shared_bytes: int
    registers: int
    """Of a thread."""
    spilled_bytes: int
    """Stores to memory, of a thread, for want of registers."""
    products: tuple[str, ...]
    """How products are computed: ``wgmma``, ``mma`` and ``tcgen05`` are instructions of the tensor
    cores, ``fma`` are not."""
    warps: int

    def programs(self, architecture: Architecture) -> int:
        """How many a multiprocessor has room for."""
        registers = -(-self.registers // 8) * 8 * 32 * self.warps
        shared = self.shared_bytes + 1024
        return min(
            REGISTERS // registers,
            architecture.multiprocessor_shared_bytes // shared,
            WARPS // self.warps,
            PROGRAMS,
        )


class Rejected(Exception):
    """The message is the compiler's."""


def compile_launch(one: Launch, folder: Path) -> Compiled:
    """Compile for the device that `compile_for` was told of.

    `folder` keeps what Triton makes of it.

    Raises:
        Rejected: the assembler did not take it.
        triton.compiler.errors.CompilationError: the kernel is no valid Triton code.
    """
    said = io.StringIO()
    with knobs.cache.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(said):
        knobs.cache.dir = tempfile.mkdtemp(dir=folder)  # what is found there says nothing
        knobs.nvidia.dump_ptxas_log = True
        try:
            program = _compile(one)
        except Exception as error:
            if type(error).__name__ != "PTXASError":
                raise
            raise Rejected(str(error).partition("Repro command")[0]) from None
    text = program.asm
    return Compiled(
        shared_bytes=program.metadata.shared,
        registers=_figure(r"Used (\d+) registers", said.getvalue()),
        spilled_bytes=_figure(r"(\d+) bytes spill stores", said.getvalue()),
        products=products(text["ttgir"]),
        warps=program.metadata.num_warps,
    )


def _figure(pattern: str, log: str) -> int:
    found = re.findall(pattern, log)
    if len(found) != 1:
        raise Rejected(f"the assembler's log does not have {pattern!r} once:\n{log}")
    return int(found[0])


_PRODUCT = re.compile(
    r"= (tt\.dot|ttng\.warp_group_dot) .*-> tensor<[^#]*#(\w+)>|(ttng\.tc_gen5_mma)"
)


def products(ttgir: str) -> tuple[str, ...]:
    """How the products of Triton's last own representation of a kernel are computed."""
    found = set()
    for operation, layout, blackwell in _PRODUCT.findall(ttgir):
        if blackwell:
            found.add("tcgen05")
        elif operation == "ttng.warp_group_dot":
            found.add("wgmma")
        else:
            found.add("mma" if layout.startswith("mma") else "fma")
    if not found and re.search(r"\btt\.dot\b|_dot\b|_mma\b", ttgir):
        raise Rejected("a product that cannot be read in Triton's representation")
    return tuple(sorted(found))


def complaints(one: Launch, compiled: Compiled, architecture: Architecture) -> Iterator[str]:
    """What keeps a program from running, or from running well, on a device."""
    if compiled.shared_bytes > architecture.shared_bytes:
        yield (
            f"needs {compiled.shared_bytes:,} bytes of shared memory, "
            f"sm_{architecture.capability} has {architecture.shared_bytes:,}"
        )
    if one.dtype.itemsize == 2 and "fma" in compiled.products:
        yield f"computes products of {one.dtype} without tensor cores"

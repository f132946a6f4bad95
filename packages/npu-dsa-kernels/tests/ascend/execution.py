"""Lowered kernels as machine code of this host, run on copies of tensors between guard pages."""

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from host_tools import LLVM
from lowering import Lowered, Signature

RUNTIME = Path(__file__).with_name("runtime.c")

# Tensors become buffers, freed where they end; operations on them loops; loops LLVM.
_PASSES = (
    "--convert-elementwise-to-linalg",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--buffer-deallocation-pipeline",
    "--convert-linalg-to-loops",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--memref-expand",
    "--expand-strided-metadata",
    "--lower-affine",
    "--arith-expand=include-bf16=true",
    "--convert-math-to-llvm",  # has rsqrt; libm has what is no instruction
    "--convert-math-to-libm",
    "--convert-cf-to-llvm",
    "--convert-arith-to-llvm",
    "--convert-index-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--convert-arith-to-llvm",
    "--reconcile-unrealized-casts",
)


class Refused(Exception):
    """A tool did not take its input; the message is the tool's."""


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Refused(f"{Path(command[0]).name}: {done.stderr.strip()[:2000]}")


def build(lowered: Lowered, library: Path) -> None:
    """Compile for this host, to the shared library of that name.

    Raises:
        Refused: some operation cannot be turned into machine code of this host.
    """
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        source, mlir, llvm, better, code, runtime, whole = (
            Path(folder, name)
            for name in ("a.mlir", "b.mlir", "c.ll", "d.ll", "e.o", "runtime.o", "whole.so")
        )
        source.write_text(lowered.text)
        # Attributes of NPU dialects, on which no operation here depends, stay as they are.
        _run(f"mlir-opt-{LLVM}", source, "--allow-unregistered-dialect", *_PASSES, "-o", mlir)
        _run(f"mlir-translate-{LLVM}", "--mlir-to-llvmir", mlir, "-o", llvm)
        _run(f"opt-{LLVM}", "-O2", "-S", llvm, "-o", better)
        _run(f"llc-{LLVM}", "-O2", "-relocation-model=pic", "-filetype=obj", better, "-o", code)
        shared = library.with_name(runtime.name)
        if not shared.exists():
            _run("gcc", "-O2", "-fPIC", "-c", RUNTIME, "-o", runtime)
            runtime.rename(shared)
        _run("gcc", "-shared", "-Wl,--wrap=malloc", code, shared, "-lm", "-o", whole)
        whole.rename(library)


_CTYPES = {"f32": ctypes.c_float, "i1": ctypes.c_bool, "i32": ctypes.c_int32, "i64": ctypes.c_int64}


@functools.cache
def _load(library: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(library))
    found.guarded.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p]
    found.guarded.restype = ctypes.c_void_p
    found.spoiled.restype = ctypes.c_char_p
    return found


def _extent(x: Tensor) -> int:
    """Bytes from the first element of `x` to the end of its last."""
    if x.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def _spans(tensors: dict[str, Tensor]) -> dict[tuple[int, int], str]:
    """Address and bytes of every piece of memory, with the name of its first tensor.

    Raises:
        ValueError: two share a part of their memory, which copies would not.
    """
    spans: dict[tuple[int, int], str] = {}
    for name, x in tensors.items():
        spans.setdefault((x.data_ptr(), _extent(x)), name)
    end, before = 0, ""
    for (start, extent), name in sorted(spans.items()):
        if extent and start < end:
            raise ValueError(f"{before} and {name} overlap in memory")
        if extent:
            end, before = start + extent, name
    return spans


class OutOfBounds(Exception):
    """A kernel wrote outside of a tensor, or its result depends on what lies there."""


def execute(
    library: Path, lowered: Lowered, signature: Signature, programs: int, report_to: int
) -> None:
    """Run all programs, one after the other, and leave the results in the tensors.

    Twice, on copies: with a page that cannot be touched right before each tensor, and right behind
    it. A touched page ends the process: exit code 99, and the reason in file descriptor
    `report_to`.

    Raises:
        OutOfBounds: bytes around a tensor were written, or the two runs differ in a bit.
    """
    code = _load(library)
    code.watch(report_to)
    spans = _spans({name: x for name, x in signature.values.items() if isinstance(x, Tensor)})
    first, second = (
        _once(code, lowered, signature, spans, programs, before) for before in (False, True)
    )
    for (start, extent), name in spans.items():
        if first[start, extent] != second[start, extent]:
            raise OutOfBounds(f"{name}: its values depend on what lies around the tensors")
        ctypes.memmove(start, first[start, extent], extent)


def _once(
    code: ctypes.CDLL,
    lowered: Lowered,
    signature: Signature,
    spans: dict[tuple[int, int], str],
    programs: int,
    before: bool,
) -> dict[tuple[int, int], bytes]:
    """One run; the bytes of every piece of memory after it. `before`: a guard page's, or behind."""
    copies = {}
    for (start, extent), name in spans.items():
        copy = code.guarded(extent, before, name.encode())
        if copy is None:
            raise MemoryError(f"no address space for {name}, {extent} bytes")
        ctypes.memmove(copy, start, extent)
        copies[start, extent] = copy

    def memref(pointer: int | None, elements: int) -> list[Any]:
        # allocated, aligned, offset, size, stride
        address, size = ctypes.c_void_p(pointer), ctypes.c_int64
        return [address, address, size(0), size(elements), size(1)]

    arguments = memref(None, 0) + memref(None, 0)
    for value, kind in zip(signature.values.values(), lowered.parameters, strict=True):
        if isinstance(value, Tensor):
            extent = _extent(value)
            pointer = copies[value.data_ptr(), extent]
            arguments += memref(pointer, extent // value.element_size())
        else:
            arguments.append(_CTYPES[kind](value))
    run = getattr(code, lowered.function)
    run.restype = None
    for program in range(programs):
        run(*arguments, *(ctypes.c_int32(x) for x in (programs, 1, 1, program, 0, 0)))
    spoiled = code.spoiled()
    if spoiled is not None:
        raise OutOfBounds(f"{spoiled.decode()}: bytes around it were written")
    results = {span: ctypes.string_at(copy, span[1]) for span, copy in copies.items()}
    code.release()
    return results

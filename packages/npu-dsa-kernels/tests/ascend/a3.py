"""Lowered kernels through the compiler for Atlas A3, as far as it goes without CANN.

bishengir-compile splits a kernel between cube and vector cores, plans their memories, inserts
synchronisation, and hands the result to hivmc, which comes only with CANN. A kernel that gets there
fits.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import ascendnpuir

from lowering import ARCHITECTURE, Lowered

COMPILER = Path(ascendnpuir.__file__).with_name("bin") / "bishengir-compile"

UB, L1, L0C = 192 * 1024, 512 * 1024, 128 * 1024
"""Bytes a core has: unified buffer of a vector core, and two buffers of a cube core."""

# Those that triton-ascend passes for its default options.
_FLAGS = (
    f"--target={ARCHITECTURE}",
    "--enable-auto-multi-buffer=True",
    "--enable-auto-bind-sub-block=True",
    "--enable-hfusion-compile=true",
    "--enable-hivm-compile=true",
    "--enable-triton-kernel-compile=true",
)

_LAST_STEP = "External hivmc run fails, returning module before running external compiler"


@dataclass(frozen=True)
class Compiled:
    """What the compiler planned for a kernel, bytes a core."""

    ub_bytes: int
    l1_bytes: int
    l0c_bytes: int
    workspace_bytes: int
    """Global memory through which cube and vector cores pass data, for one cube core."""
    cores: str
    """``cube``, ``vector``, or both: ``cube + vector`` where one of a cube core's two vector cores
    works, ``cube + 2 vector`` where both do."""
    retried: tuple[str, ...]
    """Optimisations that the compiler gave up, by itself, to make it fit."""


class Rejected(Exception):
    """The message is the compiler's."""


def compile_for_a3(lowered: Lowered) -> Compiled:
    """Compile up to the compiler's last step.

    Raises:
        Rejected: it does not fit, or holds what the compiler cannot do.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, saved = folder / "kernel.mlir", folder / "saved"
        source.write_text(lowered.text)
        command = [COMPILER, source, *_FLAGS, f"--save-temps={saved}", "-o", folder / "kernel"]
        done = subprocess.run(command, capture_output=True, text=True)
        said = done.stdout + done.stderr
        result = saved / "module.hivm.opt.mlir"
        if _LAST_STEP not in said or not result.exists():
            raise Rejected(_reason(said, done.returncode))
        return read(result.read_text(), tuple(_RETRY.findall(said)))


_RETRY = re.compile(r"Ub overflow detected; automatically set enable-([\w-]+) to false")


def _reason(said: str, code: int) -> str:
    """The errors of the compiler's output, without places in files that are gone."""
    lines = [re.sub(r'loc\("[^"]*"[^)]*\): ', "", line) for line in said.splitlines()]
    errors = [
        line.removeprefix("error: ").partition(" (possible reason")[0]
        for line in lines
        if "error: " in line and "Failed to run" not in line
    ]
    return "; ".join(dict.fromkeys(errors)) or f"exit code {code}: {said.strip()[-1000:]}"


_BITS = {"i1": 1, "i4": 4, "i8": 8, "i16": 16, "f16": 16, "bf16": 16, "i64": 64, "index": 64}
_CONSTANT = re.compile(r"(%\S+) = arith\.constant (\d+) : i64")
_BUFFER = re.compile(
    r"hivm\.hir\.pointer_cast\(([^)]*)\)(?: \[[^]]*\])? *: *"
    r"memref<((?:\d+x)*)(\w+)(?:, strided<[^>]*>)?, #hivm\.address_space<(\w+)>>"
)


def read(module: str, retried: tuple[str, ...] = ()) -> Compiled:
    """What the compiler's last module says of memory and cores.

    Raises:
        ValueError: a buffer's place is not known, so that there is no saying how much is used.
    """
    highest = {"ub": 0, "cbuf": 0, "cc": 0}
    # A name has one meaning in a function, and may have another in the next.
    functions = re.split(r"^  func\.func ", module, flags=re.MULTILINE)[1:]
    for function in functions:
        constants = {name: int(value) for name, value in _CONSTANT.findall(function)}
        if function.count("hivm.hir.pointer_cast(") != len(_BUFFER.findall(function)):
            raise ValueError("a buffer that cannot be read in the compiler's module")
        for places, shape, element, space in _BUFFER.findall(function):
            elements = 1
            for size in shape.split("x")[:-1]:
                elements *= int(size)
            size = (elements * _BITS.get(element, 32) + 7) // 8
            for place in places.split(", "):
                if space in highest:
                    highest[space] = max(highest[space], constants[place] + size)
    workspace = re.search(
        r"_infer_workspace_shape_function\(\).*?arith\.constant (\d+) : index", module, re.DOTALL
    )
    return Compiled(
        ub_bytes=highest["ub"],
        l1_bytes=highest["cbuf"],
        l0c_bytes=highest["cc"],
        workspace_bytes=int(workspace[1]) if workspace else 0,
        cores=_cores(functions),
        retried=retried,
    )


def _cores(functions: list[str]) -> str:
    entries = [function for function in functions if "hacc.entry" in function.partition("\n")[0]]
    kinds = {
        kind: function
        for function in entries
        for kind in ("AIC", "AIV")
        if f"func_core_type<{kind}>" in function.partition("\n")[0]
    }
    if set(kinds) == {"AIC"}:
        return "cube"
    if set(kinds) == {"AIV"}:
        return "vector"
    # What the compiler could not split between the vector cores, it leaves to the first one.
    alone = "limit_sub_block_id0" in kinds["AIV"]
    return "cube + vector" if alone else "cube + 2 vector"

"""Compiles cpp/ into a library beside the Python files, if there is a C++ compiler.

Without one the wheel is pure Python, and `npu_dsa_kernels.backends()` says so. `CXX` names the
compiler; `NPU_DSA_COMPILED=0` builds without.
"""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NAME = "npu_dsa_kernels/backends/libdsa.so"
SOURCES = ("kernels.cpp", "dispatch.cpp")

# Instruction sets by machine, best first, and what selects them.
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"]
INSTRUCTION_SETS = {
    "x86_64": {
        "avx512_bf16": [*AVX512, "-mavx512bf16"],
        "avx512": AVX512,
        "avx2": ["-mavx2", "-mfma"],
        "baseline": [],
    },
    "aarch64": {"neon_bf16": ["-march=armv8.2-a+bf16"], "baseline": []},
}
INSTRUCTION_SETS["arm64"] = INSTRUCTION_SETS["aarch64"]

# No debug information and no paths: the same sources give the same bytes.
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"]
FLAGS += ["-ffp-contract=fast", "-Wall", "-Wextra"]


def compile_library(
    compiler: str, sources: Path, library: Path, flags: list[str] | None = None
) -> list[str]:
    """Build `library`; returns its instruction sets. `flags` come in addition, for sanitizers."""
    flags = flags or []
    sets = {
        name: options
        for name, options in INSTRUCTION_SETS.get(machine(compiler), {"baseline": []}).items()
        if not options or compiles(compiler, [*FLAGS, *options], "int x;")
    }
    parallel = ["-pthread"]  # where the compiler brings no OpenMP
    if "-DDSA_PLAIN_THREADS" not in flags:
        openmp = compiles(compiler, ["-fopenmp"], "#include <omp.h>")
        parallel = ["-fopenmp"] if openmp else ["-pthread", "-DDSA_PLAIN_THREADS"]
    library.parent.mkdir(parents=True, exist_ok=True)

    def compile_one(name: str, source: str, *more: str) -> str:
        target = str(Path(objects) / f"{name}.o")
        run([compiler, *FLAGS, *parallel, *more, *flags, "-c", str(sources / source), "-o", target])
        return target

    with tempfile.TemporaryDirectory() as objects, ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(compile_one, name, SOURCES[0], f"-DDSA_INSTRUCTION_SET={name}", *options)
            for name, options in sets.items()
        ]
        listed = " ".join(f"X({name})" for name in sets)
        jobs.append(
            pool.submit(compile_one, "dispatch", SOURCES[1], f"-DDSA_INSTRUCTION_SETS={listed}")
        )
        files = [job.result() for job in jobs]
        strip = [] if flags else ["-s"]
        run([compiler, "-shared", *strip, *parallel, *flags, *files, "-o", str(library), "-lm"])
    return list(sets)


def find_compiler() -> str | None:
    """`CXX`, or g++ or clang++, whichever is there first.

    Raises:
        RuntimeError: `CXX` names no program.
    """
    if os.environ.get("NPU_DSA_COMPILED") == "0" or sys.platform == "win32":
        return None
    chosen = os.environ.get("CXX")
    if chosen:
        path = shutil.which(chosen)
        if path is None:
            raise RuntimeError(f"CXX: got {chosen!r}; expected the name or path of a C++ compiler")
        return path
    return next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


def compiles(compiler: str, options: list[str], source: str) -> bool:
    """Whether the compiler knows these options and headers."""
    command = [compiler, *options, "-x", "c++", "-fsyntax-only", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True).returncode == 0


def machine(compiler: str) -> str:
    """What the compiler builds for, which a cross compiler's name tells, else this machine."""
    first = Path(compiler).name.split("-")[0]
    return (
        first
        if first in INSTRUCTION_SETS
        else platform.machine().lower().replace("amd64", "x86_64")
    )


def run(command: list[str]) -> None:
    """Run a compiler.

    Raises:
        RuntimeError: it failed; with its output, and how to build without it.
    """
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(
            f"{' '.join(command)}\n{result.stdout}{result.stderr}\n"
            "The CPU kernels did not compile. NPU_DSA_COMPILED=0 builds without them."
        )


class CompiledKernels(BuildHookInterface):
    """Adds the library to the wheel and makes the wheel one for this platform."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict) -> None:
        """Called by hatchling before it builds the wheel."""
        root = Path(self.root)
        compiler = find_compiler()
        if compiler is None:
            self.app.display_warning("no C++ compiler: the wheel comes without the CPU kernels")
            if version == "editable":
                (root / "src" / NAME).unlink(missing_ok=True)
            return
        if version == "editable":  # beside the sources that Python imports
            library = root / "src" / NAME
            library.unlink(missing_ok=True)  # a process may have the old one open
        else:
            library = Path(self.directory) / "compiled" / Path(NAME).name
            build_data["force_include"][str(library)] = NAME
            build_data["pure_python"] = False
            tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{tag}"
        sets = compile_library(compiler, root / "cpp", library)
        self.app.display_info(f"CPU kernels for {', '.join(sets)}")

    def finalize(self, version: str, build_data: dict, artifact_path: str) -> None:
        """Called by hatchling once the wheel is there."""
        shutil.rmtree(Path(self.directory) / "compiled", ignore_errors=True)

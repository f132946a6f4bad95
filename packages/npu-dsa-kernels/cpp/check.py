"""Builds the CPU kernels as users do not, and runs them against plain loops (standalone.cpp).

    python cpp/check.py address   # address and undefined behaviour sanitizers, then pytest too
    python cpp/check.py thread    # thread sanitizer
    python cpp/check.py aarch64   # cross compiled, NEON with bfloat16, in an emulator

`address` puts its library into the npu-dsa-kernels that is installed for this Python.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CPP = Path(__file__).parent
ROOT = CPP.parent
sys.path.insert(0, str(ROOT))

import hatch_build  # noqa: E402 - it lies beside pyproject.toml, in no package

FLAGS = {
    "address": ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-g", "-fsanitize=thread", "-DDSA_PLAIN_THREADS"],
    "aarch64": ["-O3"],
}


def main(kind: str) -> None:
    """Build and run one kind; exits with an error if a value or an access is wrong."""
    compiler, emulator = hatch_build.find_compiler(), []
    if kind == "aarch64":
        compiler = shutil.which("aarch64-linux-gnu-g++")
        emulator = ["qemu-aarch64", "-cpu", "max", "-L", "/usr/aarch64-linux-gnu"]
        if shutil.which(emulator[0]) is None:
            sys.exit("qemu-aarch64 is missing: apt-get install qemu-user")
    if compiler is None:
        sys.exit(f"no C++ compiler for {kind}: apt-get install g++ g++-aarch64-linux-gnu")
    with tempfile.TemporaryDirectory() as folder:
        library, program = Path(folder) / "libdsa.so", Path(folder) / "standalone"
        flags = FLAGS[kind]
        sets = hatch_build.compile_library(compiler, CPP, library, flags)
        print(f"{kind}: built for {', '.join(sets)}", flush=True)
        openmp = "-pthread" if "-DDSA_PLAIN_THREADS" in flags else "-fopenmp"
        inputs = [str(CPP / "standalone.cpp"), str(library), f"-Wl,-rpath,{folder}"]
        options = ["-std=c++17", "-O1", *flags, openmp]
        hatch_build.run([compiler, *options, *inputs, "-o", str(program)])
        subprocess.run([*emulator, str(program)], check=True)
        if kind == "address":
            spec = importlib.util.find_spec("npu_dsa_kernels")
            assert spec is not None and spec.origin is not None
            installed = Path(spec.origin).parent / "backends" / "libdsa.so"
            installed.unlink(missing_ok=True)  # it may be a link into a package cache
            shutil.copy(library, installed)
            test_with_address_sanitizer(compiler)


def test_with_address_sanitizer(compiler: str) -> None:
    """The Python tests of the kernels. The sanitizer has to be there before Python's malloc."""
    runtimes = [
        subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(runtimes),
        # Python never frees everything; and a test asks for more memory than there is.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "OMP_NUM_THREADS": "1",
    }
    tests = str(ROOT / "tests" / "test_compiled.py")
    command = [sys.executable, "-m", "pytest", "--installed-only", "-q", "-n", "2", tests]
    subprocess.run(command, check=True, env=environment)


if __name__ == "__main__":
    if not sys.argv[1:] or set(sys.argv[1:]) - set(FLAGS):
        sys.exit(__doc__)
    for name in sys.argv[1:]:
        main(name)

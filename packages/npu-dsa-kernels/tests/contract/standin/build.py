"""Libraries that let the real torch_npu wheel be imported where there is no CANN.

    python build.py OUT

Then, before Python starts, ``LD_LIBRARY_PATH=OUT TORCH_DEVICE_BACKEND_AUTOLOAD=0``. The wheel then
lists its operators and runs their shape functions and autograd on fake tensors of device "npu";
nothing is ever computed. Which libraries and functions are missing is read off the wheel: a few
functions of the runtime are written out in runtime.c, all others do nothing and return 0.
"""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

RUNTIME = Path(__file__).with_name("runtime.c")
HOME = "libascendcl.so"  # all functions go here; the other libraries only have to exist


def main(out: Path) -> None:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or shutil.which("ldd") is None:
        sys.exit("a C compiler and ldd are needed (Debian: gcc libc-bin); CC names the compiler")
    out.mkdir(parents=True, exist_ok=True)
    package = _folder("torch_npu")
    libraries = [*package.glob("_C*.so"), *package.glob("lib/*.so")]
    path = f"{out}:{_folder('torch') / 'lib'}"

    def build(name: str, source: str) -> None:
        file = out / f"{name}.c"
        file.write_text(source)
        command = [compiler, "-w", "-O1", "-shared", "-fPIC", "-o", str(out / name), str(file)]
        subprocess.run(command, check=True)

    pattern = r"(lib\S+) => not found"
    missing = _ldd(libraries, path, pattern)
    # The others get what they do not link to from those that load them.
    libraries = [library for library in libraries if _ldd([library], path, pattern)]
    if HOME not in missing:
        sys.exit(f"torch_npu does not look for {HOME}, but for {', '.join(missing) or 'nothing'}")
    for name in missing:
        build(name, "")
    symbols = [
        symbol
        for symbol in _ldd(libraries, path, r"undefined symbol: (\w+)", "-r")
        if not hasattr(ctypes.pythonapi, symbol)  # what the interpreter itself provides
    ]
    runtime = RUNTIME.read_text()
    written = set(re.findall(r"^[\w *]*?\b(acl\w+)\(", runtime, re.MULTILINE))
    if unknown := written - set(symbols):
        sys.exit(f"runtime.c defines what torch_npu does not use: {', '.join(sorted(unknown))}")
    generated = [f"int {symbol}(void) {{ return 0; }}" for symbol in symbols]
    generated = [line for line in generated if line.split("(")[0].split()[1] not in written]
    build(HOME, "\n".join([runtime, *generated, ""]))
    if left := _ldd(libraries, path, r"undefined symbol: ((?!_?Py)\w+)", "-r"):
        sys.exit(f"still undefined: {', '.join(left)}")
    print(f"{len(missing)} libraries, {len(written)} functions written, {len(generated)} generated")


def _folder(module: str) -> Path:
    spec = importlib.util.find_spec(module)  # finds, does not import
    if spec is None or spec.origin is None:
        sys.exit(f"{module} is not installed")
    return Path(spec.origin).parent


def _ldd(libraries: list[Path], path: str, pattern: str, *flags: str) -> list[str]:
    found: set[str] = set()
    for library in libraries:
        command = ["ldd", *flags, str(library)]
        environment = os.environ | {"LD_LIBRARY_PATH": path}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        found |= set(re.findall(pattern, done.stdout + done.stderr))
    return sorted(found)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]).absolute())

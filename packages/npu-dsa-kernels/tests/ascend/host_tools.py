"""Programs of the system that the gate needs: `python host_tools.py` says which are missing."""

import shutil
import sys

LLVM = 19
TOOLS = {
    f"mlir-opt-{LLVM}": f"mlir-{LLVM}-tools",
    f"mlir-translate-{LLVM}": f"mlir-{LLVM}-tools",
    f"opt-{LLVM}": f"llvm-{LLVM}",
    f"llc-{LLVM}": f"llvm-{LLVM}",
    "gcc": "gcc",
}
"""Program -> the Debian package that has it."""


def missing() -> str | None:
    """What to install, or None."""
    programs = [tool for tool in TOOLS if shutil.which(tool) is None]
    if not programs:
        return None
    packages = sorted({TOOLS[tool] for tool in programs})
    return f"not found: {', '.join(programs)}. Install: apt-get install {' '.join(packages)}"


if __name__ == "__main__":
    sys.exit(missing())

"""Check an installed package: it imports, and its wheel carries what a user is promised.

python -I tools/check_installed.py npu-dsa-kernels npu_dsa_kernels
"""

import importlib
import sys
from importlib import metadata


def main() -> None:
    name, module_name = sys.argv[1:]
    distribution = metadata.distribution(name)
    module = importlib.import_module(module_name)
    files = {str(path) for path in distribution.files or []}
    checks = {
        f"{module_name}.__version__ is the wheel's": module.__version__ == distribution.version,
        "py.typed is in the wheel": f"{module_name}/py.typed" in files,
        "the licence is in the wheel": any(path.endswith("licenses/LICENSE") for path in files),
        "no tests are in the wheel": not any("tests/" in path for path in files),
    }
    for point in distribution.entry_points:
        checks[f"{point.name} = {point.value} loads"] = callable(point.load())
    failed = [check for check, passed in checks.items() if not passed]
    if failed:
        sys.exit("\n".join(f"{name} {distribution.version}: not true that {f}" for f in failed))
    print(f"{name} {distribution.version}: {'; '.join(checks)}")


if __name__ == "__main__":
    main()

"""Prove that an environment holds a package with what it declares, and nothing else.

    python tools/check_isolation.py fsdp2-npu --extra test --workspace fsdp2-npu titan-npu-train ...

Run by the `tests` session in the package's own environment.
"""

import argparse
import importlib.util
import sys
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def declared(name: str, extra: str) -> set[str]:
    """Names of the distributions that `name[extra]` asks for, directly or through others."""
    found: set[str] = set()
    waiting = [(canonicalize_name(name), frozenset({extra}))]
    seen = set()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        distribution, extras = current
        try:
            lines = metadata.requires(distribution) or []
        except metadata.PackageNotFoundError:
            continue  # asked for by another platform's marker, or missing: the import check tells
        found.add(distribution)
        for requirement in map(Requirement, lines):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": e}) for e in {"", *extras}):
                waiting.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("package")
    parser.add_argument("--extra", default="")
    parser.add_argument("--workspace", nargs="+", required=True)
    options = parser.parse_args()

    allowed = declared(options.package, options.extra)
    installed = {canonicalize_name(d.metadata["Name"]) for d in metadata.distributions()}
    problems = [f"{name} is installed but not declared" for name in sorted(installed - allowed)]
    modules = {name: name.replace("-", "_") for name in [*options.workspace, "torchtitan"]}
    for name, module in modules.items():
        importable = importlib.util.find_spec(module) is not None
        if importable and name not in allowed:
            problems.append(f"{module} can be imported but {options.package} does not declare it")
        if not importable and name in allowed:
            problems.append(f"{options.package} declares {name}, but {module} cannot be imported")
    if problems:
        sys.exit("\n".join([f"The environment of {options.package} is not its own:", *problems]))
    print(f"{options.package} is alone with the {len(allowed) - 1} distributions it declares")


if __name__ == "__main__":
    main()

"""The wheels as a user meets them: their READMEs' examples run, and the house rules can fail."""

import ast
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
LONGEST_EXAMPLE = 20  # lines, formatted


def name(package: Path) -> str:
    return package.name


def first_example(package: Path) -> str:
    blocks = re.findall(
        r"^```python\n(.*?)^```", (package / "README.md").read_text("utf-8"), re.M | re.S
    )
    assert blocks, f"{package.name}/README.md has no Python example"
    return blocks[0]


@pytest.mark.parametrize("package", PACKAGES, ids=name)
def test_readme_example_runs(package, tmp_path):
    """Copied into a file of its own, the README's first example runs and prints something."""
    example = first_example(package)
    script = tmp_path / "example.py"
    script.write_text(example, "utf-8")
    command = [sys.executable, str(script)]
    if "init_process_group" in example:
        # torch 2.14 now and then aborts when an interpreter that used Gloo shuts down.
        rank = tmp_path / "rank.py"
        rank.write_text(
            f"import os, runpy, sys\nrunpy.run_path({str(script)!r}, run_name='__main__')\n"
            "sys.stdout.flush()\nos._exit(0)\n"
        )
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [sys.executable, *torchrun, str(rank)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "the example shows nothing"


@pytest.mark.parametrize("package", PACKAGES, ids=name)
def test_readme_example_is_short_and_about_its_package(package):
    example = first_example(package)
    assert len([line for line in example.splitlines() if line.strip()]) <= LONGEST_EXAMPLE
    imported = {
        alias.partition(".")[0]
        for node in ast.walk(ast.parse(example))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [a.name for a in node.names]
        )
    }
    others = {other.name.replace("-", "_") for other in PACKAGES if other != package}
    assert package.name.replace("-", "_") in imported
    assert not imported & others


@pytest.mark.parametrize("package", PACKAGES, ids=name)
def test_typed_and_licensed(package):
    files = {str(path) for path in metadata.files(package.name)}
    module = package.name.replace("-", "_")
    assert f"{module}/py.typed" in files
    (licence,) = [path for path in files if path.endswith("/licenses/LICENSE")]
    text = metadata.distribution(package.name).locate_file(licence).read_text("utf-8")
    assert text == (ROOT / "LICENSE").read_text("utf-8")


def test_architecture_diagram_shows_the_declared_dependencies():
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    diagram = re.search(r"```mermaid\n(.*?)```", page, re.DOTALL)[1]
    drawn = set(re.findall(r"^ *(\S+) --> (\S+)$", diagram, re.MULTILINE))
    shown = {package.name for package in PACKAGES} | {"torchtitan"}
    declared = {
        (package.name, requirement.name)
        for package in PACKAGES
        for requirement in map(Requirement, metadata.requires(package.name))
        if requirement.name in shown
    }
    assert {arrow for arrow in drawn if arrow[1] in shown} == declared


def test_importing_all_packages_patches_nothing():
    """Importing every package leaves torch and torchtitan as they were."""
    modules = [package.name.replace("-", "_") for package in PACKAGES]
    script = f"""
import importlib, types
import torch, torch.distributed, torch.nn, torch.distributed.fsdp, torch.distributed.tensor
import torchtitan.trainer, torchtitan.tools.utils
def attributes():
    seen = {{}}
    for module in ("torch", "torch.cpu", "torch.distributed", "torch.nn.functional",
                   "torch.distributed.fsdp", "torchtitan.trainer", "torchtitan.tools.utils"):
        for key, value in vars(importlib.import_module(module)).items():
            if not isinstance(value, types.ModuleType):
                seen[module, key] = id(value)
    return seen
before = attributes()
for name in {modules!r}:
    importlib.import_module(name)
after = attributes()
print(sorted(key for key in before if after.get(key) != before[key]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "[]"

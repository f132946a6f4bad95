"""docs/compatibility.md says what the installed wheels say."""

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
COLUMNS = ["package", "version", "Python", "torch", "torchtitan", "torch-npu", "packages from here"]


def read_table() -> dict[str, dict[str, str]]:
    text = (ROOT / "docs" / "compatibility.md").read_text("utf-8")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    header = [re.sub(r" \(.*\)", "", cell) for cell in rows[0]]
    assert header == COLUMNS
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows[2:]}


def declared(package: str, extra: str = "") -> dict[str, SpecifierSet]:
    """The version range of each requirement that applies with, but not only without, `extra`."""
    found = {}
    for line in metadata.requires(package) or []:
        requirement = Requirement(line)
        of_extra = requirement.marker is not None and "extra" in str(requirement.marker)
        if not of_extra and not extra:
            found[requirement.name] = requirement.specifier
        if of_extra and extra and requirement.marker.evaluate({"extra": extra}):
            found[requirement.name] = requirement.specifier
    return found


def test_every_package_has_a_row():
    assert sorted(read_table()) == PACKAGES


@pytest.mark.parametrize("package", PACKAGES)
def test_row_agrees_with_the_wheel(package):
    row = read_table()[package]
    needs, npu = declared(package), declared(package, extra="npu")
    assert row["version"] == metadata.version(package)
    assert SpecifierSet(row["Python"]) == SpecifierSet(
        metadata.metadata(package)["Requires-Python"]
    )
    for name, ranges in {"torch": needs, "torchtitan": needs, "torch-npu": npu}.items():
        if name in ranges:
            assert SpecifierSet(row[name]) == ranges[name], name
        else:
            assert row[name] == "-", name
    cells = [] if row["packages from here"] == "-" else row["packages from here"].split("<br>")
    listed = {name: SpecifierSet(text) for name, _, text in (cell.partition(" ") for cell in cells)}
    assert listed == {name: needs[name] for name in needs if name in PACKAGES}


@pytest.mark.parametrize("package", PACKAGES)
def test_ranges_admit_each_other(package):
    """What a package asks of another one from here includes that one's current version."""
    for name, allowed in declared(package).items():
        if name in PACKAGES:
            assert metadata.version(name) in allowed, name


@pytest.mark.parametrize("package", PACKAGES)
def test_torch_npu_covers_the_same_torch_minors(package):
    """torch-npu's releases carry torch's numbers, so that both ranges have to be the same."""
    npu = declared(package, extra="npu")
    assert npu["torch-npu"] == declared(package)["torch"]

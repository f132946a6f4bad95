"""Write what the repository says about its packages in several places from their pyproject.toml.

    python tools/generate.py            # write
    python tools/generate.py --check    # fail where something is out of date

Written: what stands between `generated:NAME` and `/generated` in the READMEs, docs/compatibility.md
and zensical.toml, and the page of each package, docs/packages/<package>.md.
"""

import argparse
import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent
BLOCK = r"([^\n]* generated:{name}\b[^\n]*\n).*?([^\n]* /generated\b[^\n]*\n)"
PAGE = """\
<!-- Written by tools/generate.py. -->

--8<-- "packages/{name}/README.md"

## API

::: {module}

--8<-- "packages/{name}/CHANGELOG.md"
"""


def read_packages() -> list[dict]:
    """The pyproject.toml of each package, those that need no other package first."""
    paths = sorted(ROOT.glob("packages/*/pyproject.toml"))
    packages = [tomllib.loads(path.read_text("utf-8")) for path in paths]
    names = {package["project"]["name"] for package in packages}

    def workspace_needs(package: dict) -> int:
        return len(names & {requirement.name for requirement in requirements(package)})

    return sorted(packages, key=workspace_needs)


def requirements(package: dict, extra: str | None = None) -> list[Requirement]:
    project = package["project"]
    lines = project["optional-dependencies"].get(extra, []) if extra else project["dependencies"]
    return [Requirement(line) for line in lines]


def spell(specifier: SpecifierSet | None) -> str:
    """A version range as a reader writes it: lower bound first; a dash where there is none."""
    if specifier is None:
        return "-"
    order = {">=": 0, ">": 0, "==": 0, "~=": 0, "!=": 1, "<": 2, "<=": 2}
    parts = sorted(specifier, key=lambda s: order[s.operator])
    return ", ".join(f"{s.operator} {s.version}" for s in parts) or "any"


def version(package: dict) -> str:
    folder = ROOT / "packages" / package["project"]["name"]
    about = (folder / package["tool"]["hatch"]["version"]["path"]).read_text("utf-8")
    found = re.search(r'^__version__ = "(.+)"$', about, re.MULTILINE)
    if found is None:
        raise ValueError(f"{folder.name}: no __version__ line in __about__.py")
    return found[1]


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    body = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"\n{body}\n"  # a table next to a comment is not read as one everywhere


def compatibility(packages: list[dict]) -> str:
    names = {package["project"]["name"] for package in packages}
    rows = []
    for package in packages:
        project = package["project"]
        ranges = {r.name: r.specifier for r in requirements(package)}
        npu = {r.name: r.specifier for r in requirements(package, "npu")}
        workspace = [f"{name} {spell(ranges[name])}" for name in ranges if name in names]
        rows.append(
            [
                project["name"],
                version(package),
                spell(SpecifierSet(project["requires-python"])),
                spell(ranges.get("torch")),
                spell(ranges.get("torchtitan")),
                spell(npu.get("torch-npu")),
                "<br>".join(workspace) or "-",
            ]
        )
    header = ["package", "version", "Python", "torch", "torchtitan", "torch-npu (`[npu]`)"]
    return table([*header, "packages from here"], rows)


def navigation(packages: list[dict]) -> str:
    names = [package["project"]["name"] for package in packages]
    return "".join(f'        {{ "{name}" = "packages/{name}.md" }},\n' for name in names)


def overview(packages: list[dict], header: list[str], description: str) -> str:
    rows = []
    for package in packages:
        project, own = package["project"], package["tool"].get("workspace", {})
        text = own.get(description) or project["description"]
        rows.append([f"[{project['name']}](packages/{project['name']}/README.md)", text])
    return table(header, rows)


def generated(packages: list[dict]) -> dict[Path, str]:
    """Every generated file with the text it ought to have."""
    blocks = {
        "README.md": ("packages", overview(packages, ["package", "what it does"], "description")),
        "README.zh.md": ("packages", overview(packages, ["软件包", "用途"], "description-zh")),
        "zensical.toml": ("packages", navigation(packages)),
        "docs/compatibility.md": ("compatibility", compatibility(packages)),
    }
    texts = {}
    for file, (name, block) in blocks.items():
        old = (ROOT / file).read_text("utf-8")
        pattern = re.compile(BLOCK.format(name=name), re.DOTALL)
        if len(pattern.findall(old)) != 1:
            raise ValueError(f"{file}: expected one block 'generated:{name}'")
        texts[ROOT / file] = pattern.sub(lambda m, block=block: f"{m[1]}{block}{m[2]}", old)
    for package in packages:
        name = package["project"]["name"]
        page = PAGE.format(name=name, module=name.replace("-", "_"))
        texts[ROOT / "docs" / "packages" / f"{name}.md"] = page
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the generated tables and pages.")
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    check = parser.parse_args().check

    texts = generated(read_packages())
    stale = [
        path
        for path, text in texts.items()
        if not path.is_file() or path.read_text("utf-8") != text
    ]
    stale += set((ROOT / "docs" / "packages").glob("*.md")) - texts.keys()
    if check and stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        sys.exit(f"Out of date: {names}. Repair with: nox -s lint -- --fix")
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        if path in texts:
            path.write_text(texts[path], "utf-8")
        else:
            path.unlink()
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

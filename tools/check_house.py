"""House rules that no off-the-shelf linter knows. Run by `nox -s lint`.

Each rule is a generator of complaints over a checkout; its docstring is the rule.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

MACHINE_PATH = re.compile(r"(?<![\w.~$}/-])/(?:root|home|Users|work|workspace|mnt|opt)/\w")
CHANGELOG_VERSION = re.compile(r"^## \[?(\d[\w.]*)", re.MULTILINE)
LARGEST_FILE = 1 << 20  # bytes
README_COMMANDS = ("quickstart", "tests integration")


@dataclass(frozen=True)
class Checkout:
    root: Path

    def tracked(self) -> list[Path]:
        listing = subprocess.run(
            ["git", "ls-files", "-z"], cwd=self.root, check=True, capture_output=True, text=True
        ).stdout
        paths = (self.root / name for name in listing.split("\0") if name)
        return [path for path in paths if path.is_file()]

    def packages(self) -> list[Path]:
        return sorted(path.parent for path in self.root.glob("packages/*/pyproject.toml"))


def project(package: Path) -> dict:
    return tomllib.loads((package / "pyproject.toml").read_text("utf-8"))["project"]


def no_machine_paths(checkout: Checkout) -> Iterator[str]:
    """No file names an absolute path of somebody's machine."""
    for path in checkout.tracked():
        try:
            lines = path.read_text("utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # a picture
        for number, line in enumerate(lines, 1):
            if found := MACHINE_PATH.search(line):
                yield f"{path.relative_to(checkout.root)}:{number}: {line[found.start() :][:40]}"


def no_large_files(checkout: Checkout) -> Iterator[str]:
    """No tracked file is larger than 1 MiB."""
    for path in checkout.tracked():
        if path.stat().st_size > LARGEST_FILE:
            yield f"{path.relative_to(checkout.root)}: {path.stat().st_size} bytes"


def same_licence(checkout: Checkout) -> Iterator[str]:
    """Each package carries the repository's licence, word for word."""
    licence = (checkout.root / "LICENSE").read_bytes()
    for package in checkout.packages():
        copy = package / "LICENSE"
        if not copy.is_file() or copy.read_bytes() != licence:
            yield f"{copy.relative_to(checkout.root)} is missing or differs from LICENSE"


def complete_packages(checkout: Checkout) -> Iterator[str]:
    """Each package has what its users and the sessions expect of it."""
    for package in checkout.packages():
        name = package.name
        module = package / "src" / name.replace("-", "_")
        if project(package)["name"] != name:
            yield f"packages/{name} holds a project called {project(package)['name']}"
        wanted = [package / "README.md", package / "CHANGELOG.md"]
        wanted += [module / "__about__.py", module / "py.typed"]
        for path in wanted:
            if not path.is_file():
                yield f"{path.relative_to(checkout.root)} is missing"
        if not any((package / "tests").rglob("test_*.py")):
            yield f"packages/{name}/tests has no tests"


def changelog_names_version(checkout: Checkout) -> Iterator[str]:
    """The newest CHANGELOG entry of a package is its current version."""
    for package in checkout.packages():
        about = package / "src" / package.name.replace("-", "_") / "__about__.py"
        version = re.search(r'^__version__ = "(.+)"$', about.read_text("utf-8"), re.MULTILINE)
        newest = CHANGELOG_VERSION.search((package / "CHANGELOG.md").read_text("utf-8"))
        if version is None or newest is None or version[1] != newest[1]:
            found = (version and version[1], newest and newest[1])
            yield f"{package.name}: version {found[0]}, CHANGELOG {found[1]}"


def declared_imports_only(checkout: Checkout) -> Iterator[str]:
    """A package, its tests included, imports another workspace package only if it declares it."""
    modules = {package.name.replace("-", "_"): package.name for package in checkout.packages()}
    for package in checkout.packages():
        declared = {Requirement(line).name for line in project(package).get("dependencies", [])}
        for path in sorted(package.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"), path)):
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module:
                    names = [node.module]
                else:
                    continue
                for name in names:
                    other = modules.get(name.partition(".")[0])
                    if other is not None and other != package.name and other not in declared:
                        place = f"{path.relative_to(checkout.root)}:{node.lineno}"
                        yield f"{place}: {package.name} does not declare {other}"


def one_set_of_commands(checkout: Checkout) -> Iterator[str]:
    """Both READMEs give the two commands, and CI runs the second as it stands there."""
    for command in README_COMMANDS:
        for readme in ("README.md", "README.zh.md"):
            line = f'pip install "nox[uv]" && nox -s {command}\n'
            if line not in (checkout.root / readme).read_text("utf-8"):
                yield f"{readme} lacks the command: {line.strip()}"
    script = (checkout.root / ".ci/run").read_text("utf-8")
    if not re.search(rf"^nox -s {README_COMMANDS[1]}( \|\||$)", script, re.MULTILINE):
        yield f".ci/run does not run: nox -s {README_COMMANDS[1]}"


RULES = (
    no_machine_paths,
    no_large_files,
    same_licence,
    complete_packages,
    changelog_names_version,
    declared_imports_only,
    one_set_of_commands,
)


def main() -> None:
    checkout = Checkout(Path(__file__).parent.parent)
    broken = False
    for rule in RULES:
        for complaint in rule(checkout):
            broken = True
            print(f"{complaint}\n    rule: {rule.__doc__}", file=sys.stderr)
    if broken:
        sys.exit(1)
    print(f"{len(RULES)} house rules hold for {len(checkout.packages())} packages")


if __name__ == "__main__":
    main()

"""Each house rule finds what it is there to find."""

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


house = load("check_house")
site = load("check_site")


@pytest.fixture
def checkout(tmp_path):
    """A small repository in which every rule holds."""
    root = tmp_path / "repository"
    commands = "".join(f'pip install "nox[uv]" && nox -s {c}\n' for c in house.README_COMMANDS)
    files = {
        "LICENSE": "All may use it.\n",
        "README.md": commands,
        "README.zh.md": commands,
        ".ci/run": f"\nnox -s {house.README_COMMANDS[1]}\n",
    }
    for name, needs in {"one-package": "", "two-package": '"one-package>=0.1"'}.items():
        module = name.replace("-", "_")
        files |= {
            f"packages/{name}/pyproject.toml": (
                f'[project]\nname = "{name}"\ndependencies = [{needs}]\n'
            ),
            f"packages/{name}/LICENSE": "All may use it.\n",
            f"packages/{name}/README.md": f"# {name}\n",
            f"packages/{name}/CHANGELOG.md": "# Changelog\n\n## 0.2.0\n\n## 0.1.0\n",
            f"packages/{name}/src/{module}/__about__.py": '__version__ = "0.2.0"\n',
            f"packages/{name}/src/{module}/py.typed": "",
            f"packages/{name}/tests/test_it.py": "",
        }
    files["packages/two-package/src/two_package/__init__.py"] = "import one_package.part\n"
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    if shutil.which("git") is None:
        pytest.skip("the house rules look at the files git tracks; git is not installed")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    return house.Checkout(root)


def complaints(checkout):
    return [(rule.__name__, text) for rule in house.RULES for text in rule(checkout)]


def test_a_good_repository_passes(checkout):
    assert complaints(checkout) == []


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        ("no_machine_paths", "README.md", "see {}home/me/data\n"),
        ("no_machine_paths", ".ci/run", "cd '{}root/checkout'\n"),
        ("no_large_files", "LICENSE", "x" * (house.LARGEST_FILE + 1)),
        ("same_licence", "packages/one-package/LICENSE", "None may use it.\n"),
        ("changelog_names_version", "packages/one-package/CHANGELOG.md", "## 0.1.0\n"),
        (
            "declared_imports_only",
            "packages/one-package/tests/test_it.py",
            "def test():\n    from two_package import part\n",
        ),
        ("one_set_of_commands", "README.zh.md", "nox\n"),
        ("one_set_of_commands", ".ci/run", "nox -s tests\n"),
    ],
)
def test_a_broken_rule_is_found(checkout, rule, path, text):
    (checkout.root / path).write_text(text.format("/"))
    assert rule in [name for name, _ in complaints(checkout)]


@pytest.mark.parametrize("part", ["README.md", "src/one_package/py.typed", "tests/test_it.py"])
def test_an_incomplete_package_is_found(checkout, part):
    (checkout.root / "packages" / "one-package" / part).unlink()
    assert [rule for rule, _ in complaints(checkout)] == ["complete_packages"]


def test_a_misnamed_package_is_found(checkout):
    packages = checkout.root / "packages"
    shutil.move(packages / "one-package" / "src" / "one_package", packages / "kept")
    (packages / "one-package" / "pyproject.toml").write_text('[project]\nname = "other"\n')
    shutil.move(packages / "kept", packages / "one-package" / "src" / "one_package")
    assert "complete_packages" in [rule for rule, _ in complaints(checkout)]


def test_urls_and_relative_paths_are_no_machine_paths(checkout):
    text = "https://example.org/home/page src/root/file ~/work/x ${HOME}/opt/x dist/mnt/y\n"
    (checkout.root / "LICENSE").write_text(text)
    assert not list(house.no_machine_paths(checkout))


@pytest.mark.parametrize(
    ("body", "broken"),
    [
        ('<a href="b/">b</a><a href="b/#there">there</a><a href="#here" id="here">x</a>', 0),
        ('<a href="https://example.org/nowhere">outside</a>', 0),
        ('<a href="c/">c</a>', 1),
        ('<img src="missing.png">', 1),
        ('<a href="b/#nowhere">b</a>', 1),
        ('<a href="#nowhere">here</a>', 1),
    ],
)
def test_broken_links_of_the_site_are_found(tmp_path, body, broken):
    (tmp_path / "b").mkdir()
    (tmp_path / "index.html").write_text(body)
    (tmp_path / "b" / "index.html").write_text('<h1 id="there">There</h1>')
    assert len(site.broken_links(tmp_path)) == broken

"""Every job of the repository, each in its own fresh environment: `nox --list`.

Packages are found by their `packages/*/pyproject.toml`; adding one needs no change here. A session
installs the wheels that users would get, never the source tree, and only what the package declares.
"""

from __future__ import annotations

import filecmp
import functools
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import nox
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["tests", "integration", "lint"]

ROOT = Path(__file__).parent
DIST = ROOT / "dist"
# The newest torch_npu that is there for the oldest torch the packages run on; operators and shape
# functions of 2.14 are the same.
TORCH_NPU = "2.13.0"
GROUPS = nox.project.load_toml("pyproject.toml")["dependency-groups"]


@dataclass(frozen=True)
class Package:
    """One workspace package, as its pyproject.toml describes it."""

    folder: Path

    @functools.cached_property
    def project(self) -> dict:
        return nox.project.load_toml(self.folder / "pyproject.toml")["project"]

    @property
    def name(self) -> str:
        return self.project["name"]

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def requirements(self) -> list[Requirement]:
        return [Requirement(line) for line in self.project.get("dependencies", [])]

    def closure(self) -> list[Package]:
        """This package and the workspace packages it needs, itself first."""
        found: list[Package] = [self]
        for package in found:
            for requirement in package.requirements:
                needed = PACKAGES.get(canonicalize_name(requirement.name))
                if needed is not None and needed not in found:
                    found.append(needed)
        return found

    def oldest_torch(self) -> str | None:
        """The oldest torch minor it declares, or None where it declares only one."""
        for requirement in self.requirements:
            if requirement.name != "torch":
                continue
            bounds = {s.operator: Version(s.version) for s in requirement.specifier}
            lowest, above = bounds.get(">="), bounds.get("<")
            if lowest and above and lowest.minor + 1 < above.minor:
                return f"{lowest.major}.{lowest.minor}"
        return None


def _discover() -> dict[str, Package]:
    if sys.version_info < (3, 11):  # noqa: UP036 (nox itself runs on older ones)
        raise SystemExit(
            f"Python {sys.version.split()[0]} runs nox here, but the packages need 3.11 or newer."
        )
    packages = [Package(path.parent) for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]
    return {canonicalize_name(package.name): package for package in packages}


PACKAGES = _discover()
HAS_CPU_TORCH = """
import importlib.util
if importlib.util.find_spec("torch"):
    import torch
    print("" if torch.version.cuda else "yes")
"""
# triton-ascend uses pybind11 without declaring it, and numpy's functions of before 2.4.
ASCEND = ("triton-ascend==3.2.0", "ascendnpu-ir==1.2.0", "pybind11>=2.13", "numpy<2.4")
# Whose compiler and assembler the figures of the session `cuda` are of.
TRITON = "triton==3.8.0"
HAS_CUDA = "import torch; print('yes' if torch.cuda.is_available() else '')"
OWNS_TRITON = """
import importlib.metadata
owners = importlib.metadata.packages_distributions()["triton"]
assert set(owners) == {"triton-ascend"}, f"triton belongs to {owners}"
"""
_wheels: dict[str, Path] = {}


def _each(packages):
    return nox.parametrize("package", [nox.param(package, id=package.name) for package in packages])


def _wheel(session: nox.Session, package: Package) -> Path:
    """The package's wheel, built once per nox run."""
    if package.name not in _wheels:
        folder = DIST / "wheels" / package.name
        shutil.rmtree(folder, ignore_errors=True)
        session.run(
            "uv", "build", "--quiet", "--wheel", "--out-dir", str(folder), str(package.folder)
        )
        (_wheels[package.name],) = folder.glob("*.whl")
    return _wheels[package.name]


def _install(
    session: nox.Session, packages: list[Package], *others: str, extra: str | None = None
) -> None:
    """Install wheels of `packages` (with `extra`) and of the workspace packages they need."""
    arguments = list(others)
    closure = list(dict.fromkeys(needed for package in packages for needed in package.closure()))
    for package in closure:
        wanted = (
            f"[{extra}]"
            if extra and package in packages and extra in package.project["optional-dependencies"]
            else ""
        )
        arguments += [
            "--reinstall-package",
            package.name,
            f"{package.name}{wanted} @ {_wheel(session, package).as_uri()}",
        ]
    session.install(*arguments)


def _install_cpu_torch(session: nox.Session) -> None:
    """Torch as built for CPU, which is what torch_npu and triton-ascend go with.

    A CUDA build and torch_npu cannot be imported together, and it brings a triton of its own. pip,
    not uv: CPU builds are often offered by find-links or an index that only pip is configured for.
    """
    local = "+cpu" if platform.machine() == "x86_64" else ""
    requirement = f"torch=={TORCH_NPU}{local}"
    install = ["python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    said = session.run(*install, requirement, success_codes=range(256), silent=True)
    found = session.run("python", "-c", HAS_CPU_TORCH, success_codes=[0, 1], silent=True)
    if not str(found).strip():
        session.error(
            f"{requirement}, a CPU build, cannot be installed: point pip at an index that has it "
            f"(extra-index-url or find-links, as pytorch.org says). pip said:\n{said}"
        )


def _pip_install(session: nox.Session, package: Package, *others: str) -> None:
    """A package's wheel with its tests' requirements, and `others`, by pip."""
    wheel = _wheel(session, package)
    session.install(*others, f"{package.name}[test] @ {wheel.as_uri()}")
    # In an environment used again, pip leaves the same version alone, whatever the wheel has now.
    session.install("--force-reinstall", "--no-deps", str(wheel))


def _pytest(session: nox.Session, folder: Path, arguments: list[str]) -> None:
    """Run a folder's tests: two workers, then those that start their own ranks, one at a time."""
    if not any(folder.rglob("test_*.py")):
        session.error(f"{folder.relative_to(ROOT)} has no tests")
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))
    command = ["pytest", "--installed-only", str(folder.relative_to(ROOT))]
    nothing_selected = (
        5  # pytest's exit code; the check above rules out that there is nothing at all
    )
    for marker, workers in (("not distributed", ["-n", "2"]), ("distributed", [])):
        session.run(
            *command, *workers, "-m", marker, *arguments,
            env={"OMP_NUM_THREADS": threads if workers else "1"},
            success_codes=[0, nothing_selected],
        )  # fmt: skip


def _test_alone(session: nox.Session, package: Package, *constraints: str) -> None:
    _install(session, [package], *constraints, extra="test")
    workspace = [other.name for other in PACKAGES.values()]
    session.run(
        "python",
        "tools/check_isolation.py",
        package.name,
        "--extra",
        "test",
        "--workspace",
        *workspace,
    )
    arguments = list(session.posargs)
    if "--cov" in arguments:  # after the check: coverage is not the package's own
        session.install(*GROUPS["coverage"])
        arguments[arguments.index("--cov")] = f"--cov={package.module}"
        arguments.append("--cov-append")
    _pytest(session, package.folder / "tests", arguments)


@nox.session
def quickstart(session: nox.Session) -> None:
    """Train a small DeepSeek-V3.2 on real text with two processes, resume it and report."""
    _install(session, [PACKAGES["titan-npu-train"]])
    session.run("python", "-m", "titan_npu_train.quickstart", *session.posargs)


@nox.session
@_each(PACKAGES.values())
def tests(session: nox.Session, package: Package) -> None:
    """Test one package's wheel alone, with only what it declares."""
    _test_alone(session, package)


@nox.session
@_each(package for package in PACKAGES.values() if package.oldest_torch())
def oldest(session: nox.Session, package: Package) -> None:
    """The same on the oldest torch the package declares."""
    _test_alone(session, package, f"torch=={package.oldest_torch()}.*")


@nox.session
def sanitizers(session: nox.Session) -> None:
    """Run the compiled CPU kernels under sanitizers. `-- aarch64` runs them in an emulator."""
    package = PACKAGES["npu-dsa-kernels"]
    _install(session, [package], "hatchling", extra="test")
    kinds = session.posargs or ["address", "thread"]
    session.run("python", str(package.folder / "cpp" / "check.py"), *kinds)


@nox.session
def integration(session: nox.Session) -> None:
    """Test what only several packages together can show."""
    _install(session, list(PACKAGES.values()), *GROUPS["integration"], extra="test")
    _pytest(session, ROOT / "integration", session.posargs)


@nox.session(venv_backend="venv")
def contract(session: nox.Session) -> None:
    """Call torch_npu's real operators, without an NPU: schemas, shapes, gradients, placements."""
    folders = {
        package: package.folder / "tests" / "contract"
        for package in PACKAGES.values()
        if (package.folder / "tests" / "contract").is_dir()
    }
    _install_cpu_torch(session)
    for package in folders:
        _pip_install(session, package, f"torch-npu=={TORCH_NPU}")
    builder = folders[PACKAGES["npu-dsa-kernels"]] / "standin" / "build.py"
    stand_ins = str(Path(session.create_tmp()).absolute() / "stand-ins")
    session.run("python", str(builder.relative_to(ROOT)), stand_ins)
    # Both variables are read before the first line of Python.
    environment = {
        "LD_LIBRARY_PATH": stand_ins,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "NPU_DSA_STAND_INS": stand_ins,
    }
    nothing_selected = [5] if session.posargs else []  # `-k` may be about one package's tests
    for folder in folders.values():
        session.run(
            "pytest", "--installed-only", str(folder.relative_to(ROOT)), *session.posargs,
            env=environment, success_codes=[0, *nothing_selected],
        )  # fmt: skip


@nox.session(venv_backend="venv")
def ascend(session: nox.Session) -> None:
    """Run the Triton kernels as lowered for Ascend A3, and compile them for it, without an NPU."""
    package = PACKAGES["npu-dsa-kernels"]
    tests = package.folder / "tests"
    gate = (tests / "ascend").relative_to(ROOT)
    session.run("python", str(gate / "host_tools.py"))
    _install_cpu_torch(session)
    _pip_install(session, package, *ASCEND)
    environment = {
        "NPU_DSA_ASCEND_GATE": "1",
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": str(tests),
        "OMP_NUM_THREADS": "1",
    }
    session.run("python", "-c", OWNS_TRITON, env=environment)
    session.run("pytest", "--installed-only", "-n", "2", str(gate), env=environment)
    command = ["python", str(gate / "session.py"), "--docs", "docs", *session.posargs]
    session.run(*command, env=environment)


@nox.session
def cuda(session: nox.Session) -> None:
    """Compile the Triton kernels for CUDA, without a device; run them where there is one."""
    package = PACKAGES["npu-dsa-kernels"]
    tests = (package.folder / "tests").relative_to(ROOT)
    _install(session, [package], TRITON, extra="test")
    environment = {
        "NPU_DSA_CUDA_SESSION": "1",
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": str(package.folder / "tests"),
        "OMP_NUM_THREADS": "1",
    }
    pytest = ["pytest", "--installed-only"]
    if str(session.run("python", "-c", HAS_CUDA, silent=True)).strip():
        on_device = [str(path) for path in sorted(Path(tests).glob("test_triton_*.py"))]
        session.run(*pytest, *on_device, env=environment)
    else:
        session.log("There is no CUDA device: kernels are compiled, and not run.")
    session.run(*pytest, "-n", "2", str(tests / "cuda"), env=environment)
    command = ["python", str(tests / "cuda" / "session.py"), "--docs", "docs", *session.posargs]
    session.run(*command, env=environment)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, types, dependencies, house rules. `nox -s lint -- --fix` repairs what can be."""
    _install(session, list(PACKAGES.values()), *GROUPS["lint"], extra="test")
    fix = "--fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []))
    session.run("ruff", "format", *([] if fix else ["--check"]))
    session.run("python", "tools/generate.py", *([] if fix else ["--check"]))
    session.run("pyrefly", "check")
    for package in PACKAGES.values():
        with session.chdir(package.folder):
            # torch-npu is there for torch to load by itself; no import shows it.
            rules = ["--optional-dependencies-dev-groups", "test"]
            rules += ["--per-rule-ignores", "DEP002=torch-npu"]
            session.run("deptry", "src", "--no-ansi", *rules)
    session.run("python", "tools/check_house.py")


@nox.session
def build(session: nox.Session) -> None:
    """Build every wheel and sdist into dist/ and check them by installing them."""
    session.install(*GROUPS["build"])
    for package in PACKAGES.values():
        wheel = _wheel(session, package)
        folder = DIST / package.name
        shutil.rmtree(folder, ignore_errors=True)
        # Without --wheel or --sdist, uv builds the sdist and then the wheel from the sdist.
        session.run("uv", "build", "--quiet", "--out-dir", str(folder), str(package.folder))
        if not filecmp.cmp(wheel, folder / wheel.name, shallow=False):
            session.error(f"{package.name}: the sdist builds another wheel than the tree")
        session.run("validate-pyproject", str(package.folder / "pyproject.toml"))
        files = [str(path) for path in sorted(folder.iterdir()) if path.suffix in {".whl", ".gz"}]
        session.run("twine", "check", "--strict", *files)
        session.run("check-wheel-contents", str(wheel))
        environment = Path(session.create_tmp()) / package.name
        session.run(
            "uv", "venv", "--quiet", "--clear", "--python", sys.executable, str(environment)
        )
        python = str(environment / ("Scripts" if os.name == "nt" else "bin") / "python")
        needed = [str(_wheel(session, other)) for other in package.closure()]
        session.run("uv", "pip", "install", "--quiet", "--python", python, *needed)
        session.run(
            python, "-I", "tools/check_installed.py", package.name, package.module, external=True
        )
        shutil.rmtree(environment)


@nox.session
def benchmarks(session: nox.Session) -> None:
    """Time and memory next to peers: `-- dsa`, `step`, `optimizer`, ...; `-- --help` has all."""
    _install(session, [PACKAGES["titan-npu-train"]], *GROUPS["benchmarks"])
    session.run("python", "-m", "benchmarks", *(session.posargs or ["--help"]))


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into site/, links checked. `-- serve` shows it while you write."""
    session.install(*GROUPS["docs"])
    if session.posargs:
        session.run("zensical", *session.posargs)
        return
    session.run("zensical", "build", "--strict", "--clean")
    session.run("python", "tools/check_site.py", "site")

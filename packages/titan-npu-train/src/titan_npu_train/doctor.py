"""``titan-npu doctor``: what is installed, what works here, and what is missing."""

import dataclasses
import os
import platform as python_platform
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from titan_npu_train import failures
from titan_npu_train.failures import UserError

__all__ = ["Check", "checks", "run"]

State = Literal["ok", "note", "broken"]
_MARKS = {"ok": "[green]ok[/]", "note": "[yellow]--[/]", "broken": "[bold red]broken[/]"}


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the doctor's table.

    Attributes:
        what: what was looked at.
        found: what was found; for a broken one, what would mend it.
        state: "broken" makes the exit code 1; "note" is something that may be missing.
    """

    what: str
    found: str
    state: State = "ok"


def run(console: Console, *, config: str | None, nproc: int | None, module: str) -> int:
    """Print every check and return the exit code: 1 if something required is broken."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    broken = 0
    for check in checks(config=config, nproc=nproc, module=module):
        broken += check.state == "broken"
        table.add_row(_MARKS[check.state], check.what, escape(check.found))
    console.print(table)
    console.print(
        f"[bold red]{broken} broken[/]: training will not work until that is mended."
        if broken
        else "Everything that training needs is here."
    )
    return 1 if broken else 0


def checks(*, config: str | None = None, nproc: int | None = None, module: str) -> Iterator[Check]:
    """All checks in order; one that fails does not stop the ones after it."""
    yield Check("python", f"{python_platform.python_version()} on {python_platform.machine()}")
    yield from _packages()
    yield from _guarded("device", _device)
    yield from _guarded("kernels", _kernels)
    yield from _compiler()
    yield from _guarded("machine", _machine)
    if config is not None:
        yield from _guarded("layout", lambda: _layout(module, config, nproc))


def _guarded(what: str, part: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    try:
        yield from part()
    except Exception as error:
        yield Check(what, failures.describe(error).message, "broken")


def _packages() -> Iterator[Check]:
    """The package's own requirements, as its metadata states them."""
    for text in ["titan-npu-train", *(requires("titan-npu-train") or [])]:
        requirement = Requirement(text)
        optional = requirement.marker is not None and "extra" in str(requirement.marker)
        if optional and requirement.name != "torch-npu":
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            if optional:
                yield Check(
                    requirement.name,
                    "not installed; on an Ascend machine: pip install 'titan-npu-train[npu]'",
                    "note",
                )
            else:
                yield Check(
                    requirement.name,
                    f"not installed, {requirement.specifier or 'any version'} is needed: pip "
                    f"install '{requirement.name}{requirement.specifier}'",
                    "broken",
                )
            continue
        if requirement.specifier.contains(installed, prereleases=True):
            yield Check(requirement.name, installed)
        else:
            yield Check(
                requirement.name,
                f"{installed}, but {requirement.specifier} is needed: pip install "
                f"'{requirement.name}{requirement.specifier}'",
                "broken",
            )
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    if home:
        yield Check("CANN", _cann_version(Path(home)))
    else:
        yield Check("CANN", "not found (ASCEND_HOME_PATH is not set); only NPUs need it", "note")


def _cann_version(home: Path) -> str:
    for name in ("version.cfg", "opp/version.info", "compiler/version.info", "version.info"):
        try:
            first = (home / name).read_text().strip().splitlines()[:4]
        except OSError:
            continue
        return f"{home}: {' '.join(first)}"
    return f"{home} (no version file)"


def _device() -> Iterator[Check]:
    from titan_npu_train import platform

    chosen = platform.select()
    count = chosen.device_module.device_count()
    name = chosen.device_module.get_device_name(0)
    yield Check(
        "device", f"{chosen.name}: {count} x {name}, communication by {chosen.comm_backend}"
    )
    import torch.distributed

    if not torch.distributed.is_backend_available(chosen.comm_backend):
        yield Check(
            "communication",
            f"this torch has no {chosen.comm_backend} backend: install a build that does",
            "broken",
        )
    peak = chosen.peak_flops()
    if peak is None:
        yield Check("peak rate", "unknown for this device: MFU will be empty", "note")
    else:
        yield Check("peak rate", f"{peak / 1e12:.2f} TFLOP/s in bf16, what MFU is measured against")


def _kernels() -> Iterator[Check]:
    import npu_dsa_kernels

    states = npu_dsa_kernels.backends()
    compiled = states.pop("compiled")
    yield Check("CPU kernels", compiled, "ok" if compiled.startswith("part of") else "note")
    for name, state in states.items():
        yield Check(f"backend {name}", state, "ok" if state == "available" else "note")
    if "available" not in states.values():
        yield Check("kernels", "no backend works: reinstall npu-dsa-kernels", "broken")


def _compiler() -> Iterator[Check]:
    compiler = os.environ.get("CXX") or next(
        (path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None
    )
    if compiler:
        yield Check("C++ compiler", compiler)
    else:
        yield Check("C++ compiler", "none found; only --compile.enable needs one (on CPU)", "note")


def _machine() -> Iterator[Check]:
    from titan_npu_train.launch import usable_cores

    yield Check("cores", str(usable_cores()))
    from titan_npu_train.platform import CPUDeviceModule

    memory = CPUDeviceModule().get_device_properties().total_memory
    yield Check("memory", f"{memory / 2**30:.1f} GiB")


def _layout(module: str, config: str, nproc: int | None) -> Iterator[Check]:
    from titan_npu_train import launch, platform, preflight

    try:
        settings = preflight.load_config(module, config, [])
    except UserError as error:
        yield Check("configuration", str(error), "broken")
        return
    nproc = nproc or launch.default_nproc(platform.select())
    problems = list(preflight.world_problems(settings, nproc))
    problems = problems or list(preflight.model_problems(settings))
    for problem in problems:
        yield Check("layout", problem, "broken")
    if not problems:
        yield Check("layout", _describe_layout(settings.parallelism, nproc))


def _describe_layout(parallelism: Any, nproc: int) -> str:
    fixed = (
        parallelism.data_parallel_replicate_degree
        * parallelism.context_parallel_degree
        * parallelism.tensor_parallel_degree
        * parallelism.pipeline_parallel_degree
    )
    degrees = {
        "DP replicate": parallelism.data_parallel_replicate_degree,
        "FSDP": nproc // fixed,
        "CP": parallelism.context_parallel_degree,
        "TP": parallelism.tensor_parallel_degree,
        "PP": parallelism.pipeline_parallel_degree,
    }
    product = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
    return (
        f"{nproc} = {product or 'one process'}, experts over {parallelism.expert_parallel_degree}"
    )

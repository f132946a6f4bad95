"""The command line: `python -m benchmarks --help`, or `nox -s benchmarks -- --help`."""

from __future__ import annotations

import enum
import fnmatch
import importlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.measure import FEWEST_ROUNDS, Case, Result, Settings, measure

DEFAULT_OUT = Path(__file__).parent / "results"
RECORDED = Path(__file__).parents[1] / "packages/npu-dsa-kernels/tests/ascend/recorded.json"
BUDGETS = {"dsa": 120.0, "base": 20.0, "step": 300.0, "optimizer": 120.0, "sparse-mla": 10.0}
QUICK_HELP = "Tiny sizes: does all of it run?"
CHECK_HELP = "Say which claims hold; exit code 1 if one does not."
CASE_HELP = "Only cases whose title matches this pattern (see --list)."
LIST_HELP = "Show the cases and stop."
OUT_HELP = "Folder for the results: a JSON file and a picture."


class Suite(enum.StrEnum):
    """What is measured; each is a command with the same options."""

    dsa = "dsa"
    base = "base"
    step = "step"
    optimizer = "optimizer"


SUITE_HELP = {
    Suite.dsa: "Measure the DSA operators and the whole attention layer, over S, K and H.",
    Suite.base: "Measure norm, rotary embedding, SwiGLU, grouped matmul, permute.",
    Suite.step: "Measure a training step of 4 and 8 layers at S 4096.",
    Suite.optimizer: "Measure AdamW's step and memory, with its states swapped and not.",
}


def run_suite(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help=QUICK_HELP)] = False,
    check: Annotated[bool, typer.Option("--check", help=CHECK_HELP)] = False,
    case: Annotated[str, typer.Option(help=CASE_HELP)] = "*",
    list_cases: Annotated[bool, typer.Option("--list", help=LIST_HELP)] = False,
    out: Annotated[Path, typer.Option(help=OUT_HELP)] = DEFAULT_OUT,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Cores to use; all this process may use if not given.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or npu.")] = "cpu",
    budget: Annotated[
        float | None,
        typer.Option(
            min=0, help="Seconds of timed rounds a case may take (base 20, step 300, others 120)."
        ),
    ] = None,
) -> None:
    suite = Suite(context.info_name)
    _check_options(quick, check)
    threads = _threads(threads)
    _check_device(device)
    module = importlib.import_module(f"benchmarks.{suite}")
    cases = _chosen(suite, module.cases(quick), case)
    if list_cases:
        _show(cases)
    else:
        _measure(suite, module, cases, quick, check, out, threads, device, budget)


def sparse_mla(
    quick: Annotated[bool, typer.Option("--quick", help=QUICK_HELP)] = False,
    check: Annotated[bool, typer.Option("--check", help=CHECK_HELP)] = False,
    case: Annotated[str, typer.Option(help=CASE_HELP)] = "*",
    list_cases: Annotated[bool, typer.Option("--list", help=LIST_HELP)] = False,
    out: Annotated[Path, typer.Option(help=OUT_HELP)] = DEFAULT_OUT,
    budget: Annotated[
        float | None, typer.Option(min=0, help="Seconds of timed rounds a case may take (10).")
    ] = None,
    tilelang_examples: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            resolve_path=True,
            help="examples/deepseek_v32 of a checkout of TileLang, whose wheel lacks its kernels.",
        ),
    ] = None,
) -> None:
    """Measure the DSA operators on a CUDA device, next to TileLang and FlashMLA."""
    from benchmarks import sparse_mla as module  # imports torch: not for --help

    _check_options(quick, check)
    cases = _chosen("sparse-mla", module.cases(quick, tilelang_examples), case)
    if list_cases:
        _show(cases)
        return
    if (reason := module.missing_device()) is not None:
        typer.echo(f"sparse-mla needs a CUDA device: {reason}", err=True)
        raise typer.Exit(1)
    _measure("sparse-mla", module, cases, quick, check, out, _threads(None), "cuda", budget)


def _check_options(quick: bool, check: bool) -> None:
    if check and quick:
        raise typer.BadParameter("claims are about full sizes: leave out --quick or --check")


def _chosen(suite: str, cases: Iterable[Case], pattern: str) -> list[Case]:
    chosen = [c for c in cases if fnmatch.fnmatch(c.title.lower(), _glob(pattern))]
    if not chosen:
        raise typer.BadParameter(f"no case of {suite} matches {pattern!r}: see --list")
    return chosen


def _show(cases: list[Case]) -> None:
    console = _console()
    for each in cases:
        console.print(f"{each.title}  {each.note}", highlight=False)


def _measure(
    suite: str,
    module: ModuleType,
    cases: list[Case],
    quick: bool,
    check: bool,
    out: Path,
    threads: int,
    device: str,
    budget: float | None,
) -> None:
    from benchmarks import machine, report  # imports torch: not for --help

    console = _console()
    out.mkdir(parents=True, exist_ok=True)

    facts = machine.facts(threads, device)
    report.print_machine(console, facts)
    if facts["load_average"][0] > machine.QUIET:
        console.print(
            f"[yellow]The load average is {facts['load_average'][0]:.2f}: something else is at "
            "work, and these figures are not final.[/]"
        )
    settings = Settings(
        threads=threads,
        device=device,
        preload=module.preload(cases),
        budget=0.3 if quick else BUDGETS[suite] if budget is None else budget,
        fewest_rounds=2 if quick else FEWEST_ROUNDS,
        say=lambda text: console.print(text, style="dim", highlight=False),
    )
    results: list[Result] = []
    start = time.perf_counter()
    for number, each in enumerate(cases, 1):
        console.print(f"[{number}/{len(cases)}] {each.title}", highlight=False, markup=False)
        results.append(measure(each, settings))
        report.print_result(console, results[-1])
        # After every case: what was measured is kept if the next one is interrupted.
        findings, checks = list(module.findings(results)), list(module.checks(results))
        facts["load_average_end"] = machine.load()
        document = report.as_json(suite, facts, results, findings, checks)
        report.write_json(document, out / f"{suite}.json")
    report.draw(results, out / f"{suite}.png", _title(suite, facts, quick))
    for finding in findings:
        console.print(finding, highlight=False)
    elapsed = time.perf_counter() - start
    console.print(f"{elapsed:.0f} s; {out / suite}.json, {out / suite}.png", highlight=False)

    if check:
        report.print_checks(console, checks)
        if not all(c.holds for c in checks):
            raise typer.Exit(1)
    problems = [m.problem for r in results for m in r.measurements.values() if m.problem]
    if quick and any("left out: " not in problem for problem in problems):
        console.print("[red]Not everything ran.[/]")
        raise typer.Exit(1)


def _title(suite: str, facts: dict, quick: bool) -> str:
    sizes = " (tiny sizes: shapes of curves mean nothing)" if quick else ""
    return f"{suite}: {facts['cpu']}, {facts['threads']} threads, {facts['device']}{sizes}"


def _glob(pattern: str) -> str:
    pattern = pattern.lower()
    return pattern if "*" in pattern else f"*{pattern}*"


def _threads(threads: int | None) -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    usable = usable or 1
    if threads is not None and threads > usable:
        raise typer.BadParameter(f"--threads {threads}: this process may use {usable} cores")
    return threads or usable


def _check_device(device: str) -> None:
    import torch

    available = ["cpu"]
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        available.append(accelerator.type)
    if device not in available:
        raise typer.BadParameter(f"--device {device!r}: here there is {' and '.join(available)}")


def pipeline(
    check: Annotated[
        bool, typer.Option("--check", help="Exit code 1 if a published figure does not follow.")
    ] = False,
    recorded: Annotated[
        Path,
        typer.Option(exists=True, dir_okay=False, help="High-water marks of the Ascend session."),
    ] = RECORDED,
    stage_overhead: Annotated[
        float,
        typer.Option(min=0, help="What starting a stage costs, in the published figure's unit."),
    ] = 0.0,
    out: Annotated[Path, typer.Option(help=OUT_HELP)] = DEFAULT_OUT,
) -> None:
    """Model, not measure: how busy an Atlas A3's cores are in the DSA kernels."""
    from benchmarks import pipeline_report

    try:
        marks = pipeline_report.read_recorded(recorded)
    except ValueError as error:
        raise typer.BadParameter(f"--recorded {error}") from None
    if not pipeline_report.run(_console(), out, marks, stage_overhead, check):
        raise typer.Exit(1)


def prefetch(
    quick: Annotated[bool, typer.Option("--quick", help=QUICK_HELP)] = False,
    check: Annotated[bool, typer.Option("--check", help=CHECK_HELP)] = False,
    case: Annotated[str, typer.Option(help=CASE_HELP)] = "*",
    list_cases: Annotated[bool, typer.Option("--list", help=LIST_HELP)] = False,
    out: Annotated[Path, typer.Option(help=OUT_HELP)] = DEFAULT_OUT,
) -> None:
    """Measure FSDP2 on two CPU ranks with slow all-gathers: prefetched explicitly, or not."""
    from benchmarks import prefetch as module  # imports torch: not for --help

    _check_options(quick, check)
    cases = [c for c in module.CASES if fnmatch.fnmatch(c.title.lower(), _glob(case))]
    if not cases:
        raise typer.BadParameter(f"no case of prefetch matches {case!r}: see --list")
    if list_cases:
        for each in cases:
            _console().print(each.title, highlight=False)
    elif not module.run(_console(), out, cases, quick, check):
        raise typer.Exit(1)


def plan(out: Annotated[Path, typer.Option(help=OUT_HELP)] = DEFAULT_OUT) -> None:
    """Measure small real runs beside titan-npu plan's estimate; exit code 1 if one is 15 % off."""
    from benchmarks import plan_check  # imports torch: not for --help

    raise typer.Exit(plan_check.main(out))


def _console() -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = 130
    return console


def app() -> typer.Typer:
    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        help="This project's operators next to small operators, peers and the machine's limit.",
    )
    for suite in Suite:
        app.command(suite.value, help=SUITE_HELP[suite])(run_suite)
    app.command("sparse-mla")(sparse_mla)
    app.command("prefetch")(prefetch)
    app.command("plan")(plan)
    app.command("pipeline")(pipeline)
    return app


def run() -> None:
    app()(prog_name="benchmarks")

"""Results as a table, JSON and a picture."""

from __future__ import annotations

import json
import math
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.checks import Check
from benchmarks.measure import FOREIGN_CPU_LIMIT, Measurement, Result, quartiles

# An implementation has one colour in every picture (Okabe and Ito's, told apart by everyone).
_COLOURS = (
    *("#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#CC79A7", "#009E73", "#7F7F7F", "#000000"),
    *("#882255", "#999933", "#332288"),
)


def seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs"


def gigabytes(value: float) -> str:
    return f"{value / 2**20:,.0f} MiB"


def print_machine(console: Console, machine: dict[str, Any]) -> None:
    flags = ", ".join(f for f in machine["cpu_flags"] if f in {"avx2", "avx512f", "avx512_bf16"})
    memory = machine["memory_bytes"] / 2**30
    console.print(
        f"{machine['cpu']} ({flags or 'no vector flags known'}), {machine['cores']} cores, "
        f"{memory:.0f} GiB; {machine['threads']} threads; device {machine['device']}; "
        f"load average {machine['load_average'][0]:.2f}"
    )
    console.print(", ".join(f"{name} {v}" for name, v in machine["versions"].items()))
    compiled = machine["npu_dsa_kernels_backends"].get("compiled", "not in this version")
    console.print(f"compiled helper of npu-dsa-kernels: {compiled}")


def print_result(console: Console, result: Result) -> None:
    """One case: a line for each implementation."""
    case = result.case
    table = Table(title=case.title + (f"  {case.note}" if case.note else ""), title_justify="left")
    table.add_column("implementation")
    columns = ["peak memory"]
    if case.timed:
        columns = ["median", "quartiles", "GFLOP/s", "time / ours", "quartiles", *columns]
    if case.tokens:
        columns.insert(1, "tokens/s")
    for column in columns:
        table.add_column(column, justify="right")
    ours = case.implementations[0].name
    for name, m in result.measurements.items():
        cells = [name]
        if not m.ok:
            console.print(f"  [red]{name}[/]: {m.problem}", highlight=False)
        if case.timed:
            cells += _time_cells(result, name, m, is_ours=name == ours)
        cells.append(gigabytes(m.peak_bytes) if m.peak_bytes is not None else "-")
        table.add_row(*cells)
    console.print(table)
    remarks = []
    if case.timed:
        remarks.append(f"{result.rounds} rounds")
    errors = [e for m in result.measurements.values() for e in m.errors.values()]
    if errors:
        remarks.append(f"largest difference between results {max(errors):.1e}")
    if result.foreign_cpu > FOREIGN_CPU_LIMIT:
        remarks.append(f"[yellow]others used {result.foreign_cpu:.0%} of the cores[/]")
    console.print(f"  {'; '.join(remarks)}\n", highlight=False)


def _time_cells(result: Result, name: str, m: Measurement, *, is_ours: bool) -> list[str]:
    tokens = result.case.tokens
    if not m.ok or not m.seconds:
        return ["-"] * (6 if tokens else 5)
    low, high = m.quartiles()
    cells = [seconds(m.median)]
    if tokens:
        cells.append(f"{tokens / m.median:,.0f}")
    cells.append(f"{seconds(low)} - {seconds(high)}")
    cells.append(f"{m.flops / m.median / 1e9:,.0f}" if m.flops else "-")
    ratios = [] if is_ours else result.ratios(name)
    if not ratios:
        return [*cells, "1" if is_ours else "-", ""]
    low, high = quartiles(ratios)
    return [*cells, f"{result.ratio(name):.2f}", f"{low:.2f} - {high:.2f}"]


def print_checks(console: Console, checks: list[Check]) -> None:
    table = Table(title="checks", title_justify="left")
    table.add_column("")
    table.add_column("claim")
    table.add_column("found", justify="right")
    table.add_column("wanted", justify="right")
    for check in checks:
        found = "not measured" if math.isnan(check.value) else f"{check.value:.2f}"
        mark = "[green]holds[/]" if check.holds else "[red]fails[/]"
        table.add_row(mark, check.text, found, check.wanted)
    console.print(table)


def as_json(
    suite: str,
    machine: dict[str, Any],
    results: list[Result],
    findings: list[str],
    checks: list[Check],
) -> dict[str, Any]:
    return {
        "suite": suite,
        "machine": machine,
        "cases": [_case_json(result) for result in results],
        "findings": findings,
        "checks": [
            {
                "claim": c.text,
                "found": _number(c.value),
                "wanted": c.wanted,
                "holds": c.holds,
            }
            for c in checks
        ],
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _case_json(result: Result) -> dict[str, Any]:
    case = result.case
    implementations = {}
    for name, m in result.measurements.items():
        ratios = result.ratios(name)
        implementations[name] = {
            "problem": m.problem,
            "seconds": m.seconds,
            "median_seconds": m.median if m.seconds else None,
            "tokens_per_second": case.tokens / m.median if case.tokens and m.seconds else None,
            "flops": m.flops,
            "peak_bytes": m.peak_bytes,
            "time_over_ours": _number(result.ratio(name)),
            "time_over_ours_quartiles": quartiles(ratios) if ratios else None,
            "errors": m.errors,
            "backends": m.facts,
        }
    return {
        "name": case.name,
        "params": case.params,
        "note": case.note,
        "rounds": result.rounds,
        "foreign_cpu": result.foreign_cpu,
        "implementations": implementations,
    }


def write_json(document: dict[str, Any], path: Path) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", "utf-8")
    part.replace(path)


def draw(results: list[Result], path: Path, title: str) -> None:
    """Time and memory: lines over S where a case has several lengths, else bars."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    panels = _panels(results)
    names = list(dict.fromkeys(n for r in results for n in r.measurements))
    names = list(dict.fromkeys("limit" if n.startswith("limit") else n for n in names))
    colour = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(5.6 * columns, 3.6 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (heading, what, group) in zip(axes.flat, panels, strict=False):
        if len(group) > 1:
            _lines(axis, what, group, colour)
        else:
            _bars(axis, what, group[0], colour)
        axis.set_title(heading, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    handles = [plt.Line2D([], [], color=c, marker="o", label=n) for n, c in colour.items()]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False
    )
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)


_UNITS = {"time": ("seconds", 1.0), "memory": ("MiB", 2.0**20)}


def _panels(results: list[Result]) -> list[tuple[str, str, list[Result]]]:
    """What to draw: cases that differ in S only share a panel; memory where it says most."""
    groups: dict[tuple, list[Result]] = defaultdict(list)
    for result in results:
        key = tuple((k, v) for k, v in result.case.params.items() if k != "S")
        groups[result.case.name, key].append(result)
    panels = []
    for (name, key), group in groups.items():
        group.sort(key=lambda r: r.case.params.get("S", 0))
        parts = [f"{k} {v}" for k, v in key if (k, v) != ("rows", "causal")]
        if len(group) == 1 and "S" in group[0].case.params:
            parts.insert(0, f"S {group[0].case.params['S']}")
        heading = textwrap.fill(f"{name}: {', '.join(parts)}", 52)
        if any(_values(r, "time") for r in group):
            panels.append((f"{heading} - time", "time", group))
        if not group[0].case.timed or group[0].case.tokens:
            panels.append((f"{heading} - peak memory", "memory", group))
    return panels


def _values(result: Result, what: str) -> dict[str, float]:
    unit = _UNITS[what][1]
    found = {}
    for name, m in result.measurements.items():
        value = (m.median if m.seconds else None) if what == "time" else m.peak_bytes
        if m.ok and value is not None:
            found["limit" if name.startswith("limit") else name] = value / unit
    return found


def _lines(axis: Any, what: str, group: list[Result], colour: dict[str, str]) -> None:
    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for result in group:
        for name, value in _values(result, what).items():
            lines[name].append((result.case.params["S"], value))
    for name, points in lines.items():
        style = ":" if name == "limit" else "-"
        axis.plot(*zip(*points, strict=True), style, marker="o", ms=4, color=colour[name])
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = [r.case.params["S"] for r in group]
    axis.set_xticks(ticks, [str(t) for t in ticks])
    axis.set_xlabel("S")
    axis.set_ylabel(_UNITS[what][0])
    axis.grid(alpha=0.3, which="major")


def _bars(axis: Any, what: str, result: Result, colour: dict[str, str]) -> None:
    values = _values(result, what)
    names = list(values)[::-1]
    bars = axis.barh(
        range(len(names)), [values[n] for n in names], color=[colour[n] for n in names]
    )
    axis.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.margins(x=0.15)
    axis.locator_params(axis="x", nbins=4)  # labels of more would run into each other
    axis.set_xlabel(_UNITS[what][0])

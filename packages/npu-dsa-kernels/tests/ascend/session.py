"""Run every kernel of the backend "triton" on this CPU, as the code it is lowered to for Ascend A3.

    python session.py --docs DOCS           # all, and write the table
    python session.py --docs DOCS --check   # all, and fail where the table differs
    python session.py GLOB                  # operators of these names, no table

For every case of `cases.CASES`, in float32 and bfloat16: lower what the operator launches, run it
between guard pages, compare the result with its definition. Then hand each distinct kernel to the
compiler for A3, as far as it goes without CANN, and record what it needs of the core's memories.
"""

import argparse
import fnmatch
import importlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import a3
import gate
import host_tools
import jobs
from a3 import Compiled
from cases import CASES, LIMITS, Case, error
from gate import Gate, Launch, name_of
from jobs import Job, Reporter
from known import KNOWN, Known
from npu_dsa_kernels.backends.triton import tiles as table
from npu_dsa_kernels.backends.triton.tiles import Tiles

COMPILE = 60.0
"""Seconds the compiler for A3 may take for a kernel; most take one."""
COMPARE = 120.0
"""Seconds for computing what should come out."""

RECORD = Path(__file__).with_name("recorded.json")
PAGE = "ascend-gate.md"
BLOCK = re.compile(
    r"(<!-- generated:ascend-gate-(?P<name>\w+) -->\n).*?(<!-- /generated -->\n)", re.DOTALL
)


class Operators:
    """The operators of the backend, wherever they run: here it is not "available"."""

    def preload(self) -> list[ModuleType]:
        """Import them here, so that no process of a case has to."""
        backend = "npu_dsa_kernels.backends.triton"
        return [importlib.import_module(f"{backend}.{name}") for name in ("dsa", "base")]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        for module in self.preload():
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"the backend has no {name}")


def run_case(
    case: Case,
    dtype: torch.dtype,
    folder: Path,
    reporter: Reporter,
    other_tiles: dict[str, Tiles] | None = None,
) -> float:
    """The largest error of the case, if it is allowed.

    Raises:
        AssertionError: it is larger.
    """
    # Memory that an operator leaves as it was must not look right by chance.
    torch.use_deterministic_algorithms(True)
    worst = 0.0
    with Gate(folder, reporter).use(other_tiles):
        reporter.step("inputs", COMPARE)
        for name, actual, expected in case.check(Operators(), dtype):
            reporter.step(f"comparing {name}", COMPARE)
            off = error(actual, expected)
            assert off <= LIMITS[dtype], f"{name} is off by {off:.1e} of its largest value"
            worst = max(worst, off)
    return worst


def lower_case(
    case: Case,
    dtype: torch.dtype,
    folder: Path,
    reporter: Reporter,
    other_tiles: dict[str, Tiles] | None = None,
) -> list[Launch]:
    """What the case starts, lowered but not run."""
    one = Gate(folder, reporter, run=False)
    reporter.step("inputs", COMPARE)
    with one.use(other_tiles):
        for _ in case.check(Operators(), dtype):
            pass
    return one.launches


def compile_kernel(folder: Path, key: str, reporter: Reporter) -> Compiled:
    lowered = gate.load(folder, key)
    assert lowered is not None
    reporter.step(f"compiling for {a3.ARCHITECTURE}", COMPILE)
    return a3.compile_for_a3(lowered)


@dataclass
class Row:
    """A line of the table: a kernel in a dtype with certain tiles, over all it was compiled for."""

    launch: Launch
    variants: dict[str, Launch] = field(default_factory=dict)
    compiled: dict[str, Compiled] = field(default_factory=dict)
    executed: bool = True
    error: float = 0.0
    failures: list[str] = field(default_factory=list)

    def planned(self, name: str) -> int:
        return max((getattr(x, name) for x in self.compiled.values()), default=0)

    def largest(self) -> str | None:
        """Key of the program that needs most: that of a real width, not of one that is padded."""
        sizes = {key: (x.l1_bytes, x.ub_bytes) for key, x in self.compiled.items()}
        return max(sizes, key=sizes.__getitem__, default=None)


@dataclass
class Report:
    rows: dict[tuple[str, str, int, int], Row] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def row(self, one: Launch) -> Row:
        key = (one.kernel, one.dtype, one.rows, one.columns)
        return self.rows.setdefault(key, Row(one))


def run(cases: Sequence[Case], folder: Path, say: Callable[[str], None]) -> Report:
    """Tiers 2 and 3 for `cases`."""
    report = Report()
    work = [
        Job(f"{case.operator}, {case.inputs}, {name_of(dtype)}", _case_job(case, dtype, folder))
        for case in cases
        for dtype in LIMITS
    ]
    launches: dict[str, Launch] = {}
    for job, outcome in jobs.run(work):
        failed = outcome.error is not None
        said = outcome.error if failed else f"{outcome.result:.1e}"
        say(f"{'FAILED' if failed else 'ok    '} {outcome.seconds:5.1f} s  {job.name}: {said}")
        if failed:
            report.failures.append(f"{job.name}: {outcome.error}")
        ran = {one.key for one in outcome.notes if one.executed}
        for one in outcome.notes:
            launches.setdefault(one.key, one)
            row = report.row(one)
            row.variants.setdefault(one.key, one)
            row.executed &= one.key in ran and not failed
            row.error = max(row.error, outcome.result or 0.0)
    compilations = [
        Job(key, lambda reporter, key=key: compile_kernel(folder, key, reporter))
        for key in launches
    ]
    for job, outcome in jobs.run(compilations):
        one, compiled = launches[job.name], outcome.result
        what = f"{one.kernel} {one.dtype} {one.rows} x {one.columns} {one.constants}"
        if compiled is None:
            said = outcome.error
            report.failures.append(f"{what}: {said}")
        else:
            said = f"UB {compiled.ub_bytes} L1 {compiled.l1_bytes} L0C {compiled.l0c_bytes}"
            said = ", ".join([said, compiled.cores, *compiled.retried])
            for row in report.rows.values():
                if one.key in row.variants:
                    row.compiled[one.key] = compiled
        ok = "ok    " if compiled is not None else "FAILED"
        say(f"{ok} {outcome.seconds:5.1f} s  {what}: {said}")
    return report


def _case_job(
    case: Case, dtype: torch.dtype, folder: Path, other_tiles: dict[str, Tiles] | None = None
) -> Callable[[Reporter], float]:
    return lambda reporter: run_case(case, dtype, folder, reporter, other_tiles)


def unreached(report: Report) -> Iterator[str]:
    """Entries of the table of tiles that no case came by."""
    for kernel, size, tiles in table.entries(gate.TARGET):
        if not any(
            (one.kernel, one.rows, one.columns) == (kernel, tiles.rows, tiles.columns)
            and getattr(torch, one.dtype).itemsize == size
            for one in (row.launch for row in report.rows.values())
        ):
            yield f"{kernel}, {size} bytes, {tiles.rows} x {tiles.columns}: no case reaches it"


def try_known(folder: Path, say: Callable[[str], None]) -> tuple[dict[Known, str], list[str]]:
    """What is said of each of `known.KNOWN`, and complaints."""
    work = {Job(_title(x), lambda reporter, x=x: _try_known(x, folder, reporter)): x for x in KNOWN}
    messages, complaints = dict.fromkeys(KNOWN, ""), []
    for job, outcome in jobs.run(list(work)):
        known, said = work[job], outcome.error
        say(f"known  {outcome.seconds:5.1f} s  {job.name}: {said or 'passes'}")
        if said is None:
            advice = "take it out of known.py, and use it if it is of use"
            complaints.append(f"{job.name} passes now: {advice}")
        elif known.message not in said:
            complaints.append(f"{job.name} fails otherwise than known.py says: {said}")
        else:
            messages[known] = said.partition("Rejected: ")[2] or said
    return messages, complaints


def _title(known: Known) -> str:
    return f"{known.kernel} {known.dtype} {known.tiles.rows} x {known.tiles.columns}"


def _try_known(known: Known, folder: Path, reporter: Reporter) -> None:
    (case,) = [x for x in CASES if (x.operator, x.inputs) == (known.operator, known.inputs)]
    dtype = getattr(torch, known.dtype)
    for one in lower_case(case, dtype, folder, reporter, {known.kernel: known.tiles}):
        if one.kernel == known.kernel:
            compile_kernel(folder, one.key, reporter)


# --- what is written -----------------------------------------------------------------------------


def lines(report: Report) -> list[list[str]]:
    """The table, a cell at a time."""
    out = [
        ["kernel", "dtype", "tiles", "compiled for", "executed", "error", "UB", "L1", "L0C",
         "cores", "element loops", "given up", "reached hivmc"]
    ]  # fmt: skip
    for row in sorted(
        report.rows.values(), key=lambda x: (x.launch.kernel, x.launch.dtype, x.launch.rows)
    ):
        one, largest = row.launch, row.largest()
        out.append(
            [
                one.kernel,
                one.dtype,
                f"{one.rows} x {one.columns}",
                str(len(row.variants)),
                "yes" if row.executed else "no",
                f"{row.error:.0e}" if row.executed else "-",
                *(f"{row.planned(x):,}" for x in ("ub_bytes", "l1_bytes", "l0c_bytes")),
                row.compiled[largest].cores if largest else "",
                str(row.variants[largest].element_loops) if largest else "",
                ", ".join(row.compiled[largest].retried) if largest else "",
                "yes" if len(row.compiled) == len(row.variants) else "no",
            ]
        )
    return out


def known_lines(messages: dict[Known, str]) -> list[list[str]]:
    return [
        ["kernel", "dtype", "tiles", "smallest input", "message", "consequence"],
        *(
            [x.kernel, x.dtype, f"{x.tiles.rows} x {x.tiles.columns}", x.inputs, f"`{said}`",
             x.consequence]
            for x, said in messages.items()
        ),
    ]  # fmt: skip


def markdown(cells: list[list[str]]) -> str:
    if len(cells) == 1:
        return "\nNothing.\n\n"
    body = [cells[0], ["---"] * len(cells[0]), *cells[1:]]
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in body) + "\n"


def plain(cells: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def recorded(report: Report) -> list[dict[str, Any]]:
    """Every variant of every kernel, and what it takes."""
    out = [
        {
            "kernel": one.kernel,
            "dtype": one.dtype,
            "tiles": [one.rows, one.columns],
            "constants": one.constants,
            "ub_bytes": compiled.ub_bytes,
            "l1_bytes": compiled.l1_bytes,
            "l0c_bytes": compiled.l0c_bytes,
            "workspace_bytes": compiled.workspace_bytes,
            "cores": compiled.cores,
            "element_loops": one.element_loops,
            "given_up": list(compiled.retried),
        }
        for row in report.rows.values()
        for one, compiled in ((row.variants[key], x) for key, x in row.compiled.items())
    ]
    return sorted(out, key=lambda x: json.dumps(x, sort_keys=True))


def _write(
    page: Path, blocks: dict[str, str], programs: list[dict[str, Any]], check: bool
) -> list[str]:
    """Bring page and record up to date, or say what is not."""
    before = page.read_text("utf-8")
    after = BLOCK.sub(lambda found: found[1] + blocks[found["name"]] + found[3], before)
    objects = ",\n".join(json.dumps(x, sort_keys=True) for x in programs)
    record = f"[\n{objects}\n]\n"
    old = RECORD.read_text("utf-8") if RECORD.exists() else ""
    if not check:
        page.write_text(after, "utf-8")
        RECORD.write_text(record, "utf-8")
        return []
    # Errors depend on the host's arithmetic in their last digit.
    blank = re.compile(r"\| \d(?:\.\d)?e[+-]\d+ \|")
    stale = []
    if blank.sub("| |", before) != blank.sub("| |", after):
        stale.append(f"docs/{PAGE} is out of date: nox -s ascend")
    if record != old:
        stale.append(f"{RECORD.name} is out of date: nox -s ascend")
    return stale


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("operators", nargs="?", default="*", help="operators to run, a glob")
    parser.add_argument("--check", action="store_true", help="write nothing, fail where it differs")
    parser.add_argument("--docs", type=Path, help="the folder with the page that has the table")
    arguments = parser.parse_args()
    if message := host_tools.missing():
        print(message, file=sys.stderr)
        return 2
    chosen = [x for x in CASES if fnmatch.fnmatch(x.operator, arguments.operators)]
    if not chosen:
        print(f"no operator is like {arguments.operators!r}", file=sys.stderr)
        return 2
    Operators().preload()
    start = time.monotonic()
    everything = len(chosen) == len(CASES)

    def say(text: str) -> None:
        print(text, flush=True)

    with tempfile.TemporaryDirectory(prefix="ascend-") as name:
        folder = Path(name)
        report = run(chosen, folder, say)
        complaints = list(report.failures)
        if everything:
            complaints += unreached(report)
            messages, known_complaints = try_known(folder, say)
            complaints += known_complaints
    print(f"\n{plain(lines(report))}\n")
    if everything and arguments.docs is not None and (arguments.check or not complaints):
        blocks = {"table": markdown(lines(report)), "known": markdown(known_lines(messages))}
        complaints += _write(arguments.docs / PAGE, blocks, recorded(report), arguments.check)
    for complaint in complaints:
        print(f"FAILED {complaint}")
    print(f"{len(complaints)} failures, {time.monotonic() - start:.0f} s")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())

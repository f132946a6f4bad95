"""Compile every kernel of the backend "triton" for CUDA devices, on a machine without one.

    python session.py --docs DOCS           # all, and write the table
    python session.py --docs DOCS --check   # all, and fail where the table differs
    python session.py GLOB                  # operators of these names, no table
    python session.py --capability 80       # for another device, no table

For every case of `cases.CASES`, in float32 and bfloat16, each distinct program is compiled down to
machine code. A compile error fails the session, so does more shared memory than a program can have,
a product in bfloat16 outside of the tensor cores, and an entry of the table of tiles that no case
reaches.
"""

import argparse
import fnmatch
import functools
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

import offline
from ascend.jobs import Job, Reporter, run
from cases import CASES, Case
from npu_dsa_kernels.backends.triton import tiles as table
from npu_dsa_kernels.backends.triton.tiles import Tiles
from offline import ARCHITECTURES, Architecture, Compiled, Launch, Recorder

COMPILE = 120.0
"""Seconds a kernel may take; the most patient of the table's take a tenth of that."""

PAGE = "cuda.md"
RECORDED = 90
"""The architecture that the tiles are made for, and the table is of."""
BLOCK = re.compile(r"(<!-- generated:cuda-table -->\n).*?(<!-- /generated -->\n)", re.DOTALL)


def record(
    cases: Sequence[Case],
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    other_tiles: dict[str, Tiles] | None = None,
) -> list[Launch]:
    """The distinct programs that the cases start."""
    recorder = Recorder()
    with recorder.use(other_tiles):
        for case in cases:
            for dtype in dtypes:
                case.run(dtype)
    return recorder.launches


def compile_one(
    one: Launch, architecture: Architecture, folder: Path, reporter: Reporter
) -> tuple[Compiled, list[str]]:
    """What it takes of the device, and what is wrong with that."""
    reporter.step("compiling", COMPILE)
    compiled = offline.compile_launch(one, folder)
    return compiled, list(offline.complaints(one, compiled, architecture))


@dataclass
class Row:
    """A line of the table: a kernel in a dtype with certain tiles, over all it was compiled for."""

    launch: Launch
    compiled: list[Compiled] = field(default_factory=list)


@dataclass
class Report:
    architecture: Architecture
    rows: dict[tuple[str, torch.dtype, Tiles], Row] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def compile_all(
    launches: Sequence[Launch], architecture: Architecture, folder: Path, say: Callable[[str], None]
) -> Report:
    report = Report(architecture)
    work = {
        Job(title(x), functools.partial(compile_one, x, architecture, folder)): x for x in launches
    }
    for job, outcome in run(list(work)):
        one = work[job]
        row = report.rows.setdefault((one.name, one.dtype, one.tiles), Row(one))
        if outcome.error is not None:
            failures, said = [outcome.error], outcome.error
        else:
            compiled, failures = outcome.result
            row.compiled.append(compiled)
            said = (
                f"shared {compiled.shared_bytes} registers {compiled.registers} "
                f"spilled {compiled.spilled_bytes} {' + '.join(compiled.products)}"
            )
        report.failures += [f"{job.name}: {failure}" for failure in failures]
        say(f"{'FAILED' if failures else 'ok    '} {outcome.seconds:5.1f} s  {job.name}: {said}")
    return report


def title(one: Launch) -> str:
    tiles, constants = one.tiles, ", ".join(f"{k} {v}" for k, v in one.constants.items())
    return (
        f"{one.name} {name_of(one.dtype)} {tiles.rows} x {tiles.columns}, {tiles.warps} warps, "
        f"{tiles.stages} stages ({constants})"
    )


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def unreached(report: Report) -> Iterator[str]:
    """Entries of the table of tiles that no case came by."""
    reached = {(name, dtype.itemsize, tiles) for name, dtype, tiles in report.rows}
    for kernel, size, tiles in table.entries(offline.TARGET):
        if (kernel, size, tiles) not in reached:
            yield f"{kernel}, {size} bytes, {tiles.rows} x {tiles.columns}: no case reaches it"


# --- what is written -----------------------------------------------------------------------------


def lines(report: Report) -> list[list[str]]:
    """The table, a cell at a time."""
    out = [
        ["kernel", "dtype", "tiles", "warps", "stages", "compiled for", "products", "shared memory",
         "registers", "spilled", "programs"]
    ]  # fmt: skip
    for (name, dtype, tiles), row in sorted(
        report.rows.items(), key=lambda x: (x[0][0], name_of(x[0][1]))
    ):
        compiled = row.compiled
        products = sorted({product for x in compiled for product in x.products})
        cells = [name, name_of(dtype), f"{tiles.rows} x {tiles.columns}", str(tiles.warps),
                 str(tiles.stages), str(len(compiled)), " + ".join(products)]  # fmt: skip
        cells += [
            f"{max((getattr(x, figure) for x in compiled), default=0):,}"
            for figure in ("shared_bytes", "registers", "spilled_bytes")
        ]
        programs = (x.programs(report.architecture) for x in compiled)
        out.append([*cells, str(min(programs, default=0))])
    return out


def markdown(cells: list[list[str]]) -> str:
    body = [cells[0], ["---"] * len(cells[0]), *cells[1:]]
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in body) + "\n"


def plain(cells: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def write(page: Path, report: Report, check: bool) -> list[str]:
    """Bring the page up to date, or say that it is not."""
    before = page.read_text("utf-8")
    after = BLOCK.sub(lambda found: found[1] + markdown(lines(report)) + found[2], before)
    if check:
        return [] if after == before else [f"docs/{page.name} is out of date: nox -s cuda"]
    page.write_text(after, "utf-8")
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("operators", nargs="?", default="*", help="operators to compile, a glob")
    parser.add_argument("--check", action="store_true", help="write nothing, fail where it differs")
    parser.add_argument("--docs", type=Path, help="the folder with the page that has the table")
    parser.add_argument(
        "--capability", type=int, default=RECORDED, choices=ARCHITECTURES, help="of the device"
    )
    arguments = parser.parse_args()
    chosen = [x for x in CASES if fnmatch.fnmatch(x.operator, arguments.operators)]
    if not chosen:
        print(f"no operator is like {arguments.operators!r}", file=sys.stderr)
        return 2
    start = time.monotonic()
    architecture = ARCHITECTURES[arguments.capability]
    everything = len(chosen) == len(CASES)
    offline.compile_for(architecture.capability)
    with tempfile.TemporaryDirectory(prefix="cuda-") as folder:
        report = compile_all(
            record(chosen), architecture, Path(folder), lambda text: print(text, flush=True)
        )
    complaints = list(report.failures)
    if everything:
        complaints += unreached(report)
    print(f"\n{plain(lines(report))}\n")
    recorded = everything and architecture.capability == RECORDED and arguments.docs is not None
    if recorded and (arguments.check or not complaints):
        complaints += write(arguments.docs / PAGE, report, arguments.check)
    for complaint in complaints:
        print(f"FAILED {complaint}")
    print(
        f"sm_{architecture.capability}: {len(complaints)} failures, "
        f"{time.monotonic() - start:.0f} s"
    )
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())

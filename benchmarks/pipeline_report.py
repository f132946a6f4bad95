"""The pipeline model's tables and picture."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import pipeline as model
from benchmarks import report
from benchmarks.pipeline import AHEAD, PUBLISHED, SFAG, SLIG, STAGES, Kernel, Pipeline

TITLE = "A model, not a measurement"
# Okabe and Ito's colours; stages of the cube core are the dark ones.
_COLOURS = dict(zip(STAGES, ("#56B4E9", "#0072B2", "#E69F00", "#8A3B00", "#CC79A7"), strict=True))
_ON_COLOUR = dict(zip(STAGES, ("black", "white", "black", "white", "black"), strict=True))
_DRAWN = (SFAG, replace(SLIG, blocks=SFAG.blocks))


def run(
    console: Console, out: Path, recorded: list[dict[str, Any]], overhead: float, check: bool
) -> bool:
    """Print the tables, write `pipeline.json` and `pipeline.png`; False if a check failed."""
    kernels, others = model.kernels(recorded)
    out.mkdir(parents=True, exist_ok=True)
    checks = list(model.checks())
    console.print(f"{TITLE}: the rules are in benchmarks/pipeline.py.\n", highlight=False)
    _print_published(console)
    _print_widths(console)
    _print_kernels(console, kernels, overhead)
    for remark in _remarks(kernels, others, recorded, overhead):
        console.print(remark, highlight=False)
    report.write_json(_json(kernels, overhead, checks), out / "pipeline.json")
    _draw(kernels, overhead, out / "pipeline.png")
    console.print(f"{out / 'pipeline.json'}, {out / 'pipeline.png'}", highlight=False)
    if check:
        report.print_checks(console, checks)
    return all(c.holds for c in checks) or not check


def read_recorded(path: Path) -> list[dict[str, Any]]:
    """What the Ascend session recorded of compiled programs.

    Raises:
        ValueError: the file is something else.
    """
    wanted = ("kernel", "dtype", "tiles", "l1_bytes", "ub_bytes", "cores")
    try:
        rows = json.loads(path.read_text("utf-8"))
        complete = all(row[name] is not None for row in rows for name in wanted)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: a JSON list of objects with {wanted}; found {error!r}") from None
    if not complete:
        raise ValueError(f"{path}: {wanted} must not be null")
    return rows


def _print_published(console: Console) -> None:
    table = Table(title="From the published stage widths", title_justify="left")
    for column in ("pipeline", "widths", "blocks", "ahead"):
        table.add_column(column)
    for column in ("times shorter", "cube busy", "vector busy"):
        table.add_column(column, justify="right")
    for pipeline in (SFAG, replace(SFAG, blocks=2), replace(SFAG, blocks=16), SLIG):
        for ahead in AHEAD:
            found = model.figures(pipeline, ahead)
            published = {
                p.name: p.figure for p in PUBLISHED if (p.pipeline, p.ahead) == (pipeline, ahead)
            }
            table.add_row(
                pipeline.name,
                " ".join(f"{w:g}" for w in pipeline.widths),
                f"{pipeline.blocks}",
                f"{ahead}",
                *(
                    f"{found[name]:.{digits}f}"
                    + (f" (published {published[name]})" if name in published else "")
                    for name, digits in (("shorter", 3), ("cube", 1), ("vector", 1))
                ),
            )
        table.add_section()
    console.print(table)


def _print_widths(console: Console) -> None:
    table = Table(
        title="Published widths, and what the published tiles (128 x 128) give at one rate for each"
        " kind of work",
        title_justify="left",
    )
    table.add_column("pipeline")
    for stage in STAGES:
        table.add_column(stage, justify="right")
    for pipeline, found in model.published_tiles().items():
        table.add_row(f"{pipeline.name}, published", *(f"{w:g}" for w in pipeline.widths))
        table.add_row("  from the tiles", *(f"{w:.0f}" for w in found))
    console.print(table)


def _print_kernels(console: Console, kernels: list[Kernel], overhead: float) -> None:
    table = Table(
        title="Our kernels with their tiles on Ascend, bfloat16, in SFAG's unit: a tile's time"
        " before\nand after its loop, widths of a block in it; busy, all included, with 0, 1, 2"
        " ahead",
        title_justify="left",
    )
    table.add_column("kernel,\nheads x keys", no_wrap=True)
    for column in ("vector\ncores", "before", *STAGES, "after", "cube\nbusy, %", "vector\nbusy, %"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("L1 has\nroom for", no_wrap=True)
    for kernel in kernels:
        pipeline = kernel.pipeline(overhead)
        found = [model.figures(pipeline, ahead) for ahead in AHEAD]
        room = [str(a) for a in AHEAD if kernel.fits(a)]
        table.add_row(
            f"{kernel.name}\n{kernel.rows} x {kernel.keys}",
            f"{kernel.vector_cores or '2 (?)'}",
            f"{pipeline.before:.0f}",
            *(f"{w:.1f}" for w in pipeline.widths),
            f"{pipeline.after:.0f}",
            *(", ".join(f"{f[core]:.0f}" for f in found) for core in ("cube", "vector")),
            "?" if kernel.l1_bytes is None else ", ".join(room) or "none",
        )
    console.print(table)


def _remarks(kernels, others, recorded, overhead):
    if not kernels:
        yield "No kernel with these stages is in the table of tiles for Ascend."
    if others:
        yield f"Not of these stages: {', '.join(others)}."
    if not recorded:
        yield (
            "Nothing is recorded (--recorded FILE): whether L1 has room for blocks read ahead is "
            "not judged, and both vector cores of a pair are assumed to work."
        )
    elif unrecorded := [_label(kernel) for kernel in kernels if kernel.l1_bytes is None]:
        yield f"Not recorded, so both vector cores are assumed to work: {'; '.join(unrecorded)}."
    if any(kernel.gathered_before for kernel in kernels):
        yield (
            "Before and after: a tile's share of gather_slots and scatter_slots, launches of both "
            "vector cores in which the cube core is idle."
        )
    yield (
        f"Assumed: starting a stage costs {overhead:g} (--stage-overhead), a launch nothing; small "
        f"tiles reach the rates of large ones; {model.K} keys a query, {model.H} heads."
    )


def _label(kernel: Kernel) -> str:
    return f"{kernel.name}, {kernel.rows} x {kernel.keys}"


def _json(kernels: list[Kernel], overhead: float, checks) -> dict[str, Any]:
    def entry(pipeline: Pipeline) -> dict[str, Any]:
        figures = {f"{a} ahead": model.figures(pipeline, a) for a in AHEAD}
        return {**asdict(pipeline), "figures": figures}

    return {
        "suite": "pipeline",
        "what": f"{TITLE}: busy shares in per cent, widths in the published figures' unit",
        "stage_overhead": overhead,
        "published": [asdict(p) for p in PUBLISHED],
        "from_published_widths": [entry(p) for p in (SFAG, SLIG)],
        "kernels": [
            {**asdict(k), **entry(k.pipeline(overhead)), "fits_l1": [k.fits(a) for a in AHEAD]}
            for k in kernels
        ],
        "checks": [asdict(c) for c in checks],
    }


def _draw(kernels: list[Kernel], overhead: float, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    rows = [3.0] * len(_DRAWN) + ([0.9 + 0.42 * len(kernels)] if kernels else [])
    figure, axes = plt.subplots(
        len(rows), 2, figsize=(14, sum(rows) + 1.2), squeeze=False, layout="constrained",
        gridspec_kw={"width_ratios": [3.2, 1], "height_ratios": rows},
    )  # fmt: skip
    for (timeline, shares), pipeline in zip(axes, _DRAWN, strict=False):
        _draw_timeline(timeline, pipeline)
        _draw_shares(shares, pipeline)
    if kernels:
        _draw_stages(axes[-1, 0], kernels, overhead)
        _draw_busy(axes[-1, 1], kernels, overhead)
    figure.suptitle(
        f"{TITLE}: a cube core and two vector cores of an Atlas A3, 0, 1 and 2 blocks ahead\n"
        "V0 gather, C1 products, V1 vector work, C2 products, V2 scatter-add; below: number of the "
        "block",
        fontsize=11,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_timeline(axis: Any, pipeline: Pipeline) -> None:
    lanes = [(ahead, core) for ahead in AHEAD for core in "CV"]
    for lane, (ahead, core) in enumerate(lanes):
        at = lane + 0.5 * (lane // 2)
        for e in model.schedule(pipeline, ahead).events:
            if e.stage[0] != core:
                continue
            axis.barh(
                at, e.end - e.start, 0.9, e.start, color=_COLOURS[e.stage], ec="white", lw=0.8
            )
            first = e.block - pipeline.scatter_every + 1
            blocks = f"{first}+{e.block}" if e.stage == "V2" and first < e.block else f"{e.block}"
            axis.text(
                (e.start + e.end) / 2, at, f"{e.stage}\n{blocks}", ha="center", va="center",
                fontsize=6, color=_ON_COLOUR[e.stage], linespacing=0.95,
            )  # fmt: skip
    for ahead in AHEAD:
        length = model.schedule(pipeline, ahead).length
        shorter = model.figures(pipeline, ahead)["shorter"]
        axis.text(
            length * 1.008, 2.5 * ahead + 0.5, f"{length:.0f}\n{shorter:.2f} x", va="center",
            fontsize=8,
        )  # fmt: skip
    axis.set_xlim(0, model.schedule(pipeline, 0).length * 1.06)
    axis.set_yticks(
        [lane + 0.5 * (lane // 2) for lane in range(len(lanes))],
        [f"{ahead} ahead, {'cube' if core == 'C' else 'vector'}" for ahead, core in lanes],
        fontsize=8,
    )
    axis.invert_yaxis()
    widths = ", ".join(f"{s} {w:g}" for s, w in zip(STAGES, pipeline.widths, strict=True))
    title = f"{pipeline.name}, published stage widths ({widths}), {pipeline.blocks} blocks"
    for p in PUBLISHED:
        if p.pipeline.name == pipeline.name and p.name == "shorter":
            found = model.figures(p.pipeline, p.ahead)["shorter"]
            where = "" if p.pipeline == pipeline else ", in the long run"
            title += f"; {p.ahead} ahead{where}: {found:.2f} x, published {p.figure} x"
    axis.set_title(title, fontsize=9, loc="left")
    axis.set_xlabel("time, unit of the published figure", fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_shares(axis: Any, pipeline: Pipeline) -> None:
    at = range(len(AHEAD))
    for offset, core, colour in ((-0.2, "cube", "#555555"), (0.2, "vector", "#B5B5B5")):
        shares = [model.figures(pipeline, ahead)[core] for ahead in AHEAD]
        bars = axis.bar([a + offset for a in at], shares, 0.38, color=colour, label=core)
        axis.bar_label(bars, fmt="%.0f", fontsize=8, label_type="edge", padding=6)
        published = [p for p in PUBLISHED if p.pipeline == pipeline and p.name == core]
        axis.plot(
            [p.ahead + offset for p in published], [float(p.figure) for p in published], "D",
            color="black", mfc="white", ms=6, ls="none",
            label="published" if core == "vector" and published else None,
        )  # fmt: skip
    axis.set_xticks(at, [f"{a} ahead" for a in at], fontsize=8)
    axis.set_ylim(0, 142)
    axis.set_yticks(range(0, 101, 25), [f"{tick} %" for tick in range(0, 101, 25)], fontsize=8)
    axis.set_title(f"busy, {pipeline.blocks} blocks", fontsize=9, loc="left")
    axis.legend(fontsize=8, frameon=False, ncols=3, loc="upper left", columnspacing=1)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_stages(axis: Any, kernels: list[Kernel], overhead: float) -> None:
    names = [f"{_label(k)}, {k.vector_cores or 2} vector" for k in kernels]
    left = [0.0] * len(kernels)
    times = []
    for kernel in kernels:
        p = kernel.pipeline(overhead)
        times.append((p.before, *(p.blocks * w for w in p.widths), p.after))
    # Before the loop it is V0's work, after it V2's: the same colours, hatched.
    for number, label in enumerate(("before", *STAGES, "after")):
        shares = [100 * time[number] / sum(time) for time in times]
        stage = {"before": "V0", "after": "V2"}.get(label, label)
        bars = axis.barh(
            names, shares, 0.7, left, color=_COLOURS[stage], ec="white", label=label,
            hatch="///" if stage != label else None,
        )  # fmt: skip
        axis.bar_label(
            bars, [f"{s:.0f} %" if s >= 4 else "" for s in shares], label_type="center",
            fontsize=8, color=_ON_COLOUR[stage],
        )  # fmt: skip
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axis.invert_yaxis()
    axis.set_xlim(0, 100)
    axis.tick_params(labelsize=8)
    axis.set_xlabel("share of a tile's time, nothing overlapped, per cent", fontsize=8)
    axis.set_title(
        "Our kernels (heads x keys of a tile, vector cores of a pair, bfloat16), widths from their "
        "work at the published backward's rates", fontsize=9, loc="left",
    )  # fmt: skip
    axis.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    axis.spines[["top", "right"]].set_visible(False)


def _draw_busy(axis: Any, kernels: list[Kernel], overhead: float) -> None:
    """Cube and vector busy with 0, 1 and 2 blocks ahead, a line a kernel."""
    found = [
        [
            model.figures(kernel.pipeline(overhead), ahead)[core]
            for core in ("cube", "vector")
            for ahead in AHEAD
        ]
        for kernel in kernels
    ]
    axis.imshow(found, cmap="cividis", vmin=0, vmax=100, aspect="auto")
    for row, shares in enumerate(found):
        for column, share in enumerate(shares):
            colour = "white" if share < 55 else "black"
            axis.text(column, row, f"{share:.0f}", ha="center", va="center", fontsize=8, c=colour)
    axis.axvline(2.5, color="white", lw=3)
    axis.set_xticks(range(6), [*AHEAD, *AHEAD], fontsize=8)
    axis.set_yticks([])
    axis.set_xlabel("blocks ahead: cube | vector", fontsize=8)
    axis.set_title("busy, per cent: cube | vector", fontsize=9, loc="left")

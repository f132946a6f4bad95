"""A plan as a person reads it: tables, and a picture of stacked bars."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from titan_npu_train.plan.memory import PARTS, Estimate
from titan_npu_train.plan.published import PublishedRow
from titan_npu_train.plan.search import Candidate, gib

__all__ = ["draw", "memory_table", "published_table", "splits_table"]

# Groups of parts, for tables and bars that stay readable.
GROUPS = {
    "weights + gradients": ("parameters", "gradients"),
    "optimizer": ("optimizer",),
    "gathered": ("gathered",),
    "activations": ("activations", "transient", "logits"),
    "MoE worst case": ("moe_imbalance",),
    "other": ("communication", "runtime"),
}
_COLOURS = ("#1f5fa8", "#5b9bd5", "#9dc3e6", "#d1651a", "#f0a868", "#8a8f98")
_INK = "#30343b"
assert sorted(part for parts in GROUPS.values() for part in parts) == sorted(PARTS)


def memory_table(estimate: Estimate) -> Table:
    """Every part of every kind of rank, GiB."""
    table = Table(title="GiB of a device at its peak", title_justify="left", box=None)
    table.add_column("")
    for rank in estimate.ranks:
        stage = f"pipeline rank {rank.pipeline_rank}" if len(estimate.ranks) > 1 else "every rank"
        table.add_column(stage, justify="right")
    for part in PARTS:
        if any(rank.parts.get(part, 0) for rank in estimate.ranks):
            values = [f"{rank.parts.get(part, 0) / 2**30:.3f}" for rank in estimate.ranks]
            table.add_row(part.replace("_", " "), *values)
    table.add_section()
    table.add_row(
        "together", *(f"{rank.total / 2**30:.3f}" for rank in estimate.ranks), style="bold"
    )
    return table


def splits_table(candidates: Sequence[Candidate], title: str) -> Table:
    """One row a split: what it needs on its fullest rank (GiB), and what a step costs (seconds)."""
    table = Table(title=title, title_justify="left", box=None)
    for name in ("", "split", "rows", "AC", "swap"):
        table.add_column(name, justify="right" if name in ("", "rows") else "left")
    for name in (*GROUPS, "GiB"):
        table.add_column(name, justify="right")
    for name in ("compute", "comm.", "bubble", "swap", "s a step", "tokens/s/device"):
        table.add_column(name, justify="right")
    for number, candidate in enumerate(candidates, 1):
        split, cost = candidate.split, candidate.cost
        largest = candidate.estimate.largest
        table.add_row(
            str(number),
            split.name(),
            f"{split.rows} x {split.microbatches}",
            split.checkpointing,
            "yes" if split.swap else "no",
            *(gib(_group(largest.parts, group)) for group in GROUPS),
            gib(largest.total),
            *(_seconds(s) for s in (cost.compute, cost.communication, cost.bubble, cost.swap)),
            _seconds(cost.total),
            f"{cost.tokens_per_second_per_device:,.0f}",
        )
    return table


def published_table(
    rows: Sequence[tuple[PublishedRow, float]], device_memory: int, tokens: int
) -> Table:
    """Rows of the published table, each with the seconds of communication of one sequence."""
    title = f"Published counting, GiB of a device, {tokens} tokens a data-parallel rank"
    table = Table(title=title, title_justify="left", box=None)
    numbers = ("PP", "TP", "CP", "DP", "EP", "params 2^30", "param", "grad", "act", "MoE", "HCCL")
    for name in (*numbers, "total", "communication s", "fits"):
        table.add_column(name, justify="right")
    for row, seconds in rows:
        sizes = (row.parameter_bytes, row.gradient_bytes, row.activation_bytes)
        table.add_row(
            *(str(d) for d in (row.pipeline, row.tensor, row.context, row.data, row.expert)),
            f"{row.parameters / 2**30:.5f}",
            *(f"{size / 2**30:.4f}" for size in sizes),
            f"{row.moe_imbalance_bytes / 2**30:.3f}",
            f"{row.hccl_bytes / 2**30:.1f}",
            f"{row.total_bytes / 2**30:.4f}",
            f"{seconds:.3f}",
            "yes" if row.total_bytes <= device_memory else "no",
        )
    return table


def draw(candidates: Sequence[Candidate], device_memory: int, path: Path, *, title: str) -> None:
    """Write a PNG to ``path``, replacing it in one step: a bar a split, its parts stacked."""
    shown = list(reversed(candidates))  # the first on top
    height = 1.6 + 0.42 * len(shown)
    figure = Figure(figsize=(12, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    left = [0.0] * len(shown)
    for colour, name in zip(_COLOURS, GROUPS, strict=True):
        sizes = [_group(c.estimate.largest.parts, name) / 2**30 for c in shown]
        axes.barh(range(len(shown)), sizes, 0.7, left=left, color=colour, label=name)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    memory = device_memory / 2**30
    axes.axvline(memory, color=_INK, linewidth=1.2, linestyle="--")
    axes.annotate(
        f"{memory:.3g} GiB", (memory, 1.0), xycoords=("data", "axes fraction"),
        xytext=(0, 3), textcoords="offset points", ha="center", fontsize=8, color=_INK,
    )  # fmt: skip
    for y, (candidate, total) in enumerate(zip(shown, left, strict=True)):
        rate = candidate.cost.tokens_per_second_per_device
        text = f"{total:.1f}  ({rate:,.0f} tokens/s/device)" if candidate.fits else f"{total:.1f}"
        axes.text(total + 0.4, y, text, va="center", fontsize=8, color=_INK)
    axes.set_yticks(range(len(shown)), [_label(c) for c in shown], fontsize=8)
    axes.set_xlim(0, 1.25 * max(memory, *left))
    axes.set_xlabel("GiB on the fullest device")
    axes.set_title(title, fontsize=11, fontweight="bold", color=_INK, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(GROUPS), frameon=False, fontsize=8)
    partial = path.with_name(f".{path.name}")
    figure.savefig(partial, format="png")
    partial.replace(path)


def _label(candidate: Candidate) -> str:
    split = candidate.split
    extras = [] if split.checkpointing == "none" else [f"{split.checkpointing} AC"]
    extras += ["swap"] if split.swap else []
    return split.name() + (f", {', '.join(extras)}" if extras else "")


def _group(parts: dict[str, int], group: str) -> int:
    return sum(parts.get(part, 0) for part in GROUPS[group])


def _seconds(seconds: float) -> str:
    digits = 1 if seconds >= 10 else 2 if seconds >= 0.1 else 3
    return f"{seconds:.{digits}f}"

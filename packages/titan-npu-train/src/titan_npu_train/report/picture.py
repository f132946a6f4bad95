"""The report as one picture: what a run did, step by step, and what its indexers learnt."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

if TYPE_CHECKING:
    from titan_npu_train.report.evaluate import Evaluation

__all__ = ["draw"]

_BLUE, _ORANGE, _GREY = "#1f5fa8", "#d1651a", "#8a8f98"
_INK = "#30343b"


def draw(
    records: Sequence[dict[str, Any]],
    evaluation: "Evaluation | None",
    path: Path,
    *,
    title: str,
) -> None:
    """Write a PNG of 1800 x 1000 pixels to ``path``, replacing it in one step."""
    # A figure of its own, without pyplot: nothing global is touched, no display is needed.
    figure = Figure(figsize=(12, 6.67), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, fontweight="bold", color=_INK)
    axes = figure.subplots(2, 3)

    _curve(axes[0, 0], records, "loss", "LM loss", "nats a token", _BLUE)
    _indexer_loss(axes[0, 1], records)
    _recall(axes[0, 2], evaluation)
    _curve(axes[1, 0], records, "grad_norm", "gradient norm before clipping", "", _BLUE)
    _curve(axes[1, 1], records, "tokens_per_second", "tokens a second, whole job", "", _BLUE)
    _from_zero(axes[1, 1])
    axes[1, 1].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _curve(axes[1, 2], records, "peak_memory_bytes", "peak memory of rank 0", "GiB", _BLUE, 2**-30)
    _from_zero(axes[1, 2])
    for row in axes:
        for ax in row:
            _style(ax)
    partial = path.with_name(f".{path.name}")
    figure.savefig(partial, format="png")
    partial.replace(path)


def _curve(
    ax: Axes,
    records: Sequence[dict[str, Any]],
    key: str,
    title: str,
    unit: str,
    color: str,
    scale: float = 1.0,
) -> None:
    points = [(r["step"], r[key] * scale) for r in records if r.get(key) is not None]
    ax.set_title(title)
    ax.set_ylabel(unit)
    if not points:
        _nothing(ax, "not recorded")
        return
    steps, values = zip(*points, strict=True)
    # A single step would draw an invisible line.
    ax.plot(steps, values, color=color, linewidth=1.6, marker="o" if len(points) < 3 else None)
    _step_axis(ax)


def _indexer_loss(ax: Axes, records: Sequence[dict[str, Any]]) -> None:
    with_layers = [r for r in records if r.get("indexer_loss_layers")]
    count = max((len(r["indexer_loss_layers"]) for r in with_layers), default=0)
    ends: list[tuple[int, float, int]] = []
    for layer in range(count):
        points = [
            (r["step"], r["indexer_loss_layers"][layer])
            for r in with_layers
            if layer < len(r["indexer_loss_layers"])
        ]
        steps, values = zip(*points, strict=True)
        ax.plot(steps, values, color=_GREY, linewidth=0.8, alpha=0.55, zorder=1)
        ends.append((steps[-1], values[-1], layer))
    _curve(ax, records, "indexer_loss", "indexer loss (grey: each layer)", "nats a token", _ORANGE)
    _label_ends(ax, ends)


def _label_ends(ax: Axes, ends: Sequence[tuple[int, float, int]]) -> None:
    """Number the lines at their ends, where the numbers do not cover one another."""
    bottom, top = ax.get_ylim()
    written: list[float] = []
    for step, value, layer in ends:
        if any(abs(value - other) < 0.04 * (top - bottom) for other in written):
            continue
        written.append(value)
        ax.annotate(
            str(layer),
            (step, value),
            xytext=(3, 0),
            textcoords="offset points",
            fontsize=7,
            color=_GREY,
            va="center",
        )


def _recall(ax: Axes, evaluation: "Evaluation | None") -> None:
    ax.set_title("true top-k keys the indexer finds")
    if evaluation is None or evaluation.mean.recall is None:
        _nothing(ax, "indexer not evaluated" if evaluation is None else "no row is long enough")
        return
    bars = [(f.layer, f.recall) for f in evaluation.layers if f.recall is not None]
    width = 0.38
    for offset, color, name in ((-width / 2, _ORANGE, "trained"), (width / 2, _GREY, "untrained")):
        ax.bar(
            [place + offset for place in range(len(bars))],
            [100 * getattr(recall, name) for _, recall in bars],
            width,
            color=color,
            label=name,
        )
    chance = 100 * evaluation.mean.recall.chance
    ax.axhline(chance, color=_INK, linewidth=1, linestyle="--", label="chance")
    ax.set_xticks(range(len(bars)), [str(layer) for layer, _ in bars])
    ax.set_xlabel("layer")
    ax.set_ylim(0, 100)
    ax.set_ylabel(f"% of {evaluation.topk} keys")
    ax.legend(frameon=False, fontsize=8, ncols=3, loc="upper center")


def _nothing(ax: Axes, text: str) -> None:
    ax.text(0.5, 0.5, text, ha="center", va="center", transform=ax.transAxes, color=_GREY)
    ax.set_xticks([])
    ax.set_yticks([])


def _from_zero(ax: Axes) -> None:
    ax.set_ylim(0, 1.1 * ax.get_ylim()[1])


def _step_axis(ax: Axes) -> None:
    ax.set_xlabel("step")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _style(ax: Axes) -> None:
    ax.title.set(fontsize=10, color=_INK)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(_GREY)
    ax.tick_params(colors=_INK, labelsize=8)
    ax.xaxis.label.set(fontsize=8, color=_INK)
    ax.yaxis.label.set(fontsize=8, color=_INK)
    ax.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    ax.set_axisbelow(True)

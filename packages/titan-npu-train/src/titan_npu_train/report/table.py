"""The report in a terminal."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["print_report"]

_RECALLS = ("trained", "untrained", "chance")


def print_report(summary: dict[str, Any], console: Console, *, picture: Path) -> None:
    console.print(_training(summary))
    evaluation = summary["evaluation"]
    if "layers" in evaluation:
        console.print(_indexer(evaluation))
        console.print(_legend(evaluation), markup=False, style="dim")
    else:
        console.print(f"indexer not evaluated: {evaluation['not_evaluated']}", markup=False)
    console.print(f"picture: {picture}", markup=False)


def _legend(evaluation: dict[str, Any]) -> str:
    topk = evaluation["topk"]
    return (
        f"On {evaluation['queries']:,} held-out tokens, checkpoint of step {evaluation['step']}. "
        "KL: the attention's distribution over every visible key against the indexer's, nats a "
        f"token. Untrained: mean of {evaluation['seeds']} freshly initialised indexers on the same "
        f"backbone. Recall: of the {topk} keys with the most attention, over the "
        f"{evaluation['long_queries']:,} tokens that see more than {topk}; chance: of a random "
        "choice."
    )


def _training(summary: dict[str, Any]) -> Table:
    table = Table("", "first", "last", title=f"to step {summary['steps']}", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for key, label, form in (
        ("loss", "LM loss (nats a token)", ".4f"),
        ("indexer_loss", "indexer loss (nats a token)", ".4f"),
        ("grad_norm", "gradient norm", ".3f"),
    ):
        if summary[f"first_{key}"] is not None:
            table.add_row(
                label, f"{summary[f'first_{key}']:{form}}", f"{summary[f'last_{key}']:{form}}"
            )
    table.add_section()
    if summary["heldout_loss"] is not None:
        table.add_row("LM loss on held-out text", "", f"{summary['heldout_loss']:.4f}")
    if summary["tokens_per_second"] is not None:
        table.add_row("tokens a second (median)", "", f"{summary['tokens_per_second']:,.0f}")
    if summary["mfu"] is not None:
        table.add_row("MFU (median)", "", f"{summary['mfu']:.1%}")
    if summary["peak_memory_bytes"] is not None:
        table.add_row(
            "peak memory of rank 0", "", f"{summary['peak_memory_bytes'] / 2**30:.2f} GiB"
        )
    return table


def _indexer(evaluation: dict[str, Any]) -> Table:
    table = Table(title="indexer on held-out text", title_justify="left")
    table.add_column("layer")
    for heading in ("KL trained", "KL untrained", "recall trained", "recall untrained", "chance"):
        table.add_column(heading, justify="right")

    def add(label: str, figures: dict[str, Any], style: str | None = None) -> None:
        recall = figures["recall"]
        table.add_row(
            label,
            f"{figures['kl_trained']:.4f}",
            f"{figures['kl_untrained']:.4f}",
            *(f"{recall[name]:.1%}" if recall else "-" for name in _RECALLS),
            style=style,
        )

    for figures in evaluation["layers"]:
        add(str(figures["layer"]), figures)
    table.add_section()
    add("mean", evaluation["mean"], "bold")
    return table

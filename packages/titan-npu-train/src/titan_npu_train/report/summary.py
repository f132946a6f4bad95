"""The figures of a report."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titan_npu_train.report.evaluate import Evaluation

__all__ = ["summarize"]


def summarize(
    records: Sequence[dict[str, Any]],
    evaluation: "Evaluation | None",
    *,
    not_evaluated: str | None = None,
) -> dict[str, Any]:
    """report.json: plain numbers, null where a run has no such figure.

    Losses in nats a token, memory in bytes, rates in tokens a second of the whole job (the median
    over steps, because first steps are slow).
    """
    summary: dict[str, Any] = {"steps": records[-1]["step"]}
    for key, name in (
        ("loss", "loss"),
        ("indexer_loss", "indexer_loss"),
        ("grad_norm", "grad_norm"),
    ):
        values = _values(records, key)
        summary[f"first_{name}"] = values[0] if values else None
        summary[f"last_{name}"] = values[-1] if values else None
    summary["lowest_loss"] = min(_values(records, "loss"), default=None)
    summary["highest_indexer_loss"] = max(_values(records, "indexer_loss"), default=None)
    for key in ("tokens_per_second", "step_seconds", "tflops", "mfu"):
        values = _values(records, key)
        summary[key] = statistics.median(values) if values else None
    summary["peak_memory_bytes"] = max(_values(records, "peak_memory_bytes"), default=None)
    summary["tokens_seen"] = next(iter(_values(records[::-1], "tokens_seen")), None)

    mean = evaluation.mean if evaluation else None
    summary["indexer_kl_trained"] = mean.kl_trained if mean else None
    summary["indexer_kl_untrained"] = mean.kl_untrained if mean else None
    summary["indexer_kl_topk_trained"] = mean.kl_topk_trained if mean else None
    summary["indexer_kl_topk_untrained"] = mean.kl_topk_untrained if mean else None
    recall = mean.recall if mean else None
    summary["topk_recall"] = recall.trained if recall else None
    summary["topk_recall_untrained"] = recall.untrained if recall else None
    summary["topk_recall_chance"] = recall.chance if recall else None
    summary["heldout_loss"] = evaluation.heldout_loss if evaluation else None
    summary["evaluation"] = (
        dataclasses.asdict(evaluation) if evaluation else {"not_evaluated": not_evaluated}
    )
    return summary


def _values(records: Sequence[dict[str, Any]], key: str) -> list[Any]:
    return [record[key] for record in records if record.get(key) is not None]

"""How a run went: a table, a picture, and report.json for programs."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from titan_npu_train.failures import UserError
from titan_npu_train.report.picture import draw
from titan_npu_train.report.summary import summarize
from titan_npu_train.report.table import print_report
from titan_npu_train.run_folder import RunInfo, read_metrics

__all__ = ["REPORT_FILE", "REPORT_PICTURE", "report"]

REPORT_FILE = "report.json"
REPORT_PICTURE = "report.png"


def report(
    run_dir: Path,
    *,
    evaluate: bool = True,
    data: Path | None = None,
    rows: int = 16,
    console: Console | None = None,
) -> dict[str, Any]:
    """Print a report of a run and write report.png and report.json into its folder.

    Args:
        run_dir: the run's dump_folder.
        evaluate: load the newest complete checkpoint and measure the indexer on held-out text.
            Where that is not possible the report says why and leaves those figures null.
        data: the dataset to evaluate on; the run's own by default.
        rows: at most so many held-out rows.
        console: where the table goes.

    Returns:
        What report.json holds.

    Raises:
        UserError: the folder has no metrics, or cannot be written.
    """
    run_dir = Path(run_dir)
    console = console or Console()
    records = read_metrics(run_dir)
    evaluation, reason = None, "not asked for"
    if evaluate:
        from titan_npu_train.report.evaluate import evaluate_run

        try:
            evaluation, reason = evaluate_run(run_dir, data=data, rows=rows), None
        except (UserError, ValueError) as error:
            reason = str(error)
    summary = summarize(records, evaluation, not_evaluated=reason)
    try:
        draw(records, evaluation, run_dir / REPORT_PICTURE, title=_title(run_dir))
        (run_dir / REPORT_FILE).write_text(json.dumps(summary, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"cannot write the report into '{run_dir}': {error.strerror}.") from error
    print_report(summary, console, picture=run_dir / REPORT_PICTURE)
    return summary


def _title(run_dir: Path) -> str:
    try:
        return f"{RunInfo.read(run_dir).config}  ({run_dir.resolve().name})"
    except UserError:
        return run_dir.resolve().name

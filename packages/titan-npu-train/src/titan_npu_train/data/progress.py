"""A progress bar for `prepare` in a terminal."""

from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from titan_npu_train.data.prepare import Progress


@contextmanager
def progress_bar(console: Console | None = None) -> Generator[Progress]:
    """Yields what `prepare(progress=...)` takes; one bar a stage, on stderr by default.

    Where the output is no terminal, rich draws nothing until the end.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console or Console(stderr=True)) as bar:
        tasks = {}

        def report(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield report

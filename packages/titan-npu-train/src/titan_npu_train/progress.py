"""What a person sees while a run trains: one line a step, and the few log lines that matter.

The ranks write metrics.jsonl and log files; this follows the files from the launcher. A rank's own
output never reaches the terminal, so nothing is said twice.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["Progress", "notable", "step_line"]

_POLL_SECONDS = 0.2

# "[titan] 2026-01-31 12:00:00,000 - root - INFO - message"
_LOG_LINE = re.compile(r"^\[titan\] \S+ \S+ - \S+ - (?P<level>[A-Z]+) - (?P<message>.*)$")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_NOTABLE_INFO = re.compile(
    r"total parameters"
    r"|^(Loading the checkpoint|Loading .*safetensors|Skipp|Resum|Initiali[sz]ed .*indexer)"
    r"|^Created seed checkpoint"
    r"|(checkpoint .*(complete|damaged|incomplete|skipped|saved|in \d))",
    re.IGNORECASE,
)
_NOT_FOR_PEOPLE = re.compile(
    r"^(ENV\[|HF assets path|initial_load_model_only=True has no effect|Finished loading"
    r"|Peak flops undefined|model\.safetensors\.index\.json not found)",
    re.IGNORECASE,
)


class Progress(threading.Thread):
    """Follows one run's files and prints what is new, until ``finish()``.

    Args:
        metrics: the run's metrics.jsonl. What it holds already (an earlier run) is not repeated.
        log: rank 0's log.
        total_steps: the step the run ends at, for the time left.
        say: prints one line.
    """

    def __init__(
        self, metrics: Path, log: Path, total_steps: int, say: Callable[[str], None]
    ) -> None:
        super().__init__(name="progress", daemon=True)
        self.first_step: int | None = None
        self.last_step: int | None = None
        self.steps_seen = 0
        self._metrics = _Tail(metrics, from_end=True)
        self._log = _Tail(log)
        self._total_steps = total_steps
        self._say = say
        self._done = threading.Event()
        self._step_seconds: float | None = None

    def run(self) -> None:
        while not self._done.wait(_POLL_SECONDS):
            self._read()

    def finish(self) -> None:
        """Print what is left and stop."""
        self._done.set()
        if self.is_alive():
            self.join()
        self._read()

    def _read(self) -> None:
        for line in self._log.lines():
            if message := notable(line):
                self._say(message)
        for line in self._metrics.lines():
            try:
                record = json.loads(line)
                step = record["step"]
            except (ValueError, KeyError, TypeError):
                continue  # a line cut short by a kill
            self.last_step = step
            self.first_step = self.first_step or self.last_step
            self.steps_seen += 1
            self._say(step_line(record, self._total_steps, self._seconds_per_step(record)))

    def _seconds_per_step(self, record: dict[str, Any]) -> float | None:
        seconds = record.get("step_seconds")
        if seconds is None:
            return self._step_seconds
        # The first step compiles and allocates; a running mean forgets it.
        known = self._step_seconds
        slow_start = known is not None and self.steps_seen == 2
        self._step_seconds = seconds if known is None or slow_start else 0.8 * known + 0.2 * seconds
        return self._step_seconds


class _Tail:
    """The complete lines a growing file has gained since the last look."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def lines(self) -> Iterator[str]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        complete, newline, _ = data.rpartition(b"\n")
        if newline:
            self._offset += len(complete) + 1
            yield from complete.decode(errors="replace").splitlines()


def notable(line: str) -> str | None:
    """What a log line of torchtitan is worth on the terminal: a text, or None.

    Warnings and errors are; of the rest, only the model's size and what happens to checkpoints.
    """
    found = _LOG_LINE.match(_COLOR.sub("", line))
    if found is None:
        return None
    level, message = found["level"], " ".join(found["message"].split())
    if _NOT_FOR_PEOPLE.search(message):
        return None
    if level in ("WARNING", "ERROR", "CRITICAL"):
        return f"{level.lower()}: {message}"
    return message if _NOTABLE_INFO.search(message) else None


def step_line(
    record: dict[str, Any], total_steps: int, seconds_per_step: float | None = None
) -> str:
    """One line for one record of metrics.jsonl. Figures a run does not have are left out."""
    step = record["step"]
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    for key, label, form in (
        ("loss", "loss", "7.4f"),
        ("indexer_loss", "indexer", "7.4f"),
        ("topk_recall", "recall", "5.3f"),
        ("grad_norm", "grad", "6.2f"),
    ):
        if record.get(key) is not None:
            parts.append(f"{label} {record[key]:{form}}")
    if record.get("tokens_per_second") is not None:
        parts.append(f"{record['tokens_per_second']:>7,.0f} tok/s")
    if record.get("peak_memory_bytes") is not None:
        parts.append(f"{record['peak_memory_bytes'] / 2**30:5.2f} GiB")
    if seconds_per_step is not None and step < total_steps:
        parts.append(f"left {duration((total_steps - step) * seconds_per_step)}")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as 0:07, 3:02, 1:02:03 or 2d 03:00."""
    whole = round(seconds)
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, left = divmod(rest, 60)
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"

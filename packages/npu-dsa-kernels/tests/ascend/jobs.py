"""Work in processes of its own, a few at a time, with a time limit for every step.

What crashes or hangs there fails alone: a kernel's machine code may do anything.
"""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("fork")  # what is imported need not be imported again

TOUCHED = 99
"""Exit code of a process that touched a guard page (runtime.c)."""


class Reporter:
    """How a job says where it is, and what to keep of it should it not come to an end."""

    def __init__(self, connection: Connection, faults: int) -> None:
        self._connection = connection
        self.faults = faults
        """File descriptor for the reason of a guard page's exit."""

    def step(self, name: str, seconds: float) -> None:
        """From here on the job does `name`, which may take this long."""
        self._connection.send(("step", (name, seconds)))

    def note(self, note: Any) -> None:
        self._connection.send(("note", note))


@dataclass(frozen=True)
class Job:
    name: str
    run: Callable[[Reporter], Any]


@dataclass
class Outcome:
    result: Any = None
    error: str | None = None
    """Why there is no result."""
    notes: list[Any] = field(default_factory=list)
    seconds: float = 0.0


def run(jobs: Sequence[Job], at_once: int = 2) -> Iterator[tuple[Job, Outcome]]:
    """Run the jobs; each with its outcome as it ends."""
    waiting = list(reversed(jobs))
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(_Running(waiting.pop()))
            patience = max(0.0, min(one.deadline for one in running) - time.monotonic())
            wait([one.connection for one in running], patience)
            for one in list(running):
                if one.look():
                    running.remove(one)
                    yield one.job, one.outcome
    finally:
        for one in running:
            one.kill()


class _Running:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.outcome = Outcome()
        self.connection, end = _context.Pipe(duplex=False)
        self._faults, faults = os.pipe()
        self._process = _context.Process(target=_child, args=(job, end, faults), daemon=False)
        self._start = time.monotonic()
        self._step, self._limit = "start", 60.0
        self.deadline = self._start + self._limit
        self._process.start()
        end.close()
        os.close(faults)

    def look(self) -> bool:
        """Take in what the job has sent. Whether it is over."""
        try:
            while self.connection.poll():
                kind, value = self.connection.recv()
                if kind == "step":
                    self._step, self._limit = value
                    self.deadline = time.monotonic() + self._limit
                elif kind == "note":
                    self.outcome.notes.append(value)
                elif kind == "result":
                    self.outcome.result = value
                    return self._end()
                else:
                    self.outcome.error = f"{self._step}: {value}"
                    return self._end()
        except EOFError:
            self._process.join()
            self.outcome.error = f"{self._step}: {self._reason()}"
            return self._end()
        if time.monotonic() < self.deadline:
            return False
        self.outcome.error = f"{self._step}: not over after {self._limit:g} s, stopped"
        return self._end()

    def _reason(self) -> str:
        code = self._process.exitcode
        if code == TOUCHED:
            return os.read(self._faults, 4096).decode() + " (guard page)"
        if code is not None and code < 0:
            return f"ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def _end(self) -> bool:
        self.kill()
        self.outcome.seconds = time.monotonic() - self._start
        self.connection.close()
        os.close(self._faults)
        return True

    def kill(self) -> None:
        """End the job and what it started."""
        with contextlib.suppress(ProcessLookupError):  # it may be gone, or be no group leader yet
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()


def _child(job: Job, connection: Connection, faults: int) -> None:
    os.setsid()
    try:
        message = ("result", job.run(Reporter(connection, faults)))
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode() if isinstance(error.stderr, bytes) else error.stderr
        message = ("error", f"{Path(error.cmd[0]).name}: {said.strip()[:4000]}")
    except Exception as error:
        message = ("error", f"{type(error).__name__}: {error}"[:4000])
    connection.send(message)
    connection.close()
    os._exit(0)  # nothing that Python would do on its way out belongs to this process

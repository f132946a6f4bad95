"""How the benchmarks measure: several implementations side by side, taking turns.

Each implementation of a case lives in a process of its own, with its own environment, pinned to the
same cores. Only one works at a time. A process first computes a small problem and the case's own,
whose results the parent compares: a baseline that computes something else proves nothing. Peak
memory is taken from that first call, in a heap that holds nothing yet but the inputs. Then come the
rounds: every implementation once a round, in an order that rotates, so that what disturbs a round
disturbs all of them, and ratios are taken within a round.
"""

from __future__ import annotations

import functools
import gc
import math
import multiprocessing
import os
import pickle
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
import torch
from torch import Tensor

Params = dict[str, Any]

SHORTEST_SAMPLE = 0.02  # seconds: shorter calls are repeated within a sample
FEWEST_ROUNDS = 5
MOST_ROUNDS = 50
LARGEST_SHARE = 0.85  # of the free memory that an implementation may be expected to take
FOREIGN_CPU_LIMIT = 0.05  # share of the cores that others may use before figures are doubtful


class Task(NamedTuple):
    """An implementation set up for one problem."""

    run: Callable[[], Any]
    """What is timed."""
    result: Callable[[Any], dict[str, Tensor]]
    """Turns what `run` returned into quantities that all implementations of a case share."""


@dataclass(frozen=True, kw_only=True)
class Implementation:
    name: str
    build: Callable[..., Task]
    """``build(params)``: makes the inputs and the task; importable, for it runs elsewhere."""
    options: Params = field(default_factory=dict)
    """Added to the case's parameters."""
    environment: dict[str, str] = field(default_factory=dict)
    compare: Literal["always", "small", "never"] = "always"
    """Whether its results must equal the first implementation's: at the case's own size too, only
    on the small problem (dense attention, where every key is selected), or not at all (a limit)."""
    flops: Callable[[Params], float] | None = None
    bytes_needed: Callable[[Params], float] | None = None
    """Roughly the memory it takes: it is left out where there is not as much."""


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    params: Params
    implementations: tuple[Implementation, ...]
    """The first is ours: results and ratios are relative to it."""
    small: Params = field(default_factory=dict)
    """Changes to `params` that make the small problem."""
    tolerance: float = 1e-4
    """Largest error of a result, relative to its norm."""
    note: str = ""
    timed: bool = True
    tokens: int | None = None
    """Tokens a call processes, where tokens/s is the figure of interest."""

    @property
    def title(self) -> str:
        shown = {k: v for k, v in self.params.items() if not k.startswith("_")}
        return f"{self.name} " + ", ".join(f"{k} {v}" for k, v in shown.items())


@dataclass(kw_only=True)
class Measurement:
    """What was found out about one implementation."""

    seconds: list[float] = field(default_factory=list)
    """One sample a round, in the order of the rounds."""
    peak_bytes: int | None = None
    """Memory in use at the peak of the first call, above that before it."""
    errors: dict[str, float] = field(default_factory=dict)
    flops: float | None = None
    problem: str | None = None
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.problem is None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def quartiles(self) -> tuple[float, float]:
        return quartiles(self.seconds)


@dataclass(kw_only=True)
class Result:
    case: Case
    measurements: dict[str, Measurement]
    rounds: int = 0
    foreign_cpu: float = 0.0
    """Share of the cores that other processes used meanwhile."""

    @property
    def ours(self) -> Measurement:
        return self.measurements[self.case.implementations[0].name]

    def ratios(self, name: str, to: str | None = None) -> list[float]:
        """Time of `name` over that of `to` (ours), round by round; empty where either failed."""
        base = self.ours if to is None else self.measurements[to]
        other = self.measurements[name]
        if not (base.ok and other.ok):
            return []
        return [a / b for a, b in zip(other.seconds, base.seconds, strict=True)]

    def ratio(self, name: str, to: str | None = None) -> float:
        """Median of `ratios`; NaN where there are none."""
        ratios = self.ratios(name, to)
        return statistics.median(ratios) if ratios else math.nan


def quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


@dataclass(frozen=True, kw_only=True)
class Settings:
    threads: int
    device: str = "cpu"
    budget: float = 120.0
    """Seconds of timed rounds a case may take."""
    fewest_rounds: int = FEWEST_ROUNDS
    preload: tuple[str, ...] = ()
    """Modules that take long to import and read no environment variable that a case sets."""
    say: Callable[[str], None] = print


def measure(case: Case, settings: Settings) -> Result:
    """Compare, then time, all implementations of a case."""
    result = Result(case=case, measurements={i.name: Measurement() for i in case.implementations})
    _server(settings.threads, settings.preload)  # its imports are nobody's measurement
    with ExitStack() as stack, _foreign_cpu(result) as watch:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = {}
        for implementation in case.implementations:
            measurement = result.measurements[implementation.name]
            params = {**case.params, **implementation.options}
            if implementation.flops is not None:
                measurement.flops = implementation.flops(params)
            measurement.problem = _no_room(implementation, params, settings)
            if measurement.ok:
                settings.say(f"    {implementation.name}: first call")
                worker = _Worker(implementation, case, settings, folder)
                stack.callback(worker.stop)
                watch(worker.process.pid)
                workers[implementation.name] = worker
                _first_call(worker, result, folder)
        running = {name: w for name, w in workers.items() if result.measurements[name].ok}
        if case.timed and running:
            _rounds(running, result, settings)
    return result


def _no_room(implementation: Implementation, params: Params, settings: Settings) -> str | None:
    if implementation.bytes_needed is None or settings.device != "cpu":
        return None
    needed, free = implementation.bytes_needed(params), psutil.virtual_memory().available
    if needed <= LARGEST_SHARE * free:
        return None
    return f"left out: needs about {needed / 2**30:.0f} GiB, {free / 2**30:.0f} GiB are free"


def _first_call(worker: _Worker, result: Result, folder: Path) -> None:
    """The small problem and the first call of the case, compared with those of our own."""
    case, implementation = result.case, worker.implementation
    measurement = result.measurements[implementation.name]
    answer = worker.ask("prepare")
    if "problem" in answer:
        measurement.problem = answer["problem"]
        return
    measurement.peak_bytes, measurement.facts = answer["peak_bytes"], answer["facts"]
    reference = case.implementations[0].name
    if implementation.name == reference or implementation.compare == "never":
        return
    if not result.ours.ok:
        measurement.problem = "nothing to compare with"
        return
    for size in ("small", "full"):
        if size == "full" and implementation.compare == "small":
            continue
        ours = torch.load(folder / f"{_file_name(reference)}.{size}.pt")
        theirs = torch.load(folder / f"{_file_name(implementation.name)}.{size}.pt")
        if size == "full":  # the parent keeps nothing, and the disk no more than ours
            (folder / f"{_file_name(implementation.name)}.{size}.pt").unlink()
        for name, error in _differences(theirs, ours).items():
            measurement.errors[f"{name} ({size})"] = error
    wrong = {k: e for k, e in measurement.errors.items() if not e <= case.tolerance}
    if wrong:
        worst = ", ".join(f"{k} off by {e:.1e}" for k, e in wrong.items())
        measurement.problem = (
            f"computes something else than {reference}: {worst} (allowed {case.tolerance:.0e})"
        )


def _differences(theirs: dict[str, Tensor], ours: dict[str, Tensor]) -> dict[str, float]:
    """Error of each shared quantity, relative to its norm."""
    shared = theirs.keys() & ours.keys()
    if not shared:
        return {"no quantity in common": math.inf}
    errors = {}
    for name in sorted(shared):
        a, b = theirs[name].double(), ours[name].double()
        if a.shape != b.shape:
            errors[name] = math.inf
            continue
        errors[name] = ((a - b).norm() / b.norm().clamp(min=1e-30)).item()
    return errors


def _rounds(workers: dict[str, _Worker], result: Result, settings: Settings) -> None:
    repeats = {}
    total = 0.0
    for name, worker in list(workers.items()):
        answer = worker.ask("time", repeats=1)  # the warm-up that tells how long it takes
        if "problem" in answer:
            result.measurements[name].problem = answer["problem"]
            del workers[name]
            continue
        repeats[name] = max(1, math.ceil(SHORTEST_SAMPLE / answer["seconds"]))
        total += answer["seconds"] * repeats[name]
    if not workers:
        return
    result.rounds = min(MOST_ROUNDS, max(settings.fewest_rounds, int(settings.budget / total)))
    settings.say(f"    {result.rounds} rounds of {total:.2f} s")
    names = list(workers)
    for index in range(result.rounds):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            measurement = result.measurements[name]
            if not measurement.ok:
                continue
            answer = workers[name].ask("time", repeats=repeats[name])
            if "problem" in answer:
                measurement.problem = answer["problem"]
            else:
                measurement.seconds.append(answer["seconds"])


@contextmanager
def _foreign_cpu(result: Result) -> Iterator[Callable[[int | None], None]]:
    """Find how much of the cores was used by anything else: others' work makes figures doubtful."""
    own = [psutil.Process()]

    def watch(pid: int | None) -> None:
        own.append(psutil.Process(pid))

    def used_by_us() -> float:
        total = 0.0
        for process in own:
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            total += times.user + times.system
        return total

    def used_by_all() -> float:
        times = psutil.cpu_times()
        return sum(times) - times.idle - getattr(times, "iowait", 0.0)

    def finish() -> None:
        elapsed = (time.perf_counter() - start) * (psutil.cpu_count() or 1)
        foreign = (used_by_all() - all_before) - (used_by_us() - ours_before)
        result.foreign_cpu = max(0.0, foreign / elapsed)

    start, all_before, ours_before = time.perf_counter(), used_by_all(), used_by_us()
    yield watch
    finish()


# The other process


class _Worker:
    """An implementation in a process of its own.

    It is forked from a server that has imported torch and nothing more: a new process in every
    respect that matters here, without the seconds of an import.
    """

    def __init__(
        self, implementation: Implementation, case: Case, settings: Settings, folder: Path
    ) -> None:
        self.implementation = implementation
        context = _server(settings.threads, settings.preload)
        self.connection, theirs = context.Pipe()
        # Pickled here, unpickled once the environment is set: that imports the operators.
        work = pickle.dumps((implementation, case.params, case.small))
        self.process = context.Process(
            target=_serve,
            args=(theirs, work, implementation.environment, settings.threads, settings.device),
            kwargs={"folder": folder},
            daemon=True,
        )
        self.process.start()
        theirs.close()

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        try:
            self.connection.send((command, arguments))
            return self.connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self.process.join()
            return {"problem": f"its process died with exit code {self.process.exitcode}"}

    def stop(self) -> None:
        self.connection.close()
        self.process.join(timeout=10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@functools.cache
def _server(threads: int, preload: tuple[str, ...]) -> ForkServerContext:
    """Start the server that implementations are forked from, its imports done."""
    os.environ["OMP_NUM_THREADS"] = str(threads)  # read as the server starts
    os.environ["PYTHONWARNINGS"] = "ignore"  # a peer's import has many
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo", *preload])
    first = context.Process(target=int)
    first.start()
    first.join()
    return context


def _serve(
    connection: Connection,
    work: bytes,
    environment: dict[str, str],
    threads: int,
    device: str,
    *,
    folder: Path,
) -> None:
    """Answer the parent until it hangs up."""
    os.environ.update(environment)
    warnings.simplefilter("ignore")
    pin(threads)
    torch.set_num_threads(threads)
    torch.set_default_device(device)
    task: Task | None = None
    while True:
        try:
            command, arguments = connection.recv()
        except EOFError:
            return
        try:
            if command == "prepare":
                task, answer = _prepare(*pickle.loads(work), device, folder)
            else:
                assert task is not None
                answer = {"seconds": _time(task, device, **arguments)}
        except Exception as error:
            lines = traceback.format_exception_only(error)
            answer = {"problem": "".join(lines).strip()[:2000]}
        connection.send(answer)


def pin(threads: int) -> None:
    """Keep this process on the first `threads` of the cores it may use."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def _prepare(
    implementation: Implementation, params: Params, small: Params, device: str, folder: Path
) -> tuple[Task, dict[str, Any]]:
    params = {**params, **implementation.options}
    name = _file_name(implementation.name)
    task = implementation.build({**params, **small})
    _save(task.result(task.run()), folder / f"{name}.small.pt")
    task = implementation.build(params)
    gc.collect()
    memory = _PeakMemory(device)
    output = task.run()
    peak_bytes = memory.above_start()
    if implementation.compare == "always":
        _save(task.result(output), folder / f"{name}.full.pt")
    return task, {"peak_bytes": peak_bytes, "facts": _facts()}


def _save(results: dict[str, Tensor], path: Path) -> None:
    torch.save({name: value.detach().cpu() for name, value in results.items()}, path)


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def _facts() -> dict[str, str]:
    import npu_dsa_kernels

    return dict(npu_dsa_kernels.backends())


def _time(task: Task, device: str, *, repeats: int) -> float:
    """Seconds of a call, the mean over `repeats`."""
    gc.collect()
    gc.disable()
    try:
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            task.run()
        _synchronize(device)
        return (time.perf_counter() - start) / repeats
    finally:
        gc.enable()


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


class _PeakMemory:
    """Memory in use at the peak since it was made, above what was in use then.

    On CPU the resident set, whose high-water mark Linux resets on request; on an accelerator what
    torch's allocator handed out.
    """

    def __init__(self, device: str) -> None:
        self.on_cpu = device == "cpu"
        if self.on_cpu:
            Path("/proc/self/clear_refs").write_text("5")
            self.start = _resident("VmRSS")
        else:
            torch.accelerator.reset_peak_memory_stats()
            self.start = torch.accelerator.memory_allocated()

    def above_start(self) -> int:
        if self.on_cpu:
            return _resident("VmHWM") - self.start
        torch.accelerator.synchronize()
        return torch.accelerator.max_memory_allocated() - self.start


def _resident(line: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith(line):
            return int(text.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {line}: peak memory on CPU needs Linux")

"""Start the ranks of one machine, follow them, and say in one message why they stopped.

torchrun's agent starts and watches them, in this process: when a rank dies it ends the others.
"""

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_npu_train import failures, platform, preflight
from titan_npu_train.failures import UserError
from titan_npu_train.progress import Progress, duration
from titan_npu_train.train import LAUNCHER_VARIABLE

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

__all__ = [
    "Interrupted",
    "RunFailed",
    "RunResult",
    "allocator_settings",
    "default_nproc",
    "launch",
    "memory_of_a_process",
    "summary",
    "thread_settings",
    "usable_cores",
]

_SHUTDOWN_SECONDS = 15  # between SIGTERM and SIGKILL for the ranks that are still alive
_MONITOR_SECONDS = 0.2
_AGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_MMAP_THRESHOLD = "MALLOC_MMAP_THRESHOLD_"
_AGENT_LOGGERS = "torch.distributed.elastic"


class RunFailed(Exception):
    """Training started and did not reach its end. The text is the whole message."""


class Interrupted(Exception):
    """A signal ended the run (Ctrl-C, or a scheduler's SIGTERM).

    Attributes:
        signal: which one.
    """

    def __init__(self, message: str, number: signal.Signals) -> None:
        super().__init__(message)
        self.signal = number


@dataclasses.dataclass(frozen=True)
class RunResult:
    """Attributes:
    dump_folder: the run's folder.
    first_step, last_step: of the steps this launch trained, None if it trained none.
    seconds: wall time from launch to end.
    """

    dump_folder: Path
    first_step: int | None
    last_step: int | None
    seconds: float


def launch(
    config: Any,
    *,
    module: str,
    name: str,
    options: Sequence[str],
    nproc: int,
    say: Callable[[str], None] = print,
) -> RunResult:
    """Train ``name`` of ``module`` on ``nproc`` processes of this machine and wait for the end.

    Args:
        config: the configuration that ``module``, ``name`` and ``options`` give, already checked.
        module, name, options: what the ranks are started with.
        nproc: number of ranks.
        say: prints a line for a person.

    Raises:
        RunFailed: a rank failed or died; the message names it, the cause and the cure.
        Interrupted: a signal ended the run. The ranks are gone.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    dump_folder = Path(config.dump_folder)
    logs = _log_folder(dump_folder)
    failures.clear_error_files(dump_folder)

    progress = Progress(
        dump_folder / "metrics.jsonl", logs / "rank0.log", config.training.steps, say
    )
    agent = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        logs_specs=_rank_logs(logs),
        run_id=uuid.uuid4().hex,
        role="trainer",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=_MONITOR_SECONDS,
        shutdown_timeout=_SHUTDOWN_SECONDS,
    )
    command = ["-u", "-m", "titan_npu_train.train", "--module", module, "--config", name, *options]
    began = time.monotonic()
    progress.start()
    settings = {
        **thread_settings(nproc),
        **allocator_settings(),
        LAUNCHER_VARIABLE: str(os.getpid()),
    }
    with _environment(settings), _torchrun_kept_to_itself():
        try:
            elastic_launch(agent, sys.executable)(*command)
        except ChildFailedError as error:
            progress.finish()
            message = _why(error.failures, dump_folder, logs, progress, _how_to_go_on(config))
            raise RunFailed(message) from None
        except (SignalException, KeyboardInterrupt) as error:
            progress.finish()
            number = getattr(error, "sigval", signal.SIGINT)
            raise Interrupted(
                f"interrupted by {signal.Signals(number).name}{_after(progress)}. "
                + _how_to_go_on(config),
                signal.Signals(number),
            ) from None
        finally:
            progress.finish()
    return RunResult(dump_folder, progress.first_step, progress.last_step, time.monotonic() - began)


def default_nproc(platform: Any) -> int:
    """One process for each accelerator; one on CPU."""
    return 1 if platform.device_type == "cpu" else max(1, platform.device_module.device_count())


def memory_of_a_process(platform: Any, nproc: int) -> int:
    """Bytes each of ``nproc`` processes may use: an accelerator's, or a share of the host's."""
    capacity = platform.device_module.get_device_properties(0).total_memory
    return capacity // nproc if platform.device_type == "cpu" else capacity


def thread_settings(nproc: int) -> dict[str, str]:
    """OMP_NUM_THREADS so that ``nproc`` ranks share the cores, unless it is set already."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, usable_cores() // nproc))}


def allocator_settings() -> dict[str, str]:
    """MALLOC_MMAP_THRESHOLD_ of 4 MiB for ranks on a CPU, unless it is set already.

    By default glibc raises it to the largest tensor freed so far, up to 32 MiB, and keeps smaller
    ones in a heap that falls to pieces: a third more memory than is in use, at the same speed.
    """
    if platform.current().device_type != "cpu" or _MMAP_THRESHOLD in os.environ:
        return {}
    return {_MMAP_THRESHOLD: str(4 * 2**20)}


def usable_cores() -> int:
    """Cores this process may run on."""
    # Not os.cpu_count(): containers and job schedulers hand out fewer.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def summary(result: RunResult) -> str:
    if result.last_step is None:
        return (
            "no step was left to train: the newest checkpoint is at the last step already. "
            "Raise --training.steps to go on."
        )
    return f"trained to step {result.last_step} in {duration(result.seconds)}"


def _log_folder(dump_folder: Path) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{n}" for n in range(2, 100))):
        folder = dump_folder / "logs" / f"{stamp}{suffix}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise UserError(f"cannot make a log folder under '{dump_folder}/logs'. Empty it.")


def _rank_logs(folder: Path) -> Any:
    """Every rank's output into ``rank<N>.log`` and ``rank<N>.stderr.log``, none to the terminal."""
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class RankLogs(LogsSpecs):
        @property
        def root_log_dir(self) -> str:
            return str(folder)

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            destination = LogsDest()
            for local_rank, env in envs.items():
                stem = folder / f"rank{env['RANK']}"
                destination.stdouts[local_rank] = f"{stem}.log"
                destination.stderrs[local_rank] = f"{stem}.stderr.log"
                error_file = f"{stem}.error.json"
                destination.error_files[local_rank] = env["TORCHELASTIC_ERROR_FILE"] = error_file
            return destination

    return RankLogs(log_dir=str(folder))


def _why(
    failed: Mapping[int, "ProcessFailure"],
    dump_folder: Path,
    logs: Path,
    progress: Progress,
    how_to_go_on: str,
) -> str:
    """The message for the rank where the trouble began.

    When one rank fails the agent ends the others by SIGTERM, and by SIGKILL if that does not help,
    so a signal alone proves nothing: a rank that wrote down its own error comes first.
    """
    told = {rank: text for rank in failed if (text := failures.read_failure(dump_folder, rank))}
    causes = {rank: text for rank, text in told.items() if not text.startswith(failures.LOST_PEER)}
    killed = {
        rank: failure
        for rank, failure in failed.items()
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM
    }
    if causes:
        alike = len(causes) == len(failed) > 1 and len(set(causes.values())) == 1
        # The first to write its file is the first to have failed.
        rank = min(causes, key=lambda r: failures.error_file(dump_folder, r).stat().st_mtime_ns)
        others = "".join(
            f"; rank {r} was killed by {f.signal_name()}" for r, f in sorted(killed.items())
        )
        return (
            f"{causes[rank]}\n"
            f"{'every rank' if alike else f'rank {rank}'}{_after(progress)}{others}\n"
            f"traceback: {failures.error_file(dump_folder, rank)}"
        )
    if killed:
        rank, failure = min(killed.items())
        return (
            f"rank {rank} was killed by signal {-failure.exitcode} ({failure.signal_name()})"
            f"{_after(progress)}. {_signal_hint(-failure.exitcode)}{how_to_go_on}\n"
            f"log: {logs / f'rank{rank}.stderr.log'}"
        )
    if told:
        rank, text = min(told.items())
        return f"rank {rank} {text}\ntraceback: {failures.error_file(dump_folder, rank)}"
    # A rank that chose its exit code ended before the ones that were ended by the agent.
    rank, failure = min(failed.items(), key=lambda item: (item[1].exitcode < 0, item[0]))
    how = (
        f"was killed by signal {-failure.exitcode} ({failure.signal_name()})"
        if failure.exitcode < 0
        else f"ended with exit code {failure.exitcode}"
    )
    log = logs / f"rank{rank}.stderr.log"
    return (
        f"rank {rank} {how}{_after(progress)} and left no error file. Its last words:\n"
        f"{_last_words(log)}\nlog: {log}"
    )


def _after(progress: Progress) -> str:
    step = progress.last_step
    return " before the first step" if step is None else f" after step {step}"


def _signal_hint(number: int) -> str:
    if number == signal.SIGKILL:
        return (
            "Nothing but the system or a person sends it: most often memory ran out (see the "
            "kernel's log), and fewer tokens a rank help (--training.local_batch_size, "
            "--training.seq_len). "
        )
    if number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGABRT, signal.SIGFPE):
        return "Native code crashed; its last lines are in the log. "
    return "Something outside this run sent it. "


def _how_to_go_on(config: Any) -> str:
    if not config.checkpoint.enable:
        return "Checkpoints were off (--checkpoint.enable), so the run starts over next time."
    newest = preflight.newest_checkpoint(Path(config.dump_folder) / config.checkpoint.folder)
    if newest is None:
        return "No checkpoint was complete yet, so the run starts over next time."
    return f"The same command goes on from {newest}."


def _last_words(log: Path, lines: int = 8) -> str:
    try:
        return "\n".join("  " + line for line in log.read_text().splitlines()[-lines:])
    except OSError:
        return "  (no output)"


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Generator[None]:
    """Set environment variables, and put back what was there."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


@contextlib.contextmanager
def _torchrun_kept_to_itself() -> Generator[None]:
    """Undo what the agent leaves behind: its signal handlers. And do not let it print.

    Its own account of a failure repeats every rank's; ours replaces it.
    """
    handlers = {number: signal.getsignal(number) for number in _AGENT_SIGNALS}
    names = [n for n in logging.Logger.manager.loggerDict if n.startswith(_AGENT_LOGGERS)]
    levels = {name: logging.getLogger(name).level for name in names}
    if not failures.tracebacks_wanted():
        for name in names:
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        for number, handler in handlers.items():
            signal.signal(number, handler)

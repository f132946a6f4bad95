"""Failures in words: what a person reads when a run stops, and where the details went.

Every rank that fails writes ``<dump_folder>/errors/rank<N>.txt``: one line that says what happened
and what would help, then the traceback. Only one rank prints; the rest stay silent.
"""

import dataclasses
import errno
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import TracebackType

__all__ = [
    "LOST_PEER",
    "PREFIX",
    "Failure",
    "UserError",
    "claim_console",
    "clear_error_files",
    "describe",
    "error_file",
    "print_failure",
    "read_failure",
    "tracebacks_wanted",
    "write_error_file",
]

PREFIX = "error: "
LOST_PEER = "lost contact with another rank"

# Packages whose ValueErrors, assertions and so on are written for the person who set the options.
_SPEAKING_PACKAGES = ("titan_npu_train", "npu_dsa_kernels", "fsdp2_npu", "torchtitan")
_SPEAKING_TYPES = (ValueError, AssertionError, NotImplementedError, RuntimeError, FileNotFoundError)

# A rank whose neighbour died sees its connection close. It is not the rank to ask.
_LOST_PEER_SIGNS = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "remote process exited",
    "timed out waiting",
    "application timeout caused pair closure",
)


class UserError(Exception):
    """Something only the user can set right. The text names the cause and the cure."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """Attributes:
    message: one or a few lines: the cause, then the cure.
    unexpected: nobody foresaw this exception: a bug, or an environment we do not know.
    secondary: the rank lost contact with another one, which is where the cause is.
    """

    message: str
    unexpected: bool = False
    secondary: bool = False


def describe(error: BaseException) -> Failure:
    """The failure behind an exception, in words."""
    text = str(error).strip()
    lowered = text.lower()
    module = _raised_in(error.__traceback__)

    if isinstance(error, UserError):
        return Failure(text)
    if sign := _lost_peer_sign(error, lowered):
        return Failure(
            f"{LOST_PEER} ({sign}). That rank's own log says why; this one only noticed.",
            secondary=True,
        )
    if _is_out_of_memory(error, lowered):
        return Failure(
            f"out of memory: {_first_line(text)}. Lower --training.local_batch_size or "
            "--training.seq_len, checkpoint more activations (activation-checkpoint:full at the "
            "end of the command), or use more processes."
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Failure(
            f"no space left on the disk ({error.filename or _first_line(text)}). Free some, or "
            "choose another --dump_folder; a checkpoint that was being written does not count."
        )
    if isinstance(error, PermissionError):
        return Failure(
            f"no permission for {error.filename or text}. Choose a --dump_folder you may write to."
        )
    if lowered.startswith("loss is not finite"):
        return Failure(
            f"{_sentence(text)} Lower the learning rate or lengthen the warm-up, and start again "
            "from a checkpoint written before the loss went off."
        )
    if type(error).__module__.partition(".")[0] in _SPEAKING_PACKAGES and text:
        return Failure(text)
    if (
        isinstance(error, _SPEAKING_TYPES)
        and text
        and module.partition(".")[0] in _SPEAKING_PACKAGES
    ):
        return Failure(text)
    return Failure(f"{type(error).__name__}: {_short(text) or '(no message)'}", unexpected=True)


def write_error_file(
    error: BaseException, failure: Failure, folder: Path | None, rank: int
) -> Path | None:
    """Write the rank's error file; without a usable ``folder``, in the temporary directory.

    Returns its path, or None where nothing can be written at all.
    """
    text = f"{PREFIX}{failure.message}\n\n" + "".join(traceback.format_exception(error))
    fallback = Path(tempfile.gettempdir()) / f"titan-npu-{os.getpid()}"
    for parent in (folder, fallback):
        if parent is None:
            continue
        path = error_file(parent, rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError:
            continue
        return path
    return None


def error_file(dump_folder: Path, rank: int) -> Path:
    return Path(dump_folder) / "errors" / f"rank{rank}.txt"


def read_failure(dump_folder: Path, rank: int) -> str | None:
    """The message of a rank's error file, or None if it wrote none."""
    try:
        head = error_file(dump_folder, rank).read_text().split("\n\nTraceback", 1)[0]
    except OSError:
        return None
    return head.removeprefix(PREFIX).strip() or None


def clear_error_files(dump_folder: Path, *, before: float | None = None) -> None:
    """Remove what an earlier run left in ``errors/``: files older than ``before`` (time.time())."""
    before = time.time() if before is None else before
    for path in (Path(dump_folder) / "errors").glob("*"):
        try:
            if path.stat().st_mtime < before:
                path.unlink()
        except OSError:
            pass  # another rank removed it, or it is not ours to remove


def claim_console(dump_folder: Path) -> bool:
    """True for the first rank of this run that asks: it prints, the others do not.

    All ranks often fail alike, and N copies of one message hide it.
    """
    try:
        path = Path(dump_folder) / "errors" / ".printed"
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def tracebacks_wanted() -> bool:
    return os.environ.get("TITAN_NPU_TRACEBACK", "") not in ("", "0")


def print_failure(failure: Failure, path: Path | None) -> None:
    """Print to stderr: the message, and where the traceback is."""
    lines = [PREFIX + failure.message]
    if failure.unexpected:
        lines.append("This was not foreseen; the traceback is needed to understand it.")
    if path is not None:
        lines.append(f"traceback: {path}")
    print("\n".join(lines), file=sys.stderr, flush=True)


def _raised_in(trace: TracebackType | None) -> str:
    module = ""
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__", "")
        trace = trace.tb_next
    return module


def _lost_peer_sign(error: BaseException, lowered: str) -> str | None:
    if not (type(error).__name__.startswith("Dist") or isinstance(error, RuntimeError)):
        return None
    return next((sign for sign in _LOST_PEER_SIGNS if sign in lowered), None)


def _is_out_of_memory(error: BaseException, lowered: str) -> bool:
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in lowered
        or "out of memory" in lowered
    )


def _first_line(text: str) -> str:
    return text.splitlines()[0].rstrip(".") if text else "no message"


def _short(text: str, limit: int = 400) -> str:
    """Libraries put pages into a message; its beginning will do, the error file has it all."""
    first = text.split("\n\n", 1)[0]
    return first if len(first) <= limit else first[:limit].rstrip() + " ..."


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else text + "."

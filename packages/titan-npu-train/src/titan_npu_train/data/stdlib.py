"""The corpus that is always there: the Python standard library of the running interpreter."""

import hashlib
import json
import os
import platform
import sysconfig
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from titan_npu_train.data.dataset import FORMAT_VERSION, SPLITS, PreparedDataset
from titan_npu_train.data.errors import DatasetError, OutputError
from titan_npu_train.data.prepare import Progress, prepare
from titan_npu_train.data.source import Source

# Installed packages are not the standard library; its tests and the encodings' code pages are
# mostly tables; files of the build name paths of the machine.
_LEFT_OUT_FOLDERS = frozenset(
    ("__pycache__", "dist-packages", "encodings", "idle_test", "site-packages", "test", "tests")
)
_LEFT_OUT_FILES = "_sysconfigdata"


def stdlib_source() -> Source:
    """The `.py` files of the standard library, without tests, code pages and installed packages."""

    def keep(place: str) -> bool:
        name = place.rstrip("/").rpartition("/")[2]
        if place.endswith("/"):
            return name not in _LEFT_OUT_FOLDERS and not name.startswith(("config-", "."))
        return name.endswith(".py") and not name.startswith((_LEFT_OUT_FILES, "."))

    return Source.scan(
        sysconfig.get_path("stdlib"), name=f"Python {platform.python_version()} library", keep=keep
    )


def stdlib_corpus(
    *,
    vocab_size: int = 2048,
    heldout: float = 0.02,
    max_bytes: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Path:
    """The standard library as a prepared dataset; made in the user's cache on first use.

    Several processes may ask at once: one prepares, the others wait for it. The folder is keyed by
    the interpreter's version and the options, so that an upgrade prepares anew. A damaged dataset
    is made again.

    Args:
        vocab_size, max_bytes, progress: as for `prepare`.
        heldout: as for `prepare`, but more than 0.
        cache: folder for the dataset; by default the user's cache folder (XDG_CACHE_HOME).

    Raises:
        OutputError: the cache folder cannot be written.
    """
    options = {"vocab_size": vocab_size, "heldout": heldout, "max_bytes": max_bytes}
    key = {
        "format": FORMAT_VERSION,
        "left out": [*sorted(_LEFT_OUT_FOLDERS), _LEFT_OUT_FILES],
        "options": options,
        "tokenizers": version("tokenizers"),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    folder = Path(cache) if cache else user_cache_path("titan-npu-train", appauthor=False) / "data"
    out = folder / f"stdlib-{platform.python_version()}-{digest}"
    if _complete(out):
        return out
    lock = FileLock(folder / f"{out.name}.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if progress:
                progress("waiting for another process to prepare the data", 0, None)
            lock.acquire()
    except OSError as error:
        raise OutputError(
            f"cannot write the cache folder {folder} ({error.strerror}); set XDG_CACHE_HOME to a "
            "folder you may write to"
        ) from error
    try:
        if not _complete(out):
            prepare(
                stdlib_source(),
                out,
                vocab_size=vocab_size,
                heldout=heldout,
                max_bytes=max_bytes,
                progress=progress,
            )
    finally:
        lock.release()
    return out


def _complete(out: Path) -> bool:
    """Whether the dataset is there and whole; a damaged one in the cache is made again."""
    try:
        dataset = PreparedDataset(out, verify="always")
        for split in SPLITS:
            dataset.split(split)
    except DatasetError:
        return False
    return True

"""What a checkpoint folder holds, and whether a checkpoint in it is whole.

::

    checkpoint/
      step-20/                       complete: it got this name in one rename, after its last byte
        __0_0.distcp ...             one file a rank
        .metadata                    which tensor lies where
        manifest.json                every file's size and checksum, and the manifest's own
      .incomplete-30-<run>/          being written, or left by a run that was killed
      .discarded-10-<run>-<n>/       being deleted

The dotted names do not contain ``step-N``, so stock torchtitan overlooks them too.
"""

import errno
import itertools
import json
import os
import pickle
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash
from torch.distributed.checkpoint.metadata import Metadata
from torchtitan.components.checkpointer import TRAIN_STATE

from titan_npu_train.checkpoint.errors import CheckpointError

MANIFEST = "manifest.json"
METADATA = ".metadata"
MANIFEST_FORMAT = 1
READ_BYTES = 8 << 20

_STEP = re.compile(r"step-(\d+)")
_INCOMPLETE = re.compile(r"\.incomplete-(\d+)-.+")
_DISCARDED = re.compile(r"\.discarded-.+")


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def incomplete_path(folder: Path, step: int, run: str) -> Path:
    return folder / f".incomplete-{step}-{run}"


@dataclass(frozen=True)
class FolderListing:
    """The entries of a checkpoint folder by kind; steps ascending."""

    steps: dict[int, Path]
    incomplete: list[tuple[int, Path]]
    discarded: list[Path]


def list_folder(folder: Path) -> FolderListing:
    """Sort the entries of ``folder`` (which need not exist) by their names alone."""
    steps: dict[int, Path] = {}
    incomplete: list[tuple[int, Path]] = []
    discarded: list[Path] = []
    if folder.is_dir():
        for entry in folder.iterdir():
            if match := _STEP.fullmatch(entry.name):
                steps[int(match[1])] = entry
            elif match := _INCOMPLETE.fullmatch(entry.name):
                incomplete.append((int(match[1]), entry))
            elif _DISCARDED.fullmatch(entry.name):
                discarded.append(entry)
    return FolderListing(dict(sorted(steps.items())), sorted(incomplete), sorted(discarded))


# ------------------------------------------------------------------------------- durability


def sync_folder(path: Path) -> None:
    """fsync a directory, so that the names in it survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems cannot sync a directory, nor need to
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """fsync every file and directory below ``path``."""
    for entry in path.iterdir():
        if entry.is_dir():
            sync_tree(entry)
        else:
            with entry.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(path)


def discard(path: Path, run: str) -> Path | None:
    """Take ``path`` out of sight in one rename; returns what is now to be deleted.

    Deleting a checkpoint file by file would leave a half-deleted one under a good name if the
    process died on the way.
    """
    name = path.name.lstrip(".").replace("step-", "")
    target = next(
        target
        for number in itertools.count()
        if not (target := path.with_name(f".discarded-{name}-{run}-{number}")).exists()
    )
    try:
        path.rename(target)
    except FileNotFoundError:
        return None
    return target


def publish(incomplete: Path, final: Path, run: str) -> Path | None:
    """Give a finished checkpoint its name; returns an older one of that name, to be deleted.

    A process killed between the two renames leaves a finished checkpoint under its temporary
    name; :func:`recover` completes it.
    """
    replaced = discard(final, run) if final.exists() else None
    incomplete.rename(final)
    sync_folder(final.parent)
    return replaced


# --------------------------------------------------------------------------------- manifest


@dataclass(frozen=True)
class FileRecord:
    """Length in bytes and xxh3-128 checksum of one file."""

    bytes: int
    checksum: str


def checksum_file(path: Path) -> FileRecord:
    digest = xxhash.xxh3_128()
    size = 0
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileRecord(size, digest.hexdigest())


def _seal(content: Mapping[str, object]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def is_resumable(metadata: Metadata) -> bool:
    """Whether the checkpoint holds the training state, not the model alone."""
    return any(key.startswith(f"{TRAIN_STATE}.") for key in metadata.state_dict_metadata)


def write_manifest(
    path: Path,
    *,
    step: int,
    resumable: bool,
    files: Mapping[str, FileRecord],
    stage: str | None = None,
) -> None:
    """Write ``manifest.json`` into ``path`` and sync it and the directory."""
    content = {
        "format": MANIFEST_FORMAT,
        "step": step,
        "resumable": resumable,
        "stage": stage,
        "files": {
            name: {"bytes": record.bytes, "xxh3_128": record.checksum}
            for name, record in sorted(files.items())
        },
    }
    text = json.dumps({**content, "xxh3_128": _seal(content)}, indent=1)
    with (path / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path)


def _read_manifest(path: Path) -> tuple[dict[str, FileRecord], bool, str | None]:
    try:
        content = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        intact = content.pop("xxh3_128") == _seal(content)
    except (ValueError, KeyError, AttributeError, TypeError):
        content, intact = {}, False
    if not intact:
        raise CheckpointError(f"{path}: {MANIFEST} is damaged")
    if content["format"] != MANIFEST_FORMAT:
        raise CheckpointError(
            f"{path}: {MANIFEST} has format {content['format']}, this version reads "
            f"{MANIFEST_FORMAT}"
        )
    files = {
        name: FileRecord(entry["bytes"], entry["xxh3_128"])
        for name, entry in content["files"].items()
    }
    return files, content["resumable"], content.get("stage")


# ------------------------------------------------------------------------------- checkpoints


def _require_size(path: Path, name: str, size: int, *, exact: bool) -> None:
    try:
        found = (path / name).stat().st_size
    except FileNotFoundError:
        raise CheckpointError(f"{path}: {name} is missing") from None
    if found < size or (exact and found != size):
        raise CheckpointError(f"{path}: {name} has {found} bytes, should have {size}")


def _read_metadata(path: Path) -> Metadata:
    try:
        with (path / METADATA).open("rb") as file:
            metadata = pickle.load(file)
        metadata.state_dict_metadata.keys(), metadata.storage_data.items()
    except OSError:
        raise
    except Exception as error:  # unpickling damaged bytes can raise anything
        raise CheckpointError(
            f"{path}: {METADATA} cannot be read ({type(error).__name__}: {error})"
        ) from None
    return metadata


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk whose files are all there with their full length.

    Attributes:
        path: its directory.
        files: what its manifest records; empty for a checkpoint of stock torchtitan, which has
            no manifest and thus no checksums.
        resumable: whether it holds the whole training state, or the model alone.
        stage: of training that wrote it; None where it does not say.
    """

    path: Path
    files: Mapping[str, FileRecord]
    resumable: bool
    stage: str | None = None

    @classmethod
    def open(cls, path: Path) -> "Checkpoint":
        """Inspect the checkpoint at ``path`` by names and sizes.

        Raises:
            CheckpointError: it is damaged or half-written; the message says where.
        """
        path = Path(path)
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such directory")
        if (path / MANIFEST).is_file():
            files, resumable, stage = _read_manifest(path)
            for name, record in files.items():
                _require_size(path, name, record.bytes, exact=True)
            if checksum_file(path / METADATA) != files[METADATA]:  # small, and read by everyone
                raise CheckpointError(f"{path}: checksum mismatch in {METADATA}")
            return cls(path, files, resumable, stage)
        if not (path / METADATA).is_file():
            raise CheckpointError(f"{path}: {METADATA} is missing, it was never finished")
        metadata = _read_metadata(path)
        needed: dict[str, int] = {}
        for info in metadata.storage_data.values():
            end = info.offset + info.length
            needed[info.relative_path] = max(end, needed.get(info.relative_path, 0))
        for name, size in sorted(needed.items()):
            _require_size(path, name, size, exact=False)
        return cls(path, {}, is_resumable(metadata))

    def damage(self, share: int = 0, of: int = 1) -> str | None:
        """Read files ``share``, ``share + of``, ... back and compare their checksums.

        Returns what is wrong, or None. With ``of`` ranks each calling it with its own ``share``
        every file is read once.
        """
        # largest first, so that the shares come out even
        order = sorted(self.files, key=lambda name: (-self.files[name].bytes, name))
        for name in order[share::of]:
            try:
                if checksum_file(self.path / name) != self.files[name]:
                    return f"{self.path}: checksum mismatch in {name}"
            except OSError as error:
                return f"{self.path}: {name} cannot be read ({error.strerror})"
        return None


def is_hf_export(path: Path) -> bool:
    """Whether ``path`` holds Hugging Face safetensors instead of a DCP checkpoint."""
    return not (path / METADATA).exists() and any(path.glob("*.safetensors"))


def recover(folder: Path) -> list[Path]:
    """Finish a :func:`publish` that was interrupted between its two renames.

    Returns the checkpoints that got their names back.
    """
    listing = list_folder(folder)
    recovered = []
    for step, path in listing.incomplete:
        final = step_path(folder, step)
        if final.exists() or not (path / MANIFEST).is_file():
            continue
        with suppress(CheckpointError):
            Checkpoint.open(path)
            path.rename(final)
            sync_folder(folder)
            recovered.append(final)
    return recovered

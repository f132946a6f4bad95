"""The DCP storage writer that makes a checkpoint visible only when it is whole."""

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titan_npu_train.checkpoint import folder
from titan_npu_train.checkpoint.errors import CheckpointError
from titan_npu_train.checkpoint.folder import METADATA, FileRecord


@dataclass(frozen=True)
class WrittenFile(WriteResult):
    """Carries one file's checksum from the rank that wrote it to the rank that finishes."""

    checksum: str

    @classmethod
    def of(cls, name: str, record: FileRecord) -> "WrittenFile":
        return cls(MetadataIndex(name), record.bytes, None, record.checksum)


class _ChecksumStream(io.RawIOBase):
    """A binary file, written front to back, that computes its own checksum."""

    def __init__(self, raw: io.IOBase) -> None:
        self._raw = raw
        self._digest = xxhash.xxh3_128()
        self._bytes = 0
        self.error: OSError | None = None

    def write(self, data) -> int:
        try:
            count = self._raw.write(data)
        except OSError as error:
            self.error = error
            raise
        self._digest.update(data)
        self._bytes += count
        return count

    def flush(self) -> None:
        try:
            self._raw.flush()
        except OSError as error:
            self.error = error
            raise

    def fileno(self) -> int:
        return self._raw.fileno()

    def tell(self) -> int:
        return self._bytes

    def writable(self) -> bool:
        return True

    def record(self) -> FileRecord:
        return FileRecord(self._bytes, self._digest.hexdigest())


class ChecksumFileSystem(FileSystem):
    """A local or shared file system that remembers the checksum of each file written to it."""

    def __init__(self) -> None:
        self.written: dict[str, FileRecord] = {}
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        with super().create_stream(path, mode) as raw:
            if "w" not in mode:
                yield raw
                return
            stream = _ChecksumStream(raw)
            try:
                yield stream
            finally:
                self.error = self.error or stream.error
        self.written[Path(path).name] = stream.record()


class CommittingWriter(FileSystemWriter):
    """Writes into ``incomplete``; the coordinator renames that to ``final`` once it is whole.

    Order on disk: every rank's data (fsync), ``.metadata`` (fsync), ``manifest.json`` (fsync),
    the directory (fsync), then the rename. Only the last makes the checkpoint exist, so neither
    a killed process nor a power cut can leave one in part. As :meth:`finish` runs where DCP runs
    it, this holds for the background thread and the background process of the async modes too.

    Args:
        incomplete: directory to write to, the same on all ranks and used by no other save.
        final: the checkpoint's name.
        step: training step, recorded in the manifest.
        run: token that tells this run's leftovers from another's.
        training_stage: recorded in the manifest.
    """

    def __init__(
        self,
        incomplete: Path,
        final: Path,
        *,
        step: int,
        run: str,
        training_stage: str | None = None,
    ) -> None:
        super().__init__(incomplete)
        self.fs = self._checksums = ChecksumFileSystem()
        self.final = final
        self.step = step
        self.run = run
        self.training_stage = training_stage

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=str(self.final), save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            results = super().write_data(plan, planner).wait()
        except Exception:
            # torch.save hides what the operating system said behind an error of its own
            if self._checksums.error is not None:
                raise self._checksums.error from None
            raise
        files = [WrittenFile.of(name, record) for name, record in self._checksums.written.items()]
        future: Future[list[WriteResult]] = Future()
        future.set_result([*results, *files])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = {
            result.index.fqn: FileRecord(result.size_in_bytes, result.checksum)
            for rank in results
            for result in rank
            if isinstance(result, WrittenFile)
        }
        super().finish(
            metadata, [[r for r in rank if not isinstance(r, WrittenFile)] for rank in results]
        )
        incomplete = Path(self.path)
        for name, record in files.items():
            try:
                found = (incomplete / name).stat().st_size
            except FileNotFoundError:
                raise CheckpointError(
                    f"{incomplete / name} was written by another rank but is not there for rank "
                    "0: checkpoint.folder must be on a file system that all nodes share"
                ) from None
            if found != record.bytes:
                raise CheckpointError(
                    f"{incomplete / name} has {found} bytes after {record.bytes} were written"
                )
        files[METADATA] = folder.checksum_file(incomplete / METADATA)
        folder.write_manifest(
            incomplete,
            step=self.step,
            resumable=folder.is_resumable(metadata),
            files=files,
            stage=self.training_stage,
        )
        folder.publish(incomplete, self.final, self.run)

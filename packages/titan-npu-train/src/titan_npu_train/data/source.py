"""Documents out of a source: text and code files, JSON lines, Parquet; a file or a folder."""

import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from titan_npu_train.data.errors import SourceError

JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
PARQUET = (".parquet",)


@dataclass(frozen=True, slots=True)
class Document:
    """One document, or the reason why there is none at this place of the source.

    `place` is relative to the source: a file, `file:line` (JSON lines) or `file#row` (Parquet).
    """

    place: str
    text: str = ""
    skipped: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """The files of a corpus in a fixed order (by relative path), read as often as needed.

    Args:
        name: what the manifest calls the source; never an absolute path.
        files: (place relative to the source, path) of every file, sorted.
        ignored: entries of the folder that are not read (hidden, links to folders, devices).
        text_column: JSON key or Parquet column that holds a document's text.
    """

    name: str
    files: tuple[tuple[str, Path], ...]
    ignored: tuple[Document, ...] = ()
    text_column: str = "text"

    @classmethod
    def scan(
        cls,
        path: str | os.PathLike[str],
        *,
        text_column: str = "text",
        name: str | None = None,
        keep: Callable[[str], bool] | None = None,
    ) -> "Source":
        """Lists the files under `path` (or `path` itself).

        `keep(place)` narrows a folder: it is asked about each folder (`place` ends in "/") before
        it is entered and about each file; what it refuses is not part of the source. Hidden
        entries, links to folders and what is no regular file stay out too, but are reported.

        Raises:
            SourceError: `path` does not exist, cannot be listed, or holds no file.
        """
        root = Path(path)
        if not root.exists():
            raise SourceError(f"source {root} does not exist; give a file or a folder of text")
        name = name or root.resolve().name
        if not root.is_dir():
            return cls(name, ((root.name, root),), (), text_column)

        def unlistable(error: OSError) -> None:
            raise SourceError(
                f"source folder {error.filename} cannot be listed ({error.strerror}); "
                "fix its permissions or move it out of the source"
            )

        files: list[tuple[str, Path]] = []
        ignored: list[Document] = []
        for folder, folders, names in os.walk(root, onerror=unlistable):
            here = Path(folder)
            prefix = "" if here == root else here.relative_to(root).as_posix() + "/"
            wanted = []
            for entry in sorted(folders):
                if keep and not keep(f"{prefix}{entry}/"):
                    continue
                if entry.startswith("."):
                    ignored.append(Document(f"{prefix}{entry}/", skipped="hidden"))
                elif (here / entry).is_symlink():
                    ignored.append(Document(f"{prefix}{entry}/", skipped="link to a folder"))
                else:
                    wanted.append(entry)
            folders[:] = wanted
            for entry in sorted(names):
                place = f"{prefix}{entry}"
                if keep and not keep(place):
                    continue
                if entry.startswith("."):
                    ignored.append(Document(place, skipped="hidden"))
                elif not (here / entry).is_file():
                    ignored.append(Document(place, skipped="not a regular file"))
                else:
                    files.append((place, here / entry))
        if not files:
            raise SourceError(f"source folder {root} holds no file; give one with text in it")
        # By code point, so that the order depends neither on the file system nor on the locale.
        files.sort()
        ignored.sort(key=lambda document: document.place)
        return cls(name, tuple(files), tuple(ignored), text_column)

    def documents(self) -> Iterator[Document]:
        """Every document and every skipped place, in the same order each time.

        Raises:
            SourceError: a JSON-lines or Parquet file is corrupt or lacks the text column.
        """
        for place, path in self.files:
            lower = path.name.lower()
            if lower.endswith(JSON_LINES):
                yield from self._json_lines(place, path)
            elif lower.endswith(PARQUET):
                yield from self._parquet(place, path)
            else:
                yield _text_file(place, path)

    def _json_lines(self, place: str, path: Path) -> Iterator[Document]:
        keys: dict[str, None] = {}
        rows = found = 0
        try:
            with _open_lines(path) as lines:
                for number, line in enumerate(lines, start=1):
                    if not line.strip():
                        continue
                    rows += 1
                    where = f"{place}:{number}"
                    try:
                        row = json.loads(line)
                    except UnicodeDecodeError:
                        yield Document(where, skipped="not UTF-8")
                        continue
                    except (ValueError, RecursionError):
                        yield Document(where, skipped="invalid JSON")
                        continue
                    if not isinstance(row, dict):
                        yield Document(where, skipped="not a JSON object")
                    elif self.text_column not in row:
                        keys.update(dict.fromkeys(row))
                        yield Document(where, skipped="no text column")
                    else:
                        found += 1
                        yield _checked(where, row[self.text_column])
        except (OSError, EOFError, zlib.error) as error:
            raise SourceError(
                f"{path} is unreadable, corrupt or truncated after {rows} rows ({error}); "
                "restore it or move it out of the source"
            ) from error
        if rows and not found:
            raise self._no_column(path, list(keys))

    def _parquet(self, place: str, path: Path) -> Iterator[Document]:
        try:
            with pq.ParquetFile(path) as file:
                schema = file.schema_arrow
                if self.text_column not in schema.names:
                    raise self._no_column(path, schema.names)
                kind = schema.field(self.text_column).type
                if pa.types.is_dictionary(kind):
                    kind = kind.value_type
                if not _is_text(kind):
                    raise SourceError(
                        f"column {self.text_column!r} of {path} holds {kind}, not text; choose a "
                        f"column of strings with --text-column out of: {', '.join(schema.names)}"
                    )
                row = 0
                for batch in file.iter_batches(batch_size=1024, columns=[self.text_column]):
                    # As bytes: Arrow does not check UTF-8, and one bad row must not end the run.
                    for value in batch.column(0).cast(kind).cast(pa.large_binary()).to_pylist():
                        yield _decoded(f"{place}#{row}", value)
                        row += 1
        except (pa.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            raise SourceError(
                f"{path} is unreadable, corrupt or truncated ({reason}); "
                "restore it or move it out of the source"
            ) from error

    def _no_column(self, path: Path, columns: list[str]) -> SourceError:
        return SourceError(
            f"{path} has no column {self.text_column!r}; choose one with --text-column out of: "
            + (", ".join(columns) or "(its rows are no JSON objects)")
        )


def _text_file(place: str, path: Path) -> Document:
    try:
        return _decoded(place, path.read_bytes(), binary=True)
    except OSError:
        return Document(place, skipped="unreadable file")


def _decoded(place: str, data: bytes | None, *, binary: bool = False) -> Document:
    if data is not None and binary and b"\0" in data:
        return Document(place, skipped="binary file")
    try:
        return _checked(place, None if data is None else data.decode("utf-8"))
    except UnicodeDecodeError:
        return Document(place, skipped="not UTF-8")


def _checked(place: str, value: object) -> Document:
    if value is None:
        return Document(place, skipped="null text")
    if not isinstance(value, str):
        return Document(place, skipped="text is no string")
    if not value.strip():
        return Document(place, skipped="empty")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:  # a lone surrogate, which JSON's \ud800 escapes can spell
            return Document(place, skipped="not UTF-8")
    return Document(place, value)


def _is_text(kind: pa.DataType) -> bool:
    return (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


def _open_lines(path: Path) -> io.BufferedIOBase:
    lower = path.name.lower()
    if lower.endswith(".gz"):
        return gzip.open(path, "rb")
    if lower.endswith(".zst"):
        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"))
    return path.open("rb")

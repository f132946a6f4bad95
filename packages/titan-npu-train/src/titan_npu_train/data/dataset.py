"""A prepared dataset on disk: token shards, document offsets, a tokenizer and a manifest.

    manifest.json
    skipped.jsonl                  what was left out of the source, and why
    tokenizer/                     Hugging Face layout; torchtitan's hf_assets_path
    train/00000.tokens.npy         uint16 or uint32 [tokens], documents back to back
    train/00000.offsets.npy        int64 [documents + 1], where each document starts
    heldout/...

The arrays are plain NumPy files, memory-mapped: any row is read without touching the rest. A
document never spans two shards.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from titan_npu_train.data.errors import CorpusTooSmallError, DatasetError, VocabularyError
from titan_npu_train.data.tokenizer import TOKENIZER_FILES

FORMAT = "titan-npu-train dataset"
FORMAT_VERSION = 1
# Up to this size the checksums of a split are verified whenever it is opened (about a second).
_AUTO_VERIFY_BYTES = 1 << 30

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")
Verify = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class FileInfo:
    """A file of the dataset: its path inside it, size in bytes and SHA-256."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class ShardInfo:
    documents: int
    tokens: int
    files: dict[str, FileInfo]
    """The shard's "tokens" and "offsets"."""


@dataclass(frozen=True)
class SplitInfo:
    documents: int
    tokens: int
    text_bytes: int
    """UTF-8 bytes of the documents' text."""
    shards: list[ShardInfo]

    def rows(self, seq_len: int, *, document_mask: bool = True) -> int:
        """Rows of `seq_len` positions the split fills, the last one padded.

        With a document mask each document's last token is only a label, so it fills no position.
        """
        positions = self.tokens - (self.documents if document_mask else 1)
        return max(0, -(-positions // seq_len))


@dataclass(frozen=True)
class TokenizerInfo:
    vocab_size: int
    bos_id: int | None
    eod_id: int
    vocabulary_sha256: str
    trained: bool
    """Trained on this source, or taken from an existing folder."""
    text_bytes: int
    """UTF-8 bytes it was trained on."""
    files: list[FileInfo]


@dataclass(frozen=True)
class Manifest:
    """Everything about a dataset but its tokens. Holds no absolute path, host name or time."""

    source: dict[str, Any]
    options: dict[str, Any]
    tokenizer: TokenizerInfo
    splits: dict[Split, SplitInfo]
    skipped: dict[str, int]
    """Documents and places left out of the source, by reason."""
    duplicates: int
    """Documents whose text already occurred; they are kept unless `options["deduplicate"]`."""
    skipped_file: FileInfo
    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    sha256: str = field(default="")
    """Of everything above: names this dataset, tokens included."""

    def to_json(self) -> str:
        body = asdict(self) | {"sha256": ""}
        body["sha256"] = _digest(body)
        return json.dumps(body, indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, where: Path) -> "Manifest":
        """Raises DatasetError for a damaged manifest, or one of another format."""
        again = "prepare the dataset again with `titan-npu data prepare`"
        try:
            body = json.loads(text)
            if body["format"] != FORMAT:
                raise DatasetError(f"{where} is no manifest of a prepared dataset; {again}")
            if body["format_version"] != FORMAT_VERSION:
                raise DatasetError(
                    f"{where} has format version {body['format_version']}, this release reads "
                    f"version {FORMAT_VERSION}; {again}"
                )
            if body["sha256"] != _digest(body | {"sha256": ""}):
                raise DatasetError(f"{where} is damaged (its checksum does not match); {again}")
            tokenizer = body["tokenizer"]
            return cls(
                **body
                | {
                    "skipped_file": FileInfo(**body["skipped_file"]),
                    "tokenizer": TokenizerInfo(
                        **tokenizer | {"files": [FileInfo(**info) for info in tokenizer["files"]]}
                    ),
                    "splits": {name: _split_info(split) for name, split in body["splits"].items()},
                }
            )
        except DatasetError:
            raise
        except (ValueError, TypeError, KeyError) as error:
            raise DatasetError(f"{where} is damaged or cut short; {again}") from error


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _split_info(body: dict[str, Any]) -> SplitInfo:
    shards = [
        ShardInfo(**shard | {"files": {k: FileInfo(**v) for k, v in shard["files"].items()}})
        for shard in body["shards"]
    ]
    return SplitInfo(**body | {"shards": shards})


def is_dataset_file(place: str) -> bool:
    """Whether a prepared dataset may have a file at this place inside it."""
    folder, _, name = place.rpartition("/")
    if folder in SPLITS:
        return re.fullmatch(r"\d{5,}\.(tokens|offsets)\.npy", name) is not None
    if folder == "tokenizer":
        return name in TOKENIZER_FILES
    return not folder and name in ("manifest.json", "skipped.jsonl")


def file_info(root: Path, path: Path) -> FileInfo:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileInfo(path.relative_to(root).as_posix(), path.stat().st_size, digest)


class TokenSplit:
    """One split of a dataset: documents and stretches of its token stream, memory-mapped."""

    def __init__(self, root: Path, info: SplitInfo, vocab_size: int):
        self.info = info
        self._root = root
        self._vocab_size = vocab_size
        self._first_document = np.cumsum([0, *(shard.documents for shard in info.shards)])
        self._first_token = np.cumsum([0, *(shard.tokens for shard in info.shards)])
        self._first_pair = self._first_token - self._first_document
        # A shard is two file mappings; a large corpus has more shards than a process may map files.
        self._shard = lru_cache(maxsize=128)(self._open_shard)

    def __len__(self) -> int:
        """Number of documents."""
        return self.info.documents

    def document(self, index: int) -> np.ndarray:
        """Token ids of document `index`, int64, boundaries included."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        shard = int(np.searchsorted(self._first_document, index, side="right")) - 1
        tokens, offsets, _ = self._shard(shard)
        local = index - int(self._first_document[shard])
        return self._checked(tokens[offsets[local] : offsets[local + 1]])

    def documents(self) -> Iterator[np.ndarray]:
        """Every document in order."""
        return map(self.document, range(len(self)))

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of all documents joined, int64; shorter at the end of the split."""
        parts = [
            self._shard(shard)[0][first:last]
            for shard, first, last in _overlaps(self._first_token, start, stop)
        ]
        return self._checked(np.concatenate(parts or [np.empty(0, np.int64)]))

    def pairs(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Inputs, labels and positions of next-token pairs [start, stop), three int64 arrays.

        A document of n tokens has n - 1 pairs: a label is always the next token of the same
        document, EOD included, and EOD is never an input. Positions count from the start of the
        document, or from `start` in the document that `start` cuts. Shorter at the split's end.
        """
        parts = []
        for shard, first, last in _overlaps(self._first_pair, start, stop):
            tokens, _, first_pairs = self._shard(shard)
            pair = np.arange(first, last)
            document = np.searchsorted(first_pairs, pair, side="right") - 1
            # A document never spans two shards, so only the first part can start inside one.
            position = pair - np.maximum(first_pairs[document], first)
            parts.append((tokens[pair + document], tokens[pair + document + 1], position))
        if not parts:
            return (np.empty(0, np.int64),) * 3
        inputs, labels, positions = (np.concatenate(part) for part in zip(*parts, strict=True))
        return self._checked(inputs), self._checked(labels), positions

    def _open_shard(self, shard: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        files = self.info.shards[shard].files
        try:
            tokens = np.load(self._root / files["tokens"].path, mmap_mode="r", allow_pickle=False)
            offsets = np.load(self._root / files["offsets"].path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DatasetError(
                f"shard {self._root / files['tokens'].path} cannot be read ({error}); prepare the "
                "dataset again with `titan-npu data prepare`"
            ) from error
        # Document d starts at token offsets[d], which is pair offsets[d] - d.
        return tokens, offsets, offsets - np.arange(len(offsets))

    def _checked(self, tokens: np.ndarray) -> np.ndarray:
        # Where checksums are skipped for size, this still keeps garbage out of the embedding.
        if tokens.size and int(tokens.max()) >= self._vocab_size:
            raise DatasetError(
                f"a shard under {self._root} holds token {int(tokens.max())} of a vocabulary of "
                f"{self._vocab_size}; it is damaged: prepare the dataset again"
            )
        return tokens.astype(np.int64)


def _overlaps(firsts: np.ndarray, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(shard, first, last) in each shard [start, stop) touches; shard i starts at firsts[i]."""
    stop = min(stop, int(firsts[-1]))
    if start >= stop:
        return
    shard = int(np.searchsorted(firsts, start, side="right")) - 1
    while start < stop:
        last = min(stop, int(firsts[shard + 1]))
        if start < last:
            yield shard, start - int(firsts[shard]), last - int(firsts[shard])
        start, shard = max(start, last), shard + 1


class PreparedDataset:
    """A dataset directory that `prepare` wrote.

    Args:
        path: the directory.
        verify: "auto" checks the manifest's checksum and every file's size, and the files'
            checksums too where a split is at most 1 GiB; "always" checks them all; "never" leaves
            the files' checksums out.

    Raises:
        DatasetError: the directory is missing, is no prepared dataset, or is damaged.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: Verify = "auto"):
        self.path = Path(path)
        self._verify: Verify = verify
        manifest = self.path / "manifest.json"
        if not manifest.is_file():
            exists = self.path.exists()
            what = "is no prepared dataset (no manifest.json)" if exists else "is missing"
            raise DatasetError(
                f"dataset folder {self.path} {what}; make one with "
                "`titan-npu data prepare SOURCE --out DIR`"
            )
        try:
            text = manifest.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DatasetError(f"{manifest} cannot be read ({error})") from error
        self.manifest = Manifest.from_json(text, manifest)
        self._check_files(self.manifest.tokenizer.files)

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer's folder; what torchtitan takes as `hf_assets_path`."""
        return self.path / "tokenizer"

    def split(self, name: Split) -> TokenSplit:
        """Opens a split after checking its files."""
        info = self.manifest.splits.get(name)
        if info is None:
            raise DatasetError(
                f"dataset {self.path} has no split {name!r}, only "
                f"{', '.join(map(repr, self.manifest.splits))}; prepare it with heldout > 0"
            )
        self._check_files([file for shard in info.shards for file in shard.files.values()])
        return TokenSplit(self.path, info, self.manifest.tokenizer.vocab_size)

    def _check_files(self, files: list[FileInfo]) -> None:
        again = "prepare the dataset again with `titan-npu data prepare`"
        for file in files:
            path = self.path / file.path
            try:
                size = path.stat().st_size
            except OSError as error:
                raise DatasetError(f"{path} is missing from the dataset; {again}") from error
            if size != file.size:
                raise DatasetError(
                    f"{path} has {size} bytes where its manifest says {file.size}; {again}"
                )
        if self._verify == "always" or (
            self._verify == "auto" and sum(file.size for file in files) <= _AUTO_VERIFY_BYTES
        ):
            for file in files:
                if file_info(self.path, self.path / file.path) != file:
                    raise DatasetError(
                        f"{self.path / file.path} is damaged (its checksum does not match); {again}"
                    )


def check_vocab(manifest: Manifest, model_vocab_size: int) -> None:
    """Raises VocabularyError if the dataset has token ids the model has no embedding row for."""
    need = manifest.tokenizer.vocab_size
    if need > model_vocab_size:
        raise VocabularyError(
            f"the dataset's tokenizer has {need} tokens and the model's vocab_size is "
            f"{model_vocab_size}; give the model vocab_size >= {need}, or prepare the dataset with "
            f"--vocab-size {model_vocab_size}"
        )


def check_corpus_size(
    info: SplitInfo, split: Split, *, seq_len: int, batch_rows: int, document_mask: bool = True
) -> None:
    """Raises CorpusTooSmallError if a batch of `batch_rows` rows would take a row twice."""
    rows = info.rows(seq_len, document_mask=document_mask)
    if rows < batch_rows:
        raise CorpusTooSmallError(
            f"split {split!r} has {info.tokens} tokens, {rows} rows of sequence length {seq_len}, "
            f"and a global batch takes {batch_rows} rows; use more text, a shorter sequence or a "
            "smaller batch"
        )

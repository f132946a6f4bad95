"""Turns a source of text into a dataset directory: documents -> tokenizer -> token shards.

The source is read three times: to judge and hash every document, to train the tokenizer, to write
tokens. Some dozens of bytes a document and one shard stay in memory. The same source and options
give the same bytes.
"""

import hashlib
import json
import os
import shutil
import socket
import time
from array import array
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from titan_npu_train.data import tokenizer as bpe
from titan_npu_train.data.dataset import (
    SPLITS,
    Manifest,
    PreparedDataset,
    ShardInfo,
    Split,
    SplitInfo,
    TokenizerInfo,
    file_info,
    is_dataset_file,
)
from titan_npu_train.data.errors import DataError, OutputError, SourceError
from titan_npu_train.data.source import Document, Source

_SHARD_TOKENS = 1 << 26  # 128 MiB of uint16
_BATCH_CHARACTERS = 1 << 22
_BATCH_DOCUMENTS = 1024

# What becomes of a document.
_TRAIN, _HELDOUT, _TAIL, _DUPLICATE, _OVER = range(5)


class Progress(Protocol):
    """Called as work goes on; `total` is None while it is unknown."""

    def __call__(self, stage: str, done: int, total: int | None) -> None: ...


@dataclass(frozen=True)
class PrepareSummary:
    """What `prepare` did. `str()` gives a table, `rows()` its cells."""

    out: Path
    manifest: Manifest
    seconds: float
    replaced: bool
    """An older dataset at `out` was replaced."""

    def rows(self) -> list[tuple[str, str]]:
        manifest, tokenizer = self.manifest, self.manifest.tokenizer
        rows = [("dataset", f"{self.out}{' (replaced an older one)' if self.replaced else ''}")]
        for name in SPLITS:
            split = manifest.splits.get(name)
            if split is None:
                continue
            counts = f"{split.documents:,} documents, {split.tokens:,} tokens"
            rows.append((f"split {name}", f"{counts}, {split.text_bytes:,} bytes"))
        origin = f"trained on {tokenizer.text_bytes:,} bytes" if tokenizer.trained else "given"
        rows.append(("vocabulary", f"{tokenizer.vocab_size:,} tokens ({origin})"))
        wanted = manifest.options["vocab_size"]
        if tokenizer.trained and tokenizer.vocab_size < wanted:
            rows.append(("", f"the text has no more merges to fill the {wanted:,} asked for"))
        if manifest.duplicates and not manifest.options["deduplicate"]:
            rows.append(("duplicates kept", f"{manifest.duplicates:,} documents"))
        for reason, count in sorted(manifest.skipped.items()):
            rows.append((f"skipped: {reason}", f"{count:,}"))
        if manifest.skipped:
            rows.append(("", f"listed in {self.out / manifest.skipped_file.path}"))
        rows.append(("time", f"{self.seconds:.1f} s"))
        return rows

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def prepare(
    source: str | os.PathLike[str] | Source,
    out: str | os.PathLike[str],
    *,
    vocab_size: int = 32768,
    tokenizer: str | os.PathLike[str] | None = None,
    text_column: str = "text",
    heldout: float = 0.01,
    deduplicate: bool = False,
    max_bytes: int | None = None,
    tokenizer_bytes: int = 1 << 28,
    progress: Progress | None = None,
) -> PrepareSummary:
    """Prepares a dataset directory from text and code files, JSON lines or Parquet.

    Documents keep the order of the source (files by relative path, rows as stored); the loader
    shuffles rows. Which documents are held out, are dropped by `max_bytes` or train the tokenizer
    is decided by a hash of their text, so equal documents always fall on the same side.

    Args:
        source: a file, a folder (read recursively) or a `Source`. `.jsonl`, `.jsonl.gz`,
            `.jsonl.zst` and `.parquet` hold one document a row; any other file is one document.
        out: the dataset directory. It appears complete or not at all; an older dataset there is
            replaced at the very end, any other content is refused.
        vocab_size: size of the byte-level BPE vocabulary to train, boundary tokens included.
        tokenizer: folder with a `tokenizer.json` to use instead of training one.
        text_column: JSON key or Parquet column with a document's text.
        heldout: share of the distinct documents for the split "heldout", at least one; 0 for none.
            Where a source is a single document, the held-out text is its end.
        deduplicate: drop documents whose text occurred before (exactly); they are counted anyway.
        max_bytes: keep about this many bytes of text, a sample by hash.
        tokenizer_bytes: train the tokenizer on at most about this many bytes, a sample by hash.
        progress: called as `progress(stage, done, total)`.

    Raises:
        DataError: see its subclasses; `out` is left as it was.
    """
    started = time.monotonic()
    out = Path(out).resolve()
    report: Progress = progress or (lambda stage, done, total: None)
    _check_options(vocab_size, tokenizer, heldout, max_bytes, tokenizer_bytes)
    if not isinstance(source, Source):
        if out.is_relative_to(Path(source).resolve()):
            raise OutputError(f"{out} lies inside the source {source}; choose an --out outside it")
        source = Source.scan(source, text_column=text_column)
    replaced = _check_out(out)
    given = bpe.DocumentTokenizer.load(tokenizer) if tokenizer else None
    with _staging(out) as root:
        corpus = _survey(source, report)
        plan = _plan(corpus, heldout, deduplicate, max_bytes, tokenizer_bytes)
        if tokenizer:
            bpe.copy(Path(tokenizer), root / "tokenizer")
        else:
            texts = _tokenizer_texts(source, corpus, plan, report)
            bpe.train(texts, root / "tokenizer", vocab_size=vocab_size)
        encoder = given or bpe.DocumentTokenizer.load(root / "tokenizer")
        splits, skipped = _write_splits(source, corpus, plan, encoder, root, report)
        manifest = Manifest(
            source={
                "name": source.name,
                "files": len(source.files),
                "documents": len(corpus.sizes),
                "text_bytes": int(corpus.sizes.sum()),
                "sha256": hashlib.sha256(corpus.digests.tobytes()).hexdigest(),
                "order": "by relative path, rows as stored",
                "heldout": plan.heldout_rule,
            },
            options={
                "deduplicate": deduplicate,
                "heldout": heldout,
                "max_bytes": max_bytes,
                "text_column": source.text_column,
                "tokenizer_bytes": None if tokenizer else tokenizer_bytes,
                "vocab_size": None if tokenizer else vocab_size,
            },
            tokenizer=TokenizerInfo(
                vocab_size=encoder.vocab_size,
                bos_id=encoder.bos_id,
                eod_id=encoder.eod_id,
                vocabulary_sha256=bpe.vocabulary_hash(encoder.backend.get_vocab()),
                trained=not tokenizer,
                text_bytes=0 if tokenizer else plan.tokenizer_text_bytes,
                files=[file_info(root, path) for path in sorted((root / "tokenizer").iterdir())],
            ),
            splits=splits,
            skipped=skipped,
            duplicates=plan.duplicates,
            skipped_file=file_info(root, root / "skipped.jsonl"),
        )
        (root / "manifest.json").write_text(manifest.to_json(), "utf-8")
        _publish(root, out)
    manifest = PreparedDataset(out, verify="never").manifest
    return PrepareSummary(out, manifest, time.monotonic() - started, replaced)


@dataclass(frozen=True)
class _Corpus:
    """The documents of a source, in order: a hash of each text and its size."""

    digests: np.ndarray  # S16
    sizes: np.ndarray  # uint64, UTF-8 bytes


@dataclass(frozen=True)
class _Plan:
    """What becomes of each document of a corpus."""

    roles: np.ndarray  # uint8
    trains_tokenizer: np.ndarray  # bool
    tokenizer_text_bytes: int
    duplicates: int
    heldout: float
    heldout_rule: str

    def cut(self, text: str) -> int:
        """Where the held-out end of a source's only document begins: a line start if possible."""
        cut = min(max(1, round(len(text) * (1 - self.heldout))), len(text) - 1)
        return text.rfind("\n", 0, cut) + 1 or cut


def _survey(source: Source, report: Progress) -> _Corpus:
    digests, sizes = bytearray(), array("Q")
    skipped: Counter[str] = Counter()
    for document in source.documents():
        if document.skipped:
            skipped[document.skipped] += 1
            continue
        text = document.text.encode()
        digests += _digest(text)
        sizes.append(len(text))
        if len(sizes) % 256 == 0:
            report("reading", len(sizes), None)
    report("reading", len(sizes), len(sizes))
    if not sizes:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
        raise SourceError(
            f"source {source.name} has no document with text "
            f"({reasons or 'its files hold no rows'}); give one with UTF-8 text"
        )
    return _Corpus(np.frombuffer(bytes(digests), "S16"), np.frombuffer(sizes, np.uint64))


def _plan(
    corpus: _Corpus,
    heldout: float,
    deduplicate: bool,
    max_bytes: int | None,
    tokenizer_bytes: int,
) -> _Plan:
    # Distinct texts in the order of their hashes: a random order that only the text decides.
    _, first, text_of, copies = np.unique(
        corpus.digests, return_index=True, return_inverse=True, return_counts=True
    )
    text_of = text_of.reshape(-1)
    size = corpus.sizes[first].astype(np.int64) * (1 if deduplicate else copies)
    total = np.cumsum(size)
    # Three consecutive stretches of that order: held out, tokenizer sample (and train), train.
    kept = len(first) if max_bytes is None else max(1, int((total <= max_bytes).sum()))
    held = min(max(1, round(heldout * kept)), kept - 1) if heldout else 0
    before = int(total[held - 1]) if held else 0
    sampled = min(kept, max(held + 1, int((total <= before + tokenizer_bytes).sum())))
    tail = bool(heldout) and kept == 1
    roles_of_text = np.full(len(first), _OVER, np.uint8)
    roles_of_text[:kept] = _TAIL if tail else _TRAIN
    roles_of_text[:held] = _HELDOUT
    roles = roles_of_text[text_of]
    if deduplicate:
        again = np.ones(len(roles), bool)
        again[first] = False
        roles[again & (roles != _OVER)] = _DUPLICATE
    samples = np.zeros(len(first), bool)
    samples[held:sampled] = True
    if tail:
        rule = "the end of the only document"
    elif held:
        rule = f"{held} of {kept} distinct documents, by hash"
    else:
        rule = "none"
    return _Plan(
        roles=roles,
        trains_tokenizer=samples[text_of] & (roles != _DUPLICATE),
        tokenizer_text_bytes=int(size[held:sampled].sum()),
        duplicates=int((copies - 1).sum()),
        heldout=heldout,
        heldout_rule=rule,
    )


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def _planned(source: Source, corpus: _Corpus, plan: _Plan) -> Iterator[tuple[Document, int]]:
    """Each place of the source with its document's index, -1 where there is none."""
    changed = SourceError(
        f"source {source.name} changed while it was being prepared; prepare it once it is at rest"
    )
    index = 0
    for document in source.documents():
        if document.skipped:
            yield document, -1
            continue
        if index == len(corpus.digests):
            raise changed
        # NumPy drops the trailing zero bytes of a string.
        if _digest(document.text.encode()).rstrip(b"\0") != corpus.digests[index]:
            raise changed
        yield document, index
        index += 1
    if index != len(corpus.digests):
        raise changed


def _tokenizer_texts(
    source: Source, corpus: _Corpus, plan: _Plan, report: Progress
) -> Iterator[str]:
    total = int(plan.trains_tokenizer.sum())
    done = 0
    for document, index in _planned(source, corpus, plan):
        if index < 0 or not plan.trains_tokenizer[index]:
            continue
        text = document.text
        yield text[: plan.cut(text)] if plan.roles[index] == _TAIL else text
        done += 1
        if done % 64 == 0 or done == total:
            report("training the tokenizer", done, total)


def _write_splits(
    source: Source,
    corpus: _Corpus,
    plan: _Plan,
    encoder: bpe.DocumentTokenizer,
    root: Path,
    report: Progress,
) -> tuple[dict[Split, SplitInfo], dict[str, int]]:
    dtype = np.dtype("<u2" if encoder.vocab_size <= 1 << 16 else "<u4")
    writers = {
        name: _SplitWriter(root, name, dtype) for name in (SPLITS if plan.heldout else SPLITS[:1])
    }
    skipped: Counter[str] = Counter()
    boundaries = 1 if encoder.bos_id is None else 2
    total = len(corpus.digests)

    with (root / "skipped.jsonl").open("w", encoding="utf-8") as log:

        def skip(place: str, reason: str) -> None:
            skipped[reason] += 1
            log.write(json.dumps({"place": place, "reason": reason}, ensure_ascii=False) + "\n")

        def encode(batch: list[tuple[Split, str, str]]) -> None:
            for (name, place, text), ids in zip(
                batch, encoder.encode([text for _, _, text in batch]), strict=True
            ):
                if len(ids) > boundaries:
                    writers[name].add(ids, len(text.encode()))
                else:  # a given tokenizer's normalizer may leave nothing
                    skip(place, "no tokens")
            batch.clear()

        for document in source.ignored:
            skip(document.place, document.skipped or "")
        batch: list[tuple[Split, str, str]] = []
        characters = 0
        for document, index in _planned(source, corpus, plan):
            place, text = document.place, document.text
            if index < 0:
                skip(place, document.skipped or "")
                continue
            role = plan.roles[index]
            if role == _DUPLICATE:
                skip(place, "duplicate")
            elif role == _OVER:
                skip(place, "over max_bytes")
            elif role == _TAIL:
                cut = plan.cut(text)
                batch += [("train", place, text[:cut]), ("heldout", place, text[cut:])]
            else:
                batch.append(("heldout" if role == _HELDOUT else "train", place, text))
            characters += len(text)
            if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
                encode(batch)
                characters = 0
                report("writing tokens", index + 1, total)
        encode(batch)
    report("writing tokens", total, total)
    splits = {name: writer.close() for name, writer in writers.items()}
    for name, split in splits.items():
        if not split.documents:
            raise SourceError(
                f"source {source.name} leaves the split {name!r} empty; give more text"
                + (" or set heldout to 0" if name == "heldout" else "")
            )
    return splits, dict(sorted(skipped.items()))


class _SplitWriter:
    """Writes the shards of one split, holding at most one shard in memory."""

    def __init__(self, root: Path, name: str, dtype: np.dtype, shard_tokens: int = _SHARD_TOKENS):
        self._root, self._folder, self._dtype = root, root / name, dtype
        self._shard_tokens = shard_tokens
        self._folder.mkdir()
        self._documents: list[np.ndarray] = []
        self._tokens = self._text_bytes = 0
        self._shards: list[ShardInfo] = []

    def add(self, ids: list[int], text_bytes: int) -> None:
        if self._documents and self._tokens + len(ids) > self._shard_tokens:
            self._flush()
        self._documents.append(np.array(ids, self._dtype))
        self._tokens += len(ids)
        self._text_bytes += text_bytes

    def close(self) -> SplitInfo:
        if self._documents:
            self._flush()
        return SplitInfo(
            documents=sum(shard.documents for shard in self._shards),
            tokens=sum(shard.tokens for shard in self._shards),
            text_bytes=self._text_bytes,
            shards=self._shards,
        )

    def _flush(self) -> None:
        arrays = {
            "tokens": np.concatenate(self._documents),
            "offsets": np.cumsum([0, *map(len, self._documents)], dtype="<i8"),
        }
        files = {}
        for kind, values in arrays.items():
            path = self._folder / f"{len(self._shards):05d}.{kind}.npy"
            np.save(path, values, allow_pickle=False)
            files[kind] = file_info(self._root, path)
        self._shards.append(ShardInfo(len(self._documents), self._tokens, files))
        self._documents, self._tokens = [], 0


def _check_options(
    vocab_size: int,
    tokenizer: object,
    heldout: float,
    max_bytes: int | None,
    tokenizer_bytes: int,
) -> None:
    if not tokenizer and vocab_size < bpe.SMALLEST_VOCABULARY:
        raise DataError(
            f"vocab_size is {vocab_size}; a byte-level vocabulary takes at least "
            f"{bpe.SMALLEST_VOCABULARY} (256 bytes, 2 document boundaries)"
        )
    if not 0 <= heldout < 1:
        raise DataError(f"heldout is {heldout}; give a share of the documents in [0, 1)")
    for name, value in (("max_bytes", max_bytes), ("tokenizer_bytes", tokenizer_bytes)):
        if value is not None and value < 1:
            raise DataError(f"{name} is {value}; give a positive number of bytes")


def _check_out(out: Path) -> bool:
    """Whether an older dataset is at `out`. Raises OutputError for anything else in the way."""
    try:
        _clear_leftovers(out)
    except OSError as error:
        raise OutputError(
            f"the folder of {out} is not yours to write ({error.strerror}); choose another --out"
        ) from error
    if not out.exists():
        return False
    if not out.is_dir():
        raise OutputError(f"{out} exists and is no folder; choose another --out")
    try:
        files = [path.relative_to(out).as_posix() for path in out.rglob("*") if not path.is_dir()]
    except OSError as error:
        raise OutputError(f"cannot read {out} ({error.strerror}); choose another --out") from error
    # By its files, not its manifest: a damaged dataset can be prepared again, and nobody's notes
    # beside a good one are lost.
    foreign = [file for file in sorted(files) if not is_dataset_file(file)]
    if files and not foreign and not any(file.endswith(".npy") for file in files):
        foreign = files
    if foreign:
        raise OutputError(
            f"{out} holds files that are no part of a prepared dataset ({foreign[0]}"
            f"{' ...' if len(foreign) > 1 else ''}); choose another --out or move them away"
        )
    return bool(files)


def _beside(out: Path, what: str, pid: int | str) -> Path:
    return out.with_name(f".{out.name}.{what}-{socket.gethostname()}-{pid}")


def _clear_leftovers(out: Path) -> None:
    """Removes what a killed `prepare` of this machine left beside `out`."""
    parent = out.parent
    for what in ("replaced", "preparing"):
        prefix = _beside(out, what, "").name
        for path in parent.iterdir() if parent.is_dir() else ():
            pid = path.name.removeprefix(prefix)
            if not path.name.startswith(prefix) or not pid.isdigit() or _alive(int(pid)):
                continue
            if what == "replaced" and not out.exists():  # killed between the two renames
                path.rename(out)
            else:
                shutil.rmtree(path)


@contextmanager
def _staging(out: Path) -> Generator[Path]:
    """A folder beside `out` to build in; gone afterwards unless it was renamed to `out`."""
    root = _beside(out, "preparing", os.getpid())
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir()
    except OSError as error:
        raise OutputError(
            f"cannot write beside {out} ({error.strerror}); give an --out where you may write"
        ) from error
    try:
        yield root
    except OSError as error:
        raise OutputError(
            f"writing {out} failed ({error.strerror or error}); free space or choose another --out"
        ) from error
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _publish(root: Path, out: Path) -> None:
    """Moves the finished folder to `out`, swapping an older dataset out of the way."""
    for path in [*root.rglob("*"), root]:
        _sync(path)
    old = _beside(out, "replaced", os.getpid())
    if out.exists():
        out.rename(old)
    try:
        root.rename(out)
    except OSError:
        if old.exists():
            old.rename(out)
        raise
    _sync(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    """Forces a file or folder to the disk, so that a power cut cannot leave it half there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

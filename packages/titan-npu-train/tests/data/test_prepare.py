"""Preparing is complete, deterministic, atomic, and says what it left out."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from made_corpus import made_text
from titan_npu_train.data import (
    DataError,
    DocumentTokenizer,
    OutputError,
    PreparedDataset,
    SourceError,
    prepare,
)

Write = Callable[..., PreparedDataset]


def texts(dataset: PreparedDataset, split: str) -> list[str]:
    tokenizer = DocumentTokenizer.load(dataset.tokenizer_path)
    return [tokenizer.decode(ids.tolist()) for ids in dataset.split(split).documents()]


def content(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_document_is_in_exactly_one_split(corpus: Path, dataset: Path) -> None:
    prepared = PreparedDataset(dataset, verify="always")
    files = sorted(path for path in corpus.rglob("*.txt"))
    expected = {path.read_text("utf-8") for path in files}
    train, heldout = texts(prepared, "train"), texts(prepared, "heldout")
    assert len(train) + len(heldout) == len(files)
    assert set(train) | set(heldout) == expected
    assert len(heldout) == 4
    # In the order of the source.
    files.sort(key=lambda path: path.relative_to(corpus).as_posix())
    order = [path.read_text("utf-8") for path in files]
    assert train == [text for text in order if text in set(train)]


def test_counts(dataset: Path) -> None:
    manifest = PreparedDataset(dataset).manifest
    for name, info in manifest.splits.items():
        documents = list(PreparedDataset(dataset).split(name).documents())
        assert info.documents == len(documents)
        assert info.tokens == sum(map(len, documents))
        assert info.text_bytes == sum(
            len(text.encode()) for text in texts(PreparedDataset(dataset), name)
        )
    assert manifest.source["documents"] == 40
    assert manifest.source["text_bytes"] == sum(s.text_bytes for s in manifest.splits.values())
    assert manifest.source["name"] == "corpus0"


def test_same_source_same_bytes(corpus: Path, dataset: Path, tmp_path: Path) -> None:
    for seed, threads in (("1", "1"), ("2", "4")):
        code = (
            "from titan_npu_train.data import prepare; "
            f"prepare({str(corpus)!r}, {str(tmp_path / seed)!r}, vocab_size=300, heldout=0.1)"
        )
        done = run_python(code, PYTHONHASHSEED=seed, RAYON_NUM_THREADS=threads)
        assert done.returncode == 0, done.stderr
        assert content(tmp_path / seed) == content(dataset)


def test_manifest_names_no_path_of_the_machine(corpus: Path, dataset: Path) -> None:
    for name, data in content(dataset).items():
        assert str(corpus.parent).encode() not in data, name
        assert str(Path.home()).encode() not in data, name


def test_different_text_is_a_different_dataset(write_dataset: Write) -> None:
    first = write_dataset({f"{i}": made_text(i, 20) for i in range(4)}).manifest
    second = write_dataset({"3": made_text(4, 20)}).manifest
    assert first.sha256 != second.sha256
    assert first.source["sha256"] != second.source["sha256"]


def test_what_is_left_out_is_listed(write_dataset: Write) -> None:
    dataset = write_dataset(
        {
            "a.txt": "alpha",
            "b.txt": "beta",
            "c.bin": b"\0\1",
            "d.txt": " ",
            "e.txt": b"\xff",
            ".hidden": "x",
            "f.jsonl": '{"text": "gamma"}\n{"text": ""}\n',
        }
    )
    assert dataset.manifest.skipped == {"binary file": 1, "empty": 2, "hidden": 1, "not UTF-8": 1}
    lines = (dataset.path / "skipped.jsonl").read_text().splitlines()
    assert {line["place"]: line["reason"] for line in map(json.loads, lines)} == {
        ".hidden": "hidden",
        "c.bin": "binary file",
        "d.txt": "empty",
        "e.txt": "not UTF-8",
        "f.jsonl:2": "empty",
    }


DUPLICATED = {f"{i:02d}.txt": made_text(i % 5, 12) for i in range(15)}


def test_duplicates_are_kept_counted_and_on_one_side(write_dataset: Write) -> None:
    dataset = write_dataset(DUPLICATED, heldout=0.3)
    train, heldout = texts(dataset, "train"), texts(dataset, "heldout")
    assert dataset.manifest.duplicates == 10
    assert len(train) + len(heldout) == 15
    assert len(set(heldout)) == 2
    assert not set(train) & set(heldout)
    assert dataset.manifest.skipped == {}


def test_deduplicate(write_dataset: Write) -> None:
    dataset = write_dataset(DUPLICATED, heldout=0.3, deduplicate=True)
    both = texts(dataset, "train") + texts(dataset, "heldout")
    assert sorted(both) == sorted(set(DUPLICATED.values()))
    assert dataset.manifest.duplicates == 10
    assert dataset.manifest.skipped == {"duplicate": 10}


def test_max_bytes(write_dataset: Write, corpus: Path) -> None:
    files = {path.name: path.read_bytes() for path in corpus.rglob("*.txt")}
    dataset = write_dataset(files, max_bytes=8000)
    kept = sum(split.text_bytes for split in dataset.manifest.splits.values())
    largest = max(map(len, files.values()))
    assert 8000 - largest < kept <= 8000
    documents = sum(split.documents for split in dataset.manifest.splits.values())
    assert dataset.manifest.skipped == {"over max_bytes": 40 - documents}


def test_tokenizer_never_sees_held_out_text(write_dataset: Write) -> None:
    # Each word fills a document; a document that was trained on leaves its word in the vocabulary.
    words = ["qzqz", "jvjv", "wkwk", "xbxb"]
    dataset = write_dataset({word: f" {word}" * 50 for word in words}, heldout=0.75)
    [train] = texts(dataset, "train")
    vocabulary = DocumentTokenizer.load(dataset.tokenizer_path).backend.get_vocab()
    for word in words:
        assert (f"Ġ{word}" in vocabulary) == (word in train)
    assert dataset.manifest.tokenizer.text_bytes == len(train)


def test_tokenizer_bytes(write_dataset: Write) -> None:
    dataset = write_dataset({f"{i}": made_text(i, 30) for i in range(20)}, tokenizer_bytes=1000)
    assert 0 < dataset.manifest.tokenizer.text_bytes <= 1000


def test_only_document_is_cut_at_a_line(write_dataset: Write) -> None:
    text = "".join(f"line {i} of the only document\n" for i in range(200))
    dataset = write_dataset({"input.txt": text}, heldout=0.1)
    [train], [heldout] = texts(dataset, "train"), texts(dataset, "heldout")
    assert train + heldout == text
    assert heldout.startswith("line ")
    assert 0.08 < len(heldout) / len(text) < 0.12
    assert dataset.manifest.source["heldout"] == "the end of the only document"


def test_no_held_out_split(write_dataset: Write) -> None:
    dataset = write_dataset({"a": "alpha", "b": "beta"}, heldout=0)
    assert len(texts(dataset, "train")) == 2
    with pytest.raises(DataError, match="no split 'heldout', only 'train'"):
        dataset.split("heldout")


@pytest.mark.parametrize("files", [{"a.txt": " \n"}, {"a.bin": b"\0"}, {"a.jsonl": ""}])
def test_empty_corpus(write_dataset: Write, files: dict[str, str | bytes], tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="has no document with text"):
        write_dataset(files)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"vocab_size": 257}, "vocab_size is 257.*at least 258"),
        ({"heldout": 1.0}, "heldout is 1.0"),
        ({"heldout": -0.1}, "heldout is -0.1"),
        ({"max_bytes": 0}, "max_bytes is 0"),
        ({"tokenizer_bytes": 0}, "tokenizer_bytes is 0"),
    ],
)
def test_bad_options(corpus: Path, tmp_path: Path, options: dict[str, float], match: str) -> None:
    with pytest.raises(DataError, match=match):
        prepare(corpus, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_foreign_folder_is_refused(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(OutputError, match=r"no part of a prepared dataset \(manifest\.json\)"):
        prepare(corpus, tmp_path)
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(OutputError, match=r"no part of a prepared dataset \(thesis\.tex\)"):
        prepare(corpus, tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    with pytest.raises(OutputError, match="is no folder"):
        prepare(corpus, tmp_path / "thesis.tex")


def test_notes_in_a_dataset_are_not_lost(corpus: Path, tmp_path: Path) -> None:
    prepare(corpus, tmp_path / "out", vocab_size=300)
    (tmp_path / "out" / "tokenizer" / "model.safetensors").touch()
    with pytest.raises(OutputError, match=r"\(tokenizer/model\.safetensors\)"):
        prepare(corpus, tmp_path / "out", vocab_size=300)


@pytest.mark.parametrize("victim", ["manifest.json", "train/00000.tokens.npy"])
def test_damaged_dataset_can_be_prepared_again(
    corpus: Path, dataset: Path, tmp_path: Path, victim: str
) -> None:
    out = tmp_path / "out"
    prepare(corpus, out, vocab_size=300)
    (out / victim).write_bytes(b"{")
    assert prepare(corpus, out, vocab_size=300, heldout=0.1).replaced
    assert content(out) == content(dataset)


def test_out_inside_the_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("alpha")
    with pytest.raises(OutputError, match="lies inside the source"):
        prepare(tmp_path, tmp_path / "out")


def test_unwritable_place(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot write beside"):
        prepare(corpus, tmp_path / "file" / "out")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(corpus: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        prepare(corpus, tmp_path / "out")


def test_full_disk(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numpy.save", save)
    with pytest.raises(OutputError, match="No space left on device"):
        prepare(corpus, tmp_path / "out", vocab_size=300)
    assert not list(tmp_path.iterdir())


def test_an_older_dataset_is_replaced(corpus: Path, dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert not prepare(corpus, out, vocab_size=260).replaced
    assert prepare(corpus, out, vocab_size=300, heldout=0.1).replaced
    assert content(out) == content(dataset)
    assert list(tmp_path.iterdir()) == [out]


KILLED = """
import os, signal, sys
from pathlib import Path
from titan_npu_train.data import prepare
module = sys.modules["titan_npu_train.data.prepare"]

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def report(stage, done, total):
    if stage == {stage!r}:
        die()

if {stage!r} == "publishing":
    module._publish = die
if {stage!r} == "between the renames":
    rename = Path.rename
    def once(self, target):
        rename(self, target)
        die()
    Path.rename = once
prepare({corpus!r}, {out!r}, vocab_size=300, heldout=0.1, progress=report)
"""


@pytest.mark.parametrize(
    "stage",
    ["reading", "training the tokenizer", "writing tokens", "publishing", "between the renames"],
)
def test_killed_prepare(corpus: Path, dataset: Path, tmp_path: Path, stage: str) -> None:
    out = tmp_path / "out"
    prepare(corpus, out, vocab_size=270)
    before = content(out)
    done = run_python(KILLED.format(stage=stage, corpus=str(corpus), out=str(out)))
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = {path.name for path in tmp_path.iterdir()}
    if stage == "between the renames":
        assert not out.exists()  # neither dataset is there, but none is lost either
    else:
        assert content(out) == before
    assert any(name.startswith(".out.") for name in left)
    # The next run clears up and succeeds.
    assert prepare(corpus, out, vocab_size=300, heldout=0.1).replaced
    assert content(out) == content(dataset)
    assert list(tmp_path.iterdir()) == [out]


def test_source_that_changes_meanwhile(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    for i in range(3):
        (source / f"{i}.txt").write_text(made_text(i, 30))

    def report(stage: str, done: int, total: int | None) -> None:
        if stage == "training the tokenizer":
            (source / "1.txt").write_text("other text")

    with pytest.raises(SourceError, match="changed while it was being prepared"):
        prepare(source, out, vocab_size=300, progress=report)
    assert list(tmp_path.iterdir()) == [source]


def test_summary_is_a_table(corpus: Path, tmp_path: Path) -> None:
    summary = prepare(corpus, tmp_path / "out", vocab_size=100_000)
    lines = str(summary).splitlines()
    assert lines[0].split() == ["dataset", str(tmp_path / "out")]
    assert lines[1].startswith("split train")
    assert "39 documents" in lines[1]
    assert "no more merges to fill the 100,000" in str(summary)


def test_progress_ends_complete(corpus: Path, tmp_path: Path) -> None:
    last: dict[str, tuple[int, int | None]] = {}
    prepare(
        corpus,
        tmp_path / "out",
        vocab_size=300,
        progress=lambda stage, done, total: last.update({stage: (done, total)}),
    )
    assert list(last) == ["reading", "training the tokenizer", "writing tokens"]
    assert all(done == total for done, total in last.values())

"""Prepared datasets: any stretch of tokens is read right, and damage never goes unnoticed."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_npu_train.data import DatasetError, PreparedDataset, TokenSplit
from titan_npu_train.data.dataset import Manifest
from titan_npu_train.data.prepare import _SplitWriter


@pytest.fixture
def copied(dataset: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dataset, tmp_path / "copy"))


def made_split(root: Path, lengths: list[int], shard_tokens: int) -> tuple[TokenSplit, list]:
    """A split of documents of the given lengths; token ids tell document and place apart."""
    documents = [[(1000 * d + i) % 60000 for i in range(n)] for d, n in enumerate(lengths)]
    shutil.rmtree(root / "train", ignore_errors=True)
    writer = _SplitWriter(root, "train", np.dtype("<u2"), shard_tokens)
    for document in documents:
        writer.add(document, 0)
    return TokenSplit(root, writer.close(), 60000), documents


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 12), min_size=1, max_size=12),
    shard_tokens=st.sampled_from([1, 10, 25, 1000]),
    start=st.integers(0, 80),
    count=st.integers(0, 80),
)
def test_stretches(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    shard_tokens: int,
    start: int,
    count: int,
) -> None:
    root = tmp_path_factory.mktemp("split")
    split, documents = made_split(root, lengths, shard_tokens)
    assert [d.tolist() for d in split.documents()] == documents

    joined = [token for document in documents for token in document]
    assert split.tokens(start, start + count).tolist() == joined[start : start + count]

    # (input, label, document, place in it) of every next-token pair, the long way.
    pairs = [
        (document[i], document[i + 1], d, i)
        for d, document in enumerate(documents)
        for i in range(len(document) - 1)
    ][start : start + count]
    # The document that `start` cuts counts from there.
    shift = {pairs[0][2]: pairs[0][3]} if pairs else {}
    inputs, labels, positions = split.pairs(start, start + count)
    assert inputs.tolist() == [pair[0] for pair in pairs]
    assert labels.tolist() == [pair[1] for pair in pairs]
    assert positions.tolist() == [i - shift.get(d, 0) for _, _, d, i in pairs]


def test_documents_are_checked_against_the_vocabulary(tmp_path: Path) -> None:
    split, _ = made_split(tmp_path, [5, 5], 100)
    damaged = TokenSplit(tmp_path, split.info, vocab_size=1003)
    damaged.document(0)
    with pytest.raises(DatasetError, match="holds token 1004 of a vocabulary of 1003"):
        damaged.document(1)
    with pytest.raises(IndexError):
        split.document(2)


def test_rows(dataset: Path) -> None:
    info = PreparedDataset(dataset).manifest.splits["train"]
    pairs = info.tokens - info.documents
    assert info.rows(pairs) == 1
    assert info.rows(pairs - 1) == 2
    assert info.rows(info.tokens - 1, document_mask=False) == 1


def test_manifest_comes_back(dataset: Path) -> None:
    text = (dataset / "manifest.json").read_text("utf-8")
    assert Manifest.from_json(text, dataset).to_json() == text


@pytest.mark.parametrize("name", ["train/00000.tokens.npy", "train/00000.offsets.npy"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_damaged_shard(copied: Path, name: str, damage: str) -> None:
    path = copied / name
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[-3] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    match = {"flipped": "checksum", "cut": f"{len(data) - 1} bytes where", "gone": "is missing"}
    with pytest.raises(DatasetError, match=f"{name}.*{match[damage]}.*prepare the dataset again"):
        PreparedDataset(copied).split("train")
    # Only what is read is checked.
    PreparedDataset(copied).split("heldout")


def test_damaged_tokenizer(copied: Path) -> None:
    path = copied / "tokenizer" / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:-1] + b" ")
    with pytest.raises(DatasetError, match=r"tokenizer\.json is damaged"):
        PreparedDataset(copied)


def test_large_splits_are_verified_on_demand(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_npu_train.data.dataset._AUTO_VERIFY_BYTES", 1)
    path = copied / "train" / "00000.tokens.npy"
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    PreparedDataset(copied).split("train")
    PreparedDataset(copied, verify="never").split("train")
    with pytest.raises(DatasetError, match="checksum"):
        PreparedDataset(copied, verify="always").split("train")


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.99])
def test_manifest_cut_short(copied: Path, keep: float) -> None:
    path = copied / "manifest.json"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(DatasetError, match=r"manifest\.json is damaged or cut short"):
        PreparedDataset(copied)


@pytest.mark.parametrize("other", ["[]", "null", "{}", '{"format": 3}', "\udcff"])
def test_no_manifest_of_ours(copied: Path, other: str) -> None:
    (copied / "manifest.json").write_bytes(other.encode("utf-8", "surrogateescape"))
    with pytest.raises(DatasetError, match=r"manifest\.json"):
        PreparedDataset(copied)


def test_edited_manifest(copied: Path) -> None:
    path = copied / "manifest.json"
    body = json.loads(path.read_text())
    body["splits"]["train"]["tokens"] += 1
    path.write_text(json.dumps(body))
    with pytest.raises(DatasetError, match="checksum does not match"):
        PreparedDataset(copied)


def test_other_format_version(copied: Path) -> None:
    path = copied / "manifest.json"
    body = json.loads(path.read_text())
    body["format_version"] = 99
    path.write_text(json.dumps(body))
    with pytest.raises(DatasetError, match="format version 99, this release reads version 1"):
        PreparedDataset(copied)


def test_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(
        DatasetError, match="nowhere is missing; make one with `titan-npu data prepare"
    ):
        PreparedDataset(tmp_path / "nowhere")
    with pytest.raises(DatasetError, match="is no prepared dataset"):
        PreparedDataset(tmp_path)

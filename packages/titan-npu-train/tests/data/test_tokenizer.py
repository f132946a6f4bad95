"""Tokenizers are exact on any text, keep boundaries, and load in torchtitan and transformers."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from titan_npu_train.data import (
    DocumentTokenizer,
    PreparedDataset,
    TokenizerError,
    VocabularyError,
    check_vocab,
    prepare,
)
from titan_npu_train.data.tokenizer import BOS, EOD, SMALLEST_VOCABULARY


@pytest.fixture(scope="module")
def tokenizer(dataset: Path) -> DocumentTokenizer:
    return DocumentTokenizer.load(dataset / "tokenizer")


@settings(max_examples=300, deadline=None)
@given(
    text=st.lists(st.text() | st.sampled_from([BOS, EOD, "  \r\n", "１２３4567", "a"])).map("".join)
)
def test_any_text_comes_back(tokenizer: DocumentTokenizer, text: str) -> None:
    [ids] = tokenizer.encode([text])
    assert tokenizer.decode(ids) == text
    # A boundary spelled out in the text is no boundary.
    assert ids[0] == tokenizer.bos_id
    assert ids[-1] == tokenizer.eod_id
    assert not {tokenizer.bos_id, tokenizer.eod_id} & set(ids[1:-1])


def test_digits_in_groups_of_three(tokenizer: DocumentTokenizer) -> None:
    vocabulary = tokenizer.backend.get_vocab()
    assert any(token.isdigit() and len(token) == 3 for token in vocabulary)
    assert not any(sum(c.isdigit() for c in token) > 3 for token in vocabulary)


def test_torchtitan_reads_it(dataset: Path, tokenizer: DocumentTokenizer) -> None:
    theirs = HuggingFaceTokenizer(tokenizer_path=str(dataset / "tokenizer"))
    assert (theirs.bos_id, theirs.eos_id) == (tokenizer.bos_id, tokenizer.eod_id)
    assert theirs.get_vocab_size() == tokenizer.vocab_size == 300
    [ids] = tokenizer.encode(["attention über"])
    assert theirs.encode("attention über", add_bos=True, add_eos=True) == ids


def test_transformers_reads_it(dataset: Path, tokenizer: DocumentTokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(dataset / "tokenizer")
    assert (theirs.bos_token_id, theirs.eos_token_id) == (tokenizer.bos_id, tokenizer.eod_id)
    text = "attention , über  稀疏 n't"
    [ids] = tokenizer.encode([text])
    assert theirs.decode(ids[1:-1]) == text


def test_given_tokenizer_is_carried_along(corpus: Path, dataset: Path, tmp_path: Path) -> None:
    prepare(corpus, tmp_path / "again", tokenizer=dataset / "tokenizer", heldout=0.1)
    ours, theirs = PreparedDataset(tmp_path / "again"), PreparedDataset(dataset)
    assert not ours.manifest.tokenizer.trained
    assert ours.manifest.options["vocab_size"] is None
    assert [file.sha256 for file in ours.manifest.tokenizer.files] == [
        file.sha256 for file in theirs.manifest.tokenizer.files
    ]
    assert ours.manifest.splits == theirs.manifest.splits


def test_given_tokenizer_without_bos(corpus: Path, dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(dataset / "tokenizer", folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["bos_token"]
    config["eos_token"] = {"content": EOD, "lstrip": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    prepare(corpus, tmp_path / "out", tokenizer=folder)
    prepared = PreparedDataset(tmp_path / "out")
    assert prepared.manifest.tokenizer.bos_id is None
    for document in prepared.split("train").documents():
        assert document[-1] == prepared.manifest.tokenizer.eod_id
        assert not {0, 1} & set(document[:-1].tolist())


@pytest.mark.parametrize("missing", ["tokenizer.json", "tokenizer_config.json"])
def test_incomplete_folder(dataset: Path, tmp_path: Path, missing: str) -> None:
    shutil.copytree(dataset / "tokenizer", tmp_path / "t")
    (tmp_path / "t" / missing).unlink()
    with pytest.raises(TokenizerError, match=f"no {missing} in tokenizer folder"):
        DocumentTokenizer.load(tmp_path / "t")


@pytest.mark.parametrize("broken", ["tokenizer.json", "tokenizer_config.json"])
def test_broken_file(dataset: Path, tmp_path: Path, broken: str) -> None:
    shutil.copytree(dataset / "tokenizer", tmp_path / "t")
    (tmp_path / "t" / broken).write_text("{")
    with pytest.raises(TokenizerError, match=f"{broken} cannot be read"):
        DocumentTokenizer.load(tmp_path / "t")


@pytest.mark.parametrize("config", [{}, {"eos_token": "<not in it>"}, {"eos_token": None}])
def test_no_end_of_document(dataset: Path, tmp_path: Path, config: dict[str, object]) -> None:
    shutil.copytree(dataset / "tokenizer", tmp_path / "t")
    (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match="eos_token"):
        DocumentTokenizer.load(tmp_path / "t")


def test_smallest_vocabulary_is_bytes_and_boundaries(corpus: Path, tmp_path: Path) -> None:
    prepare(corpus, tmp_path / "out", vocab_size=SMALLEST_VOCABULARY)
    assert PreparedDataset(tmp_path / "out").manifest.tokenizer.vocab_size == SMALLEST_VOCABULARY


def test_check_vocab(dataset: Path) -> None:
    manifest = PreparedDataset(dataset).manifest
    check_vocab(manifest, 300)
    check_vocab(manifest, 4096)
    with pytest.raises(VocabularyError, match=r"300 tokens.*vocab_size is 299.*--vocab-size 299"):
        check_vocab(manifest, 299)

"""Byte-level BPE tokenizers: trained here, or an existing folder in the Hugging Face layout."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from titan_npu_train.data.errors import TokenizerError

BOS, EOD = "<|bos|>", "<|eod|>"
SMALLEST_VOCABULARY = 256 + 2
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class DocumentTokenizer:
    """Turns a document into token ids with its boundaries: [BOS] text EOD.

    A tokenizer without a begin-of-sequence token gives text EOD, as torchtitan's loaders do.
    Special tokens spelled out inside a document stay plain text: only a boundary is a boundary.
    """

    backend: Tokenizer
    bos_id: int | None
    eod_id: int

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "DocumentTokenizer":
        """Reads `tokenizer.json` and, for the special tokens, `tokenizer_config.json`.

        Raises:
            TokenizerError: a file is missing or broken, or no `eos_token` is declared.
        """
        folder = Path(folder)
        for name in TOKENIZER_FILES[:2]:
            if not (folder / name).is_file():
                raise TokenizerError(
                    f"no {name} in tokenizer folder {folder}; give a folder in the Hugging Face "
                    "layout, or leave --tokenizer out to train one on the source"
                )
        try:
            backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(
                f"{folder / 'tokenizer.json'} cannot be read ({error}); restore the file"
            ) from error
        try:
            config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise TokenizerError(
                f"{folder / 'tokenizer_config.json'} cannot be read ({error}); restore the file"
            ) from error
        bos_id = _special_id(backend, config, "bos_token")
        eod_id = _special_id(backend, config, "eos_token")
        if eod_id is None:
            raise TokenizerError(
                f"the tokenizer in {folder} has no end-of-document token; name one of its tokens "
                'as "eos_token" in tokenizer_config.json'
            )
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        return cls(backend, bos_id, eod_id)

    @property
    def vocab_size(self) -> int:
        """Embedding rows a model needs: the highest token id plus one."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each document, boundaries included; uses every core."""
        begin = [] if self.bos_id is None else [self.bos_id]
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [[*begin, *encoding.ids, self.eod_id] for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; boundaries at the two ends are left out."""
        ids = list(ids)
        if ids and ids[0] == self.bos_id:
            ids = ids[1:]
        if ids and ids[-1] == self.eod_id:
            ids = ids[:-1]
        return self.backend.decode(ids, skip_special_tokens=False)


def vocabulary_hash(vocabulary: dict[str, int]) -> str:
    """Identifies a tokenizer by its tokens and their ids."""
    text = json.dumps(sorted(vocabulary.items(), key=lambda item: item[1]), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def train(texts: Iterator[str], folder: Path, *, vocab_size: int) -> None:
    """Trains a byte-level BPE tokenizer and writes it to `folder` in the Hugging Face layout.

    Every byte is in the vocabulary, so any text is encoded and decoded exactly. Digits are cut
    into groups of at most three, as the tokenizer of DeepSeek-V3 does, so that numbers do not
    fill the vocabulary. The vocabulary may end up smaller than asked for on a small corpus.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in (BOS, EOD)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def copy(source: Path, folder: Path) -> None:
    """Copies the files of an existing tokenizer that a dataset carries along."""
    folder.mkdir()
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _special_id(backend: Tokenizer, config: dict[str, Any], key: str) -> int | None:
    token = config.get(key)
    if isinstance(token, dict):
        token = token.get("content")
    return backend.token_to_id(token) if isinstance(token, str) else None

"""The torchtitan data loader over a prepared dataset.

S: sequence length, B: rows of a local batch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from titan_npu_train.data.dataset import (
    PreparedDataset,
    Split,
    TokenSplit,
    Verify,
    check_corpus_size,
)
from titan_npu_train.data.errors import DataError, DatasetError, TokenizerError
from titan_npu_train.data.stdlib import stdlib_corpus
from titan_npu_train.data.tokenizer import vocabulary_hash

# torch's cross entropy and torchtitan leave this label out. Not imported from torchtitan's loss
# module, which fixes the device type when it is imported; a test compares them.
IGNORE_INDEX = -100

DATASETS: dict[str, Callable[[], Path] | None] = {"stdlib": stdlib_corpus, "prepared": None}
"""Names for `--dataloader.dataset`, each with what makes its dataset directory when no
`--dataloader.dataset_path` is given (None: it must be given)."""


def dataset_directory(dataset: str, dataset_path: str | None = None) -> Path:
    """The directory of a dataset named on the command line, prepared first if need be.

    Raises:
        DataError: the name is unknown, or stands for no directory of its own.
    """
    if dataset not in DATASETS:
        raise DataError(f"unknown dataset {dataset!r}; choose one of: {', '.join(DATASETS)}")
    if dataset_path:
        return Path(dataset_path)
    make = DATASETS[dataset]
    if make is None:
        raise DataError(
            f"dataset {dataset!r} needs a directory; give --dataloader.dataset_path DIR, made with "
            "`titan-npu data prepare SOURCE --out DIR`"
        )
    return make()


class PackedRows:
    """A split as rows of exactly `seq_len` positions, each a pure function of its index.

    Documents follow one another and continue in the next row. With `document_mask` (torchtitan's
    treatment of boundaries): labels are the next token of the same document, EOD included, EOD is
    never an input, and positions restart at 0 with each document and with each row. Every label
    counts, none crosses a document. The last row is filled up with EOD at position 0, each a
    document of its own, and labels that the loss ignores.

    Without, documents are joined by EOD into plain causal text: positions run from 0 to S - 1 and
    labels cross boundaries.
    """

    def __init__(self, split: TokenSplit, *, seq_len: int, eod_id: int, document_mask: bool = True):
        if seq_len < 1:
            raise DataError(f"seq_len is {seq_len}; give a positive sequence length")
        self._split, self._seq_len, self._eod_id = split, seq_len, eod_id
        self._document_mask = document_mask

    def __len__(self) -> int:
        return self._split.info.rows(self._seq_len, document_mask=self._document_mask)

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Inputs, labels and positions of a row, int64 [S] each."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        start, stop = row * self._seq_len, (row + 1) * self._seq_len
        if self._document_mask:
            inputs, labels, positions = self._split.pairs(start, stop)
        else:
            tokens = self._split.tokens(start, stop + 1)
            inputs, labels, positions = tokens[:-1], tokens[1:], np.arange(len(tokens) - 1)
        missing = self._seq_len - len(inputs)
        if missing:
            inputs = np.pad(inputs, (0, missing), constant_values=self._eod_id)
            labels = np.pad(labels, (0, missing), constant_values=IGNORE_INDEX)
            positions = np.pad(positions, (0, missing))
        return inputs, labels, positions

    def ignored(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A row without a single label; completes the last batch of a finite pass."""
        return (
            np.full(self._seq_len, self._eod_id),
            np.full(self._seq_len, IGNORE_INDEX),
            np.zeros(self._seq_len, np.int64),
        )


class PackedTextDataLoader(BaseDataLoader):
    """Batches of packed rows, in a global order that no parallel layout changes.

    All ranks walk one sequence of rows, epoch after epoch, each epoch in an order drawn from
    (seed, epoch). The n-th batch of rank r out of R is rows n*R*B + r*B ... of it, so the R*B*G
    rows of an optimizer step with G gradient accumulation steps are the same for every R, B and G
    of the same product. The state is the number of rows all ranks have taken: a run resumes at a
    step's end, on any number of ranks.

    A finite pass takes every row once. Its last batch is completed by rows without labels, so that
    every rank takes the same number of batches; then iteration ends as with any data loader, which
    torchtitan's trainer reports as exhausted data.

    Yields ({"input": int64 [B, S], "positions": int64 [B, S]}, labels int64 [B, S]).

    Raises:
        DataError: the dataset is missing, damaged or too small, or `tokenizer` is not its own.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        dataset: str = "stdlib"
        """Name of a dataset: stdlib (Python's standard library), prepared (give dataset_path)."""

        dataset_path: str | None = None
        """Directory that `titan-npu data prepare` wrote; the named dataset's own by default."""

        split: Split = "train"
        """Documents to read: train, or heldout, which training never sees."""

        infinite: bool = True
        """Whether to go on with another epoch when all rows were taken."""

        shuffle: bool = True
        """Whether to draw a new order of the rows for each epoch."""

        seed: int = 0
        """Seed of the orders."""

        document_mask: bool = True
        """Whether documents in a row are kept apart; else they are one text joined by EOD."""

        verify: Verify = "auto"
        """Checksums to verify when opening: auto (splits up to 1 GiB), always, never."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        tokenizer: HuggingFaceTokenizer | None = None,
        **_: Any,  # e.g. snapshot_every_n_steps: the state here costs nothing to take
    ):
        if config.seed < 0:
            raise DataError(f"dataloader.seed is {config.seed}; give a seed >= 0")
        if local_batch_size < 1:
            raise DataError(
                f"local_batch_size is {local_batch_size}; give a positive number of rows"
            )
        path = dataset_directory(config.dataset, config.dataset_path)
        self.dataset = PreparedDataset(path, verify=config.verify)
        if tokenizer is not None:
            _check_tokenizer(self.dataset, tokenizer)
        split = self.dataset.split(config.split)
        self._global_rows = dp_world_size * local_batch_size
        self._rows = PackedRows(
            split,
            seq_len=seq_len,
            eod_id=self.dataset.manifest.tokenizer.eod_id,
            document_mask=config.document_mask,
        )
        if config.infinite:
            check_corpus_size(
                split.info,
                config.split,
                seq_len=seq_len,
                batch_rows=self._global_rows,
                document_mask=config.document_mask,
            )
        self._config = config
        self._first, self._last = dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size
        self._rows_taken = 0
        self._order: tuple[int, np.ndarray] | None = None
        # What the position in the global order means something for.
        self._identity = {
            "dataset": self.dataset.manifest.sha256,
            "split": config.split,
            "seq_len": seq_len,
            "shuffle": config.shuffle,
            "seed": config.seed,
            "document_mask": config.document_mask,
        }

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while self._config.infinite or self._rows_taken < len(self._rows):
            start = self._rows_taken
            rows = [self._row(start + offset) for offset in range(self._first, self._last)]
            inputs, labels, positions = (
                torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True)
            )
            self._rows_taken = start + self._global_rows
            yield {"input": inputs, "positions": positions}, labels
        self._rows_taken = 0  # the next pass starts over

    def state_dict(self) -> dict[str, Any]:
        """Equal on every rank at the end of a step; does not depend on the number of ranks."""
        return {"rows_taken": self._rows_taken, **self._identity}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues after the rows that were taken.

        Raises:
            DatasetError: the state belongs to another dataset or order.
        """
        if not state_dict:
            return
        differing = [key for key, ours in self._identity.items() if state_dict.get(key) != ours]
        if differing:
            raise DatasetError(
                "the checkpoint's place in the data belongs to another order of rows (differing: "
                f"{', '.join(differing)}); "
                "restore these settings, or start the data from its beginning with "
                "--checkpoint.exclude_from_loading dataloader"
            )
        self._rows_taken = state_dict["rows_taken"]

    def _row(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        epoch, place = divmod(index, len(self._rows))
        if epoch and not self._config.infinite:
            return self._rows.ignored()
        if not self._config.shuffle:
            return self._rows[place]
        if self._order is None or self._order[0] != epoch:
            # NumPy promises to keep RandomState's stream for ever; not so its Generators'.
            order = np.random.RandomState([self._config.seed, epoch]).permutation(len(self._rows))
            self._order = epoch, order
        return self._rows[int(self._order[1][place])]


def _check_tokenizer(dataset: PreparedDataset, tokenizer: HuggingFaceTokenizer) -> None:
    info = dataset.manifest.tokenizer
    # torchtitan may add special tokens of tokenizer_config.json behind the vocabulary.
    vocabulary = {
        token: index for token, index in tokenizer.get_vocab().items() if index < info.vocab_size
    }
    if vocabulary_hash(vocabulary) != info.vocabulary_sha256 or tokenizer.eos_id != info.eod_id:
        raise TokenizerError(
            f"the trainer's tokenizer ({tokenizer.get_vocab_size()} tokens) is not the one dataset "
            f"{dataset.path} was prepared with ({info.vocab_size} tokens); set --hf_assets_path "
            f"{dataset.tokenizer_path}"
        )

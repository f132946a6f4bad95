"""Real text for training: prepare a source once, then stream packed rows of it.

`prepare` turns files into a dataset directory, `stdlib_corpus` does so for the text every machine
has, `PackedTextDataLoader` feeds either to torchtitan's trainer.
"""

from typing import TYPE_CHECKING, Any

from titan_npu_train.data.dataset import (
    Manifest,
    PreparedDataset,
    TokenSplit,
    check_corpus_size,
    check_vocab,
)
from titan_npu_train.data.errors import (
    CorpusTooSmallError,
    DataError,
    DatasetError,
    OutputError,
    SourceError,
    TokenizerError,
    VocabularyError,
)
from titan_npu_train.data.prepare import PrepareSummary, Progress, prepare
from titan_npu_train.data.source import Source
from titan_npu_train.data.stdlib import stdlib_corpus, stdlib_source
from titan_npu_train.data.tokenizer import DocumentTokenizer

if TYPE_CHECKING:
    from titan_npu_train.data.loader import (
        DATASETS,
        PackedRows,
        PackedTextDataLoader,
        dataset_directory,
    )

_LOADER = ("DATASETS", "PackedRows", "PackedTextDataLoader", "dataset_directory")

__all__ = [
    "DATASETS",
    "CorpusTooSmallError",
    "DataError",
    "DatasetError",
    "DocumentTokenizer",
    "Manifest",
    "OutputError",
    "PackedRows",
    "PackedTextDataLoader",
    "PrepareSummary",
    "PreparedDataset",
    "Progress",
    "Source",
    "SourceError",
    "TokenSplit",
    "TokenizerError",
    "VocabularyError",
    "check_corpus_size",
    "check_vocab",
    "dataset_directory",
    "prepare",
    "stdlib_corpus",
    "stdlib_source",
]


def __getattr__(name: str) -> Any:
    # The loader imports torch and torchtitan: seconds that `titan-npu data prepare` can do without.
    if name in _LOADER:
        from titan_npu_train.data import loader

        return getattr(loader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

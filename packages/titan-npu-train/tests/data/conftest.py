"""Small made corpora and datasets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from made_corpus import made_text
from titan_npu_train.data import PreparedDataset, prepare


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 40 text files of different lengths, in two levels."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "deep" / "er").mkdir(parents=True)
    for seed in range(40):
        place = ("deep/er" if seed % 3 else ".") + f"/{seed}.txt"
        (folder / place).write_text(made_text(seed, 5 + seed * 7 % 90), "utf-8")
    return folder


@pytest.fixture(scope="session")
def dataset(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`corpus`, prepared with every tenth document held out. Not to be changed."""
    out = tmp_path_factory.mktemp("prepared") / "dataset"
    prepare(corpus, out, vocab_size=300, heldout=0.1)
    return out


@pytest.fixture
def write_dataset(tmp_path: Path) -> Callable[..., PreparedDataset]:
    """Prepares the files given as {place: content} (str or bytes) and opens the result."""

    def write(files: dict[str, str | bytes], **options: Any) -> PreparedDataset:
        for place, content in files.items():
            path = tmp_path / "source" / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        out = tmp_path / "out"
        prepare(tmp_path / "source", out, **{"vocab_size": 300} | options)
        return PreparedDataset(out, verify="always")

    return write

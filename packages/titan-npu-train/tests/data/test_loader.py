"""Batches: boundaries as torchtitan treats them, one global order for every layout, exact resume.

B: rows of a local batch, S: sequence length, R: ranks, G: gradient accumulation steps.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import tyro
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config.manager import custom_registry
from torchtitan.hf_datasets import DatasetConfig, text_datasets

from titan_npu_train.data import (
    DATASETS,
    CorpusTooSmallError,
    DataError,
    DatasetError,
    PackedTextDataLoader,
    PreparedDataset,
    TokenizerError,
    dataset_directory,
    prepare,
)
from titan_npu_train.data.loader import IGNORE_INDEX

S = 64
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


@pytest.fixture
def load(dataset: Path) -> Callable[..., PackedTextDataLoader]:
    """The loader of rank `rank` out of `ranks`."""

    def build(
        rank: int = 0, ranks: int = 1, rows: int = 1, seq_len: int = S, **config: Any
    ) -> PackedTextDataLoader:
        config = {"dataset": "prepared", "dataset_path": str(dataset)} | config
        return PackedTextDataLoader.Config(**config).build(
            dp_rank=rank,
            dp_world_size=ranks,
            tokenizer=HuggingFaceTokenizer(tokenizer_path=f"{config['dataset_path']}/tokenizer"),
            seq_len=seq_len,
            local_batch_size=rows,
            snapshot_every_n_steps=None,
        )

    return build


def flat(batches: list[Batch]) -> list[tuple[list[int], list[int], list[int]]]:
    """The rows of some batches in order: input, positions, labels."""
    return [
        (inputs["input"][b].tolist(), inputs["positions"][b].tolist(), labels[b].tolist())
        for inputs, labels in batches
        for b in range(len(labels))
    ]


def steps(loaders: list[PackedTextDataLoader], accumulation: int, count: int) -> list[list]:
    """The rows of each of `count` optimizer steps, all ranks together, sorted."""
    iterators = [iter(loader) for loader in loaders]
    return [
        sorted(flat([next(it) for _ in range(accumulation) for it in iterators]))
        for _ in range(count)
    ]


def test_batch_contract(load: Callable[..., PackedTextDataLoader]) -> None:
    inputs, labels = next(iter(load(rows=3)))
    assert set(inputs) == {"input", "positions"}
    for tensor in (*inputs.values(), labels):
        assert tensor.shape == (3, S)
        assert tensor.dtype == torch.int64


def test_ignored_labels_are_those_torchtitan_ignores() -> None:
    from torchtitan.components import loss

    assert loss.IGNORE_INDEX == IGNORE_INDEX


@pytest.mark.parametrize("seq_len", [16, 64, 257])
def test_rows_equal_the_stock_loaders(
    load: Callable[..., PackedTextDataLoader],
    dataset: Path,
    monkeypatch: pytest.MonkeyPatch,
    seq_len: int,
) -> None:
    """Every full row is what torchtitan's text loader packs out of the same documents."""
    prepared = PreparedDataset(dataset)
    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(prepared.tokenizer_path))
    texts = [tokenizer.decode(ids[1:-1].tolist()) for ids in prepared.split("train").documents()]
    monkeypatch.setitem(
        text_datasets.DATASETS,
        "made",
        DatasetConfig(
            path="made",
            loader=lambda _: datasets.Dataset.from_dict({"text": texts}),
            sample_processor=lambda sample: sample["text"],
        ),
    )
    stock = text_datasets.HuggingFaceTextDataset("made", None, tokenizer, seq_len)
    expected = flat([({k: v[None] for k, v in i.items()}, l[None]) for i, l in stock])
    ours = flat(list(load(seq_len=seq_len, shuffle=False, infinite=False)))
    assert len(expected) > 3
    assert ours[: len(expected)] == expected
    # The stock loader drops what is left of the last row; here it is filled up and kept.
    assert len(ours) == len(expected) + 1


def test_no_label_crosses_a_document(
    load: Callable[..., PackedTextDataLoader], dataset: Path
) -> None:
    prepared = PreparedDataset(dataset)
    eod = prepared.manifest.tokenizer.eod_id
    documents = {tuple(ids.tolist()) for ids in prepared.split("train").documents()}
    pairs = [
        (i, p, l)
        for row in flat(list(load(shuffle=False, infinite=False)))
        for i, p, l in zip(*row, strict=True)
        if l != IGNORE_INDEX
    ]
    seen, current = set(), []
    for i, p, l in pairs:
        assert not current or p == 0 or i == current[-1]
        current = [*current, l] if current else [i, l]
        if l == eod:
            seen.add(tuple(current))
            current = []
    assert seen == documents


def test_positions_stay_within_the_row(load: Callable[..., PackedTextDataLoader]) -> None:
    for inputs, labels in load(rows=2, infinite=False):
        positions = inputs["positions"]
        assert (positions <= torch.arange(S)).all()
        # Each place either follows the one before it or starts a document (or the padding).
        step = positions[:, 1:] - positions[:, :-1]
        assert ((step == 1) | (positions[:, 1:] == 0)).all()
        assert (positions[labels == IGNORE_INDEX] == 0).all()


def test_joined_documents(load: Callable[..., PackedTextDataLoader], dataset: Path) -> None:
    stream = np.concatenate(list(PreparedDataset(dataset).split("train").documents())).tolist()
    rows = flat(list(load(shuffle=False, infinite=False, document_mask=False)))
    assert [t for inputs, _, _ in rows for t in inputs][: len(stream) - 1] == stream[:-1]
    assert [t for _, _, labels in rows for t in labels if t != IGNORE_INDEX] == stream[1:]
    assert all(positions == list(range(S)) for _, positions, _ in rows[:-1])


LAYOUTS = [(1, 4, 1), (1, 2, 2), (1, 1, 4), (2, 2, 1), (2, 1, 2), (4, 1, 1)]


def test_global_batches_do_not_depend_on_the_layout(
    load: Callable[..., PackedTextDataLoader],
) -> None:
    rows = len(load()._rows)
    count = 2 * rows // 4 + 3  # into the third epoch, whose start is inside a batch
    assert rows % 4
    results = {
        (ranks, b, g): steps([load(r, ranks, b) for r in range(ranks)], g, count)
        for ranks, b, g in LAYOUTS
    }
    first = results[LAYOUTS[0]]
    assert len({str(batch) for batch in first}) == count
    for layout, batches in results.items():
        assert batches == first, layout


def test_each_epoch_has_every_row_in_an_order_of_its_own(
    load: Callable[..., PackedTextDataLoader],
) -> None:
    iterator, n = iter(load()), len(load()._rows)
    epochs = [flat([next(iterator) for _ in range(n)]) for _ in range(3)]
    natural = flat(list(load(shuffle=False, infinite=False)))
    assert all(sorted(epoch) == sorted(natural) for epoch in epochs)
    assert len({str(order) for order in [natural, *epochs]}) == 4


def test_seed(load: Callable[..., PackedTextDataLoader]) -> None:
    first = [flat(list(load(infinite=False, seed=seed))) for seed in (0, 0, 1)]
    assert first[0] == first[1]
    assert first[0] != first[2]
    assert sorted(first[0]) == sorted(first[2])


def test_the_order_is_the_same_for_ever(load: Callable[..., PackedTextDataLoader]) -> None:
    """A changed order would silently change what resumed runs train on."""
    iterator = iter(load(seed=7))
    natural = flat(list(load(shuffle=False, infinite=False)))
    drawn = np.random.RandomState([7, 0]).permutation(len(natural))
    assert flat([next(iterator) for _ in natural]) == [natural[row] for row in drawn]
    assert np.random.RandomState([7, 0]).permutation(8).tolist() == [1, 7, 5, 6, 4, 3, 2, 0]


@pytest.mark.parametrize("before", [(1, 4, 1), (2, 1, 2)])
@pytest.mark.parametrize("after", [(1, 4, 1), (1, 1, 4), (2, 2, 1)])
@pytest.mark.parametrize("taken", [0, 1, 5, 40])
def test_resume_on_another_layout(
    load: Callable[..., PackedTextDataLoader],
    before: tuple[int, int, int],
    after: tuple[int, int, int],
    taken: int,
) -> None:
    uninterrupted = steps([load(rows=4)], 1, taken + 3)
    loaders = [load(rank, before[0], before[1]) for rank in range(before[0])]
    steps(loaders, before[2], taken)
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    resumed = [load(rank, after[0], after[1]) for rank in range(after[0])]
    for loader in resumed:
        loader.load_state_dict(states[0])
    assert steps(resumed, after[2], 3) == uninterrupted[taken:]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_state_survives_a_checkpoint(
    load: Callable[..., PackedTextDataLoader], tmp_path: Path
) -> None:
    loader = load(rows=2)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    dcp.save({"dataloader": loader}, checkpoint_id=str(tmp_path), no_dist=True)
    expected = flat([next(iterator)])
    resumed = load(rows=2)
    dcp.load({"dataloader": resumed}, checkpoint_id=str(tmp_path), no_dist=True)
    assert resumed.state_dict()["rows_taken"] == 6
    assert flat([next(iter(resumed))]) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"seq_len": 32},
        {"seed": 1},
        {"shuffle": False},
        {"split": "heldout"},
        {"document_mask": False},
    ],
)
def test_state_of_another_order_is_refused(
    load: Callable[..., PackedTextDataLoader], change: dict[str, Any]
) -> None:
    state = load(**change).state_dict()
    with pytest.raises(
        DatasetError, match=rf"differing: {next(iter(change))}\).*exclude_from_loading"
    ):
        load().load_state_dict(state)


def test_state_of_another_dataset_is_refused(
    load: Callable[..., PackedTextDataLoader], corpus: Path, tmp_path: Path
) -> None:
    prepare(corpus, tmp_path / "other", vocab_size=299)
    other = load(dataset_path=str(tmp_path / "other")).state_dict()
    with pytest.raises(DatasetError, match=r"differing: dataset\)"):
        load().load_state_dict(other)
    load().load_state_dict({})  # a checkpoint without data


@pytest.mark.parametrize(("ranks", "rows"), [(1, 1), (1, 5), (2, 1), (4, 3)])
def test_finite_pass_takes_everything_once(
    load: Callable[..., PackedTextDataLoader], dataset: Path, ranks: int, rows: int
) -> None:
    loaders = [
        load(r, ranks, rows, split="heldout", infinite=False, shuffle=False) for r in range(ranks)
    ]
    batches = [list(loader) for loader in loaders]
    assert len({len(b) for b in batches}) == 1  # ranks that differ in steps hang each other
    labels = sum((l != IGNORE_INDEX).sum().item() for b in batches for _, l in b)
    info = PreparedDataset(dataset).manifest.splits["heldout"]
    assert labels == info.tokens - info.documents
    # A second pass is the same again.
    assert [flat(list(loader)) for loader in loaders] == [flat(b) for b in batches]


def test_finished_pass_stays_finished_after_resume(
    load: Callable[..., PackedTextDataLoader],
) -> None:
    loader = load(infinite=False)
    iterator = iter(loader)
    for _ in range(len(loader._rows)):
        next(iterator)
    resumed = load(infinite=False)
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == []


def test_trainer_sees_exhausted_data(load: Callable[..., PackedTextDataLoader]) -> None:
    """torchtitan's batch generator turns the end of iteration into its own error."""

    def generator(loader: PackedTextDataLoader) -> Any:
        iterator = iter(loader)
        while True:
            try:
                yield next(iterator)
            except StopIteration as end:
                raise DataloaderExhaustedError from end

    with pytest.raises(DataloaderExhaustedError):
        list(generator(load(infinite=False)))


def test_too_small_for_a_batch(load: Callable[..., PackedTextDataLoader], dataset: Path) -> None:
    tokens = PreparedDataset(dataset).manifest.splits["heldout"].tokens
    with pytest.raises(
        CorpusTooSmallError,
        match=rf"split 'heldout' has {tokens} tokens, 1 rows of sequence length 4096.*takes 6 rows",
    ):
        load(0, 2, 3, seq_len=4096, split="heldout")
    assert len(list(load(0, 2, 3, seq_len=4096, split="heldout", infinite=False))) == 1


def test_foreign_tokenizer(
    load: Callable[..., PackedTextDataLoader], dataset: Path, corpus: Path, tmp_path: Path
) -> None:
    prepare(corpus, tmp_path / "other", vocab_size=299)
    config = PackedTextDataLoader.Config(dataset="prepared", dataset_path=str(dataset))
    with pytest.raises(TokenizerError, match=r"299 tokens.*300 tokens.*--hf_assets_path"):
        config.build(
            dp_rank=0,
            dp_world_size=1,
            tokenizer=HuggingFaceTokenizer(tokenizer_path=str(tmp_path / "other" / "tokenizer")),
            seq_len=S,
            local_batch_size=1,
        )


def test_command_line(dataset: Path) -> None:
    options = f"--dataset prepared --dataset-path {dataset} --split heldout --no-infinite --seed 3"
    config = tyro.cli(PackedTextDataLoader.Config, args=options.split(), registry=custom_registry)
    assert config == PackedTextDataLoader.Config(
        dataset="prepared", dataset_path=str(dataset), split="heldout", infinite=False, seed=3
    )


def test_dataset_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="unknown dataset 'c4'; choose one of: stdlib, prepared"):
        dataset_directory("c4")
    with pytest.raises(DataError, match="'prepared' needs a directory"):
        dataset_directory("prepared")
    monkeypatch.setitem(DATASETS, "stdlib", lambda: tmp_path)
    assert dataset_directory("stdlib") == tmp_path
    assert dataset_directory("stdlib", "/elsewhere") == Path("/elsewhere")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"seq_len": 0}, "seq_len is 0"),
        ({"rows": 0}, "batch_size is 0"),
    ],
)
def test_bad_options(
    load: Callable[..., PackedTextDataLoader], change: dict[str, int], match: str
) -> None:
    with pytest.raises(DataError, match=match):
        load(**change)

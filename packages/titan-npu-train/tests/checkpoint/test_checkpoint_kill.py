"""Killed anywhere, a run resumes from its newest complete checkpoint and repeats the numbers."""

import multiprocessing
import shutil
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from titan_npu_train.checkpoint import Checkpoint
from titan_npu_train.checkpoint.folder import list_folder
from toy_training import STEPS, Toy, before_each_file_operation, read_log, run

SIGKILLED = -9
# a save after every step; from step 3 on each save purges too
OPTIONS = {"interval": 1, "keep_latest_k": 2}


def copy_tree(source: Path, target: Path) -> None:
    """Copy what is there now; what a purge removes meanwhile is left out."""
    target.mkdir(parents=True)
    for entry in sorted(source.iterdir()):
        with suppress(FileNotFoundError):
            if entry.is_dir():
                copy_tree(entry, target / entry.name)
            else:
                shutil.copyfile(entry, target / entry.name)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_killed_at_every_file_operation(tmp_path: Path, mode: str) -> None:
    """A copy of the folder right before an operation is what a kill there would leave."""
    options = {**OPTIONS, "async_mode": mode}
    folder = tmp_path / "run"
    (folder / "checkpoint").mkdir(parents=True)
    snapshots: list[tuple[Path, int]] = []
    complete = 0

    def snapshot() -> None:
        copy = tmp_path / f"killed-{len(snapshots)}"
        copy_tree(folder, copy)
        snapshots.append((copy, complete))

    def saved(step: int) -> None:
        nonlocal complete
        # an async save has returned, but only the one before is known to be complete
        complete = step if mode == "disabled" else step - 1

    before_each_file_operation(folder, snapshot)
    reference = Toy(folder, options).train(saved=saved)
    before_each_file_operation(folder, None)

    resumed_from = []
    for copy, complete_then in snapshots:
        toy = Toy(copy, {"interval": 100, "async_mode": mode})
        losses = toy.train()
        start = min(losses, default=STEPS + 1) - 1
        assert losses == {step: loss for step, loss in reference.items() if step > start}, copy
        assert start >= complete_then, f"{copy}: an older checkpoint than the newest complete one"
        listing = list_folder(copy / "checkpoint")
        assert all(Checkpoint.open(path).damage() is None for path in listing.steps.values())
        assert not listing.incomplete, f"{copy}: leftovers were not removed"
        resumed_from.append(start)
    assert sorted(set(resumed_from)) == list(range(STEPS + 1))
    # per save: directory, data, metadata, manifest, rename
    assert len(snapshots) >= 5 * STEPS
    left = list_folder(folder / "checkpoint")
    assert list(left.steps) == [STEPS - 1, STEPS]
    assert not left.discarded


@pytest.mark.usefixtures("one_rank")
def test_killed_while_replacing_a_checkpoint(tmp_path: Path) -> None:
    """Going back to step 2 writes step 3 anew: the old or the new one is there at any moment."""
    folder = tmp_path / "run"
    reference = Toy(folder, OPTIONS | {"keep_latest_k": 0}).train(steps=4)
    snapshots = []

    def snapshot() -> None:
        copy = tmp_path / f"killed-{len(snapshots)}"
        copy_tree(folder, copy)
        snapshots.append(copy)

    toy = Toy(folder, OPTIONS | {"keep_latest_k": 0})
    before_each_file_operation(folder, snapshot)
    again = toy.train(load_step=2, steps=4)
    before_each_file_operation(folder, None)
    assert again == {step: reference[step] for step in (3, 4)}
    assert any(not (copy / "checkpoint" / "step-3").exists() for copy in snapshots)
    for copy in snapshots:
        # the abandoned branch's step 4, or its replacement, is complete at any moment
        Toy(copy, {"interval": 100}).checkpointer.load()
        for step in (1, 2, 3, 4):
            assert Checkpoint.open(copy / "checkpoint" / f"step-{step}").damage() is None


processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    [
        "titan_npu_train.checkpoint",
        "torch.distributed.fsdp",
        "torchtitan.components.dataloader",
        "torchtitan.components.optimizer",
    ]
)


def start(folder: Path, log: Path, options: dict[str, Any], **kill: int) -> list[BaseProcess]:
    log.parent.mkdir(parents=True, exist_ok=True)
    ranks = [
        processes.Process(
            target=run, args=(folder, log, options), kwargs={"rank": rank, "ranks": 2, **kill}
        )
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    return ranks


def finish(ranks: list[BaseProcess], *, first: int | None = None) -> list[int | None]:
    """Exit codes. Once rank ``first`` is dead the other is killed, as torchrun would."""
    if first is not None:
        ranks[first].join(120)
        for rank in ranks:
            rank.kill()
    for rank in ranks:
        rank.join(120)
        if rank.exitcode is None:
            rank.kill()
            pytest.fail("a rank hung")
    return [rank.exitcode for rank in ranks]


def train(folder: Path, log: Path, options: dict[str, Any]) -> list[dict[int, str]]:
    assert finish(start(folder, log, options)) == [0, 0]
    return [read_log(log, rank)[1] for rank in range(2)]


@pytest.fixture(scope="module")
def reference_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reference")


@pytest.fixture(scope="module")
def reference(reference_folder: Path) -> list[dict[int, str]]:
    """Losses of both ranks of an uninterrupted run in ``reference_folder``."""
    losses = train(reference_folder / "run", reference_folder / "log", OPTIONS)
    assert losses[0] != losses[1], "ranks see different data"
    return losses


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("mode", "killed_rank", "operation"),
    [("disabled", 0, 4), ("disabled", 1, 2), ("async", 0, 5), ("async", 1, 1)],
)
def test_one_of_two_ranks_killed(
    tmp_path: Path, reference: list[dict[int, str]], mode: str, killed_rank: int, operation: int
) -> None:
    options = {**OPTIONS, "async_mode": mode}
    kill = {"kill_at": operation, "kill_after_step": 2, "killed_rank": killed_rank}
    exit_codes = finish(
        start(tmp_path / "run", tmp_path / "killed", options, **kill), first=killed_rank
    )
    assert exit_codes[killed_rank] == SIGKILLED
    losses = train(tmp_path / "run", tmp_path / "resumed", options)
    resumed_from = min(losses[0]) - 1
    assert 1 <= resumed_from < STEPS
    assert losses == [
        {step: loss for step, loss in full.items() if step > resumed_from} for full in reference
    ]


@pytest.mark.distributed
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_agree_on_a_damaged_file(
    tmp_path: Path, reference: list[dict[int, str]], reference_folder: Path, rank: int
) -> None:
    """Each rank reads half of the files; what one finds, both act on."""
    shutil.copytree(reference_folder / "run", tmp_path / "run")
    data = tmp_path / "run" / "checkpoint" / f"step-{STEPS}" / f"__{rank}_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    losses = train(tmp_path / "run", tmp_path / "resumed", OPTIONS)
    assert losses == [{STEPS: full[STEPS]} for full in reference]

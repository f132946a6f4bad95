"""kill -9 in training and in checkpoint writes: the resumed run repeats the uninterrupted one.

Bit for bit: language-model loss, every layer's indexer loss, gradient norm, learning rate.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from titan_npu_train.checkpoint import Checkpoint
from titan_npu_train.checkpoint.folder import list_folder
from titan_npu_train.data import prepare

pytestmark = pytest.mark.distributed

STEPS = 5
INTERVAL = 2
COMPARED = ("loss", "indexer_loss", "indexer_loss_layers", "grad_norm", "lr", "tokens_seen")
DEADLINE = 300  # seconds, for anything that should take a fraction of it
RUN = ["-m", "titan_npu_train.train"]
KILLED_RUN = str(Path(__file__).with_name("killed_run.py"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset of short documents."""
    root = tmp_path_factory.mktemp("kill")
    (root / "text").mkdir()
    generator = torch.Generator().manual_seed(0)
    words = ["gather", "scatter", "reduce", "mask", "key", "query", "top", "sum", "(", ")", ":"]
    for i in range(60):
        size = int(torch.randint(20, 90, (), generator=generator))
        picks = torch.randint(0, len(words), (size,), generator=generator)
        (root / "text" / f"{i}.txt").write_text(
            " ".join(words[p] + str(int(p) * i % 7) for p in picks)
        )
    prepare(root / "text", root / "data", vocab_size=300)
    return root


def start(
    root: Path, folder: Path, *options: str, program: list[str] = RUN, seed: int = 0
) -> subprocess.Popen:
    """Two ranks, FSDP2 and expert parallel, the launcher in a process group of its own."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *program,
        *("--module", "titan_npu_train.deepseek_v32", "--config", "deepseek_v32_debugmodel"),
        *("--training.seq_len", "64", "--training.steps", str(STEPS), "--dsa.topk", "16"),
        *("--training.local_batch_size", "2", "--parallelism.expert_parallel_degree", "2"),
        *("--dataloader.dataset", "prepared"),
        *("--dataloader.dataset_path", str(root / "data")),
        *("--hf_assets_path", str(root / "data" / "tokenizer")),
        *("--checkpoint.enable", "--checkpoint.interval", str(INTERVAL)),
        *("--dump_folder", str(folder), "--debug.seed", str(seed), *options),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    log = (folder / "log.txt").open("a")
    return subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(launcher: subprocess.Popen) -> int:
    try:
        return launcher.wait(DEADLINE)
    except subprocess.TimeoutExpired:
        for rank in ranks_of(launcher):
            os.kill(rank, signal.SIGABRT)  # faulthandler writes where each of its threads is
        time.sleep(5)
        raise
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)


def train(root: Path, folder: Path, *options: str, seed: int = 0) -> None:
    launcher = start(root, folder, *options, seed=seed)
    try:
        code = finish(launcher)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the run hung:\n{(folder / 'log.txt').read_text()[-8000:]}")
    assert code == 0, (folder / "log.txt").read_text()[-4000:]


def metrics(folder: Path) -> dict[int, dict]:
    """The last record of each step, without times."""
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {record["step"]: {key: record[key] for key in COMPARED} for record in records}


def wait_until(condition: Callable[[], bool], launcher: subprocess.Popen) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert launcher.poll() is None, "the run ended by itself"
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


def ranks_of(launcher: subprocess.Popen) -> list[int]:
    # Not ps: a slim image has none.
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


@pytest.fixture(scope="module")
def reference(root: Path) -> dict[int, dict]:
    train(root, root / "reference")
    records = metrics(root / "reference")
    assert list(records) == list(range(1, STEPS + 1))
    assert records[1]["loss"] != records[STEPS]["loss"]
    assert all(record["indexer_loss"] is not None for record in records.values())
    return records


def assert_resumes(root: Path, folder: Path, reference: dict[int, dict], *options: str) -> str:
    """Start the killed run in ``folder`` again; returns what it printed."""
    before = (folder / "metrics.jsonl").read_bytes()
    size = (folder / "log.txt").stat().st_size
    newest = max(list_folder(folder / "checkpoint").steps)
    train(root, folder, *options, seed=1)  # weights and generators come from the checkpoint
    printed = (folder / "log.txt").read_text()[size:]
    again = [
        json.loads(line)["step"]
        for line in (folder / "metrics.jsonl").read_bytes()[len(before) :].splitlines()
    ]
    assert again == list(range(newest + 1, STEPS + 1)), "it did not resume from the newest"
    assert metrics(folder) == reference
    listing = list_folder(folder / "checkpoint")
    assert not listing.incomplete
    for path in listing.steps.values():
        assert Checkpoint.open(path).damage() is None
    return printed


def test_rank_killed_in_training(root: Path, reference: dict[int, dict]) -> None:
    folder = root / "training"
    launcher = start(root, folder, "--checkpoint.async_mode", "async")
    wait_until(lambda: 3 in metrics(folder), launcher)
    os.kill(ranks_of(launcher)[1], signal.SIGKILL)
    assert finish(launcher) != 0
    assert metrics(folder).items() <= reference.items()
    assert_resumes(root, folder, reference, "--checkpoint.async_mode", "async")


@pytest.mark.parametrize(
    ("mode", "file"),
    [("disabled", ".incomplete-4-*/__1_0.distcp"), ("async", ".incomplete-4-*/manifest.json")],
)
def test_rank_killed_in_a_checkpoint_write(
    root: Path, reference: dict[int, dict], mode: str, file: str
) -> None:
    options = ["--checkpoint.async_mode", mode]
    folder = root / f"writing-{mode}"
    launcher = start(root, folder, *options, program=[KILLED_RUN, file])
    assert finish(launcher) != 0
    listing = list_folder(folder / "checkpoint")
    assert list(listing.steps) == [2]
    # where rank 0 outlives its neighbour, it removes what cannot be finished if it has the time
    assert len(listing.incomplete) == 1 or (mode == "disabled" and not listing.incomplete)
    printed = assert_resumes(root, folder, reference, *options)
    for _, half_written in listing.incomplete:
        assert f"{half_written}: half-written checkpoint of step 4" in printed


def test_damaged_newest_checkpoint(root: Path, reference: dict[int, dict]) -> None:
    folder = root / "damaged"
    shutil.copytree(root / "reference", folder)
    damaged = folder / "checkpoint" / f"step-{STEPS}"
    data = damaged / "__1_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)

    refused = start(root, folder, "--checkpoint.load_step", str(STEPS))
    assert finish(refused) != 0
    train(root, folder)
    printed = (folder / "log.txt").read_text()
    assert f"{damaged}: checksum mismatch in __1_0.distcp. Refusing" in printed
    assert f"{damaged}: checksum mismatch in __1_0.distcp; skipped" in printed
    assert metrics(folder) == reference
    assert (folder / "metrics.jsonl").read_text().count("\n") == STEPS + 1, "resumed from step 4"
    assert Checkpoint.open(damaged).damage() is None

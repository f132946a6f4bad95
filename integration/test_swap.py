"""Runs with their optimizer swapped to disk: the same losses bit for bit, resumed either way."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from titan_npu_train.data import prepare

pytestmark = pytest.mark.distributed

STEPS, INTERVAL = 6, 3
COMPARED = ("loss", "indexer_loss", "indexer_loss_layers", "grad_norm", "lr", "tokens_seen")
SWAP = ("--optimizer.swap.storage", "disk", "--optimizer.swap.slices", "5")
PIPELINE = (
    *("--parallelism.pipeline_parallel_degree", "2"),
    *("--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"),
    *("--parallelism.expert_parallel_degree", "1", "--training.local_batch_size", "4"),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("swap")
    (root / "text").mkdir()
    generator = torch.Generator().manual_seed(0)
    words = ["gather", "scatter", "reduce", "mask", "key", "query", "top", "sum", "(", ")", ":"]
    for i in range(60):
        picks = torch.randint(0, len(words), (60,), generator=generator)
        text = " ".join(words[p] + str(int(p) * i % 7) for p in picks)
        (root / "text" / f"{i}.txt").write_text(text)
    prepare(root / "text", root / "data", vocab_size=300)
    return root


def train(root: Path, folder: Path, *options: str) -> str:
    """Two ranks, FSDP2 and expert parallel unless ``options`` say otherwise; what they printed."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "titan_npu_train.train", "--module", "titan_npu_train.deepseek_v32"),
        *("--config", "deepseek_v32_debugmodel", "--parallelism.expert_parallel_degree", "2"),
        *("--training.seq_len", "64", "--training.steps", str(STEPS), "--dsa.topk", "16"),
        *("--training.local_batch_size", "2", "--dataloader.dataset", "prepared"),
        *("--dataloader.dataset_path", str(root / "data")),
        *("--hf_assets_path", str(root / "data" / "tokenizer"), "--debug.seed", "0"),
        *("--checkpoint.enable", "--checkpoint.interval", str(INTERVAL)),
        *("--dump_folder", str(folder), *options),
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def metrics(folder: Path) -> dict[int, dict]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: {name: r[name] for name in COMPARED} for r in records}


def resumed_from(root: Path, other: Path, *options: str) -> dict[int, dict]:
    """Goes on from the first checkpoint of ``other``, in a folder of its own."""
    folder = other.with_name(other.name + "-resumed")
    name = f"step-{INTERVAL}"
    shutil.copytree(other / "checkpoint" / name, folder / "checkpoint" / name)
    train(root, folder, *options)
    return metrics(folder)


def test_swapped_runs_equal_plain_ones_and_resume_each_other(root):
    plain, swapped = root / "plain", root / "swapped"
    train(root, plain)
    said = train(root, swapped, *SWAP)
    assert re.search(r"\[titan\].*SwapOptimizer.*disk.*5 slices", said)
    expected = metrics(plain)
    assert sorted(expected) == list(range(1, STEPS + 1))
    assert metrics(swapped) == expected
    later = {step: record for step, record in expected.items() if step > INTERVAL}
    assert resumed_from(root, plain, *SWAP) == later
    assert resumed_from(root, swapped) == later
    # Neither a swap file nor its folder outlives a run.
    assert not [path for path in root.rglob("*") if "swap" in path.name and path.is_file()]
    assert not (swapped / "swap").exists()


def test_pipeline_stages_have_optimizers_of_their_own(root):
    plain, swapped = root / "pp", root / "pp-swapped"
    train(root, plain, *PIPELINE, "--training.steps", "3")
    train(root, swapped, *PIPELINE, *SWAP, "--training.steps", "3")
    assert metrics(swapped) == metrics(plain)

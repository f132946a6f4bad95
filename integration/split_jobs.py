"""Start ranks that run comparison jobs (see split_run.py), and keep what they computed."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import torch

from titan_npu_train.data import prepare

STEPS = 3
DEBUGMODEL = "deepseek_v32_debugmodel"
MTP = DEBUGMODEL + "_mtp"
# Weights with which no selection of these steps is decided by less than SMALLEST_GAP.
SEEDS = {DEBUGMODEL: 12, MTP: 13}
SMALLEST_GAP = 1e-5
OPTIONS = [
    *("--training.seq_len", "64"),
    *("--training.global_batch_size", "4"),
    *("--training.steps", str(STEPS)),
    *("--training.max_norm", "1e9"),
    # A small learning rate: Adam's first step turns the sign of a gradient's rounding error into
    # a whole step, and the second step would compare that.
    *("--lr_scheduler.warmup_steps", "1000", "--lr_scheduler.total_steps", "2000"),
    *("--dsa.topk", "16"),
    *("--dataloader.dataset", "prepared"),
]


def make_workspace(root: Path) -> Path:
    """A folder with a dataset and a seed checkpoint of each model."""
    source = root / "text"
    source.mkdir()
    generator = torch.Generator().manual_seed(0)
    words = ["gather", "scatter", "reduce", "mask", "key", "query", "top", "sum", "(", ")", ":"]
    for i in range(60):
        size = int(torch.randint(20, 90, (), generator=generator))
        picks = torch.randint(0, len(words), (size,), generator=generator)
        (source / f"{i}.txt").write_text(" ".join(words[p] + str(int(p) * i % 7) for p in picks))
    prepare(source, root / "data", vocab_size=300)
    launch(root, 1, [seed_job(root, DEBUGMODEL), seed_job(root, MTP)])
    return root


def seed_job(root: Path, config: str) -> dict:
    extra = ["--checkpoint.create_seed_checkpoint", "--checkpoint.enable"]
    folder = ["--dump_folder", str(root / f"seed-{config}")]
    return {
        "mode": "seed",
        "seed": SEEDS[config],
        "out": "",
        "options": [*options(root, config), *extra, *folder],
    }


def train_job(root: Path, name: str, config: str, extra: list[str]) -> dict:
    """Train from the seed checkpoint; the record goes to NAME.pt."""
    seed = root / f"seed-{config}" / "checkpoint" / "step-0"
    load = ["--checkpoint.enable", "--checkpoint.load_only", "--checkpoint.initial_load_path"]
    folder = ["--dump_folder", str(root / name)]
    return {
        "mode": "train",
        "out": str(root / f"{name}.pt"),
        "options": [*options(root, config), *load, str(seed), *folder, *extra],
    }


def options(root: Path, config: str) -> list[str]:
    return [
        *("--config", config),
        *OPTIONS,
        *("--dataloader.dataset_path", str(root / "data")),
        *("--hf_assets_path", str(root / "data" / "tokenizer")),
    ]


def launch(root: Path, nproc: int, jobs: list[dict]) -> None:
    """Run jobs on ``nproc`` ranks, one after the other; the first failing one ends them all."""
    for job, port in zip(jobs, free_ports(len(jobs)), strict=True):
        job["port"] = port
    path = root / f"jobs-{nproc}.json"
    path.write_text(json.dumps(jobs))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(nproc)),
        *(str(Path(__file__).with_name("split_run.py")), str(path)),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    limit = 240 + 60 * nproc * len(jobs)
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=limit, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on, below those the system gives to connections (Linux: 32768 on)."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(10000, 32768)))
            found.append(probe.getsockname()[1])
    return found


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference, relative to the wanted one's norm."""
    norm = wanted.double().norm()
    return ((got.double() - wanted.double()).norm() / norm).item() if norm else got.norm().item()


def rows(local_batch_size: int) -> list[str]:
    return ["--training.local_batch_size", str(local_batch_size)]

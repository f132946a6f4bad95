"""The same global batch, however it is split: same losses, same gradients, every parameter.

All runs start from one seed checkpoint and read the same rows. Indexer gradients are compared
first: an equal LM loss says nothing about them. top-k is a quarter of the sequence.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from titan_npu_train.data import prepare

pytestmark = pytest.mark.distributed

LIMIT = 1e-5
STEPS = 2
# Weights and rows for which no selection is decided by less than SMALLEST_GAP.
SEED = 4
SMALLEST_GAP = 1e-5
DEBUGMODEL = "deepseek_v32_debugmodel"
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


@pytest.fixture(scope="session")
def workspace(tmp_path_factory) -> Path:
    """A folder with a dataset and a seed checkpoint."""
    root = tmp_path_factory.mktemp("split")
    source = root / "text"
    source.mkdir()
    generator = torch.Generator().manual_seed(0)
    words = ["gather", "scatter", "reduce", "mask", "key", "query", "top", "sum", "(", ")", ":"]
    for i in range(60):
        size = int(torch.randint(20, 90, (), generator=generator))
        picks = torch.randint(0, len(words), (size,), generator=generator)
        (source / f"{i}.txt").write_text(" ".join(words[p] + str(int(p) * i % 7) for p in picks))
    prepare(source, root / "data", vocab_size=300)
    write_seed(root, DEBUGMODEL)
    return root


def write_seed(root: Path, config: str) -> None:
    launch(
        1,
        [
            *("seed", str(SEED)),
            *options(root, config),
            *("--checkpoint.create_seed_checkpoint", "--checkpoint.enable"),
            *("--dump_folder", str(root / f"seed-{config}")),
        ],
    )


def options(root: Path, config: str) -> list[str]:
    return [
        *("--config", config),
        *OPTIONS,
        *("--dataloader.dataset_path", str(root / "data")),
        *("--hf_assets_path", str(root / "data" / "tokenizer")),
    ]


def launch(nproc: int, arguments: list[str]) -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(nproc)),
        str(Path(__file__).with_name("split_run.py")),
        *arguments,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def run(root: Path, name: str, nproc: int, *extra: str, config: str = DEBUGMODEL) -> dict:
    seed = root / f"seed-{config}" / "checkpoint" / "step-0"
    out = root / f"{name}.pt"
    launch(
        nproc,
        [
            *("train", str(out)),
            *options(root, config),
            *("--checkpoint.enable", "--checkpoint.load_only"),
            *("--checkpoint.initial_load_path", str(seed)),
            *("--dump_folder", str(root / name)),
            *extra,
        ],
    )
    return torch.load(out)


@pytest.fixture(scope="module")
def expected(workspace) -> dict:
    """One process, the whole batch at once."""
    return clear(run(workspace, "one", 1, *rows(4)))


@pytest.fixture(scope="module")
def expected_mtp(workspace) -> dict:
    """The same of the model with an MTP layer."""
    write_seed(workspace, DEBUGMODEL + "_mtp")
    return clear(run(workspace, "one-mtp", 1, *rows(4), config=DEBUGMODEL + "_mtp"))


def clear(record: dict) -> dict:
    gap = min(record["smallest_gap"])
    assert gap > SMALLEST_GAP, f"smallest score gap {gap:.2e}: take another SEED"
    return record


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    norm = wanted.double().norm()
    return ((got.double() - wanted.double()).norm() / norm).item() if norm else got.norm().item()


FSDP2 = ["--parallelism.data_parallel_shard_degree", "2"]
EP2 = ["--parallelism.expert_parallel_degree", "2"]
HSDP = [
    *("--parallelism.data_parallel_replicate_degree", "2"),
    *("--parallelism.data_parallel_shard_degree", "1"),
]


def rows(local_batch_size: int) -> list[str]:
    return ["--training.local_batch_size", str(local_batch_size)]


@pytest.mark.parametrize(
    ("nproc", "extra"),
    [
        pytest.param(1, rows(2), id="accumulation-2"),
        pytest.param(1, rows(1), id="accumulation-4"),
        pytest.param(1, [*rows(4), "activation_checkpoint:selective"], id="ac-selective"),
        pytest.param(1, [*rows(4), "activation_checkpoint:full"], id="ac-full"),
        pytest.param(2, [*rows(2), *FSDP2], id="fsdp-2"),
        pytest.param(2, [*rows(2), *EP2], id="ep-2"),
        pytest.param(2, [*rows(2), *HSDP], id="hsdp-2x1"),
        pytest.param(
            2, [*rows(1), *EP2, "activation_checkpoint:full"], id="ep-2-accumulation-2-ac-full"
        ),
        pytest.param(
            1, [*rows(4), "--compile.enable", "--compile.backend", "aot_eager"], id="compiled"
        ),
    ],
)
def test_same_as_one_process(workspace, expected, request, nproc, extra):
    assert_same(run(workspace, request.node.callspec.id, nproc, *extra), expected)


def test_mtp_is_the_same_too(workspace, expected_mtp):
    extra = [*rows(1), *EP2, "activation_checkpoint:full"]
    got = run(workspace, "mtp-ep-2", 2, *extra, config=DEBUGMODEL + "_mtp")
    assert_same(got, expected_mtp)
    assert len(got["steps"][0]["indexer_losses"]) == 5  # four layers and the MTP layer's own


def test_coefficient_zero_trains_the_backbone_alone(workspace, expected):
    """Two steps without indexer gradients: no hang, and the backbone learns as ever."""
    zero = ["--dsa.indexer_loss_coefficient", "0"]
    got = run(workspace, "coefficient-0", 2, *rows(2), *EP2, *zero)
    for ours, wanted in zip(got["steps"], expected["steps"], strict=True):
        assert ours["indexer_losses"] is None
        for parameter, gradient in ours["gradients"].items():
            if ".indexer." in parameter:
                assert gradient is None
            else:
                assert difference(gradient, wanted["gradients"][parameter]) < LIMIT, parameter


def assert_same(got: dict, expected: dict) -> None:
    assert len(got["steps"]) == STEPS
    for step, (ours, wanted) in enumerate(zip(got["steps"], expected["steps"], strict=True), 1):
        assert ours["gradients"].keys() == wanted["gradients"].keys()
        names = sorted(wanted["gradients"], key=lambda n: (".indexer." not in n, n))
        for parameter in names:
            gradient = wanted["gradients"][parameter]
            assert gradient.norm() > 0, f"{parameter} has no gradient to compare"
            error = difference(ours["gradients"][parameter], gradient)
            assert error < LIMIT, (
                f"step {step}: gradient of {parameter} is off by {error:.2e}; smallest score gaps "
                f"{min(got['smallest_gap']):.2e} and {min(expected['smallest_gap']):.2e}"
            )
        assert ours["loss"] == pytest.approx(wanted["loss"], rel=LIMIT)
        assert ours["indexer_losses"] == pytest.approx(wanted["indexer_losses"], rel=LIMIT)
        assert ours["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=LIMIT)
    for bias, wanted in expected["expert_biases"].items():
        assert torch.equal(got["expert_biases"][bias], wanted), bias


def test_grad_norm_is_the_norm_of_all_gradients(expected):
    for step in expected["steps"]:
        squares = [g.double().square().sum() for g in step["gradients"].values()]
        exact = torch.stack(squares).sum().sqrt().item()
        assert step["grad_norm"] == pytest.approx(exact, rel=1e-9)

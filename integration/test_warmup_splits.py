"""The dense warm-up stage, however its global batch is split: what one process computes.

Every visible key is in the loss, so no selection decides anything: all figures agree closely. Only
recall, which counts keys, may differ where two keys are as good as each other.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from split_jobs import (
    DEBUGMODEL,
    MTP,
    STEPS,
    difference,
    launch,
    make_workspace,
    rows,
    train_job,
)

pytestmark = pytest.mark.distributed

LIMIT = 1e-5
WARMUP = ("--dsa.stage", "dense_warmup")
FULL, SELECTIVE = "activation_checkpoint:full", "activation_checkpoint:selective"
SAMPLED_KEYS = 4 * 32 * 16  # queries of four rows times top-k: at most so many count in a layer


@dataclass(frozen=True)
class Split:
    """A way to run the global batch of four rows."""

    name: str
    nproc: int
    local_batch_size: int
    options: str
    config: str = DEBUGMODEL

    def job(self, root: Path) -> dict:
        options = [*rows(self.local_batch_size), *WARMUP, *self.options.split()]
        return train_job(root, self.name, self.config, options)


def degrees(**kinds: int) -> str:
    names = {
        "fsdp": "data_parallel_shard",
        "hsdp": "data_parallel_replicate",
        "tp": "tensor_parallel",
        "cp": "context_parallel",
        "pp": "pipeline_parallel",
        "ep": "expert_parallel",
    }
    return " ".join(f"--parallelism.{names[kind]}_degree {n}" for kind, n in kinds.items())


SCHEDULE = "--parallelism.pipeline_parallel_schedule"
EVEN = " ".join(
    f"--parallelism.pipeline_parallel_{end}_stage_less_layers 0" for end in ("first", "last")
)
COMPILED = "--compile.enable --compile.backend aot_eager"
SPLITS = [
    Split("accumulation-4", 1, 1, ""),
    Split("ac-selective-accumulation-2", 1, 2, SELECTIVE),
    Split("compiled", 1, 4, COMPILED),
    Split("fsdp-2-ep-2", 2, 2, degrees(fsdp=2, ep=2)),
    Split("hsdp-2x1", 2, 2, degrees(hsdp=2, fsdp=1)),
    Split("tp-2", 2, 4, degrees(tp=2)),
    Split("tp-2-ac-full-accumulation-2", 2, 2, f"{degrees(tp=2)} {FULL}"),
    Split("cp-2", 2, 4, degrees(cp=2)),
    Split("pp-2-1f1b", 2, 4, f"{degrees(pp=2)} {SCHEDULE} 1F1B"),
    Split(
        "pp-2-interleaved-ac-full",
        2,
        4,
        f"{degrees(pp=2)} {SCHEDULE} Interleaved1F1B {EVEN} {FULL}",
    ),
    Split("mtp-ep-2-ac-full", 2, 2, f"{degrees(ep=2)} {FULL}", MTP),
    Split("mtp-tp-2", 2, 4, degrees(tp=2), MTP),
    Split("tp-2-cp-2-ep-4", 4, 4, degrees(tp=2, cp=2, ep=4)),
    Split("pp-2-tp-2-ac-full", 4, 4, f"{degrees(pp=2, tp=2)} {SCHEDULE} 1F1B {FULL}"),
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return make_workspace(tmp_path_factory.mktemp("warmup"))


@pytest.fixture(scope="module")
def expected(workspace) -> dict[str, dict]:
    """By configuration: one process, the whole batch at once."""
    names = {DEBUGMODEL: "one", MTP: "one-mtp"}
    jobs = [train_job(workspace, n, c, [*rows(4), *WARMUP]) for c, n in names.items()]
    launch(workspace, 1, jobs)
    return {config: torch.load(workspace / f"{name}.pt") for config, name in names.items()}


@pytest.fixture(scope="module")
def record_of(workspace, request):
    """The record of a split; all selected ones of as many ranks run in one launch."""
    chosen = {
        item.callspec.params["split"]
        for item in request.session.items
        if "split" in getattr(getattr(item, "callspec", None), "params", {})
    }

    def record(split: Split) -> dict:
        path = workspace / f"{split.name}.pt"
        if not path.exists():
            together = [s for s in SPLITS if s in chosen and s.nproc == split.nproc]
            launch(workspace, split.nproc, [s.job(workspace) for s in together])
        return torch.load(path)

    return record


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name)
def test_same_as_one_process(expected, record_of, split):
    got, wanted = record_of(split), expected[split.config]
    assert len(got["steps"]) == len(wanted["steps"]) == STEPS
    for number, (ours, theirs) in enumerate(zip(got["steps"], wanted["steps"], strict=True), 1):
        assert ours["gradients"].keys() == theirs["gradients"].keys()
        for name, gradient in ours["gradients"].items():
            if ".indexer." not in name:
                assert gradient is None, f"{name} has a gradient"
            elif number == 1:
                assert theirs["gradients"][name].norm() > 0
                error = difference(gradient, theirs["gradients"][name])
                assert error < LIMIT, f"gradient of {name} is off by {error:.2e}"
        for figure in ("loss", "indexer_losses", "grad_norm"):
            assert ours[figure] == pytest.approx(theirs[figure], rel=LIMIT), f"{figure}, {number}"
        assert ours["topk_recalls"] == pytest.approx(theirs["topk_recalls"], abs=2 / SAMPLED_KEYS)


def test_expert_biases_stay(expected, record_of, workspace):
    """Frozen like the rest of the backbone: those of the seed checkpoint after three steps."""
    seed = workspace / "seed-weights.pt"
    launch(workspace, 1, [train_job(workspace, "seed-weights", DEBUGMODEL, []) | {"mode": "load"}])
    weights = torch.load(seed)
    assert expected[DEBUGMODEL]["expert_biases"]
    for name, bias in expected[DEBUGMODEL]["expert_biases"].items():
        assert torch.equal(bias, weights[name]), name

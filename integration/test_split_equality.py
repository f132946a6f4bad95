"""The same global batch, however it is split: same losses, same gradients, every parameter.

All runs start from one seed checkpoint and read the same rows. Indexer gradients are compared
first: an equal LM loss says nothing about them. top-k is a quarter of the sequence; experts are
routed as the weights have it.
"""

from dataclasses import dataclass

import pytest
import torch
from split_jobs import (
    DEBUGMODEL,
    MTP,
    SMALLEST_GAP,
    STEPS,
    difference,
    launch,
    make_workspace,
    rows,
    train_job,
)

pytestmark = pytest.mark.distributed

LIMIT = 1e-5


@dataclass(frozen=True)
class Split:
    """A way to run the global batch of four rows."""

    name: str
    nproc: int
    options: tuple[str, ...]
    config: str = DEBUGMODEL


def split(name: str, nproc: int, local: int, *extra: str, config: str = DEBUGMODEL, **degrees: int):
    names = {
        "fsdp": "data_parallel_shard_degree",
        "hsdp": "data_parallel_replicate_degree",
        "tp": "tensor_parallel_degree",
        "cp": "context_parallel_degree",
        "pp": "pipeline_parallel_degree",
        "ep": "expert_parallel_degree",
    }
    options = rows(local)
    for kind, degree in degrees.items():
        options += [f"--parallelism.{names[kind]}", str(degree)]
    options += extra  # last: the choice of checkpointing ends the options before it
    return Split(name, nproc, tuple(options), config)


def pipeline(schedule: str, microbatch: int = 1) -> tuple[str, ...]:
    return (
        *("--parallelism.pipeline_parallel_schedule", schedule),
        *("--parallelism.pipeline_parallel_microbatch_size", str(microbatch)),
    )


FULL, SELECTIVE = "activation_checkpoint:full", "activation_checkpoint:selective"
NO_SP = "--parallelism.no-enable_sequence_parallel"
CONTIGUOUS = ("--parallelism.context_parallel_load_balancer", "contiguous")
OWN_CONTEXT = ("--context_parallel.context", "own_context.OwnContext")
UNABSORBED = ("--dsa.form", "unabsorbed")
EACH = ("--fsdp.pipeline_reduction", "each")

SPLITS = [
    split("accumulation-2", 1, 2),
    split("accumulation-4", 1, 1),
    split("ac-selective", 1, 4, SELECTIVE),
    split("ac-full", 1, 4, FULL),
    split("compiled", 1, 4, "--compile.enable", "--compile.backend", "aot_eager"),
    split("fsdp-2", 2, 2, fsdp=2),
    split("ep-2", 2, 2, ep=2),
    split("hsdp-2x1", 2, 2, hsdp=2, fsdp=1),
    split("ep-2-accumulation-2-ac-full", 2, 1, FULL, ep=2),
    split("tp-2", 2, 4, tp=2),
    split("tp-2-ac-full-accumulation-4", 2, 1, FULL, tp=2),
    split("tp-2-ac-selective", 2, 4, SELECTIVE, tp=2),
    split("tp-2-ep-2", 2, 4, tp=2, ep=2),
    split("tp-2-no-sequence-parallel", 2, 4, NO_SP, tp=2),
    split("tp-2-unabsorbed", 2, 4, *UNABSORBED, tp=2),
    split("cp-2", 2, 4, cp=2),
    split("cp-2-contiguous-ac-full", 2, 2, *CONTIGUOUS, FULL, cp=2),
    split("cp-2-own-context", 2, 4, *OWN_CONTEXT, cp=2),
    split("cp-2-unabsorbed", 2, 4, *UNABSORBED, cp=2),
    split("pp-2-1f1b", 2, 4, *pipeline("1F1B"), pp=2),
    split("pp-2-1f1b-two-microbatches", 2, 4, *pipeline("1F1B", 2), pp=2),
    split("pp-2-1f1b-ac-full-accumulation-2", 2, 2, *pipeline("1F1B"), FULL, pp=2),
    split("pp-2-interleaved-ac-selective", 2, 4, *pipeline("Interleaved1F1B"), SELECTIVE, pp=2),
    split("pp-2-interleaved-ac-full", 2, 4, *pipeline("Interleaved1F1B"), FULL, pp=2),
    split("pp-2-1f1b-reduction-each", 2, 4, *pipeline("1F1B"), *EACH, pp=2),
    split("pp-2-zbv", 2, 4, *pipeline("ZBVZeroBubble"), pp=2),
    split("mtp-ep-2-ac-full", 2, 1, FULL, config=MTP, ep=2),
    split("mtp-cp-2", 2, 4, config=MTP, cp=2),
    split("mtp-tp-2", 2, 4, config=MTP, tp=2),
    split("hsdp-2x2-ep-2", 4, 1, hsdp=2, fsdp=2, ep=2),
    split("fsdp-2-tp-2-ep-4", 4, 2, fsdp=2, tp=2, ep=4),
    split("tp-4", 4, 4, tp=4),
    split("cp-4", 4, 4, cp=4),
    split("cp-2-tp-2-ep-4-ac-full", 4, 2, FULL, cp=2, tp=2, ep=4),
    split("pp-2-tp-2", 4, 4, *pipeline("1F1B"), pp=2, tp=2),
    split(
        "pp-2-ep-2-fsdp-2-reduction-each",
        *(4, 2, *pipeline("Interleaved1F1B"), *EACH, FULL),
        pp=2,
        ep=2,
        fsdp=2,
    ),
    split("mtp-cp-2-tp-2-ep-2", 4, 4, config=MTP, cp=2, tp=2, ep=2),
    split("pp-2-tp-2-ep-2-fsdp-2", 8, 2, *pipeline("1F1B"), FULL, pp=2, tp=2, ep=2, fsdp=2),
    split("fsdp-2-tp-2-cp-2-ep-4", 8, 2, FULL, fsdp=2, tp=2, cp=2, ep=4),
    split("pp-2-tp-2-cp-2-ep-4", 8, 4, *pipeline("Interleaved1F1B"), FULL, pp=2, tp=2, cp=2, ep=4),
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return make_workspace(tmp_path_factory.mktemp("split"))


@pytest.fixture(scope="module")
def expected(workspace) -> dict[str, dict]:
    """By configuration: one process, the whole batch at once."""
    names = {DEBUGMODEL: "one", MTP: "one-mtp"}
    launch(workspace, 1, [train_job(workspace, n, c, rows(4)) for c, n in names.items()])
    records = {config: torch.load(workspace / f"{name}.pt") for config, name in names.items()}
    for record in records.values():
        gap = min(record["smallest_gap"])
        assert gap > SMALLEST_GAP, f"smallest score gap {gap:.2e}: take another of SEEDS"
    return records


@pytest.fixture(scope="module")
def record_of(workspace, request):
    """The record of a split; all selected ones of as many ranks run in one launch."""
    chosen = {
        item.callspec.params["split"]
        for item in request.session.items
        if "split" in getattr(getattr(item, "callspec", None), "params", {})
    }
    failed: dict[int, str] = {}

    def record(split: Split) -> dict:
        path = workspace / f"{split.name}.pt"
        if not path.exists() and split.nproc not in failed:
            together = [s for s in SPLITS if s in chosen and s.nproc == split.nproc]
            jobs = [train_job(workspace, s.name, s.config, list(s.options)) for s in together]
            try:
                launch(workspace, split.nproc, jobs)
            except AssertionError as error:
                failed[split.nproc] = str(error)
        if not path.exists():
            pytest.fail(f"this or an earlier split of {split.nproc} ranks: {failed[split.nproc]}")
        return torch.load(path)

    return record


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name)
def test_same_as_one_process(expected, record_of, split):
    assert_same(record_of(split), expected[split.config])


def assert_same(got: dict, expected: dict) -> None:
    gaps = (
        f"smallest score gaps {min(got['smallest_gap'], default=float('nan')):.2e} and "
        f"{min(expected['smallest_gap']):.2e}"
    )
    assert len(got["steps"]) == len(expected["steps"]) == STEPS
    ours, wanted = got["steps"][0]["gradients"], expected["steps"][0]["gradients"]
    assert ours.keys() == wanted.keys()
    for parameter in sorted(wanted, key=lambda n: (".indexer." not in n, n)):
        assert ours[parameter] is not None, f"{parameter} has no gradient"
        assert wanted[parameter].norm() > 0, f"{parameter} has no gradient to compare"
        error = difference(ours[parameter], wanted[parameter])
        assert error < LIMIT, f"gradient of {parameter} is off by {error:.2e}; {gaps}"
    for number, (ours, wanted) in enumerate(zip(got["steps"], expected["steps"], strict=True), 1):
        for figure in ("loss", "indexer_losses", "grad_norm"):
            assert ours[figure] == pytest.approx(wanted[figure], rel=LIMIT), (
                f"{figure} of step {number}; {gaps}"
            )
    assert got["expert_biases"].keys() == expected["expert_biases"].keys()
    for bias, wanted in expected["expert_biases"].items():
        assert torch.equal(got["expert_biases"][bias], wanted), bias


def test_mtp_has_an_indexer_loss_of_its_own(expected):
    assert len(expected[MTP]["steps"][0]["indexer_losses"]) == 5  # four layers and the MTP layer


OFF = ("--dsa.indexer_loss_coefficient", "0")
ZERO = [
    split("coefficient-0-ep-2", 2, 2, *OFF, ep=2),
    split("coefficient-0-cp-2", 2, 4, *OFF, cp=2),
    split("coefficient-0-tp-2", 2, 4, *OFF, tp=2),
    split("coefficient-0-pp-2", 2, 4, *pipeline("1F1B"), *OFF, pp=2),
]


@pytest.fixture(scope="module")
def without_indexer_loss(workspace) -> dict[str, dict]:
    launch(workspace, 2, [train_job(workspace, s.name, s.config, list(s.options)) for s in ZERO])
    return {s.name: torch.load(workspace / f"{s.name}.pt") for s in ZERO}


@pytest.mark.parametrize("name", [s.name for s in ZERO])
def test_coefficient_zero_trains_the_backbone_alone(without_indexer_loss, expected, name):
    """Steps without indexer gradients: no hang, and the backbone learns as ever."""
    steps = without_indexer_loss[name]["steps"]
    assert len(steps) == STEPS
    for step in steps:
        assert step["indexer_losses"] is None
        assert all((".indexer." in p) == (g is None) for p, g in step["gradients"].items())
    # From the second step on the indexers of the other run have learned to choose other keys.
    for parameter, wanted in expected[DEBUGMODEL]["steps"][0]["gradients"].items():
        if ".indexer." not in parameter:
            assert difference(steps[0]["gradients"][parameter], wanted) < LIMIT, parameter


def test_grad_norm_is_the_norm_of_all_gradients(expected):
    for step in expected[DEBUGMODEL]["steps"]:
        squares = [g.double().square().sum() for g in step["gradients"].values()]
        exact = torch.stack(squares).sum().sqrt().item()
        assert step["grad_norm"] == pytest.approx(exact, rel=1e-9)

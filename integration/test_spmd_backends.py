"""Which of torchtitan's SPMD backends runs which combination: a table in the documentation.

    WRITE_TABLE=1 pytest integration/test_spmd_backends.py      after a change on purpose

Each combination trains a step from the seed checkpoint; "same" means the losses and every gradient
of one process. What fails is in the table with its error, so that an upstream release that mends it
makes this test fail.
"""

import json
import os
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from split_jobs import DEBUGMODEL, difference, launch, make_workspace, rows, train_job

pytestmark = pytest.mark.distributed

TABLE = Path(__file__).parents[1] / "docs" / "spmd-backends.md"
BACKENDS = ("spmd_types", "full_dtensor", "partial_dtensor")
DEGREES = {
    "tp": "tensor_parallel_degree",
    "cp": "context_parallel_degree",
    "ep": "expert_parallel_degree",
    "fsdp": "data_parallel_shard_degree",
    "pp": "pipeline_parallel_degree",
}
LIMIT = 1e-5
FULL, SELECTIVE = ["activation_checkpoint:full"], ["activation_checkpoint:selective"]
COMPILE = ["--compile.enable", "--compile.backend", "aot_eager"]
# One row of the global batch at a time: full_dtensor takes no more under TP and CP together.
COMBINATIONS: dict[str, tuple[dict[str, int], list[str]]] = {
    "FSDP 2, EP 2": ({"fsdp": 2, "ep": 2}, []),
    "TP 2, EP 2": ({"tp": 2, "ep": 2}, []),
    "TP 2, full AC": ({"tp": 2}, FULL),
    "TP 2, selective AC": ({"tp": 2}, SELECTIVE),
    "TP 2, compile": ({"tp": 2}, COMPILE),
    "CP 2": ({"cp": 2}, []),
    "CP 2, full AC": ({"cp": 2}, FULL),
    "CP 2, selective AC": ({"cp": 2}, SELECTIVE),
    "CP 2, compile": ({"cp": 2}, COMPILE),
    "PP 2 (1F1B)": ({"pp": 2}, []),
    "PP 2 (1F1B), full AC": ({"pp": 2}, FULL),
    "PP 2 (1F1B), compile": ({"pp": 2}, COMPILE),
}
HEAD = """# torchtitan's SPMD backends

`--parallelism.spmd_backend` chooses how torchtitan describes sharded tensors. What runs with
DeepSeek-V3.2 on torch {torch} and torchtitan {torchtitan}; "same": every gradient and loss of one
process to 1e-5. `integration/test_spmd_backends.py` writes this table: it trains each of these on
two processes.

"""


def name_of(backend: str, combination: str) -> str:
    letters = "".join(c if c.isalnum() else "-" for c in combination.lower())
    return f"{backend}-{letters}"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, dict[str, str]]:
    """ "same", or what went wrong, by combination and backend."""
    root = make_workspace(tmp_path_factory.mktemp("backends"))
    # A rank whose neighbour failed gives up soon.
    step = ["--training.steps", "1", "--comm.init_timeout_seconds", "60"]
    launch(root, 1, [train_job(root, "one", DEBUGMODEL, [*rows(4), *step])])
    jobs = []
    for combination, (degrees, extra) in COMBINATIONS.items():
        for backend in BACKENDS:
            options = [*step, "--parallelism.spmd_backend", backend]
            for kind, degree in degrees.items():
                options += [f"--parallelism.{DEGREES[kind]}", str(degree)]
            if "pp" in degrees:
                options += [*rows(2), "--parallelism.pipeline_parallel_schedule", "1F1B"]
            else:
                options += rows(1)
            job = train_job(root, name_of(backend, combination), DEBUGMODEL, [*options, *extra])
            jobs.append(job | {"may_fail": True})
    launch(root, 2, jobs)
    expected = torch.load(root / "one.pt")["steps"][0]
    return {
        combination: {
            backend: outcome(root / f"{name_of(backend, combination)}.pt", expected)
            for backend in BACKENDS
        }
        for combination in COMBINATIONS
    }


def outcome(path: Path, expected: dict) -> str:
    errors = [error.read_text() for error in sorted(path.parent.glob(f"{path.name}.*"))]
    if errors:
        # A rank that lost its neighbour says nothing of why.
        telling = [e for e in errors if "onnection" not in e and "imed out" not in e] or errors
        return re.sub(r"0x[0-9a-f]+", "0x...", telling[0])[:200].replace("`", "'")
    step = torch.load(path)["steps"][0]
    worst = max(
        difference(step["gradients"][name], wanted)
        for name, wanted in expected["gradients"].items()
    )
    losses = [step["loss"] / expected["loss"]]
    losses += [
        a / b for a, b in zip(step["indexer_losses"], expected["indexer_losses"], strict=True)
    ]
    worst = max(worst, *(abs(ratio - 1) for ratio in losses))
    return "same" if worst < LIMIT else f"wrong by {worst:.0e}"


def table(outcomes: dict[str, dict[str, str]]) -> str:
    lines = ["| | " + " | ".join(f"`{b}`" for b in BACKENDS) + " |", "| --- | --- | --- | --- |"]
    notes: list[str] = []
    for combination, found in outcomes.items():
        cells = []
        for backend in BACKENDS:
            text = found[backend]
            if text != "same":
                if text not in notes:
                    notes.append(text)
                text = f"no ({notes.index(text) + 1})"
            cells.append(text)
        lines.append(f"| {combination} | " + " | ".join(cells) + " |")
    numbered = [f"{i}. `{note}`" for i, note in enumerate(notes, 1)]
    minor = ".".join(torch.__version__.split(".")[:2])
    head = HEAD.format(torch=minor, torchtitan=version("torchtitan"))
    return head + "\n".join([*lines, "", *numbered]).rstrip() + "\n"


def test_the_documented_table_is_what_happens(outcomes):
    found = table(outcomes)
    if os.environ.get("WRITE_TABLE"):
        TABLE.write_text(found)
    assert TABLE.read_text() == found, json.dumps(outcomes, indent=1)


def test_the_default_backend_runs_everything(outcomes):
    assert {c: found["spmd_types"] for c, found in outcomes.items()} == dict.fromkeys(
        COMBINATIONS, "same"
    )

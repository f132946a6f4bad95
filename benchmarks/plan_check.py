"""The plan's memory estimate beside the measured peak of real runs that differ in what dominates.

Every case is trained for a few steps with `titan-npu train` on this machine and estimated in this
process, which has imported what the ranks import.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from titan_npu_train import platform

WITHIN = 0.15
STEPS = 3
MODULE = "benchmarks.plan_configs"
PARALLEL = "--parallelism."


@dataclass(frozen=True)
class Case:
    """``title`` says what dominates. ``options`` are of `titan-npu train`."""

    title: str
    config: str
    options: tuple[str, ...]
    processes: int = 2
    module: str = "titan_npu_train.deepseek_v32"


CASES = (
    Case("quickstart", "deepseek_v32_debugmodel", (f"{PARALLEL}expert_parallel_degree", "2")),
    Case("activations", "deepseek_v32_4layers_small", ("--training.local_batch_size", "2")),
    Case(
        "recomputation",
        "deepseek_v32_4layers_small",
        ("--training.local_batch_size", "2", "activation_checkpoint:full"),
    ),
    Case("parameters and optimizer", "wide", (), module=MODULE),
    Case("logits", "vocabulary", (), module=MODULE),
    Case("tensor parallel", "deepseek_v32_debugmodel", (f"{PARALLEL}tensor_parallel_degree", "2")),
    Case(
        "pipeline",
        "deepseek_v32_debugmodel",
        (
            *(f"{PARALLEL}pipeline_parallel_degree", "2"),
            *("--training.local_batch_size", "8"),
            *(f"{PARALLEL}pipeline_parallel_microbatch_size", "2"),
        ),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """Bytes, predicted and measured."""

    title: str
    predicted: int
    measured: int
    parts: dict[str, int]
    moment: str

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def predict(case: Case) -> Any:
    """The estimate of rank 0, which writes the metrics."""
    from titan_npu_train import preflight
    from titan_npu_train.plan.memory import estimate

    config = preflight.load_config(case.module, case.config, list(case.options))
    return estimate(config, case.processes).ranks[0]


def measure(case: Case) -> int:
    """The largest `peak_memory_bytes` of a run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "titan_npu_train.cli", "train", case.config),
            *("--module", case.module, "--nproc", str(case.processes)),
            *("--training.steps", str(STEPS), "--dump_folder", folder, *case.options),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{case.title}: {' '.join(command)}\n{done.stdout}\n{done.stderr}")
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
        return max(json.loads(line)["peak_memory_bytes"] for line in lines)


def outcomes() -> Iterator[Outcome]:
    platform.select("cpu")
    for case in CASES:
        rank = predict(case)
        yield Outcome(case.title, rank.total, measure(case), rank.parts, rank.moment)


def table(found: list[Outcome]) -> Table:
    result = Table(title="Peak resident memory, MiB")
    for name in ("case", "predicted", "measured", "", "largest parts"):
        result.add_column(name, justify="left" if name in ("case", "largest parts") else "right")
    for o in found:
        parts = sorted(o.parts.items(), key=lambda item: -item[1])
        largest = ", ".join(f"{k} {v / 2**20:,.0f}" for k, v in parts[:4])
        result.add_row(
            o.title,
            f"{o.predicted / 2**20:,.0f}",
            f"{o.measured / 2**20:,.0f}",
            f"{o.error:+.1%}",
            largest,
        )
    return result


def failures(found: list[Outcome]) -> list[str]:
    """What is further off than claimed."""
    return [
        f"{o.title}: predicted {o.error:+.1%} of the measured peak"
        for o in found
        if abs(o.error) > WITHIN
    ]


def main(out: Path | None = None) -> int:
    """Run all cases; 1 if one is further off than claimed."""
    from rich.console import Console

    found = list(outcomes())
    Console(width=140).print(table(found))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "plan.json").write_text(json.dumps([dataclasses.asdict(o) for o in found], indent=2))
    for problem in (problems := failures(found)):
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

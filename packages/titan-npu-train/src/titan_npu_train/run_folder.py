"""What a run's dump_folder says about the run: run.json and metrics.jsonl."""

import dataclasses
import json
import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from titan_npu_train.failures import UserError

__all__ = ["METRICS_FILE", "RUN_FILE", "RunInfo", "read_metrics"]

RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"

_PACKAGES = (
    "torch",
    "torchtitan",
    "titan-npu-train",
    "npu-dsa-kernels",
    "fsdp2-npu",
    "swap-optimizer",
)


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """How a run was started, so that its model can be built again.

    Attributes:
        module, config, options: what the ranks got on their command line.
        world_size: number of ranks.
        platform: "cpu", "cuda" or "npu".
        versions: of the packages that decide what a run computes.
    """

    module: str
    config: str
    options: list[str]
    world_size: int
    platform: str
    versions: dict[str, str]

    @classmethod
    def of_this_process(
        cls, module: str, config: str, options: Sequence[str], platform: str
    ) -> "RunInfo":
        world_size = int(os.environ["WORLD_SIZE"])
        return cls(module, config, list(options), world_size, platform, package_versions())

    def write(self, dump_folder: Path) -> None:
        """Write run.json, all of it or nothing."""
        path = Path(dump_folder) / RUN_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{RUN_FILE}.{os.getpid()}")
        partial.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        partial.replace(path)

    @classmethod
    def read(cls, dump_folder: Path) -> "RunInfo":
        """Raises UserError where there is none, or it cannot be understood."""
        path = Path(dump_folder) / RUN_FILE
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            raise UserError(
                f"no {RUN_FILE} in '{dump_folder}': it does not say which model was trained there."
            ) from None
        except (ValueError, TypeError, OSError) as error:
            raise UserError(f"'{path}' cannot be read ({error}).") from error


def package_versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def read_metrics(dump_folder: Path) -> list[dict[str, Any]]:
    """The run's records in order of their steps, one a step.

    A resumed run appends, and may repeat steps. What it wrote replaces everything an earlier try
    had written from its first step on, also steps that it did not reach again.

    Raises:
        UserError: no such folder, no metrics in it, or not a single record.
    """
    folder = Path(dump_folder)
    path = folder / METRICS_FILE
    if not folder.is_dir():
        raise UserError(f"no run folder '{folder}'. Give the --dump_folder of a training run.")
    if not path.is_file():
        raise UserError(
            f"no {METRICS_FILE} in '{folder}': no step was trained there. Give the --dump_folder "
            "of a training run."
        )
    records: list[dict[str, Any]] = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
            step = record["step"]
        except (ValueError, KeyError, TypeError):
            continue  # a kill can cut a line short
        while records and records[-1]["step"] >= step:
            records.pop()
        records.append(record)
    if not records:
        raise UserError(f"'{path}' has no record: no step was finished.")
    return records

"""The launcher that runs kernels as the code they were lowered to for Ascend A3."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import execution
import lowering
from jobs import Reporter
from lowering import Lowered
from npu_dsa_kernels.backends.triton import launch
from npu_dsa_kernels.backends.triton import tiles as table
from npu_dsa_kernels.backends.triton.tiles import Tiles

TARGET = "ascend"

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "i32": torch.int32, "i64": torch.int64}
"""By Triton's names."""


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Seconds that a step may take. They are there for what hangs: each takes a tenth of that.
LOWER, BUILD, RUN = 60.0, 60.0, 120.0


@dataclass(frozen=True)
class Launch:
    """A kernel that was started: what it was compiled for."""

    key: str
    kernel: str
    dtype: str
    """By which its tiles were found; its first tensor's if they were another kernel's."""
    rows: int
    columns: int
    constants: dict[str, Any]
    element_loops: int
    executed: bool = False


class Gate:
    """Lowers a kernel, builds it for this host, runs it between guard pages.

    `folder` keeps what was lowered and built, for this and for other processes.
    """

    target = TARGET
    programs = 3  # so that work is shared, and unevenly

    def __init__(self, folder: Path, reporter: Reporter, *, run: bool = True) -> None:
        self._folder = folder
        self._reporter = reporter
        self._runs = run
        self._found: dict[str, str] = {}
        self.launches: list[Launch] = []
        """Every kernel that was started, in order."""

    @contextmanager
    def use(self, other_tiles: dict[str, Tiles] | None = None) -> Iterator[None]:
        """Start all kernels here. `other_tiles` by kernel, in place of the table's."""
        find = table.find

        def found(kernel: str, target: str, dtype: torch.dtype) -> Tiles | None:
            self._found[kernel] = name_of(dtype)
            return (other_tiles or {}).get(kernel) or find(kernel, target, dtype)

        with launch.use(self), mock.patch.object(table, "find", found):
            yield

    def __call__(
        self,
        kernel: Any,
        programs: int,
        arguments: tuple[Any, ...],
        constants: dict[str, Any],
        tiles: Tiles,
    ) -> None:
        name = kernel.__name__
        self._reporter.step(f"lowering {name}", LOWER)
        signature = lowering.bind(kernel, arguments, constants)
        key = signature.key(kernel)
        lowered = load(self._folder, key)
        if lowered is None:
            lowered = lowering.lower(kernel, signature)
            _save(self._folder, key, lowered)
        first = next(x[1:] for x in signature.types.values() if x.startswith("*"))
        named = {x: signature.constants[x] for x in kernel.arg_names if x in signature.constants}
        loops = lowered.element_loops
        dtype = self._found.get(name) or name_of(_TYPES[first])
        started = Launch(key, name, dtype, tiles.rows, tiles.columns, named, loops)
        self.launches.append(started)
        self._reporter.note(started)
        if not self._runs:
            return
        self._reporter.step(f"building {name}", BUILD)
        library = self._folder / f"{key}.so"
        if not library.exists():
            execution.build(lowered, library)
        self._reporter.step(f"running {name}", RUN)
        execution.execute(library, lowered, signature, programs, self._reporter.faults)
        self._reporter.note(replace(started, executed=True))


def load(folder: Path, key: str) -> Lowered | None:
    path = folder / f"{key}.json"
    return Lowered(**json.loads(path.read_text())) if path.exists() else None


def _save(folder: Path, key: str, lowered: Lowered) -> None:
    path = folder / f"{key}.json"
    part = path.with_suffix(f".{os.getpid()}.part")  # another process may be at the same
    part.write_text(json.dumps(asdict(lowered)))
    part.rename(path)

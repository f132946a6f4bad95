"""An optimizer's step with its states off the device: ours, plain AdamW, and who else does it.

On CPU the states are on disk (storage "disk"), on an accelerator in the host's memory. Parameters
are those of a transformer: some large matrices, many small ones. Peak memory is that of the first
step, which makes the states: gradients and parameters are there before it.
"""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.checks import Check, at_most
from benchmarks.measure import Case, Implementation, Params, Result, Task
from swap_optimizer import SwapOptimizer

OURS, PLAIN, FOREACH = "swap-optimizer", "torch AdamW, fused", "torch AdamW, foreach"
LIMIT = "limit: file"
CHUNK = 8 << 20
LARGEST_MEMORY, LONGEST = 0.15, 1.6
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}


def parameters(p: Params) -> list[nn.Parameter]:
    """About p["million"] million of them, with gradients: blocks of 4 d x d, 8 d x d / 2, 2 d."""
    torch.manual_seed(0)
    d = p["_width"]
    block = [(d, d)] * 4 + [(4 * d, d)] * 2 + [(d,)] * 2
    size = sum(torch.Size(shape).numel() for shape in block)
    shapes = block * max(1, round(p["million"] * 1e6 / size))
    made = [nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


def step_task(made: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> Task:
    def run() -> None:
        optimizer.step()

    def result(_: None) -> dict[str, Tensor]:
        return {"parameters": torch.cat([p.detach().flatten() for p in made])}

    return Task(run, result)


def build_plain(p: Params) -> Task:
    made = parameters(p)
    return step_task(made, torch.optim.AdamW(made, **SETTINGS, **{p["_kind"]: True}))


def build_ours(p: Params) -> Task:
    made = parameters(p)
    inner = torch.optim.AdamW(made, **SETTINGS, fused=True)
    storage = "disk" if made[0].device.type == "cpu" else "host"
    return step_task(made, SwapOptimizer(inner, slices=p["slices"], storage=storage))


def build_torchao(p: Params) -> Task:
    from torchao.optim import CPUOffloadOptimizer

    made = parameters(p)
    return step_task(made, CPUOffloadOptimizer(made, torch.optim.AdamW, **SETTINGS))


def build_bitsandbytes(p: Params) -> Task:
    import bitsandbytes

    made = parameters(p)
    return step_task(made, bitsandbytes.optim.PagedAdamW32bit(made, **SETTINGS))


def build_file(p: Params) -> Task:
    """Read and write as many bytes as the states have, in one file, one after the other."""
    total = 8 * sum(parameter.numel() for parameter in parameters(p))
    # Unlinked at once: it goes when this process goes.
    with tempfile.NamedTemporaryFile() as file:
        descriptor = os.dup(file.fileno())
    os.posix_fallocate(descriptor, 0, total)
    buffer = memoryview(bytearray(CHUNK))

    def run() -> None:
        for offset in range(0, total, CHUNK):
            part = buffer[: min(CHUNK, total - offset)]
            os.preadv(descriptor, [part], offset)
            os.pwritev(descriptor, [part], offset)

    return Task(run, lambda _: {})


def _peers() -> tuple[Implementation, ...]:
    return (
        Implementation(
            name=f"torchao {_version('torchao')}, CPUOffloadOptimizer",
            build=build_torchao,
            compare="small",
        ),
        Implementation(
            name=f"bitsandbytes {_version('bitsandbytes')}, PagedAdamW32bit",
            build=build_bitsandbytes,
            compare="small",
        ),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def cases(quick: bool) -> Iterator[Case]:
    sizes = [(2, 256)] if quick else [(50, 1024), (200, 1024)]
    for million, width in sizes:
        yield Case(
            name="step",
            params={"million": million, "slices": 4 if quick else 16, "_width": width},
            implementations=(
                Implementation(name=OURS, build=build_ours, compare="small"),
                Implementation(
                    name=PLAIN, build=build_plain, options={"_kind": "fused"}, compare="small"
                ),
                Implementation(
                    name=FOREACH, build=build_plain, options={"_kind": "foreach"}, compare="small"
                ),
                *_peers(),
                Implementation(name=LIMIT, build=build_file, compare="never"),
            ),
            small={"million": 1, "_width": 64},
            tolerance=1e-6,
            note="states on disk on CPU, on the host on an accelerator",
        )


def preload(cases: Iterable[Case]) -> tuple[str, ...]:
    return ("swap_optimizer",)


def findings(results: list[Result]) -> Iterator[str]:
    for result in results:
        ours, plain = result.ours, result.measurements[PLAIN]
        if ours.ok and plain.ok and ours.peak_bytes and plain.peak_bytes:
            yield (
                f"{result.case.title}: {ours.peak_bytes / 2**20:.0f} MiB in the first step, plain "
                f"{plain.peak_bytes / 2**20:.0f} MiB"
            )


def checks(results: list[Result]) -> Iterator[Check]:
    for result in results:
        if result.case.params["million"] < 200:
            continue
        ours, plain = result.ours, result.measurements[PLAIN]
        file = result.measurements[LIMIT]
        share = slower = float("nan")
        if ours.ok and plain.ok:
            share = (ours.peak_bytes or 0) / (plain.peak_bytes or 1)
            if file.ok and ours.seconds:
                slower = ours.median / max(plain.median, file.median)
        yield at_most("memory of the states, first step, of plain AdamW's", share, LARGEST_MEMORY)
        yield at_most("a step, of the larger of plain AdamW's and the file's", slower, LONGEST)

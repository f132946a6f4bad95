"""All-gathers behind computation: explicit prefetch, FSDP2's own, and none.

Two ranks on this machine's cores, with Gloo all-gathers that take a chosen time (a network slower
than this machine's memory), half and three halves of a block's forward. Blocks are residual MLPs
as they are, recomputed in backward, or with experts on a mesh of their own and the host in between,
as in expert dispatch. fp32, one thread a rank.

Shape letters: N tokens, D model dim, F hidden dim, E experts.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from benchmarks import machine, report
from benchmarks.checks import Check, at_least, at_most
from benchmarks.measure import quartiles
from fsdp2_npu import OverlapReport, Prefetch, overlap_report, shard_model
from fsdp2_npu.testing import delayed_all_gathers

RANKS = 2
EXPLICIT, IMPLICIT, NONE = "explicit", "FSDP2's own", "none"
VARIANTS = (EXPLICIT, IMPLICIT, NONE)
PHASES = ("forward", "backward", "all", "but first")
HIDDEN, FAR_LESS = 0.9, 0.5
"""Wanted with explicit prefetch where computation is longer; at most without any."""


@dataclass(frozen=True)
class Sizes:
    blocks: int = 12
    N: int = 512
    D: int = 512
    F: int = 2048
    E: int = 4
    rounds: int = 5


QUICK = Sizes(blocks=4, N=128, D=64, F=256, rounds=2)


@dataclass(frozen=True)
class Case:
    kind: str  # "dense", "recomputed" or "MoE"
    latency: float  # of an all-gather, in forward times of a block

    @property
    def title(self) -> str:
        return f"{self.kind}, an all-gather takes {self.latency:g} forwards of a block"


CASES = (
    *(Case("dense", 0.5), Case("recomputed", 0.5), Case("MoE", 0.5)),
    *(Case("dense", 1.5), Case("MoE", 1.5)),
)


@dataclass
class Measured:
    """One case.

    Attributes:
        latency_seconds: what an all-gather takes.
        seconds: of steps by variant, one a round.
        shares: hidden parts of the all-gather time by PHASES, likewise; a step's first all-gather
            has nothing to hide behind.
        reports: rank 0's last profile of each variant.
        difference: largest relative difference between the variants' gradients.
    """

    case: Case
    latency_seconds: float
    seconds: dict[str, list[float]]
    shares: dict[str, dict[str, list[float]]]
    reports: dict[str, OverlapReport]
    difference: float

    def ratios(self, name: str) -> list[float]:
        """Times of a variant over those with explicit prefetch, in the same round."""
        pairs = zip(self.seconds[name], self.seconds[EXPLICIT], strict=True)
        return [other / ours for other, ours in pairs]

    def share(self, name: str, phase: str = "but first") -> float:
        return statistics.median(self.shares[name][phase])


class Experts(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        E, D, F = sizes.E, sizes.D, sizes.F // sizes.E
        self.w1_EDF = nn.Parameter(torch.randn(E, D, F) / D**0.5)
        self.w2_EFD = nn.Parameter(torch.randn(E, F, D) / F**0.5)

    def forward(self, x_ND: Tensor, counts: list[int]) -> Tensor:
        parts = x_ND.split(counts)
        weights = zip(parts, self.w1_EDF, self.w2_EFD, strict=True)
        return torch.cat([torch.relu(part @ w1) @ w2 for part, w1, w2 in weights])


class Block(nn.Module):
    def __init__(self, kind: str, sizes: Sizes) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(sizes.D)
        self.up = nn.Linear(sizes.D, sizes.F)
        self.down = nn.Linear(sizes.F, sizes.D)
        self.experts = Experts(sizes) if kind == "MoE" else None

    def forward(self, x_ND: Tensor) -> Tensor:
        if self.kind == "recomputed":
            return checkpoint(self.compute, x_ND, use_reentrant=False)
        return self.compute(x_ND)

    def compute(self, x_ND: Tensor) -> Tensor:
        h_ND = self.down(torch.relu(self.up(self.norm(x_ND))))
        if self.experts is not None:
            expert_N = h_ND.detach()[:, : self.experts.w1_EDF.shape[0]].argmax(-1)
            order = expert_N.argsort(stable=True)
            # The host waits here, as for the token counts of an all-to-all.
            counts = expert_N.bincount(minlength=self.experts.w1_EDF.shape[0]).tolist()
            y_ND = self.experts(h_ND[order], counts)
            h_ND = h_ND.index_add(0, order, y_ND)
        return x_ND + h_ND


def make(kind: str, variant: str, sizes: Sizes, meshes: tuple[DeviceMesh, DeviceMesh]) -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block(kind, sizes) for _ in range(sizes.blocks)]
    model = nn.Sequential(*blocks)
    depth = 1 if variant == EXPLICIT else 0
    shard_model(
        model,
        meshes[0],
        blocks=blocks,
        experts=lambda block: block.experts,
        expert_mesh=meshes[1],
        prefetch=Prefetch(forward=depth, backward=depth),
    )
    if variant == NONE:
        for block in blocks:
            # In backward FSDP2 gathers one block ahead unless it is told otherwise.
            assert isinstance(block, FSDPModule)
            block.set_modules_to_backward_prefetch([block])
    return model


def step(model: nn.Module, x_ND: Tensor) -> float:
    """Seconds of forward and backward."""
    model.zero_grad()
    dist.barrier()
    start = time.perf_counter()
    model(x_ND).square().mean().backward()
    return time.perf_counter() - start


def forward_seconds(kind: str, sizes: Sizes, x_ND: Tensor) -> float:
    """Of one block, with both ranks at work; the slower one's."""
    block = Block(kind, sizes)
    times = []
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        block(x_ND)
        times.append(time.perf_counter() - start)
    longest = torch.tensor(statistics.median(times))
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return longest.item()


def run_case(case: Case, sizes: Sizes, meshes: tuple[DeviceMesh, DeviceMesh]) -> Measured:
    x_ND = torch.randn(sizes.N, sizes.D, generator=torch.Generator().manual_seed(1))
    latency = case.latency * forward_seconds(case.kind, sizes, x_ND)
    models = {name: make(case.kind, name, sizes, meshes) for name in VARIANTS}
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    shares: dict[str, dict[str, list[float]]] = {
        name: {phase: [] for phase in PHASES} for name in VARIANTS
    }
    reports = {}
    with ExitStack() as delays:
        for model in models.values():
            delays.enter_context(delayed_all_gathers(model, latency))
            step(model, x_ND)
        difference = _difference(models)
        for number in range(sizes.rounds):
            order = VARIANTS[number % len(VARIANTS) :] + VARIANTS[: number % len(VARIANTS)]
            for name in order:
                seconds[name].append(step(models[name], x_ND))
                with profile(activities=[ProfilerActivity.CPU]) as result:
                    step(models[name], x_ND)
                found = reports[name] = overlap_report(result)
                shares[name]["all"].append(found.share)
                shares[name]["but first"].append(_but_the_first(found))
                shares[name]["forward"].append(found.total("forward").share)
                shares[name]["backward"].append(found.total("backward").share)
    return Measured(case, latency, seconds, shares, reports, difference)


def _but_the_first(found: OverlapReport) -> float:
    rows = [row for row in found.layers if (row.layer, row.phase) != ("0", "forward")]
    return sum(row.hidden for row in rows) / sum(row.seconds for row in rows)


def _difference(models: dict[str, nn.Module]) -> float:
    worst = 0.0
    for name in VARIANTS[1:]:
        pairs = zip(models[EXPLICIT].parameters(), models[name].parameters(), strict=True)
        for ours, other in pairs:
            a, b = (p.grad.to_local() for p in (ours, other))  # pyrefly: ignore
            worst = max(worst, float((a - b).norm() / a.norm().clamp(min=1e-30)))
    return worst


def _rank(rank: int, store: str, sizes: Sizes, cases: list[Case], results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    dense = dist.init_device_mesh("cpu", (RANKS,))
    group = dist.new_group(list(range(RANKS)))
    meshes = (dense, DeviceMesh.from_group(group, "cpu"))
    for case in cases:
        measured = run_case(case, sizes, meshes)
        if rank == 0:
            results.put(measured)
    dist.barrier()


def measure(sizes: Sizes, cases: list[Case]) -> Iterator[Measured]:
    """Rank 0's figures, case by case."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler reports each start and stop
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        arguments = (str(Path(folder) / "store"), sizes, cases, results)
        ranks = [
            context.Process(target=_rank, args=(rank, *arguments), daemon=True)
            for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        try:
            for _ in cases:
                yield _next(results, ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def _next(results: Any, ranks: list[Any]) -> Measured:
    while True:
        try:
            return results.get(timeout=1)
        except queue.Empty:
            if dead := [i for i, rank in enumerate(ranks) if rank.exitcode]:
                raise RuntimeError(f"rank {dead[0]} of the benchmark failed; see above") from None


def checks(results: list[Measured]) -> Iterator[Check]:
    for m in results:
        title = m.case.title
        yield at_most(f"{title}: difference between gradients", m.difference, 1e-6)
        slower = statistics.median(m.ratios(NONE))
        yield at_least(f"{title}: time without prefetch over with", slower, 1.0)
        if m.case.latency < 1:
            yield at_least(
                f"{title}: hidden share with explicit prefetch", m.share(EXPLICIT), HIDDEN
            )
            yield at_most(f"{title}: hidden share without prefetch", m.share(NONE), FAR_LESS)
            own = m.share(IMPLICIT, "forward")
            yield at_most(f"{title}: hidden share of FSDP2's own in forward", own, FAR_LESS)


def show(console: Console, m: Measured) -> None:
    note = f"{report.seconds(m.latency_seconds)} each; hidden shares"
    table = Table(title=f"{m.case.title}: {note}", title_justify="left")
    table.add_column("prefetch")
    columns = ("step", "quartiles", "/ explicit", "quartiles", *PHASES, "spread")
    for column in columns:
        table.add_column(column, justify="right")
    for name in VARIANTS:
        low, high = quartiles(m.seconds[name])
        a, b = quartiles(m.ratios(name))
        spread = m.shares[name][PHASES[-1]]
        ratio = ["1", ""]
        if name != EXPLICIT:
            ratio = [f"{statistics.median(m.ratios(name)):.2f}", f"{a:.2f} - {b:.2f}"]
        table.add_row(
            name,
            report.seconds(statistics.median(m.seconds[name])),
            f"{report.seconds(low)} - {report.seconds(high)}",
            *ratio,
            *(f"{m.share(name, phase):.0%}" for phase in PHASES),
            f"{min(spread):.0%} - {max(spread):.0%}",
        )
    console.print(table)


def as_json(facts: dict[str, Any], results: list[Measured], found: list[Check]) -> dict[str, Any]:
    return {
        "suite": "prefetch",
        "machine": facts,
        "cases": [
            {
                **asdict(m.case),
                "latency_seconds": m.latency_seconds,
                "seconds": m.seconds,
                "time_over_explicit": {n: statistics.median(m.ratios(n)) for n in VARIANTS},
                "hidden_shares": m.shares,
                "reports": {name: r.to_dict() for name, r in m.reports.items()},
                "gradient_difference": m.difference,
            }
            for m in results
        ],
        "checks": [
            {
                "claim": c.text,
                "found": None if math.isnan(c.value) else c.value,
                "wanted": c.wanted,
                "holds": c.holds,
            }
            for c in found
        ],
    }


def run(console: Console, out: Path, cases: list[Case], quick: bool, check: bool) -> bool:
    """Measure, print and write; False if a claim is checked and does not hold."""
    out.mkdir(parents=True, exist_ok=True)
    facts = machine.facts(1, "cpu")
    report.print_machine(console, facts)
    if facts["load_average"][0] > machine.QUIET:
        console.print(
            f"[yellow]The load average is {facts['load_average'][0]:.2f}: something else is at "
            "work, and these figures are not final.[/]"
        )
    sizes = QUICK if quick else Sizes()
    results: list[Measured] = []
    for m in measure(sizes, cases):
        results.append(m)
        show(console, m)
        for name in (EXPLICIT, IMPLICIT):
            if m.case == cases[0]:
                m.reports[name].picture(out / f"prefetch-{'on' if name == EXPLICIT else 'off'}.png")
        facts["load_average_end"] = machine.load()
        document = as_json(facts, results, list(checks(results)))
        report.write_json(document, out / "prefetch.json")
    found = list(checks(results))
    console.print(f"{out / 'prefetch'}.json, -on.png, -off.png", highlight=False)
    if check:
        report.print_checks(console, found)
    return not check or all(c.holds for c in found)

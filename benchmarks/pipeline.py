"""A model, not a measurement: how busy the cores of an Atlas A3 are in a DSA kernel.

A cube core and its two vector cores work on blocks of gathered keys. A block passes five stages:
V0 gather, C1 products, V1 vector work, C2 products, V2 scatter-add. Widths of stages are times of
the pair: those of V0, V1 and V2 are times of both vector cores together.

The rules:

1. The cube core does one stage at a time, so do the vector cores, each in the order of issue. A
   stage follows the one before it of its block. V2 is done once for every `scatter_every` blocks,
   after C2 of the last of them.
2. There are 1 + `ahead` places for gathered blocks, and C2 still reads them. With `ahead` 0 stages
   are issued block by block: a gather waits for the last block's C2, so nothing overlaps.
3. With `ahead` 1 or 2, V0 and C1 of so many blocks are issued up front. Then, as many blocks at a
   time: V1 and C2 of these, V0 and C1 of the next, V2 of these.
4. Every other buffer is double, which this order never exceeds: C1 is at most two blocks ahead of
   V1, V1 two of C2, C2 two scatters of V2.
5. What launches of their own do before and after the loop overlaps with nothing: the cube core is
   idle, both vector cores work.

Widths come from the published figures (`SFAG`, `SLIG`), or from the work a kernel does for a block
with its tiles (`WORK`). Work is turned into time by the rates at which the published backward, with
its published tiles, has its published widths: no rate comes from elsewhere, the unit of time is the
figure's, and small tiles are assumed to reach the rates of 128 x 128 ones. Where the compiler uses
only one vector core of the pair, V0, V1 and V2 take twice as long, and "busy" is said of that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from benchmarks.checks import Check, at_most, rounds_to

STAGES = ("V0", "C1", "V1", "C2", "V2")
AHEAD = (0, 1, 2)


@dataclass(frozen=True)
class Pipeline:
    name: str
    widths: tuple[float, ...]
    """Of V0, C1, V1, C2 and V2."""
    blocks: int
    scatter_every: int = 1
    before: float = 0.0
    """Time of the vector cores before the loop."""
    after: float = 0.0


# Widths as read off the published figures, in the figures' unit. SFAG, the backward of sparse
# attention, scatters once for two blocks and gathers two ahead. SLIG, the indexer's loss with its
# gradients, gathers one ahead; what is published of it is taken for the steady state.
SFAG = Pipeline("SFAG", (79, 68, 70, 98, 73), blocks=4, scatter_every=2)
SLIG = Pipeline("SLIG", (146, 115, 115, 115, 115), blocks=1000)


@dataclass(frozen=True)
class Published:
    """A published figure, as printed: busy shares in per cent, or how many times shorter."""

    pipeline: Pipeline
    ahead: int
    name: str
    figure: str


PUBLISHED = (
    Published(SFAG, 0, "cube", "47"),
    Published(SFAG, 0, "vector", "53"),
    Published(SFAG, 2, "cube", "76"),
    Published(SFAG, 2, "vector", "85"),
    Published(SFAG, 2, "shorter", "1.62"),
    Published(SLIG, 1, "shorter", "1.62"),
)


# The schedule


@dataclass(frozen=True)
class Event:
    stage: str
    block: int
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    events: list[Event]
    """Of the loop."""
    outside: float = 0.0
    """Time of the vector cores before and after it."""

    @property
    def length(self) -> float:
        return max(event.end for event in self.events) + self.outside

    def busy(self, core: str) -> float:
        """Share of the time in which the core, "C" or "V", works."""
        inside = sum(e.end - e.start for e in self.events if e.stage[0] == core)
        return (inside + (self.outside if core == "V" else 0.0)) / self.length


def schedule(pipeline: Pipeline, ahead: int) -> Schedule:
    """When every stage starts and ends under the rules above.

    Raises:
        ValueError: `ahead` is not 0, 1 or 2, or the last blocks would not be scattered.
    """
    if ahead not in AHEAD:
        raise ValueError(f"ahead {ahead}: 0, 1 or 2, which is what double buffers hold")
    if pipeline.blocks < 1 or pipeline.blocks % pipeline.scatter_every:
        raise ValueError(
            f"blocks {pipeline.blocks}: a multiple of scatter_every {pipeline.scatter_every}"
        )
    free = {"C": 0.0, "V": 0.0}
    ended: dict[tuple[int, str], float] = {}
    events = []
    for block, stage in _program(pipeline, ahead):
        core, width = stage[0], pipeline.widths[STAGES.index(stage)]
        start = max([free[core], *(ended[n] for n in _needs(block, stage, ahead))])
        free[core] = ended[block, stage] = start + width
        events.append(Event(stage, block, start, start + width))
    return Schedule(events, pipeline.before + pipeline.after)


def _program(pipeline: Pipeline, ahead: int) -> Iterator[tuple[int, str]]:
    """(block, stage) in the order of issue."""
    at_once = max(1, ahead)

    def issue(first: int, *stages: str) -> Iterator[tuple[int, str]]:
        blocks = range(first, min(first + at_once, pipeline.blocks))
        return ((block, stage) for block in blocks for stage in stages)

    if ahead:
        yield from issue(0, "V0", "C1")
    for first in range(0, pipeline.blocks, at_once):
        if not ahead:
            yield from issue(first, "V0", "C1")
        yield from issue(first, "V1", "C2")
        if ahead:
            yield from issue(first + ahead, "V0", "C1")
        for block, stage in issue(first, "V2"):
            if (block + 1) % pipeline.scatter_every == 0:
                yield block, stage


def _needs(block: int, stage: str, ahead: int) -> list[tuple[int, str]]:
    """What must have ended before, besides what its core was issued before."""
    if stage == "V0":  # the block whose place it takes
        return [(block - 1 - ahead, "C2")] if block > ahead else []
    return [(block, STAGES[STAGES.index(stage) - 1])]


def figures(pipeline: Pipeline, ahead: int) -> dict[str, float]:
    """What is published of a pipeline, from the model, and its length."""
    result = schedule(pipeline, ahead)
    return {
        "length": result.length,
        "cube": 100 * result.busy("C"),
        "vector": 100 * result.busy("V"),
        "shorter": schedule(pipeline, 0).length / result.length,
    }


def checks() -> Iterator[Check]:
    """Which of the published figures follow from the published widths."""
    for p in PUBLISHED:
        value = figures(p.pipeline, p.ahead)[p.name]
        text = f"{p.pipeline.name}, {p.pipeline.blocks} blocks, {p.ahead} ahead: {p.name}"
        if p.pipeline is SFAG:
            yield rounds_to(text, value, p.figure)
        else:  # the vector cores' share of the widths, 376 of 606, allows no more than 1.612
            off = 100 * abs(value / float(p.figure) - 1)
            yield at_most(f"{text}, per cent off {p.figure}", off, 1)


# Stages of our kernels, from their tiles

H, A, V, K = 128, 576, 512, 2048  # heads, widths of a key and of its value, selected keys
I, D = 64, 128  # the indexer's heads and their width
L1_BYTES = 512 * 1024


@dataclass(frozen=True)
class Work:
    """What a kernel does for a block of keys."""

    gathered_bytes: float
    c1_flops: float
    v1_passes: float
    """Passes of V1, each over every element of a tile."""
    c2_flops: float = 0
    scattered_bytes: float = 0
    v2_passes: float = 0


# Here every tile of heads gathers keys and scatters their gradients itself, in its loop, as the
# published kernels do. `Kernel` takes that out of the loop where launches of their own do it.


def _forward(rows: int, keys: int, size: int) -> Work:
    """V1: scale, mask, maximum, subtract, exp, mask, sum, cast. V2: shrink the output, add."""
    tile = rows * keys
    return Work(keys * A * size, 2 * tile * A, 8 * tile, 2 * tile * V, v2_passes=2 * rows * V)


def _backward(rows: int, keys: int, size: int) -> Work:
    """V1: scale, subtract, exp, mask, subtract, multiply, scale, two casts."""
    tile = rows * keys
    c1, c2 = 2 * tile * (A + V), 2 * tile * (A + A + V)
    return Work(keys * A * size, c1, 9 * tile, c2, scattered_bytes=keys * A * 4)


def _target(rows: int, keys: int, size: int) -> Work:
    """All heads pass over a block gathered once. V1: scale, subtract, exp, sum."""
    return Work(keys * A * size * rows / H, 2 * rows * keys * A, 4 * rows * keys)


def _indexer_kl(rows: int, keys: int, size: int) -> Work:
    """All index heads are one tile. V1: relu, weight, sum; the row of keys itself is small."""
    return Work(keys * D * size, 2 * I * keys * D, 3 * I * keys)


def _indexer_kl_backward(rows: int, keys: int, size: int) -> Work:
    """The pass for gradients. V1: as above, then multiply, sum, compare, two for dS, cast."""
    tile = I * keys
    gradients = Work(keys * D * size, 2 * tile * D, 9 * tile, 4 * tile * D)
    return replace(gradients, scattered_bytes=keys * D * 4)


def _slig(rows: int, keys: int, size: int) -> Work:
    """The published one makes the target too: a target's and a loss's work."""
    target, loss = _target(rows, keys, size), _indexer_kl_backward(rows, keys, size)
    return Work(*(getattr(target, f.name) + getattr(loss, f.name) for f in fields(Work)))


WORK: dict[str, Callable[[int, int, int], Work]] = {
    "sparse_attention": _forward,
    "sparse_attention_backward": _backward,
    "attention_target": _target,
    "indexer_kl_loss": _indexer_kl,
    "indexer_kl_loss_backward": _indexer_kl_backward,
}
ATTENTION = ("sparse_attention", "sparse_attention_backward", "attention_target")


def _rates() -> dict[str, float]:
    """Work in a unit of the figure's time, from SFAG's published tiling: 128 x 128, bfloat16."""
    work = _backward(128, 128, 2)
    v0, c1, v1, c2, v2 = SFAG.widths
    return {
        "gathered_bytes": work.gathered_bytes / v0,
        "flops": (work.c1_flops + work.c2_flops) / (c1 + c2),
        "passes": work.v1_passes / v1,
        "scattered_bytes": SFAG.scatter_every * work.scattered_bytes / v2,
    }


RATES = _rates()


def widths(work: Work, overhead: float = 0, vector_cores: int = 2) -> tuple[float, ...]:
    """Times of the five stages. `overhead`: what starting a stage costs; none is published."""
    v0, c1, v1, c2, v2 = (
        work.gathered_bytes / RATES["gathered_bytes"],
        work.c1_flops / RATES["flops"],
        work.v1_passes / RATES["passes"],
        work.c2_flops / RATES["flops"],
        work.scattered_bytes / RATES["scattered_bytes"] + work.v2_passes / RATES["passes"],
    )
    slower = 2 / vector_cores
    times = (slower * v0, c1, slower * v1, c2, slower * v2)
    return tuple(time + overhead if time else 0.0 for time in times)


def published_tiles() -> dict[Pipeline, tuple[float, ...]]:
    """Widths that the work of the published tiles, 128 x 128, has at `RATES`."""
    v0, c1, v1, c2, v2 = widths(_backward(128, 128, 2))
    return {
        SFAG: (v0, c1, v1, c2, SFAG.scatter_every * v2),
        SLIG: widths(_slig(128, 128, 2)),
    }


VECTOR_CORES = {"cube + vector": 1, "cube + 2 vector": 2}
"""How many of a pair work, by what is recorded of a program. Others have no products."""


@dataclass(frozen=True)
class Kernel:
    """A kernel of ours with its tiles, in bfloat16."""

    name: str
    rows: int
    keys: int
    l1_bytes: int | None = None
    """The compiler's high-water mark, where one was recorded."""
    vector_cores: int | None = None
    """How many of a pair the compiler uses, where that was recorded; else both are assumed."""
    gathered_before: bool = False
    """Whether launches of their own gather keys and scatter gradients, once for all heads."""

    def pipeline(self, overhead: float = 0) -> Pipeline:
        """The loop of a tile of heads over a query's keys, with the tile's share of the launches
        around it. These cost nothing to start."""
        work, before, after = WORK[self.name](self.rows, self.keys, 2), 0.0, 0.0
        if self.gathered_before:
            elements = K * A * self.rows / H
            before = elements * 2 / RATES["gathered_bytes"]
            if work.scattered_bytes:  # the loop adds whole rows, a pass over each, to one a slot
                after = elements * 4 / RATES["scattered_bytes"]
                work = replace(work, scattered_bytes=0, v2_passes=self.keys * A)
            work = replace(work, gathered_bytes=0)  # rows in order: the cube core loads them
        stages = widths(work, overhead, self.vector_cores or 2)
        return Pipeline(self.name, stages, K // self.keys, before=before, after=after)

    def fits(self, ahead: int) -> bool | None:
        """Whether L1 has room for the blocks read ahead; None if its use was not recorded."""
        if self.l1_bytes is None:
            return None
        block = self.keys * (A if self.name in ATTENTION else D) * 2
        return self.l1_bytes + ahead * block <= L1_BYTES


def kernels(recorded: list[dict[str, Any]]) -> tuple[list[Kernel], list[str]]:
    """Our kernels with their tiles on Ascend, and the names of those that the model leaves out.

    bfloat16 only: the published widths are bfloat16's and say nothing of the rates in fp32.

    Args:
        recorded: of every compiled program an object with `kernel`, `dtype`, `tiles` (rows,
            columns), `cores` and the high-water marks `l1_bytes` and `ub_bytes`.
    """
    from npu_dsa_kernels.backends.triton.tiles import entries  # imports torch

    # Of a kernel's programs, the one that takes most: that of the model's widths.
    largest: dict[tuple, dict[str, Any]] = {}
    staged = [r for r in recorded if r["cores"] in VECTOR_CORES]
    for r in sorted(staged, key=lambda r: (r["l1_bytes"], r["ub_bytes"])):
        largest[r["kernel"], r["dtype"], *r["tiles"]] = r
    table = {name: tiles for name, size, tiles in entries("ascend") if size == 2}
    ours = [
        Kernel(
            name,
            tiles.rows,
            tiles.columns,
            gathered_before=name in ATTENTION and "gather_slots" in table,
        )
        for name, tiles in table.items()
        if name in WORK
    ]
    for number, kernel in enumerate(ours):
        if r := largest.get((kernel.name, "bfloat16", kernel.rows, kernel.keys)):
            cores = VECTOR_CORES[r["cores"]]
            ours[number] = replace(kernel, l1_bytes=r["l1_bytes"], vector_cores=cores)
    return ours, [name for name in table if name not in (*WORK, "gather_slots", "scatter_slots")]

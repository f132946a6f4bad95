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

Widths come from the published figures (`SFAG`, `SLIG`), or from the work a kernel does for a block
with its tiles (`WORK`). Work is turned into time by the rates at which the published backward, with
its published tiles, has its published widths: no rate comes from elsewhere, the unit of time is the
figure's, and small tiles are assumed to reach the rates of 128 x 128 ones.
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

    @property
    def length(self) -> float:
        return max(event.end for event in self.events)

    def busy(self, core: str) -> float:
        """Share of the time in which the core, "C" or "V", works."""
        return sum(e.end - e.start for e in self.events if e.stage[0] == core) / self.length


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
    return Schedule(events)


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
    """What is published of a pipeline, from the model."""
    result = schedule(pipeline, ahead)
    return {
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


# Keys of the attention are gathered once for all heads, and their gradients scattered once, by
# kernels of their own: a tile of heads has its share of that.


def _forward(rows: int, keys: int, size: int) -> Work:
    """V1: scale, mask, maximum, subtract, exp, mask, sum, cast. V2: shrink the output, add."""
    tile, gathered = rows * keys, keys * A * size * rows / H
    return Work(gathered, 2 * tile * A, 8 * tile, 2 * tile * V, v2_passes=2 * rows * V)


def _backward(rows: int, keys: int, size: int) -> Work:
    """V1: scale, subtract, exp, mask, subtract, multiply, scale, two casts. V2: heads are added."""
    tile, share = rows * keys, rows / H
    return Work(
        gathered_bytes=keys * A * size * share,
        c1_flops=2 * tile * (A + V),
        v1_passes=9 * tile,
        c2_flops=2 * tile * (A + A + V),
        scattered_bytes=keys * A * 4 * share,
        v2_passes=keys * A if rows < H else 0,
    )


def _target(rows: int, keys: int, size: int) -> Work:
    """V1: scale, subtract, exp, sum."""
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


def widths(work: Work, overhead: float = 0) -> tuple[float, ...]:
    """Times of the five stages. `overhead`: what starting a stage costs; none is published."""
    times = (
        work.gathered_bytes / RATES["gathered_bytes"],
        work.c1_flops / RATES["flops"],
        work.v1_passes / RATES["passes"],
        work.c2_flops / RATES["flops"],
        work.scattered_bytes / RATES["scattered_bytes"] + work.v2_passes / RATES["passes"],
    )
    return tuple(time + overhead if time else 0.0 for time in times)


def published_tiles() -> dict[Pipeline, tuple[float, ...]]:
    """Widths that the work of the published tiles, 128 x 128, has at `RATES`."""
    v0, c1, v1, c2, v2 = widths(_backward(128, 128, 2))
    return {
        SFAG: (v0, c1, v1, c2, SFAG.scatter_every * v2),
        SLIG: widths(_slig(128, 128, 2)),
    }


@dataclass(frozen=True)
class Kernel:
    """A kernel of ours with its tiles, in bfloat16."""

    name: str
    rows: int
    keys: int
    l1_bytes: int | None = None
    """The compiler's high-water mark, where one was recorded."""

    @property
    def work(self) -> Work:
        return WORK[self.name](self.rows, self.keys, 2)

    def pipeline(self, overhead: float = 0) -> Pipeline:
        return Pipeline(self.name, widths(self.work, overhead), blocks=K // self.keys)

    def fits(self, ahead: int) -> bool | None:
        """Whether L1 has room for the blocks gathered ahead; None if its use was not recorded."""
        if self.l1_bytes is None:
            return None
        block = self.keys * (D if self.name.startswith("indexer") else A) * 2
        return self.l1_bytes + ahead * block <= L1_BYTES


def kernels(recorded: list[dict[str, Any]]) -> tuple[list[Kernel], list[str]]:
    """Our kernels with their tiles on Ascend, and the names of those without these stages.

    bfloat16 only: the published widths are bfloat16's and say nothing of the rates in fp32.

    Args:
        recorded: high-water marks, objects with `kernel`, `dtype`, `tiles` (rows, columns) and
            `l1_bytes`.
    """
    from npu_dsa_kernels.backends.triton.tiles import entries  # imports torch

    marks: dict[tuple, int] = {}  # the highest of all shapes
    for r in recorded:
        key = (r["kernel"], r["dtype"], *r["tiles"])
        marks[key] = max(r["l1_bytes"], marks.get(key, 0))
    table = [(name, tiles) for name, size, tiles in entries("ascend") if size == 2]
    ours = [
        Kernel(name, t.rows, t.columns, marks.get((name, "bfloat16", t.rows, t.columns)))
        for name, t in table
        if name in WORK
    ]
    return ours, [name for name, _ in table if name not in WORK]

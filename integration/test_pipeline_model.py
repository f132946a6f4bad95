"""The benchmarks' model of an Atlas A3's cores: its rules hold, and give the published figures."""

import itertools
import random
from dataclasses import replace

import pytest

from benchmarks import pipeline as model
from benchmarks.pipeline import AHEAD, SFAG, SLIG, Kernel, Pipeline, figures, schedule

NEVER_LATER = 1e-9


def test_published_figures():
    assert schedule(SFAG, 0).length == 1406  # 4 x (79 + 68 + 70 + 98) + 2 x 73
    # The vector cores are idle once, from the last V1 to the last V2, for C2 of both last blocks.
    assert schedule(SFAG, 2).length == 4 * (79 + 70) + 2 * 73 + (2 * 98 - 70)
    failed = [c for c in model.checks() if not c.holds]
    assert not failed and len(model.PUBLISHED) == 6


@pytest.mark.parametrize("name", ["cube", "vector", "shorter"])
@pytest.mark.parametrize("blocks", [2, 6, 8])
def test_only_four_blocks_give_them(blocks, name):
    published = {p.name: float(p.figure) for p in model.PUBLISHED if p.pipeline is SFAG and p.ahead}
    assert figures(replace(SFAG, blocks=blocks), 2)[name] != pytest.approx(
        published[name], rel=0.03
    )


def test_one_ahead_reaches_what_the_vector_cores_allow():
    bound = sum(SLIG.widths) / sum(SLIG.widths[::2])
    assert figures(SLIG, 1)["shorter"] == pytest.approx(bound, rel=1e-3)
    assert figures(replace(SLIG, blocks=4), 1)["shorter"] < 0.9 * bound


def pipelines():
    random.seed(0)
    for every in (1, 2):
        for _ in range(10):
            widths = tuple(random.choice((0, 1, 5, 20)) + random.random() for _ in model.STAGES)
            yield Pipeline("random", widths, blocks=8, scatter_every=every)


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("pipeline", [SFAG, replace(SLIG, blocks=8), *pipelines()])
def test_rules(pipeline, ahead):
    events = schedule(pipeline, ahead).events
    at = {(e.stage, e.block): e for e in events}
    every, blocks = pipeline.scatter_every, range(pipeline.blocks)
    assert len(at) == len(events) == 4 * len(blocks) + len(blocks) // every

    for core in "CV":
        own = sorted((e.start, e.end) for e in events if e.stage[0] == core)
        assert all(a[1] <= b[0] + NEVER_LATER for a, b in itertools.pairwise(own))

    def follows(later, earlier):
        return at[later].start >= at[earlier].end - NEVER_LATER

    for block in blocks:
        assert follows(("C1", block), ("V0", block))
        assert follows(("V1", block), ("C1", block))
        assert follows(("C2", block), ("V1", block))
        assert follows(("V2", block - block % every + every - 1), ("C2", block))

    def held(filled, emptied, end):
        """The most blocks between the start of one stage and the end of another."""
        spans = [(at[filled, b].start, at[emptied, end(b)].end) for b in blocks]
        return max(sum(s <= t < e - NEVER_LATER for s, e in spans) for t, _ in spans)

    assert held("V0", "C2", lambda b: b) <= 1 + ahead
    assert held("C1", "V1", lambda b: b) <= 2
    assert held("V1", "C2", lambda b: b) <= 2
    assert held("C2", "V2", lambda b: b - b % every + every - 1) <= 2 * every


def test_nothing_overlaps_without_blocks_ahead():
    for pipeline in pipelines():
        result = schedule(pipeline, 0)
        assert result.busy("C") + result.busy("V") == pytest.approx(1)


@pytest.mark.parametrize("ahead", [-1, 3])
def test_ahead_is_refused(ahead):
    with pytest.raises(ValueError, match=f"ahead {ahead}"):
        schedule(SFAG, ahead)


def test_blocks_that_would_not_be_scattered_are_refused():
    with pytest.raises(ValueError, match="blocks 3"):
        schedule(replace(SFAG, blocks=3), 2)


def test_rates_give_the_published_backward():
    found = model.published_tiles()[SFAG]
    assert found[::2] == pytest.approx(SFAG.widths[::2])
    assert found == pytest.approx(SFAG.widths, rel=0.04)  # one rate for both C1 and C2


@pytest.mark.parametrize("ahead", AHEAD)
def test_the_cube_is_idle_before_and_after_the_loop(ahead):
    for pipeline in pipelines():
        loop, whole = (
            schedule(p, ahead) for p in (pipeline, replace(pipeline, before=70, after=5))
        )
        assert whole.events == loop.events
        assert whole.length == pytest.approx(loop.length + 75)
        for core, more in (("C", 0), ("V", 75)):
            worked = loop.busy(core) * loop.length + more
            assert whole.busy(core) == pytest.approx(worked / whole.length)


def test_widths_of_tiles():
    loop = Kernel("sparse_attention_backward", 128, 128).pipeline()
    assert loop.widths[::2] == pytest.approx((79, 70, 73 / 2)) and not loop.before + loop.after
    kernels = [
        Kernel("sparse_attention_backward", rows, 64, gathered_before=True) for rows in (16, 128)
    ]
    small, large = (kernel.pipeline() for kernel in kernels)
    assert small.blocks == 32 and small.widths[0] == large.widths[0] == 0
    # A tile has its heads' share of gathering, scattering and products, but adds whole rows.
    assert (large.before, large.after) == pytest.approx((16 * 79, 16 * 73 / 2))
    assert (large.before, large.after) == pytest.approx((8 * small.before, 8 * small.after))
    assert large.widths[1:4] == pytest.approx([8 * w for w in small.widths[1:4]])
    a_pass = 70 / (9 * 128 * 128)
    assert (small.widths[4], large.widths[4]) == pytest.approx([64 * 576 * a_pass] * 2)
    # No scatter, no time after; no stage, no overhead.
    target = Kernel("attention_target", 128, 128, gathered_before=True).pipeline(3)
    assert target.before == pytest.approx(large.before) and target.after == 0
    assert [w > 0 for w in target.widths] == [False, True, True, False, False]
    plain, costly = (Kernel("indexer_kl_loss", 64, 64).pipeline(o).widths for o in (0, 3))
    assert (
        costly == tuple(w + 3 if w else 0 for w in plain) and plain[0] > 0 and plain[3:] == (0, 0)
    )


def test_one_vector_core_takes_twice_as_long_in_the_loop():
    kernel = Kernel("sparse_attention_backward", 16, 32, gathered_before=True)
    unknown, one, both = (replace(kernel, vector_cores=n).pipeline() for n in (None, 1, 2))
    assert unknown == both
    assert one == replace(both, widths=one.widths)
    assert one.widths == tuple(w * f for w, f in zip(both.widths, (2, 1, 2, 1, 2), strict=True))
    loop = replace(kernel, gathered_before=False)
    assert replace(loop, vector_cores=1).pipeline().widths[0] == 2 * loop.pipeline().widths[0] > 0


def test_room_in_l1():
    gathered = 64 * 576 * 2
    kernel = Kernel("sparse_attention", 16, 64)
    assert [kernel.fits(a) for a in AHEAD] == [None, None, None]
    kernel = replace(kernel, l1_bytes=524288 - gathered)
    assert [kernel.fits(a) for a in AHEAD] == [True, True, False]


def test_our_tiles_and_what_is_recorded_of_them():
    ours, others = model.kernels([])
    assert {k.name for k in ours} == set(model.WORK)
    assert not set(others) & {*model.WORK, "gather_slots", "scatter_slots"}
    assert {k.name for k in ours if k.gathered_before} == set(model.ATTENTION)
    assert all(k.l1_bytes is None and k.vector_cores is None for k in ours)
    first = ours[0]
    program = {"kernel": first.name, "dtype": "bfloat16", "tiles": [first.rows, first.keys]}
    rows = [  # the largest counts, and of equals in L1 the largest in UB
        {**program, "l1_bytes": 7, "ub_bytes": 3, "cores": "cube + vector"},
        {**program, "l1_bytes": 7, "ub_bytes": 2, "cores": "cube + 2 vector"},
        {**program, "l1_bytes": 5, "ub_bytes": 9, "cores": "cube + 2 vector"},
        {**program, "l1_bytes": 9, "ub_bytes": 9, "cores": "cube + 2 vector", "dtype": "x"},
        {**program, "l1_bytes": 9, "ub_bytes": 9, "cores": "cube + 2 vector", "tiles": [1, 1]},
        {**program, "l1_bytes": 9, "ub_bytes": 9, "cores": "vector"},  # of it, but without products
    ]
    for recorded in (rows, rows[::-1]):
        found = model.kernels(recorded)[0]
        assert found == [replace(first, l1_bytes=7, vector_cores=1), *ours[1:]]

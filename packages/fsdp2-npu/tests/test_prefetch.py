import pytest
import torch
import torch.distributed as dist

from fsdp2_npu import Prefetch, shard_model
from fsdp2_ranks import run_ranks
from toy import LENGTH, batch, build, loss_of

LAYERS = 4


def _timelines(rank, depths):
    return {depth: _timeline(Prefetch(depth, depth)) for depth in depths}


@pytest.fixture(scope="module")
def timelines():
    return run_ranks(_timelines, 2, (0, 1, 2))


def _timeline(prefetch):
    """FSDP2's own marks in the order in which they begin, as (what, group)."""
    model = build(layers=LAYERS)
    shard_model(
        model,
        dist.init_device_mesh("cpu", (2,)),
        blocks=model.layers,
        full_precision=[model.layers[2].scorer],
        reshard_after_forward=True,
        prefetch=prefetch,
    )
    loss_of(model, batch(1), LENGTH).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss_of(model, batch(1), LENGTH).backward()
    events = []
    for event in sorted(profile.events(), key=lambda event: event.time_range.start):
        what, _, group = event.name.removeprefix("FSDP::").partition(" (")
        if event.name.startswith("FSDP::") and group.endswith(")"):
            events.append((what, group[:-1]))
    return events


def _running_ahead(events, end):
    """For each layer, in order: the layers whose all-gathers begin before it ends."""
    ends = [i for i, (what, group) in enumerate(events) if what == end and group in LAYER_NAMES]
    ahead = {}
    for position in ends:
        gathered = [g for what, g in events[:position] if what == "all_gather"]
        ahead[events[position][1]] = gathered
    return ahead


LAYER_NAMES = [f"layers.{i}" for i in range(LAYERS)]


def _split(events):
    """Forward and backward."""
    last = events.index(("post_forward", LAYER_NAMES[-1])) + 1
    return events[:last], events[last:]


@pytest.mark.distributed
@pytest.mark.parametrize("depth", [1, 2])
def test_all_gathers_run_ahead_of_their_block(timelines, depth):
    for events in timelines:
        forward, backward = _split(events[depth])
        ahead = _running_ahead(forward, "post_forward")
        assert list(ahead) == LAYER_NAMES
        for i, name in enumerate(LAYER_NAMES):
            wanted = LAYER_NAMES[: i + 1 + depth]
            gathered = [g for g in ahead[name] if g in LAYER_NAMES]
            assert gathered == wanted, (name, gathered)
        # A group inside a block is gathered right after it, before the block begins.
        gathers = [group for what, group in forward if what == "all_gather"]
        assert gathers.index("layers.2.scorer") == gathers.index("layers.2") + 1
        begin = forward.index(("pre_forward", "layers.2"))
        assert forward.index(("all_gather", "layers.2.scorer")) < begin

        reverse = LAYER_NAMES[::-1]
        ahead = _running_ahead(backward, "post_backward_reshard")
        assert list(ahead) == reverse
        for i, name in enumerate(reverse):
            gathered = [g for g in ahead[name] if g in LAYER_NAMES]
            assert gathered == reverse[: i + 1 + depth], (name, gathered)


@pytest.mark.distributed
def test_without_prefetch_a_block_gathers_its_own(timelines):
    for events in timelines:
        forward, _ = _split(events[0])
        ahead = _running_ahead(forward, "post_forward")
        for i, name in enumerate(LAYER_NAMES):
            assert [g for g in ahead[name] if g in LAYER_NAMES] == LAYER_NAMES[: i + 1]


@pytest.mark.parametrize("value", [-1, 1.5, True, None])
def test_depths_are_numbers_of_blocks(value):
    with pytest.raises(ValueError, match=r"Prefetch\.backward is a number of blocks"):
        Prefetch(backward=value)

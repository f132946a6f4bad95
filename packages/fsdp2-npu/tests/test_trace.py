"""What is gathered and freed when. Ranks of a size start once; each test looks at one case."""

from itertools import pairwise

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp2_npu import Event, Prefetch, shard_model, trace_collectives
from fsdp2_npu.trace import check_torch
from fsdp2_ranks import run_ranks
from toy import DIM, LENGTH, VOCAB, batch, build, loss_of

LAYERS = 3
BLOCKS = ["embedding", *(f"layers.{i}" for i in range(LAYERS)), "norm, head"]
SCORERS = [f"layers.{i}.scorer" for i in range(LAYERS)]

TWO_RANKS = {
    "plain": {},
    "ac inside": {"ac": "inside"},
    "ac outside": {"ac": "outside"},
    "last kept": {"reshard": None},
    "all kept": {"reshard": False},
    "no prefetch": {"prefetch": Prefetch(0, 0)},
    "two ahead": {"prefetch": Prefetch(2, 2)},
    "accumulation": {"accumulate": True},
}
FOUR_RANKS = {
    "hsdp": {"shape": (2, 2)},
    "hsdp, ac inside": {"shape": (2, 2), "ac": "inside"},
    "to pairs": {"reshard": 2},
    "experts": {"experts": True},
    "experts, ac inside": {"experts": True, "ac": "inside"},
    "experts, ac outside": {"experts": True, "ac": "outside"},
}
IN_TURN = ["plain", "ac inside", "ac outside", *FOUR_RANKS]


def _traces(rank, cases):
    return {name: _trace(**options) for name, options in cases.items()}


@pytest.fixture(scope="module")
def traces():
    results = {2: run_ranks(_traces, 2, TWO_RANKS), 4: run_ranks(_traces, 4, FOUR_RANKS)}
    return {name: [r[name] for r in ranks] for ranks in results.values() for name in ranks[0]}


def _model(shape=None, experts=False, ac=None, reshard=True, prefetch=Prefetch()):  # noqa: B008
    model = build(layers=LAYERS)
    model.recompute = ac == "outside"
    for layer in model.layers:
        layer.recompute = ac == "inside"
    names = ("replicate", "shard") if shape else None
    options = {}
    if experts:
        sparse = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
        for layer in model.layers:
            mine = slice(2 * sparse.get_local_rank("ep"), 2 * sparse.get_local_rank("ep") + 2)
            layer.experts.w_EDD = nn.Parameter(layer.experts.w_EDD.detach()[mine].clone())
            layer.experts.group = sparse.get_group("ep")
        options = {
            "experts": {layer: layer.experts for layer in model.layers},
            "expert_mesh": sparse["efsdp"],
        }
    shard_model(
        model,
        dist.init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names),
        blocks=model.blocks(),
        full_precision=[layer.scorer for layer in model.layers],
        reshard_after_forward=reshard,
        prefetch=prefetch,
        **options,
    )
    return model


class _Waits:
    """An all-gather that says when it is waited for."""

    def __init__(self, comm, layer, log):
        self.comm, self.layer, self.log = comm, layer, log
        self.allocate = comm.allocate

    def __call__(self, *args, **kwargs):
        work = self.comm(*args, **kwargs)
        if work is None:  # it has waited already
            self.log.append(f"wait {self.layer}")
        return work and _Work(work, self)


class _Work(dist.Work):
    def __init__(self, work, comm):
        super().__init__()
        self.work, self.comm = work, comm

    def wait(self, *args):
        self.comm.log.append(f"wait {self.comm.layer}")
        return self.work.wait(*args)


def _trace(accumulate=False, **options):
    model = _model(**options)
    log = []
    for i, layer in enumerate(model.layers):
        for group in layer._get_fsdp_state()._fsdp_param_groups:
            group._all_gather_comm = _Waits(group._all_gather_comm, f"layers.{i}", log)
    loss_of(model, batch(1), LENGTH).backward()
    before = _inside(model)
    with trace_collectives(model) as events:
        for i, layer in enumerate(model.layers):
            layer.at_sync = lambda i=i: events.append(f"sync layers.{i}")
            for group in layer._get_fsdp_state()._fsdp_param_groups:
                group._all_gather_comm.log = events
        if accumulate:
            model.set_requires_gradient_sync(False)
            loss_of(model, batch(1), LENGTH).backward()
            events.append("accumulated")
            model.set_requires_gradient_sync(True)
        loss_of(model, batch(1), LENGTH).backward()
    for layer in model.layers:
        layer.at_sync = lambda: None
        for group in layer._get_fsdp_state()._fsdp_param_groups:
            group._all_gather_comm.log = []
    assert _inside(model) == before, "a closed trace leaves something behind"
    length = len(events)
    loss_of(model, batch(1), LENGTH).backward()
    assert len(events) == length
    return events


def _inside(model):
    """All that a trace might touch."""
    found = []
    for module in model.modules():
        found += [dict(module._forward_pre_hooks), dict(module._forward_hooks)]
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                found.append(set(vars(group)))
                found += [group._reduce_scatter_comm, group._all_gather_comm]
    return found


def _only(events, phase):
    return [e for e in events if isinstance(e, Event) and e.phase == phase]


def _position(events, layer, kind, edge="", last=False):
    found = [
        i
        for i, e in enumerate(events)
        if isinstance(e, Event) and (e.layer, e.kind, e.edge) == (layer, kind, edge)
    ]
    return found[-1 if last else 0]


def _alive(events, kinds=("dense", "expert")):
    """After each event: the layers with whole parameters of these kinds."""
    now, over_time = {}, []
    for event in events:
        if isinstance(event, Event) and event.group in kinds:
            if event.kind == "all_gather":
                now[event.layer, event.group] = event.bytes
            elif event.kind == "free":
                del now[event.layer, event.group]
        over_time.append(dict(now))
    return over_time


@pytest.mark.distributed
@pytest.mark.parametrize("case", [*IN_TURN, "two ahead"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_gathers_run_ahead_and_frees_follow_at_once(traces, case, phase):
    depth = 2 if case == "two ahead" else 1
    for trace in traces[case]:
        events = _only(trace, phase)
        order = BLOCKS if phase == "forward" else BLOCKS[::-1]
        gathered = [e.layer for e in events if e.kind == "all_gather" and e.layer in order]
        assert list(dict.fromkeys(gathered)) == order
        for before, layer in zip(order, order[depth:], strict=False):
            gathers = [
                i for i, e in enumerate(events) if (e.layer, e.kind) == (layer, "all_gather")
            ]
            assert len(gathers) == (2 if case.startswith("experts") and "layers" in layer else 1)
            assert max(gathers) < _position(events, before, "compute", "end", last=True), layer
        for layer in order:
            own = [e for e in events if e.layer == layer]
            groups = {e.group for e in own if e.kind == "all_gather"}
            end = _position(events, layer, "compute", "end", last=True)
            wanted = [
                (layer, kind)
                for _ in groups
                for kind in (["free"] if phase == "forward" else ["free", "reduce_scatter"])
            ]
            after = events[end + 1 : end + 1 + len(wanted)]
            assert [(e.layer, e.kind) for e in after] == wanted
            assert {e.group for e in after} == groups


@pytest.mark.distributed
@pytest.mark.parametrize("case", IN_TURN)
def test_at_most_two_blocks_are_whole(traces, case):
    for trace in traces[case]:
        alive = _alive(trace)
        assert max(len({layer for layer, _ in now}) for now in alive) == 2
        assert alive[-1] == {}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "blocks"), [("no prefetch", 2), ("two ahead", 3), ("all kept", 5)]
)
def test_more_blocks_are_whole_where_asked_for(traces, case, blocks):
    # Without explicit prefetch FSDP2 still gathers one ahead in backward.
    for trace in traces[case]:
        assert max(len(now) for now in _alive(trace)) == blocks


@pytest.mark.distributed
def test_without_prefetch_a_block_waits_for_its_own_gather(traces):
    for trace in traces["no prefetch"]:
        events = _only(trace, "forward")
        for before, layer in pairwise(BLOCKS):
            end = _position(events, before, "compute", "end")
            assert _position(events, layer, "all_gather") > end


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "ahead"), [("plain", True), ("experts", True), ("no prefetch", False)]
)
def test_a_host_sync_inside_a_block_delays_no_gather(traces, case, ahead):
    for trace in traces[case]:
        for i in range(LAYERS - 1):
            sync = trace.index(f"sync layers.{i}")
            gather = next(
                j
                for j, e in enumerate(trace)
                if isinstance(e, Event)
                and (e.layer, e.kind, e.phase) == (f"layers.{i + 1}", "all_gather", "forward")
            )
            assert (gather < sync) is ahead


@pytest.mark.distributed
@pytest.mark.parametrize("case", IN_TURN)
def test_gathers_are_waited_for_when_their_block_begins(traces, case):
    """Also on CPU, where FSDP2 by itself would wait where it issues them."""
    for trace in traces[case]:
        for i in range(1, LAYERS):
            waits = [j for j, e in enumerate(trace) if e == f"wait layers.{i}"]
            assert len(waits) == (4 if case.startswith("experts") else 2)  # forward and backward
            assert waits[0] > trace.index(f"sync layers.{i - 1}")
            end = _position(trace, f"layers.{i - 1}", "compute", "end")
            assert waits[0] > end
            # In backward after the block that follows in the model.
            following = BLOCKS[BLOCKS.index(f"layers.{i}") + 1]
            assert waits[-1] > _position(trace, following, "compute", "end", last=True)
            # All of its groups, before it computes.
            begin = _position(trace, f"layers.{i}", "compute", "begin", last=True)
            assert waits[-1] < begin


@pytest.mark.distributed
@pytest.mark.parametrize("case", IN_TURN)
def test_full_precision_modules_are_gathered_once_and_kept(traces, case):
    for trace in traces[case]:
        events = [e for e in trace if isinstance(e, Event) and e.group == "full_precision"]
        for scorer in SCORERS:
            own = [e for e in events if e.layer == scorer and not e.edge]
            assert [(e.kind, e.phase) for e in own] == [
                ("all_gather", "forward"),
                ("free", "backward"),
                ("reduce_scatter", "backward"),
            ]
            assert own[0].bytes == own[1].bytes == 2 * DIM * 4
        whole = [sum(now.values()) for now in _alive(trace, ("full_precision",))]
        assert max(whole) == LAYERS * 2 * DIM * 4


@pytest.mark.distributed
def test_a_group_inside_a_block_is_gathered_right_after_it(traces):
    for trace in traces["plain"]:
        gathers = [e.layer for e in _only(trace, "forward") if e.kind == "all_gather"]
        for i, scorer in enumerate(SCORERS):
            assert gathers.index(scorer) == gathers.index(f"layers.{i}") + 1


@pytest.mark.distributed
def test_sizes_and_ranks(traces):
    for trace in traces["experts"]:
        gathers = {(e.layer, e.group): e for e in trace if getattr(e, "kind", "") == "all_gather"}
        assert gathers["embedding", "dense"].bytes == VOCAB * DIM * 4
        assert gathers["layers.0", "dense"].bytes == (DIM * DIM + DIM) * 4
        assert gathers["layers.0", "expert"].bytes == 2 * DIM * DIM * 4
        assert {key[1]: e.ranks for key, e in gathers.items()} == {
            "dense": 4,
            "expert": 2,
            "full_precision": 4,
        }
    for trace in traces["to pairs"]:
        # After forward, two ranks have a whole layer between them.
        for phase, ranks in (("forward", 4), ("backward", 2)):
            gathers = [e for e in _only(trace, phase) if e.kind == "all_gather"]
            assert {e.ranks for e in gathers if e.group == "dense"} == {ranks}
    for trace in traces["hsdp"]:
        assert {e.ranks for e in trace if getattr(e, "kind", "") == "all_gather"} == {2}


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["plain", "ac inside", "ac outside", "experts, ac outside"])
def test_recomputation_is_part_of_backward(traces, case):
    for trace in traces[case]:
        for layer in [*BLOCKS[:-1], *SCORERS]:
            computes = [
                (e.phase, e.edge)
                for e in trace
                if getattr(e, "kind", "") == "compute" and e.layer == layer
            ]
            assert computes == [
                ("forward", "begin"),
                ("forward", "end"),
                ("backward", "begin"),
                ("backward", "end"),
            ]


@pytest.mark.distributed
def test_accumulation_without_communication(traces):
    for trace in traces["accumulation"]:
        cut = trace.index("accumulated")
        first, second = (
            [e for e in part if getattr(e, "kind", "") == "reduce_scatter"]
            for part in (trace[:cut], trace[cut:])
        )
        assert first == []
        assert {e.layer for e in second} == {*BLOCKS, *SCORERS}


def test_a_model_that_is_not_sharded():
    with (
        pytest.raises(ValueError, match="no module of this Toy is sharded"),
        trace_collectives(build()),
    ):
        pass


def test_another_fsdp2_is_refused():
    group = type("Group", (), dict.fromkeys(("unshard", "pre_backward", "post_backward")))()
    with pytest.raises(RuntimeError, match=r"has no FSDPParamGroup\._to_sharded, which"):
        check_torch(group)


def _misuse(rank):
    model = _model()
    again = trace_collectives(model)
    with (
        trace_collectives(model),
        pytest.raises(ValueError, match="being traced already"),
        again,
    ):
        pass
    before = _inside(model)
    with pytest.raises(RuntimeError, match="of the user"), trace_collectives(model):
        raise RuntimeError("of the user")
    assert _inside(model) == before
    # By hand, as pipeline schedules do.
    with trace_collectives(model) as events:
        model.layers[0].unshard()
        model.layers[0].reshard()
    assert [(e.kind, e.phase) for e in events] == [("all_gather", "outside"), ("free", "outside")]
    return True


@pytest.mark.distributed
def test_misuse_and_calls_by_hand():
    assert run_ranks(_misuse, 2) == [True, True]

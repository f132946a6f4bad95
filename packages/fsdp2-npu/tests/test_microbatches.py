"""What happens between microbatches: of pipelines with torch's schedules, and of accumulation."""

from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor

from fsdp2_npu import shard_model, trace_collectives
from fsdp2_ranks import run_ranks

pytestmark = pytest.mark.distributed

DIM, MICROBATCHES, BLOCKS = 8, 4, 8  # blocks of the whole model
ROWS = 2 * MICROBATCHES  # of the whole batch; two data-parallel ranks share it
PARAMETERS = DIM * DIM + DIM  # of a block

SCHEDULES = {"1F1B": (Schedule1F1B, 1), "Interleaved1F1B": (ScheduleInterleaved1F1B, 2)}
# Name: schedule, microbatch_reduction, reshard_after_forward
PIPELINES = {
    f"{schedule}, {reduction}": (schedule, reduction, reduction == "each")
    for schedule in SCHEDULES
    for reduction in ("last", "each")
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(DIM, DIM)

    def forward(self, x_BD):
        return x_BD + torch.tanh(self.dense(x_BD))


def _blocks():
    torch.manual_seed(0)
    return [Block() for _ in range(BLOCKS)]


def _batch():
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))


def _loss(y_BD, target_BD):
    return (y_BD - target_BD).square().sum()


def _expected():
    model = nn.Sequential(*_blocks())
    _loss(model(_batch()), torch.zeros(ROWS, DIM)).backward()
    return [block.dense.weight.grad for block in model]


def _unreduced_bytes(modules):
    """Gradients of whole parameters that are alive."""
    total = 0
    for module in modules:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                for group in part._get_fsdp_state()._fsdp_param_groups:
                    for p in group.fsdp_params:
                        grads = [p.unsharded_accumulated_grad]
                        grads.append(getattr(getattr(p, "_unsharded_param", None), "grad", None))
                        total += sum(g.nbytes for g in grads if g is not None)
    return total


def _watch(modules, peak):
    """Keeps in ``peak`` the most bytes of unreduced gradients before any block's forward."""

    def look(*_):
        peak[0] = max(peak[0], _unreduced_bytes(modules))

    for module in modules:
        for part in module.modules():
            if isinstance(part, Block):
                part.register_forward_pre_hook(look)
    return look


class Stage(PipelineStage):
    """Looks at gradients also where the schedule has them reduced."""

    def perform_reduce_grad(self, grad_scale_factor):
        self.at_reduction()
        super().perform_reduce_grad(grad_scale_factor)


def _pipeline(mesh, schedule, reduction, reshard):
    make, stages_a_rank = SCHEDULES[schedule]
    rank, ranks = mesh.get_local_rank("pp"), mesh["pp"].size()
    count = ranks * stages_a_rank
    per_stage = BLOCKS // count
    whole, stages, mine = _blocks(), [], []
    for i in range(rank, count, ranks):
        blocks = whole[i * per_stage : (i + 1) * per_stage]
        module = nn.Sequential(*blocks)
        shard_model(
            module,
            mesh["dp"],
            blocks=blocks,
            gradient_divide_factor=1.0,
            reshard_after_forward=reshard,
            microbatch_reduction=reduction,
        )
        stages.append(Stage(module, i, count, torch.device("cpu"), group=mesh["pp"].get_group()))
        stages[-1].at_reduction = lambda: None
        mine += [(i * per_stage + j, block) for j, block in enumerate(blocks)]
    pipeline = make(
        stages if stages_a_rank > 1 else stages[0],
        MICROBATCHES,
        loss_fn=_loss,
        scale_grads=False,
    )
    x_BD = _batch().chunk(mesh["dp"].size())[mesh.get_local_rank("dp")]

    def step():
        args = (x_BD,) if stages[0].is_first else ()
        target = torch.zeros_like(x_BD) if stages[-1].is_last else None
        pipeline.step(*args, target=target)

    step()  # finds out shapes, with a forward and a backward of its own
    for stage in stages:
        stage.submod.zero_grad()
    peak = [0]
    look = _watch([stage.submod for stage in stages], peak)
    for stage in stages:
        stage.at_reduction = look
    with ExitStack() as open_traces:
        traces = [open_traces.enter_context(trace_collectives(s.submod)) for s in stages]
        step()
    want = _expected()
    error = max(
        float((block.dense.weight.grad.full_tensor() - want[i]).norm() / want[i].norm())
        for i, block in mine
    )
    whole_bytes = 0
    for events in traces:
        now = most = 0
        for event in events:
            now += {"all_gather": event.bytes, "free": -event.bytes}.get(event.kind, 0)
            most = max(most, now)
        whole_bytes += most
    return {
        "error": error,
        "gathers": [_count(events, "all_gather") for events in traces],
        "reductions": [_count(events, "reduce_scatter") for events in traces],
        "whole": whole_bytes,
        "unreduced": peak[0],
        "left": _unreduced_bytes([stage.submod for stage in stages]),
    }


def _count(events, kind):
    """By layer."""
    found: dict[str, int] = {}
    for event in events:
        if event.kind == kind:
            found[event.layer] = found.get(event.layer, 0) + 1
    return found


def _pipelines(rank, ranks):
    mesh = dist.init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("pp", "dp"))
    return {name: _pipeline(mesh, *options) for name, options in PIPELINES.items()}


@pytest.fixture(scope="module")
def pipelines():
    return run_ranks(_pipelines, 4, 4)


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_equal_one_process(pipelines, name):
    assert max(ranks[name]["error"] for ranks in pipelines) < 1e-6


def test_pipelines_whose_ranks_hold_whole_parameters():
    for ranks in run_ranks(_pipelines, 2, 2):
        for name in PIPELINES:
            assert ranks[name]["error"] < 1e-6, name


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_last_communicates_once_a_step(pipelines, schedule):
    for ranks in pipelines:
        found = ranks[f"{schedule}, last"]
        for gathers, reductions in zip(found["gathers"], found["reductions"], strict=True):
            assert set(gathers.values()) == set(reductions.values()) == {1}
        # Parameters and gradients of all the rank's blocks, whole.
        assert found["whole"] == BLOCKS // 2 * PARAMETERS * 4
        assert found["unreduced"] == BLOCKS // 2 * PARAMETERS * 4
        assert found["left"] == 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_frees_and_reduces_after_every_microbatch(pipelines, schedule):
    stages_a_rank = SCHEDULES[schedule][1]
    for ranks in pipelines:
        found = ranks[f"{schedule}, each"]
        for gathers, reductions in zip(found["gathers"], found["reductions"], strict=True):
            assert len(reductions) == BLOCKS // 2 // stages_a_rank
            assert set(reductions.values()) == {MICROBATCHES}
            assert set(gathers.values()) == {2 * MICROBATCHES}  # forward and backward
        assert found["whole"] == stages_a_rank * 2 * PARAMETERS * 4  # two blocks of each stage
        assert found["unreduced"] == 0
        assert found["left"] == 0


def _accumulate(rank):
    return {reduction: _accumulated(rank, reduction) for reduction in ("last", "each")}


def _accumulated(rank, reduction):
    blocks = _blocks()
    model = nn.Sequential(*blocks)
    shard_model(
        model,
        dist.init_device_mesh("cpu", (2,)),
        blocks=blocks,
        gradient_divide_factor=1.0,
        microbatch_reduction=reduction,
    )
    parts = _batch().chunk(2)[rank].chunk(MICROBATCHES)
    peak = [0]
    _watch([model], peak)
    with trace_collectives(model) as events:
        for i, x_BD in enumerate(parts):
            model.set_requires_gradient_sync(i == MICROBATCHES - 1)
            _loss(model(x_BD), torch.zeros_like(x_BD)).backward()
    want = _expected()
    error = max(
        float((block.dense.weight.grad.full_tensor() - w).norm() / w.norm())
        for block, w in zip(blocks, want, strict=True)
    )
    return error, _count(events, "reduce_scatter"), peak[0]


@pytest.fixture(scope="module")
def accumulated():
    return run_ranks(_accumulate, 2)


@pytest.mark.parametrize(
    ("reduction", "reductions", "unreduced"),
    [("last", 1, BLOCKS * PARAMETERS * 4), ("each", MICROBATCHES, 0)],
)
def test_gradient_accumulation(accumulated, reduction, reductions, unreduced):
    for ranks in accumulated:
        error, counts, peak = ranks[reduction]
        assert error < 1e-6
        assert counts == {str(i): reductions for i in range(BLOCKS)}
        assert peak == unreduced


def _modules(rank):
    block = nn.Sequential(*_blocks())
    model = nn.Sequential(block, nn.Tanh())
    mesh = dist.init_device_mesh("cpu", (1,))
    shard_model(model, mesh, blocks=[block], microbatch_reduction="each")
    assert isinstance(block, FSDPModule) and isinstance(block, nn.Sequential)
    part = block[:2]  # makes a container of the original class
    assert type(part) is nn.Sequential and list(part) == [block[0], block[1]]
    weight = block[0].dense
    block.unshard(async_op=True).wait()
    assert isinstance(weight.weight, DTensor)
    block.unshard()
    assert not isinstance(weight.weight, DTensor)
    block.reshard()
    # A module inside may still be told to wait, as losses in chunks tell the head.
    block.set_requires_gradient_sync(False)
    model(torch.ones(1, DIM)).sum().backward()
    assert block[0].dense.weight.grad is None and _unreduced_bytes([model]) > 0
    return True


def test_modules_stay_what_they_were():
    assert run_ranks(_modules, 1) == [True]

"""aten.matmul and its backward on real ranks against one process."""

import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import stand_ins
from cases import MATMULS, all_cases, compute
from distribute import P, R, choices, close, distribute, mesh, moved
from dtensor_npu_strategies import redistributions, register
from strategy_ranks import run_ranks

pytestmark = pytest.mark.distributed


def _factors(left, right):
    torch.manual_seed(0)
    return torch.randn(left, dtype=torch.float64), torch.randn(right, dtype=torch.float64)


def _train(x, w, d_y):
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = torch.matmul(x, w)
    y.backward(d_y)
    return y, x.grad, w.grad


def _linear(device_mesh, x_placed, w_placed, d_placed, left=(2, 7, 8), right=(8, 6)):
    """A product and its gradients with these placements, and the collectives that took."""
    x, w = _factors(left, right)
    d_y = torch.randn((x @ w).shape, dtype=torch.float64)
    expected = _train(x, w, d_y)
    placed = (x_placed, w_placed, d_placed)
    given = [distribute(t, device_mesh, p) for t, p in zip((x, w, d_y), placed, strict=True)]
    with CommDebugMode() as comm:
        got = _train(*given)
    for a, b in zip(got, expected, strict=True):
        close(a, b, placed)
    return moved(comm), [t.placements for t in got]


def _planned(rank):
    one = mesh(dist.get_world_size())
    S = Shard
    found = {}
    for name, placements in {
        "q_lora": ((R,), (R,), (R,)),
        "lm_head": ((R,), (S(1),), (S(2),)),
        "row parallel": ((S(2),), (S(0),), (R,)),
        "sequence": ((S(1),), (R,), (S(1),)),
        "batch": ((S(0),), (R,), (S(0),)),
        "a sum": ((P,), (R,), (R,)),
    }.items():
        with register("matmul"):
            found[name] = _linear(one, *placements)
    # Without the strategy, DTensor knows neither operator.
    try:
        _linear(one, (R,), (R,), (R,))
    except (NotImplementedError, RuntimeError) as error:
        found["unregistered"] = str(error)
    return found


@pytest.mark.parametrize("ranks", ["two", "four"])
def test_nothing_is_redistributed(ranks, request):
    sum_, S = Partial(), Shard
    for found in (result["planned"] for result in request.getfixturevalue(ranks)):
        counts = {name: result[0] for name, result in found.items() if name != "unregistered"}
        assert counts == dict.fromkeys(counts, 0)
        placements = {n: r[1] for n, r in found.items() if n != "unregistered"}
        assert placements["q_lora"] == [(R,), (R,), (R,)]
        assert placements["lm_head"] == [(S(2),), (sum_,), (S(1),)]
        assert placements["row parallel"] == [(sum_,), (S(2),), (S(0),)]
        assert placements["sequence"] == [(S(1),), (S(1),), (sum_,)]
        assert placements["batch"] == [(S(0),), (S(0),), (sum_,)]
        assert placements["a sum"] == [(sum_,), (R,), (sum_,)]
        assert "matmul" in found["unregistered"]


def _lm_head_by_default(rank):
    """The rule that mutation puts in place of ours: what DTensor makes of any operator."""
    from torch.distributed.tensor.experimental import register_sharding

    whole = [Replicate()]
    register_sharding(torch.ops.aten.matmul.default)(lambda x, w: [(whole, whole * 2)])
    register_sharding(torch.ops.aten.matmul_backward.default)(
        lambda d, x, w, mask: [(whole * 2, [*whole * 3, None])]
    )
    one = mesh(dist.get_world_size())
    placements = (R,), (Shard(1),), (Shard(2),)
    without = _linear(one, *placements)[0]
    with register("matmul"):
        ours = _linear(one, *placements)[0]
    return without, ours, _linear(one, *placements)[0]


def test_without_our_strategy_the_same_shows_it(two):
    for result in two:
        assert result["lm_head by default"] == (3, 0, 3)


def _uneven(rank):
    stand_ins.matmul_as_on_an_npu()
    S, found = Shard, {}
    with register():
        grid, line = mesh(4, 2), mesh(8)
        # Six columns over the second of two mesh dimensions, over the first, and over both.
        for w in ((R, S(1)), (S(1), R), (S(1), S(1))):
            d_y = tuple(R if p == R else S(2) for p in w)
            found[f"columns {w}"] = _linear(grid, (R, R), w, d_y)[0]
        # A sequence of 100 on 8 ranks: 13 rows on each but the last.
        sequence = (2, 100, 8)
        found["rows"] = _linear(line, (S(1),), (R,), (S(1),), sequence)[0]
        found["rows of both"] = _linear(grid, (S(1), S(1)), (R, R), (S(1), S(1)), sequence)[0]
        found["fewer rows than ranks"] = _linear(line, (S(1),), (R,), (S(1),), (2, 5, 8))[0]
        found["a sum, other dim sharded"] = _linear(grid, (P, S(1)), (R, R), (R, S(1)))[0]
        found["two sums"] = _linear(grid, (P, P), (R, R), (R, R))[0]
        found["tensor and sequence"] = _linear(grid, (S(1), R), (R, S(1)), (S(1), S(2)))[0]
    return found


def test_any_mesh_and_sizes_that_do_not_divide():
    for found in run_ranks(_uneven, 8):
        assert found == dict.fromkeys(found, 0)


def _anything(rank, seed):
    """Random placements: whatever has to be redistributed, the values are right."""
    grid, choose = mesh(2, 2), random.Random(seed)
    count = 0
    with register():
        for name, call in [case for case in all_cases() if case[0].startswith("aten::")]:
            op = getattr(torch.ops.aten, name.partition("::")[2]).default
            expected = compute(name, call)
            for _ in range(8):
                placed = {
                    n: choose.choice(choices(x, 2)) for n, x in call.items()
                    if isinstance(x, torch.Tensor)
                }  # fmt: skip
                given = [
                    distribute(x, grid, placed[n]) if n in placed else x for n, x in call.items()
                ]
                with torch.inference_mode():
                    got = op(*given)
                for a, b in zip(got if isinstance(got, tuple) else (got,), expected, strict=True):
                    assert (a is None) == (b is None)
                    if b is not None:
                        close(a, b, (name, placed))
                        count += 1
    return count


def test_values_with_any_placements(four):
    assert min(result["anything"] for result in four) >= 8 * len(MATMULS) * 4


def _block(rank):
    """Column and row parallel products with a residual: what is moved is in the report."""
    one = mesh(dist.get_world_size())
    x, w = _factors((2, 7, 8), (8, 8))
    expected_x = x.clone().requires_grad_()
    ((expected_x @ w).relu() @ w.T + expected_x).square().sum().backward()

    def step():
        a = distribute(x, one, (Shard(1),)).requires_grad_()
        first = distribute(w, one, (Shard(1),))
        second = distribute(w.T.contiguous(), one, (Shard(0),))
        whole = a.redistribute(placements=(R,))
        y = torch.matmul(torch.matmul(whole, first).relu(), second)
        out = y.redistribute(placements=(Shard(1),)) + a
        out.square().sum().full_tensor().backward()
        grads.append(a.grad)

    grads = []
    with register():
        report = str(redistributions(step))
    close(grads[0], expected_x.grad)
    return report


def test_a_tensor_parallel_block_moves_what_was_asked_for(two):
    for report in (result["block"] for result in two):
        assert "aten::matmul" not in report, report
        assert report.count("reduce_scatter") == 2 and report.count("all_gather") == 2, report


def _on_two(rank):
    stand_ins.matmul_as_on_an_npu()
    return {
        "planned": _planned(rank),
        "lm_head by default": _lm_head_by_default(rank),  # after `planned`: it stays in force
        "block": _block(rank),
    }


def _on_four(rank):
    stand_ins.matmul_as_on_an_npu()
    return {"planned": _planned(rank), "anything": _anything(rank, 7)}


@pytest.fixture(scope="module")
def two():
    return run_ranks(_on_two, 2)


@pytest.fixture(scope="module")
def four():
    return run_ranks(_on_four, 4)

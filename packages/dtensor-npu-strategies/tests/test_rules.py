"""Every rule of every operator against its definition: ranks simulated in one process."""

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from cases import all_cases, compute, is_local, schema
from dtensor_npu_strategies.rules import OPERATORS, Arguments, Rule, leading, sharded

CASES = all_cases()


def rules_of(name, call):
    return list(OPERATORS[name].rules(Arguments(call)))


def share(x: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    """Shards as DTensor has them: like torch.chunk, empty where there are too few rows."""
    size = -(-x.shape[dim] // ranks)
    start = min(rank * size, x.shape[dim])
    return x.narrow(dim, start, min(size, x.shape[dim] - start)).contiguous()


def split(x, placement, rank: int, ranks: int):
    if not isinstance(x, Tensor):
        return x
    if isinstance(placement, Shard):
        return share(x, placement.dim, rank, ranks)
    if isinstance(placement, Partial):
        parts = [torch.full_like(x, 0.3) * (r + 1) for r in range(ranks - 1)]
        return (x - sum(parts)) if rank == ranks - 1 else parts[rank]
    return x


def simulate(name, call, rule: Rule, ranks: int):
    """What ranks compute of what each has, put together again."""
    computed = []
    for rank in range(ranks):
        mine = {n: split(x, rule.inputs.get(n, Replicate()), rank, ranks) for n, x in call.items()}
        local_values = OPERATORS[name].local_values
        if local_values is not None and any(isinstance(p, Shard) for p in rule.inputs.values()):

            def of_rank(argument, rows, rank=rank):
                placement = rule.inputs.get(argument, Replicate())
                if placement != Shard(0):
                    return rows
                return share(torch.empty(rows), 0, rank, ranks).shape[0]

            mine |= local_values(Arguments(call), of_rank)
        computed.append(compute(name, mine))
    found = []
    for outputs, placement in zip(zip(*computed, strict=True), rule.outputs, strict=True):
        if outputs[0] is None:
            found.append(None)
        elif isinstance(placement, Shard):
            found.append(torch.cat(outputs, placement.dim))
        elif isinstance(placement, Partial):
            found.append(sum(outputs))
        else:
            assert all(torch.equal(outputs[0], other) for other in outputs)
            found.append(outputs[0])
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("name", "call"), CASES, ids=[f"{i}-{name}" for i, (name, _) in enumerate(CASES)]
)
def test_shards_put_together_are_the_whole(name, call, ranks):
    expected = compute(name, call)
    checked = 0
    for rule in rules_of(name, call):
        assert len(rule.outputs) == len(schema(name).returns)
        assert rule.inputs.keys() <= call.keys()
        if is_local(name, rule):
            continue
        for got, wanted in zip(simulate(name, call, rule, ranks), expected, strict=True):
            if wanted is not None:
                torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9, msg=f"{rule}: {{}}")
        checked += 1
    assert checked or name.endswith("fused_kl_loss_backward")


@pytest.mark.parametrize("name", [name for name in OPERATORS if not name.startswith("npu::")])
def test_every_operator_has_a_case(name):
    assert name in {name for name, _ in CASES}


def test_a_wrong_rule_is_noticed():
    """The simulation fails where a sum is taken for a whole, or one dimension for another."""
    (name, call) = next(case for case in CASES if case[0] == "npu_dsa::sparse_attention_backward")
    right = next(r for r in rules_of(name, call) if r.inputs["q"] == Shard(2))
    assert right.outputs == (Shard(2), Partial())
    for wrong in (
        right._replace(outputs=(Shard(2), Replicate())),
        right._replace(inputs={**right.inputs, "d_out": Replicate()}),
        right._replace(inputs={**right.inputs, "kv": Shard(2)}),
    ):

        def compare(wrong=wrong):
            found = simulate(name, call, wrong, 2)
            for got, wanted in zip(found, compute(name, call), strict=True):
                torch.testing.assert_close(got, wanted)

        with pytest.raises((AssertionError, RuntimeError)):
            compare()


def test_rows_of_queries_without_bounds_are_not_cut():
    """The mask is causal by row number then."""
    over = {}
    for name, call in CASES:
        if "bounds" in call:
            first = "q_index" if "q_index" in call else "q"
            placements = {rule.inputs.get(first) for rule in rules_of(name, call)}
            over.setdefault(call["bounds"] is None, []).append(Shard(1) in placements)
    assert not any(over[True]) and all(over[False])
    assert over[True] and over[False]


def test_patterns():
    a = Arguments({"x": torch.empty(2, 3, 4), "w": None, "y": torch.empty(3)})
    assert list(sharded(a, "x:ABC w:C y:B -> AC =B .", "AB")) == [
        Rule({"x": Shard(0), "y": Replicate()}, (Shard(0), Replicate(), Partial())),
        Rule({"x": Shard(1), "y": Shard(0)}, (Partial(), Shard(0), Partial())),
    ]
    assert list(sharded(a, "x:AB -> A", "A")) == []  # another number of dimensions
    assert leading(4, without=[-1, 1]) == ("a_c_", "ac")

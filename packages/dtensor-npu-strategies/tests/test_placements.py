"""What DTensor makes of the rules, on meshes without other ranks: no values, but placements."""

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from cases import all_cases, is_local
from distribute import choices, distribute
from dtensor_npu_strategies import redistributions, register
from dtensor_npu_strategies.rules import OPERATORS, Arguments

R = Replicate()


def _fitting():
    for name, call in all_cases():
        if not name.startswith("aten::"):
            for p in OPERATORS[name].rules(Arguments(call)):
                if is_local(name, p):
                    continue  # the numbers of rows in the cases are those of one process
                yield pytest.param(name, call, p, id=f"{name.partition('::')[2]}-{p.inputs}")


@pytest.mark.parametrize(("name", "call", "rule"), list(_fitting()))
def test_what_a_rule_names_is_not_redistributed(line, grid, name, call, rule):
    """On one mesh dimension, on the second of two next to a whole one, and on both."""
    op = getattr(torch.ops.npu_dsa, name.partition("::")[2]).default
    meshes = (line, lambda p: (p,)), (grid, lambda p: (R, p)), (grid, lambda p: (p, p))
    for mesh, places in meshes:
        given = [distribute(x, mesh, places(rule.inputs.get(n, R))) for n, x in call.items()]
        seen = []
        with register():
            found = redistributions(lambda op=op, given=given, seen=seen: seen.append(op(*given)))
        got = seen.pop()
        assert not found, found
        got = got if isinstance(got, tuple) else (got,)
        for y, wanted in zip(got, rule.outputs, strict=True):
            if y is not None:
                assert y.placements == places(wanted)


def test_strided_shards(line):
    """Rows of a sharded sequence, batches flattened: on each rank a piece of every batch."""
    x = distribute(torch.ones(3, 8, 4), line, (Shard(1),))
    rows = x.flatten(0, 1)
    assert rows.placements != (Shard(0),) and not rows.placements[0].is_replicate()
    with register():
        seen = []
        found = redistributions(lambda: seen.append(torch.ops.npu_dsa.hadamard(rows, 1.0, "torch")))
        assert not found
        assert seen[0].placements == rows.placements


def test_averages_stay_averages(line):
    x = distribute(torch.ones(8, 4), line, (Partial("avg"),))
    with register():
        assert torch.ops.npu_dsa.hadamard(x, 1.0, "torch").placements == (Partial("avg"),)
        x = distribute(torch.ones(8, 4), line, (Partial("max"),))
        assert torch.ops.npu_dsa.hadamard(x, 1.0, "torch").placements != (Partial("max"),)


def test_meshes_do_not_mix(line, grid):
    x, weight = distribute(torch.ones(8, 4), line, (R,)), distribute(torch.ones(4), grid, (R, R))
    with register(), pytest.raises(RuntimeError, match=r"weight is on DeviceMesh.*one mesh"):
        torch.ops.npu_dsa.rms_norm(x, weight, 0.1, "torch")


def test_compiled(grid):
    """Whole graphs, with placements as without compilation."""
    call = next(c for name, c in all_cases() if name == "npu_dsa::sparse_attention")
    places = {"q": (Shard(1), Shard(2)), "kv": (R, R), "indices": (Shard(1), R)}

    def attend(q, kv, indices):
        return torch.ops.npu_dsa.sparse_attention(q, kv, indices, 0.4, call["v_dim"], "torch")[0]

    given = [distribute(call[n], grid, p) for n, p in places.items()]
    q, kv = (x.requires_grad_() for x in given[:2])
    with register():
        out = torch.compile(attend, backend="aot_eager", fullgraph=True)(*given)
        out.sum().backward()
        torch.testing.assert_close(out.to_local(), attend(*given).to_local())
    assert out.placements == q.grad.placements == (Shard(1), Shard(2))
    assert kv.grad.placements == (Partial(), Partial())


def test_all_placements_are_accepted(line):
    """Whatever one tensor is like, the others being whole."""
    with register():
        for name, call in all_cases():
            if name.startswith("aten::"):
                continue
            op = getattr(torch.ops.npu_dsa, name.partition("::")[2]).default
            tensors = [n for n, x in call.items() if isinstance(x, torch.Tensor)]
            for n in tensors:
                for (placement,) in choices(call[n], 1):
                    if placement == Shard(0) and n in (*OPERATORS[name].pinned, "d_tokens", "x"):
                        continue  # as above
                    given = [
                        distribute(x, line, (placement if m == n else R,)) for m, x in call.items()
                    ]
                    try:
                        op(*given)
                    except RuntimeError as error:
                        raise AssertionError((name, n, placement)) from error

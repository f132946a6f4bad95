"""What DTensor makes of the rules, on meshes without other ranks: no values, but placements."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

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
    for mesh, places in ((line, lambda p: (p,)), (grid, lambda p: (R, p)), (grid, lambda p: (p, p))):
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

"""The report against collectives that are known."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.utils.checkpoint import checkpoint

from distribute import P, R, distribute, mesh
from dtensor_npu_strategies import Redistribution, redistributions
from strategy_ranks import run_ranks

S = Shard


def _rows(found):
    return [(m.operator, m.argument, m.from_, m.to, m.collective, m.bytes, m.phase) for m in found]


def _reports(rank):
    line, grid = mesh(4), mesh(2, 2)
    x = torch.arange(64.0).view(8, 8)  # 256 bytes
    a = distribute(x, line, (S(0),))
    found = {}

    def explicit():
        x = a
        for to in (R, S(0), S(1), R):
            x = x.redistribute(placements=[to])

    found["explicit"] = _rows(redistributions(explicit))
    b = distribute(x, line, (P,))
    found["sums"] = _rows(redistributions(
        lambda: (b.redistribute(placements=[R]), b.redistribute(placements=[S(1)]))
    ))  # fmt: skip
    found["implicit"] = _rows(redistributions(lambda: a.cos() + distribute(x, line, (S(1),))))
    found["list"] = _rows(redistributions(lambda: torch.cat([a, b, a])))
    two = distribute(x, grid, (P, P))
    found["two dims"] = _rows(redistributions(lambda: two.redistribute(placements=[R, S(0)])))
    found["nothing"] = _rows(redistributions(lambda: a + a))
    found["others"] = _rows(redistributions(lambda: dist.all_reduce(torch.ones(4))))

    def backward():
        w = distribute(x, line, (S(0),)).requires_grad_()
        (w.redistribute(placements=[R]) ** 2).sum().backward()

    found["backward"] = _rows(redistributions(backward))

    def recomputed():
        w = distribute(x, line, (S(0),)).requires_grad_()
        y = checkpoint(lambda w: w.redistribute(placements=[R]).cos(), w, use_reentrant=False)
        y.sum().backward()

    found["recomputed"] = _rows(redistributions(recomputed))
    # The second run takes its placements from DTensor's cache.
    found["cached"] = _rows(redistributions(lambda: a.cos() + distribute(x, line, (S(1),))))
    try:
        redistributions(lambda: 1 / 0)
    except ZeroDivisionError:
        found["after an error"] = _rows(redistributions(lambda: a + a))
    found["printed"] = str(redistributions(backward))
    return found


@pytest.mark.distributed
def test_reports():
    step = 3 * 256 // 4  # what a rank sends of 256 bytes
    for found in run_ranks(_reports, 4):
        to_all = ("redistribute", "input", (S(0),), (R,), "all_gather", step, "forward")
        assert found["explicit"] == [
            to_all,
            ("redistribute", "input", (R,), (S(0),), "none (local slice)", 0, "forward"),
            # Gloo has no all-to-all of DTensor's kind, so torch gathers and cuts.
            ("redistribute", "input", (S(0),), (S(1),), "all_gather", step, "forward"),
            ("redistribute", "input", (S(1),), (R,), "all_gather", step, "forward"),
        ]
        assert found["sums"] == [
            ("redistribute", "input", (P,), (R,), "all_reduce", 2 * step, "forward"),
            ("redistribute", "input", (P,), (S(1),), "reduce_scatter", step, "forward"),
        ]
        implicit = [m for m in found["implicit"] if m[0] == "aten::add.Tensor"]
        assert len(implicit) == 1 and implicit[0][4] == "all_gather"
        assert [m for m in found["cached"] if m[0] == "aten::add.Tensor"] == implicit
        # What distribute_tensor does is none of DTensor's operators: no argument, no placements.
        assert {m[1:4] for m in found["implicit"] if m not in implicit} <= {("", (), ())}
        assert {m[0] for m in found["list"]} == {"aten::cat"}
        assert {m[1] for m in found["list"] if m[2] == (P,)} == {"tensors[1]"}
        assert {m[1] for m in found["list"]} <= {f"tensors[{i}]" for i in range(3)}
        (two,) = found["two dims"]
        assert two[:4] == ("redistribute", "input", (P, P), (R, S(0)))
        assert set(two[4].split(" + ")) == {"all_reduce", "reduce_scatter"}
        assert found["nothing"] == found["after an error"] == []
        assert found["others"] == [("all_reduce", "", (), (), "all_reduce", 24, "forward")]
        asked = [m for m in found["backward"] if m[0] == "redistribute"]
        assert asked[0] == to_all
        assert asked[1][-1] == "backward" and asked[1][3] == (S(0),)
        asked = [m for m in found["recomputed"] if m[0] == "redistribute"]
        assert [m[-1] for m in asked] == ["forward", "backward", "backward"]
        assert [m[4] for m in asked] == ["all_gather", "all_gather", "none (local slice)"]
        lines = found["printed"].splitlines()
        assert lines[0].split() == [
            "operator", "argument", "from", "to", "collective", "bytes", "phase",
        ]  # fmt: skip
        assert f"redistribute  input     S(0)  R     all_gather            {step}  forward" in lines


def test_what_ranks_would_have_moved(line):
    """The fake backend has no other ranks; what is reported is the same."""
    x = distribute(torch.ones(8, 4), line, (S(0),))
    (found,) = redistributions(lambda: x.full_tensor())
    assert isinstance(found, Redistribution)
    assert (found.collective, found.bytes) == ("all_gather", 3 * 128 // 4)


def test_arguments_results_and_nesting(line):
    x = distribute(torch.ones(8, 4), line, (S(0),))
    seen = []

    def function(a, *, scale):
        seen.append(redistributions(lambda: a.full_tensor()))
        seen.append(a * scale)

    found = redistributions(function, x, scale=2.0)
    assert len(seen[0]) == 1 and isinstance(seen[1], DTensor)
    assert len(found) <= 1


def test_a_printed_list(line):
    y = DTensor.from_local(torch.ones(1200, 10), line, [Partial("avg")])
    text = str(redistributions(lambda: y.redistribute(placements=[R])))
    header, row = text.splitlines()
    assert header.index("bytes") + len("bytes") == row.index("72,000") + len("72,000")
    assert "P(avg)" in row
    assert str(redistributions(lambda: None)).splitlines()[1] == "nothing was redistributed"
    assert repr(redistributions(lambda: None)) == str(redistributions(lambda: None))

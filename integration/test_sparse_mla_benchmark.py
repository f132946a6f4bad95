"""The benchmark on a CUDA device, as far as it goes without one: cases, peers' calls, report."""

import importlib
import io
import math
import sys

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import cli, report
from benchmarks import sparse_mla as suite
from benchmarks.measure import Measurement, Result
from benchmarks.sparse_mla import BACKWARD, FLASH_MLA, FORWARD, TILELANG, TORCH, TRITON

CASES = list(suite.cases(quick=False))
SMALL = {"S": 6, "T": 9, "K": 4, "dtype": "float32"}


def case(name):
    return next(c for c in CASES if c.name == name)


def params(name, **changes):
    one = case(name)
    small = SMALL | ({"H": 2} if "H" in one.params else {}) | changes
    if name == "lightning_indexer":
        small["T"] = small["S"]
    return {**one.params, **small}


def close(actual, expected):
    assert actual.keys() == expected.keys() and actual
    for name in expected:
        torch.testing.assert_close(actual[name].float(), expected[name].float(), msg=name)


# --- cases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(dict.fromkeys(c.name for c in CASES)))
def test_our_backends_compute_the_same(name):
    p, build = params(name), case(name).implementations[0].build
    results = []
    for backend in ("reference", "torch"):
        task = build({**p, "_backend": backend})
        results.append(task.result(task.run()))
        close(task.result(task.run()), results[-1])  # a task can be run again
    close(*results)


def test_claimed_sizes_are_measured():
    assert list(suite.checks([])) == []
    nothing = {name: Measurement(problem="left out") for name in (TRITON, TILELANG)}
    results = [Result(case=c, measurements=nothing) for c in CASES]
    assert len(list(suite.checks(results, "NVIDIA H200"))) == len(suite.CLAIMS) == 2
    for one in CASES:
        assert [i.name for i in one.implementations[:2]] == [TRITON, TORCH]
        assert one.params["dtype"] == "bfloat16"
    peers = {(c.name, i.name) for c in CASES for i in c.implementations[2:]}
    assert peers == {(FORWARD, TILELANG), (FORWARD, FLASH_MLA), (BACKWARD, TILELANG)}


def test_flops_are_those_of_the_published_figures():
    forward = {"S": 4096, "H": 128, "K": 2048}
    assert suite.forward_flops(forward) == 2 * 4096 * 2048 * 128 * (576 + 512)
    # At 600 TFLOP/s the forward takes 3.9 ms, at 115 the backward of 64 heads 25.7 ms.
    assert suite.forward_flops(forward) / 600e12 == pytest.approx(3.89e-3, rel=1e-2)
    backward = suite.backward_flops({"S": 4096, "H": 64, "K": 2048})
    assert backward == 4096 * 2 * 2048 * (2 * 64 * 512 + 3 * 64 * 576)
    assert backward / 115e12 == pytest.approx(25.7e-3, rel=1e-2)
    assert suite.indexer_flops({"S": 3, "T": 2}) == 2 * (1 + 2 + 2) * 64 * 128


@pytest.mark.parametrize("rows", ["full", "causal"])
def test_selected_keys(rows):
    S, T, K = 700, 40, 16
    (keys_SK,) = suite.selected_keys({"S": S, "T": T, "K": K, "rows": rows})
    assert keys_SK.shape == (S, K) and keys_SK.dtype == torch.int32
    for s in (0, 5, 15, 30, 511, 512, 699):
        row = keys_SK[s].tolist()
        seen = T if rows == "full" else min(s + 1, T)
        kept = [key for key in row if key >= 0]
        assert len(set(kept)) == len(kept) == min(K, seen) and max(kept) < seen
        assert row[len(kept) :] == [-1] * (K - len(kept))


# --- peers ---------------------------------------------------------------------------------------

# What the peers' functions take and return, computed by our definition. A key is visible to
# TileLang's query s if it is not after `place + s`, whatever else is in a slot.
STAND_IN = """
import torch
import npu_dsa_kernels as dsa

def attend(q_BSHD, kv_BTD, indices_BSK, scale, place=None):
    S, T = q_BSHD.shape[1], kv_BTD.shape[1]
    assert q_BSHD.shape[3] == kv_BTD.shape[2] == 576 and indices_BSK.dtype == torch.int32
    if place is not None:
        hidden = indices_BSK > place + torch.arange(S)[:, None]
        assert indices_BSK[~hidden].numel() == 0 or indices_BSK[~hidden].min() >= 0
        assert indices_BSK.max() <= T
        indices_BSK = indices_BSK.masked_fill(hidden, -1)
    else:
        indices_BSK = indices_BSK.masked_fill(indices_BSK >= T, -1)
    return dsa.sparse_attention(
        q_BSHD, kv_BTD, indices_BSK, scale=scale, v_dim=512, backend="reference"
    )
"""
FLASH = """
def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512{legacy}):
    assert kv.shape[1] == indices.shape[1] == 1 and q.dim() == kv.dim() == indices.dim() == 3
    {check}
    out, lse = attend(q[None], kv[None, :, 0], indices[None, :, 0], sm_scale)
    return out[0], None, lse[0]
"""
TILELANG_FILES = {
    "sparse_mla_fwd_pipelined": """
def sparse_mla_fwd_interface(q, kv, indices, q_start_index_s, kv_stride, sm_scale=None):
    assert kv_stride == 1 and kv.shape[2] == indices.shape[2] == 1
    return attend(q, kv[:, :, 0], indices[:, :, 0], sm_scale, q_start_index_s)
""",
    "sparse_mla_fwd": """
def sparse_mla_fwd_interface(q, kv, indices, sm_scale=None):
    return attend(q, kv[:, :, 0], indices[:, :, 0], sm_scale, 0)
""",
    "sparse_mla_bwd": """
def sparse_mla_bwd(q, kv, o, do, indices, lse, sm_scale=None):
    assert o.shape == do.shape and lse.shape == o.shape[:3]
    q, kv = (x.detach().requires_grad_() for x in (q, kv))
    out, _ = attend(q, kv[:, :, 0], indices[:, :, 0], sm_scale, 0)
    return torch.autograd.grad(out, (q, kv), do)
""",
}


@pytest.fixture
def imports(monkeypatch):
    """What a test imports from a folder of its own is forgotten after it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    names = ("flash_mla", *TILELANG_FILES)
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    yield
    for name in names:
        sys.modules.pop(name, None)


def ours(name, **changes):
    p = params(name, **changes)
    task = case(name).implementations[0].build({**p, "_backend": "reference"})
    return p, task.result(task.run())


@pytest.mark.parametrize(
    ("legacy", "check"), [("", ""), (", use_legacy=False", "assert use_legacy")]
)
@pytest.mark.parametrize("rows", ["full", "causal"])
def test_flash_mla_is_given_what_it_takes(tmp_path, imports, rows, legacy, check):
    text = STAND_IN + FLASH.format(legacy=legacy, check=check or "pass")
    (tmp_path / "flash_mla.py").write_text(text)
    sys.path.insert(0, str(tmp_path))
    p, expected = ours(FORWARD, rows=rows)
    task = suite.build_flash_mla_forward(p)
    close(task.result(task.run()), expected)


@pytest.mark.parametrize(
    ("name", "build", "rows"),
    [
        (FORWARD, suite.build_tilelang_forward, "full"),
        (FORWARD, suite.build_tilelang_forward, "causal"),
        (BACKWARD, suite.build_tilelang_backward, "causal"),
    ],
)
def test_tilelang_is_given_what_it_takes(tmp_path, imports, name, build, rows):
    for module, text in TILELANG_FILES.items():
        (tmp_path / f"{module}.py").write_text(STAND_IN + text)
    p, expected = ours(name, rows=rows)
    task = build({**p, "_tilelang_examples": str(tmp_path)})
    close(task.result(task.run()), expected)


def test_peers_that_are_not_there_are_left_out_with_the_reason(tmp_path, imports):
    p = params(FORWARD)
    with pytest.raises(RuntimeError, match=r"left out: FlashMLA's.*pip install sgl-flash-mla"):
        suite.build_flash_mla_forward(p)
    with pytest.raises(RuntimeError, match=r"left out: .*not part of its package"):
        suite.build_tilelang_forward({**p, "_tilelang_examples": None})
    with pytest.raises(RuntimeError, match=r"sparse_mla_bwd\.py|sparse_mla_fwd\.py cannot be"):
        suite.build_tilelang_backward({**p, "_tilelang_examples": str(tmp_path)})


# --- report --------------------------------------------------------------------------------------


def measured(name, seconds, **sizes):
    """A result in which implementations took these seconds; None: could not be run."""
    one = next(c for c in CASES if c.name == name and sizes.items() <= c.params.items())
    measurements = {}
    for i in one.implementations:
        time = seconds.get(i.name)
        measurements[i.name] = Measurement(
            seconds=[time] * 5 if time else [],
            flops=i.flops(one.params),
            peak_bytes=2**20,
            problem=None if time else "left out: it is not there",
        )
    return Result(case=one, measurements=measurements, rounds=5)


def checks(seconds, card):
    results = [
        measured(FORWARD, seconds[0], T=4096),
        measured(FORWARD, {TRITON: 1.0}, T=8192),
        measured(BACKWARD, seconds[1], H=64),
    ]
    return list(suite.checks(results, card))


def test_claims_are_judged_in_the_same_run_where_they_can():
    # Ours takes 0.5 s; TileLang 0.2 s forward and 0.9 s backward.
    forward, backward = checks(
        ({TRITON: 0.5, TILELANG: 0.2}, {TRITON: 0.5, TILELANG: 0.9}), "NVIDIA H200"
    )
    assert "TileLang's in this run" in forward.text and "on NVIDIA H200" in forward.text
    assert forward.value == pytest.approx(0.4) and not forward.holds
    assert backward.value == pytest.approx(1.8) and backward.holds


@pytest.mark.parametrize(
    ("card", "figure"), [("H200", 115), ("H800", 100), ("H100 80GB HBM3", 115)]
)
def test_claims_are_judged_by_the_published_figure_elsewhere(card, figure):
    # Ours at 400 TFLOP/s forward, 150 backward.
    forward = suite.forward_flops({"S": 4096, "H": 128, "K": 2048}) / 400e12
    backward = suite.backward_flops({"S": 4096, "H": 64, "K": 2048}) / 150e12
    first, second = checks(({TRITON: forward}, {TRITON: backward}), f"NVIDIA {card}")
    assert "published 600 TFLOP/s on H800" in first.text
    assert first.value == pytest.approx(400 / 600) and first.holds
    assert f"published {figure} TFLOP/s on H" in second.text
    assert second.value == pytest.approx(150 / figure) and second.holds is (figure == 100)


@pytest.mark.parametrize(
    ("seconds", "card"), [({TRITON: 1e-9}, "NVIDIA A100"), ({}, "NVIDIA H200"), ({}, None)]
)
def test_what_was_not_measured_does_not_hold(seconds, card):
    for check in checks((seconds, seconds), card):
        assert math.isnan(check.value) and not check.holds


def test_the_report_names_rates_and_published_figures():
    result = measured(FORWARD, {}, T=4096)
    flops = suite.forward_flops(result.case.params)
    for name, rate in ((TRITON, 420e12), (TORCH, 21e12)):
        result.measurements[name] = Measurement(seconds=[flops / rate] * 5, flops=flops)
    (line,) = suite.findings([result], "NVIDIA H200")
    assert "rows full: triton 420, torch 21 TFLOP/s on NVIDIA H200" in line
    assert line.endswith("published: TileLang 600 on H800, FlashMLA 640 on H800")
    console = Console(file=io.StringIO(), width=130)
    report.print_result(console, result)
    assert f"{TILELANG}: left out: it is not there" in console.file.getvalue()
    report.as_json("sparse-mla", {}, [result], [line], list(suite.checks([result], "NVIDIA H200")))


# --- without a device ----------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so_in_a_line(tmp_path):
    app = cli.app()
    run = CliRunner().invoke(app, ["sparse-mla", "--out", str(tmp_path / "out")])
    assert run.exit_code == 1
    (line,) = run.output.splitlines()
    assert line.startswith("sparse-mla needs a CUDA device: torch ")
    assert not (tmp_path / "out").exists()
    run = CliRunner().invoke(app, ["sparse-mla", "--list"])
    assert run.exit_code == 0 and len(run.output.splitlines()) == len(CASES)

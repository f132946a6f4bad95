"""Peak memory against sequence length.

Of torch code, from the allocator's own trace of every allocation. The compiled kernels take their
buffers themselves: theirs is the high-water mark of a process.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from npu_dsa_kernels import (
    attention_target,
    dense_attention,
    dense_indexer_kl_loss,
    grouped_matmul,
    indexer_kl_loss,
    lightning_indexer,
    sparse_attention,
)
from npu_dsa_kernels.backends import blocked, compiled

H, D, V, HI, DI = 2, 16, 8, 2, 8


def peak_bytes(fn) -> int:
    """Most bytes alive at once during `fn`, above those alive before, inside of operators too."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        fn()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    steps = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    assert steps, "the profiler saw no allocation"
    alive = peak = 0
    for _, size in steps:
        alive += size
        peak = max(peak, alive)
    return peak


@pytest.fixture(autouse=True)
def torch_code(monkeypatch):
    monkeypatch.setenv("NPU_DSA_COMPILED", "0")


LAYER = """
import sys
import torch
from npu_dsa_kernels import dsa_attention

def run(S):
    torch.manual_seed(0)
    shapes = [(1, S, 2, 32), (1, S, 32), (1, S, 2, 32), (1, S, 32), (1, S, 2)]
    x = [torch.randn(*s, requires_grad=True) for s in shapes]
    mark = resident()
    layer = dsa_attention(*x, topk=128, scale=0.2, v_dim=32, backend="torch")
    (layer.out.sum() + layer.kl.sum()).backward()
    return resident("VmHWM") - mark

def resident(line="VmRSS"):
    if line == "VmRSS":
        open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts here
    with open("/proc/self/status") as status:
        return next(int(l.split()[1]) * 1024 for l in status if l.startswith(line))

run(512)  # what comes with the first call of an operator
print(run(int(sys.argv[1])))
"""


@pytest.mark.skipif(not compiled.instruction_sets(), reason=compiled.status())
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_the_compiled_layer_grows_linearly(monkeypatch):
    monkeypatch.delenv("NPU_DSA_COMPILED")
    peaks = {}
    for S in (8192, 16384):
        command = [sys.executable, "-c", LAYER, str(S)]
        peaks[S] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    noise = 16 * 2**20  # pages that the allocator still had, or asked for early
    assert noise < peaks[16384] <= 2.2 * peaks[8192] + noise, peaks
    assert peaks[16384] < 16384 * 16384 / 2, peaks  # an eighth of one S x S matrix of floats


def inputs(S: int):
    torch.manual_seed(0)
    shapes = [(1, S, H, D), (1, S, D), (1, S, HI, DI), (1, S, DI), (1, S, HI)]
    return [torch.randn(*x, requires_grad=True) for x in shapes]


def attend_and_learn(S: int, K: int):
    q, kv, qi, ki, w = inputs(S)
    indices = torch.randint(0, S, (1, S, K), dtype=torch.int32)

    def run():
        out, lse = sparse_attention(q, kv, indices, scale=0.25, v_dim=V, backend="torch")
        target = attention_target(q, kv, indices, lse, scale=0.25, backend="torch")
        loss = indexer_kl_loss(qi, ki, w, indices, target, backend="torch")
        (out.sum() + loss.sum()).backward()

    return run


def test_peak_grows_linearly():
    peaks = {S: peak_bytes(attend_and_learn(S, 256)) for S in (2048, 4096, 8192)}
    assert peaks[4096] <= 2.2 * peaks[2048], peaks
    assert peaks[8192] <= 2.2 * peaks[4096], peaks
    # Less than one S x S matrix of floats, and than the gathered rows S x K x D.
    assert peaks[8192] < 8192 * 8192 * 4, peaks
    assert peaks[8192] < 8192 * 256 * D * 4, peaks


def test_the_dense_loss_holds_no_square(monkeypatch):
    # A block of queries has all its keys, so at least one row of scores: small blocks show the
    # slope of what is kept besides.
    monkeypatch.setattr(blocked, "_CPU_BLOCK_BYTES", 2**17)

    def learn(S):
        q, kv, qi, ki, w = inputs(S)
        return lambda: dense_indexer_kl_loss(qi, ki, w, q, kv, scale=0.25).sum().backward()

    peaks = {S: peak_bytes(learn(S)) for S in (1024, 2048, 4096)}
    assert peaks[2048] <= 2.2 * peaks[1024], peaks
    assert peaks[4096] <= 2.2 * peaks[2048], peaks
    assert peaks[4096] < 4096 * 4096, peaks  # a quarter of one S x S matrix of floats


def test_dense_attention_holds_no_square(monkeypatch):
    monkeypatch.setattr(blocked, "_CPU_BLOCK_BYTES", 2**16)

    def attend(S):
        q, k, v = (torch.randn(1, S, H, d, requires_grad=True) for d in (D, D, V))
        return lambda: dense_attention(q, k, v, scale=0.25)[0].sum().backward()

    peaks = {S: peak_bytes(attend(S)) for S in (512, 1024, 2048)}
    assert peaks[1024] <= 2.2 * peaks[512], peaks
    assert peaks[2048] <= 2.2 * peaks[1024], peaks
    assert peaks[2048] < 2048 * 2048, peaks  # a quarter of one S x S matrix of floats


def test_a_grouped_matmul_holds_its_results_alone():
    x, w = torch.randn(512, 64, requires_grad=True), torch.randn(16, 64, 64, requires_grad=True)
    counts = torch.full((16,), 32)
    peak = peak_bytes(lambda: grouped_matmul(x, w, counts=counts).sum().backward())
    assert peak < 1.2 * 4 * (3 * 512 * 64 + 16 * 64 * 64), peak


def test_the_meter_sees_quadratic_growth():
    def select(S):
        q, k, w = inputs(S)[2:]
        return lambda: lightning_indexer(q, k, w, topk=8, backend="reference")

    peaks = [peak_bytes(select(S)) for S in (256, 512)]
    assert peaks[1] > 3 * peaks[0], peaks


def test_indexer_alone_holds_no_square():
    S, K = 4096, 64
    q, k, w = (x.detach() for x in inputs(S)[2:])
    peak = peak_bytes(lambda: lightning_indexer(q, k, w, topk=K, backend="torch"))
    assert peak < S * K * 8 + 24 * 2**20, peak

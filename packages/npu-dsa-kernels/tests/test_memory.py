"""Peak memory against sequence length, from the allocator's own trace of every allocation."""

import json
import tempfile
from pathlib import Path

import torch

from npu_dsa_kernels import (
    attention_target,
    indexer_kl_loss,
    lightning_indexer,
    sparse_attention,
)

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

"""The warm-up loss over keys of each head's own, as attention has them before absorption."""

import pytest
import torch

import dsa_definitions as definition
from dsa_definitions import PACKED, TOLERANCE, assert_close, leaves
from npu_dsa_kernels import dense_indexer_kl_loss
from npu_dsa_kernels.backends import blocked

HEADS, D, SCALE = 4, 7, 0.4


def teacher(dtype):
    q = PACKED.normal(PACKED.B, PACKED.S, HEADS, D, dtype=dtype)
    return q, PACKED.normal(PACKED.B, PACKED.T, HEADS, D, dtype=dtype)


def target(q, k):
    """One head at a time, each as an absorbed attention of its own."""
    everything = torch.full((PACKED.B, PACKED.S, PACKED.T), -1, dtype=torch.int32)
    for b in range(PACKED.B):
        for s in range(PACKED.S):
            for t in definition.visible_keys(PACKED.bounds, b, s, PACKED.T):
                everything[b, s, t] = t
    heads = [
        definition.attention_target(q[:, :, h : h + 1], k[:, :, h], everything, SCALE)
        for h in range(HEADS)
    ]
    return everything, sum(heads)


@pytest.mark.parametrize("budget", [2**21, 300])
def test_values_and_gradients(backend, dtype, budget, monkeypatch):
    monkeypatch.setattr(blocked, "_CPU_BLOCK_BYTES", budget)
    q, k = teacher(dtype)
    indexer = leaves(*PACKED.indexer(dtype))
    loss = dense_indexer_kl_loss(*indexer, q, k, scale=SCALE, bounds=PACKED.bounds, backend=backend)
    wide = leaves(*(x.double() for x in indexer))
    expected = definition.indexer_kl_loss(*wide, *target(q.double(), k.double()))
    assert_close(loss, expected, TOLERANCE[dtype])
    d_loss = torch.rand_like(loss)
    actual = torch.autograd.grad(loss, indexer, d_loss)
    for a, b in zip(actual, torch.autograd.grad(expected, wide, d_loss.double()), strict=True):
        assert_close(a, b, TOLERANCE[dtype])


def test_one_key_for_all_heads_is_the_same_key_for_each(backend):
    q, k = teacher(torch.float64)
    indexer = PACKED.indexer()
    shared = k[:, :, 0]
    arguments = {"scale": SCALE, "bounds": PACKED.bounds, "backend": backend}
    one = dense_indexer_kl_loss(*indexer, q, shared, **arguments)
    each = dense_indexer_kl_loss(*indexer, q, shared[:, :, None].expand_as(k), **arguments)
    assert_close(each, one, 1e-12)
    assert (dense_indexer_kl_loss(*indexer, q, k, **arguments) - one).abs().max() > 1e-3


def test_meta_shape(backend):
    q, k = (x.to("meta") for x in teacher(torch.float32))
    indexer = (x.to("meta") for x in PACKED.indexer(torch.float32))
    bounds = PACKED.bounds.to("meta")
    loss = dense_indexer_kl_loss(*indexer, q, k, scale=SCALE, bounds=bounds, backend=backend)
    assert loss.shape == (PACKED.B, PACKED.S)


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda k: k[:, :, 1:], r"kv: got shape \(2, 16, 3, 7\); expected \[B=2, T=16, H=4, D=7\]"),
        (lambda k: k[..., 1:], r"kv: got shape \(2, 16, 4, 6\); expected \[B=2, T=16, H=4, D=7\]"),
        (lambda k: k[0, 0], r"kv: got shape \(4, 7\); expected 3 dimensions \[B, T, D\]"),
        (lambda k: k.double(), r"kv: got torch.float64; expected float32, the dtype of q"),
    ],
)
def test_bad_input(cut, message):
    q, k = teacher(torch.float32)
    with pytest.raises(ValueError, match=message):
        dense_indexer_kl_loss(*PACKED.indexer(torch.float32), q, cut(k), scale=SCALE)

import math

import pytest
import torch
from hypothesis import given

import dsa_definitions as definition
from base_definitions import assert_rounds_less_than
from dsa_definitions import EVERY, PACKED, TOLERANCE, Case, assert_close, cases, leaves
from npu_dsa_kernels import indexer_kl_loss, lightning_indexer
from npu_dsa_kernels.backends import blocked

NAMES = ("loss", "dq", "dk", "dw")


def run(loss_fn, inputs, indices, target, **kwargs):
    inputs = leaves(*inputs)
    loss = loss_fn(*inputs, indices, target, **kwargs)
    g = torch.randn(loss.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    if not loss.requires_grad:  # the definition of a case without a single key
        return dict(zip(NAMES, [loss, *(torch.zeros_like(x) for x in inputs)], strict=True))
    grads = torch.autograd.grad(loss, inputs, g.to(loss.dtype))
    return dict(zip(NAMES, [loss, *grads], strict=True))


def define(inputs, indices, target):
    return run(definition.indexer_kl_loss, [x.double() for x in inputs], indices, target.double())


def assert_same(actual, expected, tolerance, what="", **kwargs):
    for name in expected:
        assert_close(actual[name], expected[name], tolerance, f"{what} {name}", **kwargs)


def random_target(case: Case) -> torch.Tensor:
    """Of any norm, with exact zeros in it."""
    target = case.normal(case.B, case.S, case.topk).exp()
    return target.masked_fill(target < 0.7, 0.0)


@given(case=cases())
def test_values_and_gradients(case):
    inputs, target = case.indexer(torch.float32), random_target(case).float()
    expected = define(inputs, case.indices(), target)
    for backend, dtype in EVERY:
        cast = [x.to(dtype) for x in inputs]
        actual = run(indexer_kl_loss, cast, case.indices(), target.to(dtype), backend=backend)
        assert actual["loss"].dtype == dtype
        # A loss is a difference of logarithms of size 1: that is what its error is relative to.
        assert_same(actual, expected, TOLERANCE[dtype], f"{backend} {dtype}", floor=0.1)


def test_many_blocks(backend, monkeypatch):
    monkeypatch.setattr(blocked, "_CPU_BLOCK_BYTES", 3000)
    inputs, target = PACKED.indexer(), random_target(PACKED)
    actual = run(indexer_kl_loss, inputs, PACKED.indices(), target, backend=backend)
    assert_same(actual, define(inputs, PACKED.indices(), target), 1e-10)


@pytest.mark.parametrize("spread", [0.7, 5.7, 29.0])
def test_gradients_at_any_spread_of_the_scores(backend, spread):
    S, K, H, D = 64, 16, 4, 16
    torch.manual_seed(0)
    q, k, w = torch.randn(1, S, H, D), torch.randn(1, S, D), torch.randn(1, S, H)
    # Random visible keys instead of the best ones, so that the selected scores spread as all do.
    indices = torch.rand(S, S).tril().argsort(-1, descending=True)[:, :K].int()
    indices = indices.masked_fill(indices > torch.arange(S)[:, None], -1)[None]
    scores = torch.einsum("bshd,btd->bsht", q, k).relu().mul(w[..., None]).sum(2)
    w = w * (spread / scores.std())
    target = (spread * torch.randn(1, S, K)).softmax(-1)
    actual = run(indexer_kl_loss, (q, k, w), indices, target, backend=backend)
    assert_same(actual, define((q, k, w), indices, target), 1e-5)


@pytest.mark.parametrize("spread", [0.7, 5.7, 29.0])
def test_score_gradient_exactly(backend, spread):
    # H = D = 1 and q = w = 1 make the score of a positive key the key itself, so the gradient
    # of a key that one query alone selects is dI.
    S, K = 8, 32
    torch.manual_seed(1)
    k = (spread * torch.randn(1, S * K, 1)).sub_(-200)
    q, w = torch.ones(1, S, 1, 1), torch.ones(1, S, 1)
    indices = torch.arange(S * K, dtype=torch.int32).view(1, S, K)
    target = (spread * torch.randn(1, S, K)).softmax(-1)
    k.requires_grad_()
    loss = indexer_kl_loss(q, k, w, indices, target, backend=backend)
    (d_i,) = torch.autograd.grad(loss.sum(), k)
    y = k.detach().double().view(1, S, K).softmax(-1)
    p = target.double() / target.double().sum(-1, keepdim=True)
    assert_close(d_i.view(1, S, K), y - p, 2e-6)


def test_rows_without_keys_or_target(backend, dtype):
    inputs = leaves(*PACKED.indexer(dtype))
    indices, target = PACKED.indices(), random_target(PACKED).to(dtype) + 0.1
    indices[0, :5] = -1
    target[0, 5:9] = 0.0
    loss = indexer_kl_loss(*inputs, indices, target, backend=backend)
    assert (loss[0, :9] == 0).all()
    d_q, d_k, d_w = torch.autograd.grad(loss.sum(), inputs)
    assert (d_q[0, :9] == 0).all()
    assert (d_w[0, :9] == 0).all()
    assert all(x.isfinite().all() for x in (loss, d_q, d_k, d_w))
    assert d_q[0, 9:].any()


def test_empty_slots_read_neither_key_nor_target(backend):
    inputs, indices = PACKED.indexer(torch.float32), PACKED.indices()
    indices[indices == 0] = -1
    target = random_target(PACKED).float().masked_fill(indices < 0, 0.0)
    expected = run(indexer_kl_loss, inputs, indices, target, backend=backend)
    q, k, w = inputs
    k = k.clone()
    k[:, 0] = math.nan
    wild = indices.masked_fill(indices < 0, 77)
    target = target.masked_fill(indices < 0, math.nan)
    actual = run(indexer_kl_loss, (q, k, w), wild, target, backend=backend)
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


def test_nan_is_not_swallowed(backend):
    q, k, w = PACKED.indexer()
    target = random_target(PACKED) + 0.1
    for place in ("k", "target"):
        k_, target_ = k.clone(), target.clone()
        (k_ if place == "k" else target_)[0].fill_(math.nan)
        loss = indexer_kl_loss(q, k_, w, PACKED.indices(), target_, backend=backend)
        some = (PACKED.indices() >= 0).any(-1)
        assert loss[0][some[0]].isnan().all(), place
        assert loss[1].isfinite().all(), place


def test_normalisation_of_the_target_does_not_matter(backend):
    inputs, target = PACKED.indexer(), random_target(PACKED)
    a = run(indexer_kl_loss, inputs, PACKED.indices(), target, backend=backend)
    b = run(indexer_kl_loss, inputs, PACKED.indices(), 128 * target, backend=backend)
    assert_same(a, b, 1e-13)


def test_only_the_indexer_is_trained(backend):
    inputs = leaves(*PACKED.indexer())
    target = random_target(PACKED).requires_grad_()
    loss = indexer_kl_loss(*inputs, PACKED.indices(), target, backend=backend)
    grads = torch.autograd.grad(loss.sum(), [*inputs, target], allow_unused=True)
    assert all(g is not None for g in grads[:3])
    assert grads[3] is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_with_fp32_weights(backend, dtype):
    q, k, w = PACKED.indexer(dtype)
    inputs, target = (q, k, w.float()), random_target(PACKED).float()
    actual = run(indexer_kl_loss, inputs, PACKED.indices(), target, backend=backend)
    expected = define(inputs, PACKED.indices(), target)
    assert actual["loss"].dtype == actual["dw"].dtype == torch.float32
    assert actual["dq"].dtype == actual["dk"].dtype == dtype
    assert_close(actual["loss"], expected["loss"], 1e-5)
    assert_close(actual["dw"], expected["dw"], 1e-5)
    assert_same(actual, expected, torch.finfo(dtype).eps)


def test_half_precision_rounds_less_than_the_formula_in_it():
    indices, target = PACKED.indices(), random_target(PACKED).bfloat16()
    empty = indices < 0
    dead = (empty | (target == 0)).all(-1, keepdim=True)
    batch = torch.arange(2)[:, None, None]

    def eager(q, k, w):
        rows = k[batch, indices.clamp(min=0).long()]
        scores = (w[..., None] * torch.einsum("bshd,bskd->bshk", q, rows).relu()).sum(2)
        log_y = scores.masked_fill(empty, -math.inf).masked_fill(dead, 0.0).log_softmax(-1)
        p = target.masked_fill(empty, 0.0)
        p = p / p.sum(-1, keepdim=True).masked_fill(dead, 1.0)
        nothing = p == 0
        log_ratio = p.masked_fill(nothing, 1.0).log() - log_y.masked_fill(nothing, 0.0)
        return (p * log_ratio).sum(-1)

    assert_rounds_less_than(
        eager,
        lambda *x, backend: indexer_kl_loss(*x, indices, target, backend=backend),
        lambda *x: definition.indexer_kl_loss(*x, indices, target),
        PACKED.indexer(),
    )


def test_gradcheck(backend):
    inputs = leaves(*PACKED.indexer())
    target = random_target(PACKED)
    assert torch.autograd.gradcheck(
        lambda *x: indexer_kl_loss(*x, PACKED.indices(), target, backend=backend),
        inputs,
        fast_mode=True,
    )


def test_non_contiguous_and_expanded_gradients(backend):
    inputs, target = leaves(*PACKED.indexer()), random_target(PACKED)
    loss = indexer_kl_loss(*inputs, PACKED.indices(), target, backend=backend)
    expanded = torch.autograd.grad(loss.sum(), inputs, retain_graph=True)
    plain = torch.autograd.grad(loss, inputs, torch.ones(2, 16).double(), retain_graph=True)
    strided = torch.autograd.grad(loss, inputs, torch.ones(16, 2).double().T)
    for a, b, c in zip(expanded, plain, strided, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_same_bits_on_every_run(backend):
    torch.manual_seed(0)
    inputs = torch.randn(1, 256, 4, 16), torch.randn(1, 64, 16), torch.randn(1, 256, 4)
    indices = torch.rand(1, 256, 64).argsort(-1)[..., :16].int()
    target = torch.rand(1, 256, 16)
    first = run(indexer_kl_loss, inputs, indices, target, backend=backend)
    for _ in range(5):
        again = run(indexer_kl_loss, inputs, indices, target, backend=backend)
        for name in first:
            assert torch.equal(again[name], first[name]), name


def test_autocast_does_not_lower_the_precision(backend):
    inputs, target = PACKED.indexer(torch.float32), random_target(PACKED).float()
    expected = run(indexer_kl_loss, inputs, PACKED.indices(), target, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=backend != "reference"):
        # The reference's backward is autograd's own, and belongs outside of autocast.
        actual = run(under_autocast, inputs, PACKED.indices(), target, backend=backend)
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


def under_autocast(*args, **kwargs):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return indexer_kl_loss(*args, **kwargs)


def test_double_backward_is_refused():
    inputs = leaves(*PACKED.indexer())
    loss = indexer_kl_loss(*inputs, PACKED.indices(), random_target(PACKED), backend="torch")
    (d_q,) = torch.autograd.grad(loss.sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not implemented"):
        d_q.sum().backward()


@pytest.mark.parametrize(("B", "S", "T"), [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_empty_sizes(backend, B, S, T):
    inputs = leaves(torch.randn(B, S, 2, 5), torch.randn(B, T, 5), torch.randn(B, S, 2))
    indices = torch.zeros(B, S, 3, dtype=torch.int32)
    loss = indexer_kl_loss(*inputs, indices, torch.ones(B, S, 3), backend=backend)
    assert loss.shape == (B, S)
    grads = torch.autograd.grad(loss.sum(), inputs)
    assert all((g == 0).all() or T for g in grads)


ARGUMENTS = {
    "q_index": torch.randn(2, 8, 3, 4),
    "k_index": torch.randn(2, 8, 4),
    "weights": torch.randn(2, 8, 3),
    "indices": torch.arange(2).int().expand(2, 8, 2),
    "target": torch.ones(2, 8, 2),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_known_scores_give_the_same_loss_and_gradients(dtype):
    inputs = leaves(*PACKED.indexer(dtype))
    indices, scores = lightning_indexer(*inputs, topk=4, bounds=PACKED.bounds, backend="torch")
    indices[1, 12] = -1  # scores of empty slots are not looked at
    scores = scores.masked_fill(indices < 0, 3.0)
    target = torch.rand(2, 16, 4, dtype=scores.dtype)
    target[0, 5] = 0
    losses = [
        indexer_kl_loss(*inputs, indices, target, scores=known, backend="torch")
        for known in (None, scores)
    ]
    assert losses[0][0, 3] > 0
    assert_close(losses[1], losses[0], TOLERANCE.get(dtype, 1e-5), "loss")
    grads = [torch.autograd.grad(loss.sum(), inputs) for loss in losses]
    for known, computed in zip(*grads, strict=True):
        assert torch.equal(known, computed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_index": torch.randn(8, 3, 4)}, r"q_index: got shape \(8, 3, 4\)"),
        ({"k_index": torch.randn(2, 8, 5)}, r"k_index: got shape \(2, 8, 5\)"),
        ({"weights": torch.randn(2, 8, 4)}, r"weights: got shape \(2, 8, 4\)"),
        ({"indices": torch.zeros(2, 8, 2)}, r"indices: got torch.float32; expected int32"),
        ({"k_index": torch.randn(1, 8, 4)}, r"k_index: got shape \(1, 8, 4\); expected \[B=2"),
        ({"k_index": torch.randn(2, 8, 4).half()}, r"k_index: got torch.float16; expected float3"),
        ({"weights": torch.randn(2, 8, 3).half()}, r"weights: got torch.float16; expected float3"),
        ({"weights": torch.randn(2, 8, 3, device="meta")}, r"weights: got device meta; expected"),
        ({"indices": torch.zeros(2, 8, 0).int()}, r"indices: got shape \(2, 8, 0\); expected K"),
        ({"indices": torch.zeros(2, 8).int()}, r"indices: got shape \(2, 8\); expected 3 dim"),
        (
            {"indices": torch.zeros(2, 8, 2).int(), "validate": True},
            r"indices: got key 0 more than once in row \[0, 0\]",
        ),
        (
            {"indices": torch.tensor([0, 8]).int().expand(2, 8, 2), "validate": True},
            r"indices: got values in \[0, 8\]; expected -1 \(empty\) or a key in \[0, T=8\)",
        ),
        (
            {"target": torch.full((2, 8, 2), math.nan), "validate": True},
            r"target: got negative or non-finite entries",
        ),
        ({"target": torch.ones(2, 8, 3)}, r"target: got shape \(2, 8, 3\); expected \[B=2, S=8, K"),
        ({"target": torch.ones(2, 8)}, r"target: got shape \(2, 8\); expected 3 dimensions"),
        ({"target": torch.ones(2, 8, 2).int()}, r"target: got torch.int32; expected float64"),
        ({"target": torch.ones(2, 8, 2, device="meta")}, r"target: got device meta"),
        ({"target": -torch.ones(2, 8, 2), "validate": True}, r"target: got negative or non-fin"),
        ({"scores": torch.ones(2, 8)}, r"scores: got shape \(2, 8\); expected 3 dimensions"),
        ({"scores": torch.ones(2, 8, 3)}, r"scores: got shape \(2, 8, 3\); expected \[B=2, S=8, K"),
        ({"scores": torch.ones(2, 8, 2).half()}, r"scores: got torch.float16; expected float32"),
        ({"scores": torch.ones(2, 8, 2, device="meta")}, r"scores: got device meta; expected cpu"),
        ({"backend": ""}, r"backend: got ''; expected one of reference"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        indexer_kl_loss(**ARGUMENTS | change)

import math

import pytest
import torch
from hypothesis import given

import dsa_definitions as definition
from base_definitions import assert_follows, assert_rounds_less_than, values_and_gradients
from dsa_definitions import PACKED, TOLERANCE, assert_close, cases, leaves
from npu_dsa_kernels import (
    attention_target,
    causal_bounds,
    dense_indexer_kl_loss,
    indexer_kl_loss,
    lightning_indexer,
    sparse_attention,
)
from npu_dsa_kernels.backends import blocked

SCALE = 0.4


def teacher(case, dtype=torch.float32):
    """The attention's q and kv: other sizes than the indexer's."""
    H, D = case.H + 1, case.D + 2
    return case.normal(case.B, case.S, H, D, dtype=dtype), case.normal(
        case.B, case.T, D, dtype=dtype
    )


def against_the_definition(case):
    q, kv = teacher(case)

    def op(*indexer, backend):
        # fp32 numbers in either dtype: fp64 has them exactly.
        attention = (x.to(indexer[0].dtype) for x in (q, kv))
        return dense_indexer_kl_loss(
            *indexer, *attention, scale=SCALE, bounds=case.bounds, backend=backend, validate=True
        )

    def define(*indexer):
        return definition.dense_indexer_kl_loss(
            *indexer, q.double(), kv.double(), SCALE, case.bounds
        )

    # A loss is a difference of logarithms of size 1: that is what its error is relative to.
    assert_follows(op, define, case.indexer(), floor=0.1)


@given(case=cases())
def test_values_and_gradients(case):
    against_the_definition(case)


@pytest.mark.parametrize("budget", [1, 300, 3000])
def test_many_blocks_of_queries_and_of_heads(monkeypatch, budget):
    monkeypatch.setattr(blocked, "_CPU_BLOCK_BYTES", budget)
    against_the_definition(PACKED)


def everything_selected(indexer, q, kv, bounds, backend):
    """The sparse operators with K = T."""
    T = kv.shape[1]
    indices, _ = lightning_indexer(*indexer, topk=T, bounds=bounds, backend=backend)
    _, lse = sparse_attention(q, kv, indices, scale=SCALE, v_dim=1, backend=backend)
    target = attention_target(q, kv, indices, lse, scale=SCALE, backend=backend)
    return indexer_kl_loss(*indexer, indices, target, backend=backend)


def test_it_is_the_sparse_loss_of_all_keys(backend):
    q, kv = teacher(PACKED, torch.float64)
    dense = values_and_gradients(
        lambda *x: dense_indexer_kl_loss(
            *x, q, kv, scale=SCALE, bounds=PACKED.bounds, backend=backend
        ),
        PACKED.indexer(),
    )
    sparse = values_and_gradients(
        lambda *x: everything_selected(x, q, kv, PACKED.bounds, backend), PACKED.indexer()
    )
    for a, b in zip(dense, sparse, strict=True):
        assert_close(a, b, 1e-12)


def test_every_visible_key_counts_not_only_the_best(backend):
    # A warm-up over the top-k alone teaches a fresh indexer what it already does.
    q, kv = teacher(PACKED, torch.float64)
    q_index, k_index, w = PACKED.indexer()
    bounds = causal_bounds(torch.arange(16).expand(2, 16))
    topk = 4

    def loss(k_index):
        return dense_indexer_kl_loss(
            q_index, k_index, w, q, kv, scale=SCALE, bounds=bounds, backend=backend
        )[0, 15]

    selected, _ = lightning_indexer(q_index, k_index, w, topk=topk, bounds=bounds)
    before = loss(k_index)
    for s in set(range(16)) - set(selected[0, 15].tolist()):
        # Along each query head, so that some head's relu is surely active.
        changed = k_index.clone()
        changed[0, s] += q_index[0, 15].sum(0)
        assert loss(changed) != before, s


def test_shards_of_the_queries_give_their_share(backend):
    # Context parallel ranks have some of the queries and all of the keys.
    positions = torch.cat([torch.arange(7), torch.arange(9)]).expand(2, 16)
    indexer, (q, kv) = leaves(*PACKED.indexer()), teacher(PACKED, torch.float64)

    def run(rows):
        q_index, k_index, w = indexer
        loss = dense_indexer_kl_loss(
            q_index[:, rows],
            k_index,
            w[:, rows],
            q[:, rows],
            kv,
            scale=SCALE,
            bounds=causal_bounds(positions[:, rows], index=rows),
            backend=backend,
        )
        return torch.autograd.grad(loss.sum(), indexer)

    ranks = torch.tensor([0, 1, 2, 3, 12, 13, 14, 15]), torch.arange(4, 12)
    for whole, a, b in zip(run(torch.arange(16)), *map(run, ranks), strict=True):
        assert_close(a + b, whole, 1e-13)


def test_padding_changes_nothing(backend):
    tensors = [*PACKED.indexer(), *teacher(PACKED, torch.float64)]
    alone = [x[:, :12].clone() for x in tensors]
    for x in tensors:
        x[:, 12:] = math.nan
    positions = torch.cat([torch.arange(12), torch.full((4,), -1)]).expand(2, 16)
    results = []
    for t, bounds in ((alone, None), (tensors, causal_bounds(positions))):
        t[:3] = leaves(*t[:3])
        loss = dense_indexer_kl_loss(
            *t, scale=SCALE, bounds=bounds, reduction="sum", backend=backend
        )
        results.append([loss, *torch.autograd.grad(loss, t[:3])])
    assert_close(results[1][0], results[0][0], 1e-13)
    for a, b in zip(results[0][1:], results[1][1:], strict=True):
        assert_close(b[:, :12], a, 1e-13)
        assert (b[:, 12:] == 0).all()


@pytest.mark.parametrize("spread", [0.7, 5.7, 29.0])
def test_gradients_at_any_spread_of_the_scores(spread):
    S, H, D = 48, 4, 8
    g = torch.Generator().manual_seed(0)
    q_index, k_index, w = (
        torch.randn(*x, generator=g) for x in ((1, S, H, D), (1, S, D), (1, S, H))
    )
    scores = torch.einsum("bshd,btd->bsht", q_index, k_index).relu().mul(w[..., None]).sum(2)
    w = w * (spread / scores.std())
    q, kv = torch.randn(1, S, 2, D, generator=g), torch.randn(1, S, D, generator=g)
    expected = values_and_gradients(
        lambda *x: definition.dense_indexer_kl_loss(*x, q.double(), kv.double(), SCALE),
        [x.double() for x in (q_index, k_index, w)],
    )
    for backend in ("reference", "torch"):
        actual = values_and_gradients(
            lambda *x, b=backend: dense_indexer_kl_loss(*x, q, kv, scale=SCALE, backend=b),
            (q_index, k_index, w),
        )
        for a, e in zip(actual, expected, strict=True):
            assert_close(a, e, 1e-5, backend)


def test_score_gradient_exactly(backend):
    # H = D = 1, q = w = 1, positive keys: the score is the key, so the gradient is dI = y - p.
    T = 32
    g = torch.Generator().manual_seed(1)
    k = (29 * torch.randn(1, T, 1, generator=g) + 200).requires_grad_()
    q, kv = torch.randn(1, 1, 3, 5, generator=g), torch.randn(1, T, 5, generator=g)
    loss = dense_indexer_kl_loss(
        torch.ones(1, 1, 1, 1),
        k,
        torch.ones(1, 1, 1),
        q,
        kv,
        scale=SCALE,
        bounds=torch.tensor([[[0, T]]], dtype=torch.int32),
        backend=backend,
    )
    (d_i,) = torch.autograd.grad(loss.sum(), k)
    y = k.detach().double().flatten().softmax(-1)
    p = (SCALE * q.double()[0, 0] @ kv.double()[0].T).softmax(-1).mean(0)
    assert_close(d_i.flatten(), y - p, 2e-6)


def test_only_the_indexer_is_trained(backend):
    tensors = leaves(*PACKED.indexer(), *teacher(PACKED))
    tensors[:3] = leaves(*PACKED.indexer(torch.float32))
    loss = dense_indexer_kl_loss(*tensors, scale=SCALE, backend=backend)
    grads = torch.autograd.grad(loss.sum(), tensors, allow_unused=True)
    assert all(g is not None and g.any() for g in grads[:3])
    assert grads[3:] == (None, None)


def test_rows_without_keys(backend, dtype):
    q, kv = teacher(PACKED, dtype)
    inputs = leaves(*PACKED.indexer(dtype))
    bounds = PACKED.bounds.clone()
    bounds[0] = 0
    loss = dense_indexer_kl_loss(*inputs, q, kv, scale=SCALE, bounds=bounds, backend=backend)
    hidden = bounds[..., 0] == bounds[..., 1]
    assert hidden.sum() == 19
    assert (loss[hidden] == 0).all()
    upstream = torch.where(hidden, math.nan, 1.0).to(dtype)  # 0 / 0 of a mean over no token
    d_q, d_k, d_w = torch.autograd.grad(loss, inputs, upstream)
    assert (d_q[hidden] == 0).all()
    assert (d_w[hidden] == 0).all()
    assert (d_k[0] == 0).all()
    assert all(x.isfinite().all() for x in (d_q, d_k, d_w))
    assert d_k[1].any()


@pytest.mark.parametrize("change", [1e3, math.nan, math.inf])
@pytest.mark.parametrize("budget", [1, 2**21])
def test_the_future_and_other_documents_never_reach_the_past(backend, change, budget, monkeypatch):
    monkeypatch.setattr(blocked, "_CPU_BLOCK_BYTES", budget)
    bounds = causal_bounds(torch.cat([torch.arange(7), torch.arange(9)]).expand(2, 16))

    def run(late, early):
        tensors = [*PACKED.indexer(), *teacher(PACKED, torch.float64)]
        for x in tensors:
            x[:, 12:] *= late
            x[:, :7] *= early
        tensors[:3] = leaves(*tensors[:3])
        loss = dense_indexer_kl_loss(*tensors, scale=SCALE, bounds=bounds, backend=backend)
        grads = torch.autograd.grad(loss[:, 7:12].sum(), tensors[:3])
        return loss[:, 7:12], grads

    loss, grads = run(1.0, 1.0)
    changed, changed_grads = run(change, change)
    assert_close(changed, loss, 1e-13)
    # Gradients of what is looked at: of keys, late queries (whose loss is not used) add 0 * NaN.
    for i in (0, 2):
        assert_close(changed_grads[i][:, 7:12], grads[i][:, 7:12], 1e-13)
    if math.isfinite(change):
        assert_close(changed_grads[1][:, 7:12], grads[1][:, 7:12], 1e-13)
    for x in grads:
        assert (x[:, 12:] == 0).all()
        assert (x[:, :7] == 0).all()


@pytest.mark.parametrize("place", ["q_index", "k_index", "weights", "q", "kv"])
def test_nan_is_not_swallowed(backend, place):
    names = ("q_index", "k_index", "weights", "q", "kv")
    tensors = dict(zip(names, (*PACKED.indexer(), *teacher(PACKED, torch.float64)), strict=True))
    tensors[place][0, 3].fill_(math.nan)
    inputs = [tensors[n].requires_grad_() for n in names[:3]]
    loss = dense_indexer_kl_loss(**tensors, scale=SCALE, backend=backend)
    seen = torch.zeros(2, 16, dtype=torch.bool)
    seen[0, 3 : 16 if place.startswith("k") else 4] = True
    assert torch.equal(loss.isnan(), seen)
    d_q, d_k, d_w = torch.autograd.grad(loss.sum(), inputs)
    assert torch.equal(d_q.isnan().flatten(2).all(-1), seen)
    assert torch.equal(d_w.isnan().all(-1), seen)
    # Keys that no spoilt query sees keep their gradient.
    first = 16 if place.startswith("k") else 4
    assert d_k[0, :first].isnan().all()
    assert d_k[0, first:].isfinite().all()
    assert d_k[1].isfinite().all()


def test_reduction(backend):
    indexer, attention = leaves(*PACKED.indexer()), teacher(PACKED, torch.float64)

    def run(**kwargs):
        return dense_indexer_kl_loss(*indexer, *attention, scale=SCALE, backend=backend, **kwargs)

    total = run(reduction="sum")
    assert total.shape == ()
    assert_close(total, run().sum(), 1e-14)
    for a, b in zip(
        torch.autograd.grad(total, indexer), torch.autograd.grad(run().sum(), indexer), strict=True
    ):
        assert torch.equal(a, b)


def test_gradcheck(backend):
    attention = teacher(PACKED, torch.float64)
    assert torch.autograd.gradcheck(
        lambda *x: dense_indexer_kl_loss(
            *x, *attention, scale=SCALE, bounds=PACKED.bounds, backend=backend
        ),
        leaves(*PACKED.indexer()),
        fast_mode=True,
    )


def test_half_precision():
    q, kv = (x.bfloat16() for x in teacher(PACKED))
    hidden = torch.ones(16, 16).triu(1).bool()

    def eager(q_index, k_index, w):
        logits = SCALE * torch.einsum("bshd,btd->bsht", q, kv)
        p = logits.masked_fill(hidden[:, None], -math.inf).softmax(-1).sum(2)
        p = p / p.sum(-1, keepdim=True)
        scores = (w[..., None] * torch.einsum("bshd,btd->bsht", q_index, k_index).relu()).sum(2)
        log_y = scores.masked_fill(hidden, -math.inf).log_softmax(-1)
        log_p = p.masked_fill(hidden, 1.0).log()
        return (p * (log_p - log_y.masked_fill(hidden, 0.0))).sum(-1)

    assert_rounds_less_than(
        eager,
        lambda *x, backend: dense_indexer_kl_loss(*x, q, kv, scale=SCALE, backend=backend),
        lambda *x: definition.dense_indexer_kl_loss(*x, q.double(), kv.double(), SCALE),
        PACKED.indexer(),
    )


def test_dtypes_of_teacher_and_indexer_may_differ(backend):
    q_index, k_index, w = leaves(*PACKED.indexer(torch.bfloat16))
    w = w.detach().float().requires_grad_()
    attention = teacher(PACKED, torch.float32)
    loss = dense_indexer_kl_loss(q_index, k_index, w, *attention, scale=SCALE, backend=backend)
    expected = definition.dense_indexer_kl_loss(
        *(x.double() for x in (q_index, k_index, w, *attention)), SCALE
    )
    assert loss.dtype == torch.float32
    assert_close(loss, expected, TOLERANCE[torch.float32])
    grads = torch.autograd.grad(loss.sum(), (q_index, k_index, w))
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_non_contiguous_and_expanded_gradients(backend):
    tensors = [*PACKED.indexer(), *teacher(PACKED, torch.float64)]
    expected = values_and_gradients(
        lambda *x: dense_indexer_kl_loss(*x, *tensors[3:], scale=SCALE, backend=backend),
        tensors[:3],
    )[0]
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors]
    strided[:3] = [x.requires_grad_() for x in strided[:3]]
    bounds = causal_bounds(torch.arange(16).expand(2, 16))
    bounds = bounds.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    loss = dense_indexer_kl_loss(*strided, scale=SCALE, bounds=bounds, backend=backend)
    assert_close(loss, expected, 1e-14)
    expanded = torch.autograd.grad(loss.sum(), strided[:3], retain_graph=True)
    plain = torch.autograd.grad(loss, strided[:3], torch.ones(16, 2).double().T)
    for a, b in zip(expanded, plain, strict=True):
        assert torch.equal(a, b)


def test_same_bits_on_every_run(backend):
    inputs = PACKED.indexer(torch.float32)
    runs = [
        values_and_gradients(
            lambda *x: dense_indexer_kl_loss(*x, *teacher(PACKED), scale=SCALE, backend=backend),
            inputs,
        )
        for _ in range(4)
    ]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_autocast_does_not_lower_the_precision(backend):
    tensors = [*PACKED.indexer(torch.float32), *teacher(PACKED)]
    expected = dense_indexer_kl_loss(*tensors, scale=SCALE, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = dense_indexer_kl_loss(*tensors, scale=SCALE, backend=backend)
    assert torch.equal(actual, expected)


def test_double_backward():
    for backend in ("reference", "torch"):
        inputs = leaves(*PACKED.indexer())
        attention = teacher(PACKED, torch.float64)
        loss = dense_indexer_kl_loss(*inputs, *attention, scale=SCALE, backend=backend)
        (d_q,) = torch.autograd.grad(loss.sum(), inputs[:1], create_graph=True)
        if backend == "reference":
            assert torch.autograd.grad(d_q.sum(), inputs[0])[0].isfinite().all()
        else:
            with pytest.raises(RuntimeError, match="dense_indexer_kl_loss: double backward"):
                d_q.sum().backward()


@pytest.mark.parametrize(("B", "S", "T"), [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_empty_sizes(backend, B, S, T):
    inputs = leaves(torch.randn(B, S, 2, 5), torch.randn(B, T, 5), torch.randn(B, S, 2))
    loss = dense_indexer_kl_loss(
        *inputs,
        torch.randn(B, S, 3, 4),
        torch.randn(B, T, 4),
        scale=1.0,
        bounds=torch.zeros(B, S, 2, dtype=torch.int32),
        backend=backend,
    )
    assert loss.shape == (B, S)
    for g, x in zip(torch.autograd.grad(loss.sum(), inputs), inputs, strict=True):
        assert g.shape == x.shape
        assert not g.any()


def test_more_keys_than_8192():
    # A row at the end of a long sequence; fused kernels of this loss have stopped at 8192.
    T = 9000
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*x, generator=g) for x in ((1, 2, 2, 4), (1, T, 4), (1, 2, 2))]
    attention = [torch.randn(*x, generator=g) for x in ((1, 2, 2, 4), (1, T, 4))]
    bounds = torch.tensor([[[0, T], [100, T - 1]]], dtype=torch.int32)
    reference, actual = (
        values_and_gradients(
            lambda *x, b=b: dense_indexer_kl_loss(
                *x, *attention, scale=SCALE, bounds=bounds, backend=b
            ),
            inputs if b == "torch" else [x.double() for x in inputs],
        )
        for b in ("reference", "torch")
    )
    for a, e in zip(actual, reference, strict=True):
        assert_close(a, e, 1e-5)


ARGUMENTS = {
    "q_index": torch.randn(2, 8, 3, 4),
    "k_index": torch.randn(2, 8, 4),
    "weights": torch.randn(2, 8, 3),
    "q": torch.randn(2, 8, 2, 6),
    "kv": torch.randn(2, 8, 6),
    "scale": 1.0,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_index": torch.randn(8, 3, 4)}, r"q_index: got shape \(8, 3, 4\)"),
        ({"k_index": torch.randn(2, 8, 5)}, r"k_index: got shape \(2, 8, 5\)"),
        ({"weights": torch.randn(2, 8, 4)}, r"weights: got shape \(2, 8, 4\)"),
        ({"q": torch.randn(8, 2, 6)}, r"q: got shape \(8, 2, 6\); expected 4 dimensions"),
        ({"q": torch.randn(2, 7, 2, 6)}, r"q: got shape \(2, 7, 2, 6\); expected \[B=2, S=8, H"),
        ({"q": torch.randn(3, 8, 2, 6)}, r"q: got shape \(3, 8, 2, 6\); expected \[B=2, S=8, H"),
        ({"q": torch.ones(2, 8, 2, 6).int()}, r"q: got torch.int32; expected float64"),
        ({"q": torch.randn(2, 8, 0, 6)}, r"q: got shape \(2, 8, 0, 6\); expected H"),
        ({"q": torch.randn(2, 8, 2, 6, device="meta")}, r"q: got device meta; expected cpu"),
        ({"kv": torch.randn(2, 7, 6)}, r"kv: got shape \(2, 7, 6\); expected \[B=2, T=8, D=6\]"),
        ({"kv": torch.randn(2, 8, 6).double()}, r"kv: got torch.float64; expected float32, the"),
        ({"kv": torch.randn(2, 8, 6, device="meta")}, r"kv: got device meta; expected cpu"),
        ({"scale": math.inf}, r"scale: got inf; expected a finite float"),
        ({"bounds": torch.zeros(2, 8, 2)}, r"bounds: got torch.float32; expected int32"),
        ({"bounds": torch.zeros(2, 7, 2).int()}, r"bounds: got shape \(2, 7, 2\)"),
        (
            {"bounds": torch.tensor([0, 9]).int().expand(2, 8, 2), "validate": True},
            r"bounds: got values in \[0, 9\]; expected 0 <= lo <= hi <= T=8",
        ),
        (
            {"bounds": torch.tensor([5, 2]).int().expand(2, 8, 2), "validate": True},
            r"bounds: got lo=5 > hi=2 at \[0, 0\]",
        ),
        ({"reduction": "mean"}, r"reduction: got 'mean'; expected one of 'none', 'sum'"),
        ({"backend": "fast"}, r"backend: got 'fast'; expected one of reference"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        dense_indexer_kl_loss(**ARGUMENTS | change)


def test_queries_and_keys_of_different_length_need_bounds():
    change = {"k_index": torch.randn(2, 9, 4), "kv": torch.randn(2, 9, 6)}
    with pytest.raises(ValueError, match="bounds: got None with S=8 queries and T=9 keys"):
        dense_indexer_kl_loss(**ARGUMENTS | change)


def test_wild_bounds_read_no_memory(backend):
    wild = torch.tensor([-(2**31), 2**31 - 1]).int().expand(2, 8, 2)
    whole = torch.tensor([0, 8]).int().expand(2, 8, 2)
    a, b = (dense_indexer_kl_loss(**ARGUMENTS, bounds=x, backend=backend) for x in (wild, whole))
    assert torch.equal(a, b)


def test_a_key_at_minus_infinity_scores_nothing_and_learns_nothing():
    g = torch.Generator().manual_seed(0)
    q, k, w = leaves(
        torch.rand(1, 6, 2, 4, generator=g), torch.rand(1, 6, 4, generator=g),
        torch.rand(1, 6, 2, generator=g),
    )  # fmt: skip
    with torch.no_grad():
        k[0, 2, 1] = -math.inf  # its dot products are -inf, whose relu is 0
    attention = torch.randn(1, 6, 2, 4, generator=g), torch.randn(1, 6, 4, generator=g)
    loss = dense_indexer_kl_loss(q, k, w, *attention, scale=0.5, backend="torch")
    assert loss.isfinite().all()
    dk, dw = torch.autograd.grad(loss.sum(), (k, w))
    assert (dk[0, 2] == 0).all()
    assert dw.isfinite().all()
    assert dk[0, [0, 1, 3]].abs().min() > 0

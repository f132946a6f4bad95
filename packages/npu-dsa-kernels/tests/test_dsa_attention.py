import math

import pytest
import torch
from hypothesis import given

import dsa_definitions as definition
from dsa_definitions import EVERY, TOLERANCE, assert_close, cases, leaves
from npu_dsa_kernels import (
    DSAOutput,
    attention_target,
    causal_bounds,
    dsa_attention,
    indexer_kl_loss,
    lightning_indexer,
    sparse_attention,
)
from npu_dsa_kernels.backends import reference

B, S, H, D, V, HI, DI, K = 2, 32, 3, 10, 6, 4, 8, 8
SETTINGS = {"topk": K, "scale": 0.4, "v_dim": V}
NAMES = ("q", "kv", "q_index", "k_index", "weights")


def inputs(seed: int = 0, dtype: torch.dtype = torch.float64, s: int = S) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = [(B, s, H, D), (B, s, D), (B, s, HI, DI), (B, s, DI), (B, s, HI)]
    return [torch.randn(*x, generator=g, dtype=torch.float64).to(dtype) for x in shapes]


def gradients(layer, tensors, seed=1):
    g = torch.Generator().manual_seed(seed)
    d_out = torch.randn(layer.out.shape, generator=g, dtype=torch.float64).to(layer.out.dtype)
    d_kl = torch.rand(layer.kl.shape, generator=g, dtype=torch.float64).to(layer.kl.dtype)
    return torch.autograd.grad((layer.out, layer.kl), tensors, (d_out, d_kl))


@given(case=cases())
def test_whole_layer_against_the_definition(case):
    tensors = [*case.attention(torch.float32), *case.indexer(torch.float32)]
    expected = {}
    for backend, dtype in EVERY:
        layer = dsa_attention(
            *(x.to(dtype) for x in tensors),
            topk=case.topk,
            scale=0.4,
            v_dim=1,
            bounds=case.bounds,
            backend=backend,
        )
        # From the selection on: near ties may be selected otherwise by other roundings.
        key = tuple(layer.indices.flatten().tolist())
        if key not in expected:
            expected[key] = define(*(x.double() for x in tensors), layer.indices)
        out, lse, kl = expected[key]
        what = f"{backend} {dtype}"
        assert_close(layer.out, out, TOLERANCE[dtype], f"{what} out")
        assert_close(layer.lse, lse, TOLERANCE[dtype], f"{what} lse")
        # A loss is a difference of logarithms of size 1: that is what its error is relative to.
        assert_close(layer.kl, kl, TOLERANCE[dtype], f"{what} kl", floor=0.1)


def define(q, kv, q_index, k_index, weights, indices):
    out, lse = definition.sparse_attention(q, kv, indices, 0.4, 1)
    target = definition.attention_target(q, kv, indices, 0.4)
    return out, lse, definition.indexer_kl_loss(q_index, k_index, weights, indices, target)


def test_kl_trains_the_indexer_and_out_the_attention(backend):
    tensors = leaves(*inputs())
    layer = dsa_attention(*tensors, **SETTINGS, backend=backend)

    def trained(x):
        grads = torch.autograd.grad(x.sum(), tensors, allow_unused=True, retain_graph=True)
        return [n for n, g in zip(NAMES, grads, strict=True) if g is not None and g.any()]

    assert trained(layer.out) == ["q", "kv"]
    assert trained(layer.lse) == ["q", "kv"]
    assert trained(layer.kl) == ["q_index", "k_index", "weights"]
    assert not layer.indices.is_floating_point()


@pytest.mark.parametrize("topk", [8, 10, 11, 64], ids=["S/4", "S-1", "S", "K>T"])
@pytest.mark.parametrize("lengths", [(11, 21), (1, 31), (16, 16)])
def test_packed_documents_equal_the_documents_apart(backend, lengths, topk):
    # topk 10, 11 and 64 straddle the first document's length.
    tensors = leaves(*inputs())
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(B, S)
    packed = dsa_attention(
        *tensors, **SETTINGS | {"topk": topk}, bounds=causal_bounds(positions), backend=backend
    )
    whole = torch.autograd.grad((packed.out.square().sum() + packed.kl.sum()), tensors)
    start = 0
    for n in lengths:
        rows = slice(start, start + n)
        alone = leaves(*(x[:, rows] for x in tensors))
        layer = dsa_attention(*alone, **SETTINGS | {"topk": topk}, backend=backend)
        indices = packed.indices[:, rows]
        assert torch.equal(torch.where(indices < 0, -1, indices - start), layer.indices)
        assert_close(packed.out[:, rows], layer.out, 1e-12, "out")
        assert_close(packed.lse[:, rows], layer.lse, 1e-12, "lse")
        assert_close(packed.kl[:, rows], layer.kl, 1e-12, "kl")
        apart = torch.autograd.grad((layer.out.square().sum() + layer.kl.sum()), alone)
        for name, a, b in zip(NAMES, whole, apart, strict=True):
            assert_close(a[:, rows], b, 1e-12, name)
        start += n


@pytest.mark.parametrize("topk", [8, 31, 32, 40])
@pytest.mark.parametrize("change", [1e3, math.nan, math.inf])
def test_the_future_and_other_documents_never_reach_the_past(backend, topk, change):
    # Tokens 24.. change: the future of the second document, and none of the first one's business.
    positions = torch.cat([torch.arange(12), torch.arange(20)]).expand(B, S)
    bounds = causal_bounds(positions)

    def run(late):
        tensors = inputs()
        for x in tensors:
            x[:, 24:] *= late
        tensors = leaves(*tensors)
        layer = dsa_attention(*tensors, **SETTINGS | {"topk": topk}, bounds=bounds, backend=backend)
        # Only the past has a loss: no gradient may reach the future, nor the past's change.
        grads = torch.autograd.grad(
            layer.out[:, :24].square().sum() + layer.kl[:, :24].sum(), tensors
        )
        return layer, grads

    layer, grads = run(1.0)
    changed, changed_grads = run(change)
    assert torch.equal(layer.indices[:, :24], changed.indices[:, :24])
    for name in ("out", "lse", "kl"):
        a, b = getattr(layer, name)[:, :24], getattr(changed, name)[:, :24]
        assert a.isfinite().all()
        assert_close(b, a, 1e-13, name)
    for name, a, b in zip(NAMES, grads, changed_grads, strict=True):
        assert (a[:, 24:] == 0).all(), name
        # Late queries do see early keys: 0 * NaN is what a NaN query gives them, rightly.
        if math.isfinite(change) or name not in ("kv", "k_index"):
            assert_close(b[:, :24], a[:, :24], 1e-13, name)


def test_context_parallel_queries_give_their_share(backend):
    # Two ranks with head and tail shards of the queries, all keys each: outputs by row, gradients
    # of shared tensors by sum.
    tensors = leaves(*inputs())
    positions = torch.cat([torch.arange(13), torch.arange(19)]).expand(B, S)
    whole = dsa_attention(*tensors, **SETTINGS, bounds=causal_bounds(positions), backend=backend)
    expected = torch.autograd.grad(whole.out.square().sum() + whole.kl.sum(), tensors)
    chunks = torch.arange(S).view(4, 8)
    total = [torch.zeros_like(x) for x in tensors]
    for rank in range(2):
        rows = torch.cat([chunks[rank], chunks[3 - rank]])
        q, kv, q_index, k_index, weights = tensors
        layer = dsa_attention(
            q[:, rows],
            kv,
            q_index[:, rows],
            k_index,
            weights[:, rows],
            **SETTINGS,
            bounds=causal_bounds(positions[:, rows], index=rows),
            backend=backend,
        )
        assert torch.equal(layer.indices, whole.indices[:, rows])
        assert_close(layer.kl, whole.kl[:, rows], 1e-12)
        parts = torch.autograd.grad(layer.out.square().sum() + layer.kl.sum(), tensors)
        total = [a + b for a, b in zip(total, parts, strict=True)]
    for name, a, b in zip(NAMES, total, expected, strict=True):
        assert_close(a, b, 1e-12, name)


@pytest.mark.parametrize("garbage", [1e3, math.nan])
def test_padding_changes_nothing(backend, dtype, garbage):
    # 24 tokens and a tail of padding, whose rows are hidden.
    tensors = inputs(dtype=dtype)
    alone = leaves(*(x[:, :24] for x in tensors))
    for x in tensors:
        x[:, 24:] = garbage
    padded = leaves(*tensors)
    positions = torch.cat([torch.arange(24), torch.full((8,), -1)]).expand(B, S)
    layers = (
        dsa_attention(*alone, **SETTINGS, backend=backend),
        dsa_attention(*padded, **SETTINGS, bounds=causal_bounds(positions), backend=backend),
    )
    assert torch.equal(layers[0].indices, layers[1].indices[:, :24])
    assert (layers[1].kl[:, 24:] == 0).all()
    assert (layers[1].out[:, 24:] == 0).all()
    losses = [layer.out.square().sum() + layer.kl.sum() for layer in layers]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}[dtype]
    assert_close(losses[1], losses[0], tolerance)
    for name, a, b in zip(
        NAMES,
        torch.autograd.grad(losses[0], alone),
        torch.autograd.grad(losses[1], padded),
        strict=True,
    ):
        assert_close(b[:, :24], a, tolerance, name)
        assert (b[:, 24:] == 0).all(), name


def test_accumulated_microbatches_give_the_gradient_of_the_whole(backend):
    tensors = leaves(*inputs())

    def run(rows):
        layer = dsa_attention(*(x[rows] for x in tensors), **SETTINGS, backend=backend)
        return torch.autograd.grad(layer.out.square().sum() + layer.kl.sum(), tensors)

    whole, parts = run(slice(0, 2)), [run(slice(b, b + 1)) for b in range(2)]
    for name, a, b, c in zip(NAMES, whole, *parts, strict=True):
        assert_close(b + c, a, 1e-12, name)


def test_reduce_target_makes_head_shards_equal_the_whole(backend):
    q, kv, *indexer = leaves(*inputs())
    whole = dsa_attention(q, kv, *indexer, **SETTINGS, backend=backend)
    seen = []
    dsa_attention(
        q[:, :, 2:],
        kv,
        *indexer,
        **SETTINGS,
        reduce_target=lambda t: seen.append(t) or t,
        backend=backend,
    )
    other = seen[0]
    assert other.shape == (B, S, K)
    assert not other.requires_grad
    layer = dsa_attention(
        q[:, :, :2], kv, *indexer, **SETTINGS, reduce_target=lambda t: t + other, backend=backend
    )
    assert_close(layer.kl, whole.kl, 1e-12)
    a = torch.autograd.grad(layer.kl.sum(), indexer)
    b = torch.autograd.grad(whole.kl.sum(), indexer)
    for x, y in zip(a, b, strict=True):
        assert_close(x, y, 1e-12)
    # Not the same as leaving it out.
    assert (dsa_attention(q[:, :, :2], kv, *indexer, **SETTINGS).kl - whole.kl).abs().max() > 1e-3


def test_loss_of_another_backend(monkeypatch):
    tensors = leaves(*inputs())
    whole = dsa_attention(*tensors, **SETTINGS, backend="torch")
    calls = []
    for name in ("attention_target", "indexer_kl_loss"):
        plain = getattr(reference, name)
        monkeypatch.setattr(
            reference, name, lambda *a, name=name, plain=plain: calls.append(name) or plain(*a)
        )
    for name in ("lightning_indexer", "sparse_attention"):
        monkeypatch.delattr(reference, name)  # the loss alone changes
    layer = dsa_attention(*tensors, **SETTINGS, backend="torch", kl_backend="reference")
    assert calls == ["attention_target", "indexer_kl_loss"]
    assert_close(layer.kl, whole.kl, 1e-12)
    dsa_attention(*tensors, **SETTINGS, backend="torch")
    assert len(calls) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_layer_equals_its_operators_one_by_one(backend, dtype):
    # The layer takes the target from the attention and the scores from the indexer.
    tensors = inputs(dtype=dtype)
    q, kv, *indexer = whole = leaves(*tensors)
    layer = dsa_attention(*whole, **SETTINGS, backend=backend)
    assert not layer.indices.requires_grad
    expected = gradients(layer, whole)

    q, kv, *indexer = apart = leaves(*tensors)
    indices, _ = lightning_indexer(*indexer, topk=K, backend=backend)
    out, lse = sparse_attention(q, kv, indices, scale=0.4, v_dim=V, backend=backend)
    target = attention_target(q, kv, indices, lse, scale=0.4, backend=backend)
    kl = indexer_kl_loss(*indexer, indices, target, backend=backend)
    assert torch.equal(indices, layer.indices)
    assert torch.equal(out, layer.out)
    assert torch.equal(lse, layer.lse)
    assert_close(layer.kl, kl, TOLERANCE[dtype], floor=0.1)
    actual = gradients(DSAOutput(out, lse, indices, kl), apart)
    for name, a, b in zip(NAMES, actual, expected, strict=True):
        assert_close(a, b, TOLERANCE[dtype], name)


def test_the_layer_s_target_is_reduced(backend):
    q, kv, *indexer = inputs()
    seen = []
    layer = dsa_attention(
        q, kv, *indexer, **SETTINGS, reduce_target=lambda t: seen.append(t) or t, backend=backend
    )
    expected = definition.attention_target(q, kv, layer.indices, 0.4)
    assert_close(seen[0], expected, 1e-10)
    assert not seen[0].requires_grad


def test_sum_of_the_loss(backend):
    tensors = leaves(*inputs())
    each = dsa_attention(*tensors, **SETTINGS, backend=backend)
    total = dsa_attention(*tensors, **SETTINGS, kl_reduction="sum", backend=backend)
    assert total.kl.shape == ()
    assert_close(total.kl, each.kl.sum(), 1e-14)
    for a, b in zip(
        torch.autograd.grad(total.kl, tensors[2:]),
        torch.autograd.grad(each.kl.sum(), tensors[2:]),
        strict=True,
    ):
        assert_close(a, b, 1e-14)
    assert dsa_attention(*tensors, **SETTINGS, kl_reduction="sum", compute_kl=False).kl is None
    with pytest.raises(ValueError, match="kl_reduction: got 'mean'; expected one of 'none', 's"):
        dsa_attention(*tensors, **SETTINGS, kl_reduction="mean")


def test_reduce_target_must_return_it():
    with pytest.raises(ValueError, match=r"reduce_target: got a function that returned NoneType"):
        dsa_attention(*inputs(), **SETTINGS, reduce_target=lambda t: None)


def test_without_loss_no_indexer_tensor_is_kept(backend):
    tensors = leaves(*inputs())
    storages = {x.untyped_storage().data_ptr() for x in tensors[2:]}
    shapes = {tensors[2].shape, tensors[4].shape}  # copies count, too; k_index looks like indices

    def bytes_kept(compute_kl):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            layer = dsa_attention(*tensors, **SETTINGS, compute_kl=compute_kl, backend=backend)
        return layer, [
            x for x in kept if x.untyped_storage().data_ptr() in storages or x.shape in shapes
        ]

    layer, indexer = bytes_kept(False)
    assert layer.kl is None
    assert not indexer
    layer.out.sum().backward()
    assert tensors[0].grad.any()
    assert all(x.grad is None for x in tensors[2:])
    assert bytes_kept(True)[1]  # the hook does see them


def test_default_bounds_are_causal(backend):
    tensors = inputs()
    causal = causal_bounds(torch.arange(S).expand(B, S))
    a = dsa_attention(*tensors, **SETTINGS, backend=backend)
    b = dsa_attention(*tensors, **SETTINGS, bounds=causal, backend=backend)
    assert torch.equal(a.indices, b.indices)
    assert_close(a.out, b.out, 1e-14)


def test_the_loss_teaches_the_indexer_where_attention_looks():
    # The keys of the attention are a function of those the indexer sees: it can be learnt.
    torch.manual_seed(0)
    s, topk = 128, 16
    x = torch.randn(1, s, 16)
    q, kv = 3 * torch.randn(1, s, 2, 16), x
    w_q = torch.nn.Parameter(torch.randn(2 * 16, 4 * 16) * 0.1)
    w_k = torch.nn.Parameter(torch.randn(16, 16) * 0.1)
    w_h = torch.nn.Parameter(torch.full((32, 4), 0.01))
    optimizer = torch.optim.Adam([w_q, w_k, w_h], lr=1e-2)

    def layer():
        flat = q.flatten(2)
        indexer = (flat @ w_q).view(1, s, 4, 16), x @ w_k, flat @ w_h
        return dsa_attention(q, kv, *indexer, topk=topk, scale=0.25, v_dim=16)

    def recall(indices):
        p = (torch.einsum("bshd,btd->bsht", q, kv) * 0.25).masked_fill(
            torch.ones(s, s).triu(1).bool()[None, :, None], -math.inf
        )
        best = p.softmax(-1).sum(2).topk(topk).indices[0, 64:]
        hit = (best.unsqueeze(-1) == indices[0, 64:].unsqueeze(-2)).any(-1)
        return hit.float().mean().item()

    before = layer()
    for _ in range(150):
        optimizer.zero_grad()
        layer().kl.mean().backward()
        optimizer.step()
    after = layer()
    assert after.kl.mean() < 0.5 * before.kl.mean()
    assert recall(after.indices) > 2 * recall(before.indices)


@pytest.mark.parametrize(
    ("name", "cut", "message"),
    [
        ("q_index", lambda x: x[:, :9], r"q_index: got shape \(2, 9, 4, 8\); expected \[B, S\]"),
        ("k_index", lambda x: x[:, :9], r"k_index: got shape \(2, 9, 8\); expected \[B, T\]"),
        ("weights", lambda x: x[:, :9], r"weights: got shape \(2, 9, 4\)"),
        ("kv", lambda x: x[..., 0], r"kv: got shape \(2, 32\); expected 3 dimensions \[B, T, D"),
    ],
)
def test_bad_input(name, cut, message):
    tensors = dict(zip(NAMES, inputs(), strict=True))
    with pytest.raises(ValueError, match=message):
        dsa_attention(**tensors | {name: cut(tensors[name])}, **SETTINGS)

import math

import pytest
import torch
from hypothesis import given, settings

import dsa_definitions as definition
from base_definitions import assert_rounds_less_than
from dsa_definitions import EVERY, PACKED, TOLERANCE, assert_close, cases, leaves
from npu_dsa_kernels import causal_bounds, dense_attention
from npu_dsa_kernels.backends import blocked

SCALE = 0.4
NAMES = ("out", "lse", "dq", "dk", "dv")


def inputs(case, dtype=torch.float64):
    """q, k, v; values two columns narrower than keys."""
    H, D = case.H, case.D + 2
    return (
        case.normal(case.B, case.S, H, D, dtype=dtype),
        case.normal(case.B, case.T, H, D, dtype=dtype),
        case.normal(case.B, case.T, H, D - 2, dtype=dtype).flip(1),
    )


def run(attention, tensors, bounds, grads=None, **kwargs):
    """Results and gradients; `grads` are those of out and lse. Nothing is asked of empty rows."""
    tensors = leaves(*tensors)
    out, lse = attention(*tensors, scale=SCALE, bounds=bounds, **kwargs)
    d_out, d_lse = upstream(out, lse) if grads is None else grads
    lse_seen = lse.masked_fill(lse == -math.inf, 0.0)
    zero = sum(0 * x.sum() for x in tensors)  # where all is hidden, a definition has no gradient
    loss = zero + (out * d_out.to(out.dtype)).sum() + (lse_seen * d_lse.to(lse.dtype)).sum()
    return dict(zip(NAMES, (out, lse, *torch.autograd.grad(loss, tensors)), strict=True))


def upstream(out, lse):
    g = torch.Generator().manual_seed(5)
    draws = (torch.randn(x.shape, generator=g, dtype=torch.float64) for x in (out, lse))
    return tuple(x.mul(8).round().div(8) for x in draws)  # no dtype rounds them again


def assert_same(actual, expected, tolerance, what=""):
    for name in NAMES:
        assert_close(actual[name], expected[name], tolerance, f"{what} {name}")


@settings(max_examples=25)
@given(case=cases())
def test_values_and_gradients(case):
    tensors = inputs(case, torch.float32)
    expected = run(definition.dense_attention, [x.double() for x in tensors], case.bounds)
    for backend, dtype in EVERY:
        args = [x.to(dtype) for x in tensors]
        actual = run(dense_attention, args, case.bounds, backend=backend, validate=True)
        assert actual["out"].dtype == actual["lse"].dtype == dtype
        assert_same(actual, expected, TOLERANCE[dtype], f"{backend} {dtype}")


@pytest.mark.parametrize(("budget", "rows"), [(1, 256), (700, 256), (6000, 256), (2**23, 3)])
def test_many_blocks_of_queries_and_of_heads(monkeypatch, budget, rows):
    monkeypatch.setattr(blocked, "_CPU_BLOCK_BYTES", budget)
    monkeypatch.setattr(blocked, "_DENSE_ROWS", rows)
    expected = run(definition.dense_attention, inputs(PACKED), PACKED.bounds)
    assert_same(run(dense_attention, inputs(PACKED), PACKED.bounds), expected, 1e-10)


def test_gradcheck(backend):
    def f(q, k, v):
        out, lse = dense_attention(q, k, v, scale=SCALE, bounds=PACKED.bounds, backend=backend)
        return out, lse.masked_fill(lse.isinf(), 0.0)

    assert torch.autograd.gradcheck(f, leaves(*inputs(PACKED)), fast_mode=True)


def test_packed_documents_are_documents_of_their_own(backend):
    tensors, lengths = inputs(PACKED), (7, 9)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, 16)
    together = run(dense_attention, tensors, causal_bounds(positions), backend=backend)
    grads = upstream(together["out"], together["lse"])
    parts = [
        run(dense_attention, x, None, g, backend=backend)
        for x, g in zip(
            zip(*(x.split(lengths, 1) for x in tensors), strict=True),
            zip(*(g.split(lengths, 1) for g in grads), strict=True),
            strict=True,
        )
    ]
    for name in NAMES:
        assert_close(together[name], torch.cat([p[name] for p in parts], 1), 1e-13, name)


def test_queries_of_a_context_parallel_rank(backend):
    """S < T: ranks with some of the queries and all keys; their key gradients add up."""
    tensors = inputs(PACKED)
    positions = torch.cat([torch.arange(7), torch.arange(9)]).expand(2, 16)
    whole = run(dense_attention, tensors, causal_bounds(positions), backend=backend)
    grads = upstream(whole["out"], whole["lse"])
    ranks = torch.tensor([0, 1, 2, 3, 12, 13, 14, 15]), torch.arange(4, 12)
    shards = []
    for rows in ranks:
        bounds = causal_bounds(positions[:, rows], index=rows)
        shard = (tensors[0][:, rows], *tensors[1:])
        shards.append(
            run(dense_attention, shard, bounds, [g[:, rows] for g in grads], backend=backend)
        )
        for name in ("out", "lse", "dq"):
            assert_close(shards[-1][name], whole[name][:, rows], 1e-13, name)
    for name in ("dk", "dv"):
        assert_close(shards[0][name] + shards[1][name], whole[name], 1e-13, name)


def test_rows_without_keys(backend, dtype):
    q, k, v = leaves(*inputs(PACKED, dtype))
    bounds = PACKED.bounds.clone()
    bounds[0] = 5
    out, lse = dense_attention(q, k, v, scale=SCALE, bounds=bounds, backend=backend)
    empty = bounds[..., 0] == bounds[..., 1]
    assert empty.sum() == 19
    assert (out[empty] == 0).all()
    assert (lse[empty] == -math.inf).all()
    # 0 / 0 of a mean over no token, and what exp(-inf) brings.
    d_out, d_lse = (
        torch.where(empty.view(2, 16, *[1] * (x.dim() - 2)), math.nan, torch.ones_like(x))
        for x in (out, lse)
    )
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (d_out, d_lse))
    assert (dq[empty] == 0).all()
    assert (dk[0] == 0).all()
    assert (dv[0] == 0).all()
    assert all(x.isfinite().all() and x[1].any() for x in (dq, dk, dv))


def test_padding_changes_nothing(backend):
    tensors = inputs(PACKED)
    alone = run(dense_attention, [x[:, :12] for x in tensors], None, backend=backend)
    for x in tensors:
        x[:, 12:] = math.nan
    positions = torch.cat([torch.arange(12), torch.full((4,), -1)]).expand(2, 16)
    grads = [
        torch.nn.functional.pad(g, (0, 0) * (g.dim() - 2) + (0, 4), value=math.nan)
        for g in upstream(alone["out"], alone["lse"])
    ]
    grads[1][:, 12:] = 0  # 0 * NaN of the test's own loss
    padded = run(
        dense_attention, leaves(*tensors), causal_bounds(positions), grads, backend=backend
    )
    for name in NAMES:
        assert_close(padded[name][:, :12], alone[name], 1e-13, name)
        assert (padded[name][:, 12:] == (-math.inf if name == "lse" else 0)).all()


@pytest.mark.parametrize("change", [1e3, math.nan, math.inf])
@pytest.mark.parametrize("budget", [1, 2**23])
def test_what_a_query_does_not_see_never_reaches_it(change, budget, monkeypatch):
    """The future and other documents, and nothing they hold, in one block or in many."""
    monkeypatch.setattr(blocked, "_CPU_BLOCK_BYTES", budget)
    bounds = causal_bounds(torch.cat([torch.arange(7), torch.arange(9)]).expand(2, 16))

    def run(late, early):
        tensors = [x.clone() for x in inputs(PACKED)]
        for x in tensors:
            x[:, 12:] *= late
            x[:, :7] *= early
        tensors = leaves(*tensors)
        out, lse = dense_attention(*tensors, scale=SCALE, bounds=bounds)
        loss = out[:, 7:12].square().sum() + lse[:, 7:12].sum()
        return out[:, 7:12], lse[:, 7:12], *torch.autograd.grad(loss, tensors)

    for name, a, b in zip(NAMES, run(change, change), run(1.0, 1.0), strict=True):
        if name.startswith("d"):
            assert (b[:, :7] == 0).all()
            a, b = a[:, 7:12], b[:, 7:12]
        if name in ("dk", "dv") and not math.isfinite(change):
            continue  # late queries, whose results are not used, add 0 * NaN
        assert_close(a, b, 1e-13, name)


@pytest.mark.parametrize("place", ["q", "k", "v", "d_out", "d_lse"])
def test_nan_is_not_swallowed(place):
    tensors = dict(zip("qkv", leaves(*inputs(PACKED)), strict=True))
    if place in tensors:
        with torch.no_grad():
            tensors[place][0, 3, 0, 0] = math.nan
    out, lse = dense_attention(**tensors, scale=SCALE)
    d_out, d_lse = upstream(out, lse)
    if place.startswith("d_"):
        {"d_out": d_out, "d_lse": d_lse}[place][0, 3].view(3, -1)[0, 0] = math.nan
    dq, dk, dv = torch.autograd.grad((out, lse), tensors.values(), (d_out, d_lse))

    of_key = place in ("k", "v")
    rows, keys = torch.zeros(2, 2, 16, 3, dtype=torch.bool)
    rows[0, 3 : 16 if of_key else 4, 0] = True  # queries that see it
    keys[0, : 16 if of_key else 4, 0] = True  # keys that those see
    if not place.startswith("d_"):
        assert torch.equal(out.isnan().any(-1), rows)
        assert torch.equal(lse.isnan(), rows)
    assert torch.equal(dq.isnan().any(-1), rows)
    assert torch.equal(dk.isnan().any(-1), keys)
    assert torch.equal(dv.isnan().any(-1), keys)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_accumulates_in_fp32(backend, dtype):
    tensors = inputs(PACKED, dtype)
    actual = run(dense_attention, tensors, PACKED.bounds, backend=backend)
    expected = run(definition.dense_attention, [x.double() for x in tensors], PACKED.bounds)
    assert all(actual[n].dtype == dtype for n in ("out", "dq", "dk", "dv"))
    assert actual["lse"].dtype == torch.float32
    assert_close(actual["lse"], expected["lse"], 1e-5)
    # What is left is one rounding of each result.
    assert_same(actual, expected, torch.finfo(dtype).eps)


def test_half_precision_rounds_less_than_the_formula_in_it():
    hidden = torch.ones(16, 16, dtype=torch.bool).triu(1)[:, None]

    def eager(q, k, v):
        logits = SCALE * torch.einsum("bshd,bthd->bsht", q, k)
        logits = logits.masked_fill(hidden, -math.inf)
        return torch.einsum("bsht,bthv->bshv", logits.softmax(-1), v), logits.logsumexp(-1)

    def op(attention):
        return lambda *x, **kwargs: attention(*x, scale=SCALE, **kwargs)

    assert_rounds_less_than(
        eager, op(dense_attention), op(definition.dense_attention), inputs(PACKED)
    )


def test_large_logits(backend, dtype):
    q, k, v = inputs(PACKED, dtype)
    actual = run(dense_attention, (q * 300, k, v), PACKED.bounds, backend=backend)
    wide = q.double() * 300, k.double(), v.double()
    expected = run(definition.dense_attention, wide, PACKED.bounds)
    # The logits, near 1000, round to 1e-7 of themselves: the probabilities to 1e-4 in fp32.
    assert_same(actual, expected, {torch.float64: 1e-10, torch.float32: 1e-3}[dtype])


def test_non_contiguous_everything(backend):
    tensors = inputs(PACKED)
    grads = upstream(torch.empty(2, 16, 3, 5), torch.empty(2, 16, 3))
    expected = run(dense_attention, tensors, PACKED.bounds, grads, backend=backend)

    def strided(x):
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    inner = leaves(*tensors)
    out, lse = dense_attention(
        *map(strided, inner), scale=SCALE, bounds=strided(PACKED.bounds), backend=backend
    )
    lse_seen = lse.masked_fill(lse.isinf(), 0.0)
    d = torch.autograd.grad((out, lse_seen), inner, [strided(g) for g in grads])
    for name, x in zip(NAMES, (out, lse, *d), strict=True):
        assert_close(x, expected[name], 1e-13, name)


def test_gradient_of_one_output_alone(backend):
    tensors = leaves(*inputs(PACKED))
    out, lse = dense_attention(*tensors, scale=SCALE, backend=backend)
    of_out = torch.autograd.grad(out.sum(), tensors, retain_graph=True)
    of_lse = torch.autograd.grad(lse.sum(), tensors[:2], retain_graph=True)
    both = torch.autograd.grad(out.sum() + lse.sum(), tensors)
    for a, b, c in zip(of_out, (*of_lse, 0.0), both, strict=True):
        assert_close(a + b, c, 1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_sized_heads(dtype):
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 300, 3, d, generator=g) for d in (192, 192, 128)]
    tensors = [(192**-0.25 * x).to(dtype) for x in tensors]
    positions = torch.cat([torch.arange(270), torch.arange(30)]).expand(1, -1)
    grads = [x.to(dtype) for x in upstream(torch.empty(1, 300, 3, 128), torch.empty(1, 300, 3))]
    wide = [x.double() for x in tensors]
    settings = {"bounds": causal_bounds(positions), "grads": grads}
    actual = run(dense_attention, tensors, **settings, backend="torch")
    expected = run(dense_attention, wide, **settings, backend="reference")
    assert_same(actual, expected, 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps)


def test_same_bits_on_every_run(backend, monkeypatch):
    monkeypatch.setattr(blocked, "_CPU_BLOCK_BYTES", 3000)
    first, *others = (
        run(dense_attention, inputs(PACKED, torch.float32), PACKED.bounds, backend=backend)
        for _ in range(3)
    )
    for again in others:
        for name in NAMES:
            assert torch.equal(again[name], first[name]), name


def test_autocast_does_not_lower_the_precision(backend):
    def under_autocast(*args, **kwargs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return dense_attention(*args, **kwargs)

    tensors = inputs(PACKED, torch.float32)
    expected = run(dense_attention, tensors, PACKED.bounds, backend=backend)
    # The reference's backward is autograd's own, and belongs outside of autocast.
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=backend != "reference"):
        actual = run(under_autocast, tensors, PACKED.bounds, backend=backend)
    for name in NAMES:
        assert torch.equal(actual[name], expected[name]), name


def test_double_backward():
    for backend in ("reference", "torch"):
        tensors = leaves(*inputs(PACKED))
        out, _ = dense_attention(*tensors, scale=SCALE, backend=backend)
        (d_q,) = torch.autograd.grad(out.square().sum(), tensors[0], create_graph=True)
        if backend == "reference":
            assert torch.autograd.grad(d_q.sum(), tensors[0])[0].isfinite().all()
        else:
            with pytest.raises(RuntimeError, match="double backward is not implemented"):
                torch.autograd.grad(d_q.sum(), tensors[0])


@pytest.mark.parametrize(("B", "S", "T"), [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_empty_sizes(backend, B, S, T):
    tensors = leaves(*(torch.randn(B, n, 2, d) for n, d in ((S, 5), (T, 5), (T, 4))))
    bounds = torch.zeros(B, S, 2, dtype=torch.int32)
    out, lse = dense_attention(*tensors, scale=1.0, bounds=bounds, backend=backend)
    assert out.shape == (B, S, 2, 4)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), tensors))


def test_gradients_hold_no_more_than_themselves():
    tensors = leaves(*inputs(PACKED))
    dense_attention(*tensors, scale=SCALE)[0].sum().backward()
    for x in tensors:
        assert x.grad.untyped_storage().nbytes() == x.numel() * x.element_size()


def test_triton_has_no_kernel_for_it():
    message = r"backend: got 'triton'; it (has no kernel for dense_attention; backend=|is not)"
    with pytest.raises(ValueError, match=message):
        dense_attention(*inputs(PACKED, torch.float32), scale=1.0, backend="triton")


Q, K, V = torch.randn(2, 8, 3, 4), torch.randn(2, 8, 3, 4), torch.randn(2, 8, 3, 2)
BOUNDS = torch.zeros(2, 8, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": Q[0]}, r"q: got shape \(8, 3, 4\); expected 4 dimensions \[B, S, H, D\]"),
        ({"q": Q.long()}, r"q: got torch.int64; expected float64"),
        ({"q": Q[:, :, :0]}, r"q: got shape \(2, 8, 0, 4\); expected H"),
        ({"k": K[:, :, 0]}, r"k: got shape \(2, 8, 4\); expected 4 dimensions \[B, T, H, D\]"),
        ({"k": K[..., :3]}, r"k: got shape \(2, 8, 3, 3\); expected \[B=2, T=8, H=3, D=4\]"),
        ({"k": K[:, :, :1]}, r"k: got shape \(2, 8, 1, 4\); expected \[B=2, T=8, H=3, D=4\]"),
        ({"k": K.bfloat16()}, r"k: got torch.bfloat16; expected float32, the dtype of q"),
        ({"k": K.to("meta")}, r"k: got device meta; expected cpu, where q is"),
        ({"v": V[:, :7]}, r"v: got shape \(2, 7, 3, 2\); expected \[B=2, T=8, H=3, V=2\]"),
        ({"v": V[..., :0]}, r"v: got shape \(2, 8, 3, 0\); expected V \(dimension 3\) >= 1"),
        ({"v": V.half()}, r"v: got torch.float16; expected float32, the dtype of q"),
        ({"scale": math.nan}, r"scale: got nan; expected a finite float"),
        ({"q": Q[:, :5]}, r"bounds: got None with S=5 queries and T=8 keys; None means causal"),
        ({"bounds": BOUNDS.long()}, r"bounds: got torch.int64; expected int32"),
        ({"bounds": BOUNDS[:1]}, r"bounds: got shape \(1, 8, 2\); expected \[B=2, S=8, 2=2\]"),
        ({"bounds": BOUNDS + 9, "validate": True}, r"bounds: got values in \[9, 9\]; expected 0"),
        ({"backend": "cuda"}, r"backend: got 'cuda'; expected one of reference, torch, triton"),
    ],
)
def test_bad_input(change, message):
    arguments = {"q": Q, "k": K, "v": V, "scale": 1.0}
    with pytest.raises(ValueError, match=message):
        dense_attention(**arguments | change)

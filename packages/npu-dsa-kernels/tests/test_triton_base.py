"""The Triton kernels of the base operators: in Triton's interpreter on CPU, compiled on CUDA."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import base_definitions as definition
from base_definitions import values_and_gradients
from dsa_definitions import assert_close, leaves
from npu_dsa_kernels import backends, moe_permute, moe_unpermute, rms_norm, rotary_mul

STATUS = backends()["triton"]
pytestmark = pytest.mark.skipif(STATUS != "available", reason=f"backend 'triton' is {STATUS}")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
few = settings(max_examples=12)
on_cuda = pytest.mark.skipif(DEVICE != "cuda", reason="half precision is wrong in the interpreter")


def run(op, *args, **kwargs):
    """`op` of backend "triton", on the device of its kernels; results on CPU."""
    args = [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in args]
    kwargs = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in kwargs.items()}
    out = op(*args, **kwargs, backend="triton")
    if isinstance(out, torch.Tensor):
        return out.cpu()
    return type(out)(*(None if x is None else x.cpu() for x in out))


def assert_follows(op, defined, inputs, tolerance=1e-5, floor=1e-3):
    """Values and gradients of `op` are those of `defined` in fp64, and the same on every run."""
    expected = values_and_gradients(defined, [x.double() for x in inputs])
    actual, again = values_and_gradients(op, inputs), values_and_gradients(op, inputs)
    for i, (a, b, e) in enumerate(zip(actual, again, expected, strict=True)):
        assert_close(a, e, tolerance, f"number {i}", floor)
        assert torch.equal(a, b), f"number {i} differs between two runs"


def tensors(seed, *shapes):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g) for shape in shapes]


# --- RMSNorm -------------------------------------------------------------------------------------


@few
@given(
    lead=st.lists(st.integers(1, 4), max_size=2),
    D=st.integers(3, 9),  # with one or two features the gradient is what a cancellation leaves
    eps=st.sampled_from([1e-6, 1e-3, 1.0]),
    weighted=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_rms_norm(lead, D, eps, weighted, seed):
    x, w = tensors(seed, (*lead, D), (D,))
    assert_follows(
        lambda x, w=None: run(rms_norm, x, w, eps=eps),
        lambda x, w=None: definition.rms_norm(x, w, eps),
        [x, w] if weighted else [x],
    )


@pytest.mark.parametrize("D", [1, 2, 128, 1500, 7168])
def test_rms_norm_widths(D):
    assert_follows(
        lambda x, w: run(rms_norm, x, w),
        lambda x, w: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w,
        tensors(0, (7, D), (D,)),
        floor=1.0,
    )


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4)])
@pytest.mark.parametrize("weighted", [False, True])
def test_rms_norm_of_nothing(shape, weighted):
    x, w = leaves(torch.zeros(shape), torch.ones(4))
    y = run(rms_norm, x, w if weighted else None)
    assert y.shape == shape
    d_x, d_w = torch.autograd.grad(y.sum(), (x, w), materialize_grads=True, allow_unused=True)
    assert d_x.shape == shape
    assert (d_w == 0).all()


def test_rms_norm_rows_of_zeros():
    x, w = torch.zeros(3, 4, requires_grad=True), torch.ones(4, requires_grad=True)
    y = run(rms_norm, x, w)
    assert (y == 0).all()
    d_x, d_w = torch.autograd.grad(y.sum(), (x, w))
    assert_close(d_x, torch.full((3, 4), 1000.0), 1e-6)  # eps ** -0.5
    assert (d_w == 0).all()


def test_rms_norm_refuses_rows_that_do_not_fit():
    with pytest.raises(ValueError, match=r"x: got a last dimension of 8193; .* at most 8192 fea"):
        run(rms_norm, torch.zeros(1, 8193), None)


# --- RoPE ----------------------------------------------------------------------------------------


def angles_of(seed, *shape):
    return 6 * torch.rand(shape, generator=torch.Generator().manual_seed(seed)).double()


def tables(angles, interleaved):
    twice = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    return twice.cos(), twice.sin()


@few
@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 5), st.integers(1, 5), st.integers(1, 3)),
    per_row=st.booleans(),
    interleaved=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_rotary_mul(sizes, per_row, interleaved, seed):
    B, S, H, half = sizes
    (x,) = tensors(seed, (B, S, H, 2 * half))
    angles = angles_of(seed, B if per_row else 1, S, half).expand(B, S, half)
    cos, sin = tables(angles if per_row else angles[0], interleaved)
    assert_follows(
        lambda x: run(rotary_mul, x, cos, sin, interleaved=interleaved),
        lambda x: definition.rotary_mul(x, angles, interleaved),
        [x],
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("H", [1, 128])
def test_rotary_mul_of_the_model(interleaved, H):
    (x,) = tensors(0, (1, 3, H, 64))
    cos, sin = tables(angles_of(0, 3, 32), interleaved)

    def formula(x):
        pairs = x.unflatten(-1, (32, 2) if interleaved else (2, 32))
        a, b = pairs.unbind(-1 if interleaved else -2)
        rotated = torch.stack([-b, a], -1 if interleaved else -2).flatten(-2)
        return x * cos[:, None] + rotated * sin[:, None]

    assert_follows(lambda x: run(rotary_mul, x, cos, sin, interleaved=interleaved), formula, [x])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_tables_of_any_dtype_and_shape_that_are_no_pairs(interleaved):
    # Not a rotation then, but the formula all the same, and its transpose in the backward.
    (x,) = tensors(0, (2, 5, 3, 8))
    cos, sin = torch.randn(5, 8).half(), torch.randn(2, 5, 8).double()
    partner = torch.arange(8).view(-1, 2).flip(1).flatten()
    sign = torch.tensor([-1.0, 1.0]).repeat(4)
    if not interleaved:
        partner, sign = torch.arange(8).roll(4), sign.view(4, 2).T.flatten()
    assert_follows(
        lambda x: run(rotary_mul, x, cos, sin, interleaved=interleaved),
        lambda x: x * cos[None, :, None] + x[..., partner] * sign * sin[:, :, None],
        [x],
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_second_derivative(interleaved):
    (x,) = leaves(*tensors(0, (2, 3, 2, 6)))
    cos, sin = tables(angles_of(0, 3, 3), interleaved)
    upstream = torch.ones(x.shape, requires_grad=True)
    y = run(rotary_mul, x, cos, sin, interleaved=interleaved)
    (d_x,) = torch.autograd.grad(y, x, upstream, create_graph=True)
    (dd_y,) = torch.autograd.grad(d_x, upstream, x.detach())
    assert torch.equal(dd_y, y)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(0, 4, 2, 6), (2, 0, 2, 6), (2, 4, 0, 6), (2, 4, 2, 0)])
def test_rotary_mul_of_nothing(interleaved, shape):
    x, angle = torch.zeros(shape, requires_grad=True), torch.zeros(shape[1], shape[3])
    y = run(rotary_mul, x, angle, angle, interleaved=interleaved)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape


# --- MoE permute and unpermute -------------------------------------------------------------------


@st.composite
def routings(draw):
    """Experts [N, k], their number, M, a seed: ragged, repeated, with ids of other ranks."""
    N, k, num_experts = draw(st.integers(1, 9)), draw(st.integers(1, 3)), draw(st.integers(1, 7))
    ids = st.integers(-1, num_experts - 1 + draw(st.integers(0, 2)))
    rows = st.lists(st.lists(ids, min_size=k, max_size=k), min_size=N, max_size=N)
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    M = draw(st.one_of(st.none(), st.integers(1, N * k + 3)))
    return torch.tensor(draw(rows), dtype=dtype), num_experts, M, draw(st.integers(0, 2**20))


@few
@given(routing=routings(), D=st.integers(1, 6))
def test_moe_permute(routing, D):
    experts, num_experts, M, seed = routing
    (N, k), given = experts.shape, {"num_experts": num_experts, "num_out_tokens": M}
    tokens, probs = tensors(seed, (N, D), (N, k))
    assert_follows(
        lambda t, p: run(moe_permute, t, experts, probs=p, **given),
        lambda t, p: definition.moe_permute(t, p, experts, num_experts, M),
        [tokens, probs],
    )
    slots = definition.permuted_slots(experts, num_experts, M)
    row = {slot: i for i, slot in enumerate(slots)}
    here = [int(experts[slot]) for slot in slots]
    out = run(moe_permute, tokens, experts, **given)
    assert out.probs is None
    assert (out.rows.dtype, out.counts.dtype) == (torch.int32, torch.int64)
    assert out.rows.tolist() == [[row.get((n, j), -1) for j in range(k)] for n in range(N)]
    assert out.counts.tolist() == [here.count(e) for e in range(num_experts)]


@few
@given(
    M=st.integers(1, 8),
    N=st.integers(1, 5),
    k=st.integers(1, 9),
    D=st.integers(1, 6),
    weighted=st.booleans(),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**20),
)
def test_moe_unpermute(M, N, k, D, weighted, dtype, seed):
    # Any one-to-one map, of rows that exist, do not, or are named by no slot.
    g = torch.Generator().manual_seed(seed)
    rows = torch.randperm(M + N * k, generator=g)[: N * k].view(N, k).to(dtype) - N * k // 2
    x, probs = tensors(seed, (M, D), (N, k))
    assert_follows(
        lambda x, probs=None: run(moe_unpermute, x, rows, probs=probs),
        lambda x, probs=None: definition.moe_unpermute(x, rows, probs),
        [x, probs] if weighted else [x],
    )


def test_slots_of_many_blocks_and_experts_keep_their_order():
    g = torch.Generator().manual_seed(0)
    experts = torch.randint(-5, 40, (50, 4), generator=g)
    experts[25:] = 7  # one expert with slots of many blocks
    tokens = torch.arange(50.0)[:, None]
    out = run(moe_permute, tokens, experts, num_experts=30)
    key = experts.flatten().where((experts.flatten() >= 0) & (experts.flatten() < 30), 30)
    order = key.argsort(stable=True)[: int((key < 30).sum())]
    assert torch.equal(out.tokens[: len(order), 0], (order // 4).float())
    assert (out.tokens[len(order) :] == 0).all()
    assert torch.equal(out.rows.flatten()[order], torch.arange(len(order), dtype=torch.int32))
    assert torch.equal(out.counts, torch.bincount(key, minlength=31)[:30])


EXPERTS = torch.tensor([[0, 2], [2, -1], [1, 2], [0, 1], [-1, -1], [2, 0]])
"""Of six tokens; expert 3 gets none, and four slots belong to other ranks."""


def routed():
    tokens, probs = tensors(0, (6, 3), (6, 2))
    return tokens, probs, run(moe_permute, tokens, EXPERTS, num_experts=4, probs=probs)


def test_dropped_slots_read_nothing():
    tokens, probs, expected = routed()
    assert expected.counts.tolist() == [3, 2, 4, 0]
    tokens[4], probs[EXPERTS < 0] = math.nan, math.nan
    wild = EXPERTS.masked_fill(EXPERTS < 0, 2**62)
    tokens, probs = leaves(tokens, probs)
    out = run(moe_permute, tokens, wild, num_experts=4, probs=probs)
    for a, b in zip(out, expected, strict=True):
        assert torch.equal(a, b)
    upstream = torch.ones(12, 3)
    upstream[9:] = math.nan
    d_tokens, d_probs = torch.autograd.grad(
        (out.tokens, out.probs), (tokens, probs), (upstream, upstream[:, 0])
    )
    assert d_tokens[:, 0].tolist() == [2, 1, 2, 2, 0, 2]
    assert torch.equal(d_probs, (EXPERTS >= 0).float())


@pytest.mark.parametrize("wild", [-1, -7, 12, -(2**31), 2**31 - 1])
def test_rows_out_of_range_read_nothing(wild):
    _, probs, out = routed()
    (x,) = tensors(1, (12, 3))
    expected = run(moe_unpermute, x, out.rows, probs=probs)
    # Row 0 is what kernels read in their place.
    x[9:], probs[out.rows < 0] = math.nan, math.nan
    x, probs = leaves(x, probs)
    rows = out.rows.masked_fill(out.rows < 0, wild)
    y = run(moe_unpermute, x, rows, probs=probs)
    assert torch.equal(y, expected)
    upstream = torch.ones(6, 3)
    upstream[4] = math.nan  # of a token without slots
    d_x, d_probs = torch.autograd.grad(y, (x, probs), upstream)
    assert (d_x[9:] == 0).all()
    assert (d_probs[out.rows < 0] == 0).all()
    assert d_x.isfinite().all()
    assert d_probs.isfinite().all()


def test_what_is_read_in_the_place_of_nothing_may_be_anything():
    x, probs = torch.full((3, 4), math.inf), torch.ones(2, 2)
    x[1:] = 1.0
    rows = torch.tensor([[1, -1], [-1, 2]], dtype=torch.int32)
    x, probs = leaves(x, probs)
    y = run(moe_unpermute, x, rows, probs=probs)
    assert (y == 1).all()
    d_x, d_probs = torch.autograd.grad(y.sum(), (x, probs))
    assert d_x[:, 0].tolist() == [0, 1, 1]
    assert d_probs.tolist() == [[4, 0], [0, 4]]
    upstream = torch.tensor([[math.inf], [1.0]]).expand(2, 4)
    (d_x,) = torch.autograd.grad(run(moe_unpermute, x, rows), x, upstream)
    assert d_x[:, 0].tolist() == [0, math.inf, 1]
    tokens = torch.tensor([[math.inf], [2.0]])
    out = run(moe_permute, tokens, torch.tensor([[-1], [0]]), num_experts=1)
    assert out.tokens.tolist() == [[2], [0]]


@pytest.mark.parametrize(("N", "D", "M"), [(0, 3, None), (0, 3, 2), (4, 0, None), (4, 3, 0)])
def test_permute_of_nothing(N, D, M):
    tokens, probs = leaves(torch.randn(N, D), torch.rand(N, 2))
    experts = torch.zeros(N, 2, dtype=torch.int32)
    out = run(moe_permute, tokens, experts, num_experts=2, probs=probs, num_out_tokens=M)
    assert out.tokens.shape == (2 * N if M is None else M, D)
    assert out.counts.tolist() == [2 * N if M is None else 0, 0]
    back = run(moe_unpermute, out.tokens, out.rows, probs=probs)
    assert back.shape == (N, D)
    d_tokens, d_probs = torch.autograd.grad(back.sum() + out.probs.sum(), (tokens, probs))
    assert d_tokens.shape == (N, D)
    assert d_probs.shape == (N, 2)


# --- all of them ---------------------------------------------------------------------------------


def test_non_contiguous():
    def strided(x):
        return x.mT.contiguous().mT

    x, w, tokens, probs = tensors(0, (4, 3, 2, 6), (6,), (6, 3), (6, 2))
    cos, sin = tables(angles_of(0, 3, 3), True)
    out = moe_permute(tokens, EXPERTS, num_experts=4, probs=probs, backend="torch")
    for op, args, kwargs in (
        (rms_norm, [x, w], {}),
        (rotary_mul, [x, cos, sin], {"interleaved": True}),
        (rotary_mul, [x, cos, sin], {"interleaved": False}),
        (moe_permute, [tokens, EXPERTS], {"num_experts": 4, "probs": probs}),
        (moe_unpermute, [out.tokens, out.rows], {"probs": probs}),
    ):
        plain = leaves(*(a for a in args[:1]))[0]
        (other,) = leaves(*args[:1])
        args_s = [strided(a) if a.dim() > 1 else torch.stack([a, a], 1)[:, 0] for a in args[1:]]
        kwargs_s = {n: strided(a) if n == "probs" else a for n, a in kwargs.items()}
        y, y_s = run(op, plain, *args[1:], **kwargs), run(op, strided(other), *args_s, **kwargs_s)
        y, y_s = (a if isinstance(a, torch.Tensor) else a.tokens for a in (y, y_s))
        assert torch.equal(y, y_s), op.__name__
        # Of a sum: an upstream gradient of stride 0.
        (d_s,) = torch.autograd.grad(y_s.sum(), other)
        (d,) = torch.autograd.grad(y, plain, torch.ones_like(y))
        assert torch.equal(d, d_s), op.__name__


def test_float64_is_refused():
    x = torch.zeros(2, 3, 4, 6).double()
    for op, args, kwargs in (
        (rms_norm, (x, None), {}),
        (rotary_mul, (x, x[0, :, 0], x[0, :, 0]), {}),
        (moe_unpermute, (x[0, 0], torch.zeros(2, 2, dtype=torch.int32)), {}),
        (moe_permute, (x[0, 0], torch.zeros(4, 2, dtype=torch.int32)), {"num_experts": 1}),
    ):
        with pytest.raises(ValueError, match=r"(x|tokens): got torch.float64; backend 'triton' ta"):
            run(op, *args, **kwargs)


@on_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True])
def test_half_precision(dtype, wide):
    """Rounded once: the error is that of the last rounding, with weights in either precision."""
    other = torch.float32 if wide else dtype
    x, w, tokens, probs = tensors(0, (4, 3, 2, 64), (64,), (6, 48), (6, 2))
    cos, sin = tables(angles_of(0, 3, 32), True)
    out = moe_permute(tokens, EXPERTS, num_experts=4, backend="torch")
    cases = (
        (lambda x, w: run(rms_norm, x, w), definition.rms_norm, [x, w]),
        (
            lambda x: run(rotary_mul, x, cos, sin, interleaved=True),
            lambda x: definition.rotary_mul(x, angles_of(0, 1, 3, 32).expand(4, 3, 32), True),
            [x],
        ),
        (
            lambda t, p: run(moe_permute, t, EXPERTS, num_experts=4, probs=p),
            lambda t, p: definition.moe_permute(t, p, EXPERTS, 4),
            [tokens, probs],
        ),
        (
            lambda x, p: run(moe_unpermute, x, out.rows, probs=p),
            lambda x, p: definition.moe_unpermute(x, out.rows, p),
            [out.tokens, probs],
        ),
    )
    for op, defined, (first, *rest) in cases:
        inputs = [first.to(dtype), *(a.to(other) for a in rest)]
        expected = values_and_gradients(defined, [a.double() for a in inputs])
        for a, e in zip(values_and_gradients(op, inputs), expected, strict=True):
            assert_close(a, e, torch.finfo(a.dtype).eps if a.dtype == dtype else 1e-5)

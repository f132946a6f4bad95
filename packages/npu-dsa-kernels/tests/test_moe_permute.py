"""moe_permute and moe_unpermute, which is its way back."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import base_definitions as definition
from base_definitions import assert_follows, assert_rounds_less_than, values_and_gradients
from dsa_definitions import EVERY, assert_close, leaves
from npu_dsa_kernels import grouped_matmul, moe_permute, moe_unpermute
from npu_dsa_kernels.backends import base

E = 4
EXPERTS = torch.tensor([[0, 2], [2, -1], [1, 2], [0, 1], [-1, -1], [2, 0]])
"""Of six tokens; expert 3 gets none, and four slots belong to other ranks."""


def sample(N=6, k=2, D=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(N, D, generator=g), torch.rand(N, k, generator=g)]


@st.composite
def routings(draw):
    """Experts [N, k], their number, M, a seed: ragged, repeated, with ids of other ranks."""
    N, k, num_experts = draw(st.integers(1, 7)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    ids = st.integers(-1, num_experts - 1 + draw(st.integers(0, 2)))
    rows = st.lists(st.lists(ids, min_size=k, max_size=k), min_size=N, max_size=N)
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    M = draw(st.one_of(st.none(), st.integers(1, N * k + 3)))
    return torch.tensor(draw(rows), dtype=dtype), num_experts, M, draw(st.integers(0, 2**20))


@given(routing=routings())
def test_permute(routing):
    experts, num_experts, M, seed = routing
    tokens, probs = sample(*experts.shape, seed=seed)

    def permute(tokens, probs, backend):
        return moe_permute(
            tokens,
            experts,
            num_experts=num_experts,
            probs=probs,
            num_out_tokens=M,
            backend=backend,
        )

    assert_follows(
        permute,
        lambda *x: definition.moe_permute(*x, experts, num_experts, M),
        [tokens, probs],
    )
    slots = definition.permuted_slots(experts, num_experts, M)
    row = {slot: i for i, slot in enumerate(slots)}
    N, k = experts.shape
    for backend, dtype in EVERY:
        out = permute(tokens.to(dtype), probs.to(dtype), backend)
        assert out.rows.dtype == torch.int32
        assert out.counts.dtype == torch.int64
        assert out.rows.tolist() == [[row.get((n, j), -1) for j in range(k)] for n in range(N)]
        here = [int(experts[slot]) for slot in slots]
        assert out.counts.tolist() == [here.count(e) for e in range(num_experts)]
        assert moe_permute(
            tokens, experts, num_experts=num_experts, num_out_tokens=M, backend=backend
        ).tokens.equal(out.tokens.float())


@given(
    M=st.integers(1, 8),
    N=st.integers(1, 5),
    k=st.integers(1, 3),
    weighted=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_unpermute(M, N, k, weighted, seed):
    # Any one-to-one map, of rows that exist, do not, or are named by no slot.
    g = torch.Generator().manual_seed(seed)
    rows = torch.randperm(M + N * k, generator=g)[: N * k].view(N, k).int() - N * k // 2
    x, probs = torch.randn(M, 3, generator=g), torch.rand(N, k, generator=g)
    assert_follows(
        lambda x, probs=None, *, backend: moe_unpermute(x, rows, probs=probs, backend=backend),
        lambda x, probs=None: definition.moe_unpermute(x, rows, probs),
        [x, probs] if weighted else [x],
    )


def test_many_blocks(monkeypatch):
    monkeypatch.setattr(base, "_CPU_BLOCK_BYTES", 50)
    tokens, probs = sample(D=7)
    assert_follows(
        lambda t, p, backend: moe_permute(t, EXPERTS, num_experts=E, probs=p, backend=backend),
        lambda t, p: definition.moe_permute(t, p, EXPERTS, E),
        [tokens, probs],
    )
    rows = moe_permute(tokens, EXPERTS, num_experts=E).rows
    assert_follows(
        lambda x, p, backend: moe_unpermute(x, rows, probs=p, backend=backend),
        lambda x, p: definition.moe_unpermute(x, rows, p),
        [torch.randn(12, 7), probs],
    )


def test_there_and_back(backend):
    tokens, probs = sample()
    out = moe_permute(tokens, EXPERTS, num_experts=E, probs=probs, backend=backend)
    assert out.counts.tolist() == [3, 2, 4, 0]
    assert (out.tokens[9:] == 0).all()
    assert (out.probs[9:] == 0).all()
    back = moe_unpermute(out.tokens, out.rows, probs=probs, backend=backend)
    kept = (probs * (EXPERTS >= 0)).sum(-1, keepdim=True)
    assert_close(back, tokens * kept, 1e-6)
    # Weights before or after are the same thing.
    other = moe_unpermute(out.tokens * out.probs[:, None], out.rows, backend=backend)
    assert_close(other, back, 1e-6)


def test_experts_of_two_ranks_add_up(backend):
    # Local maps: each rank names its own experts from 0 and the other's -1.
    tokens, probs = sample()
    weight = torch.randn(E, 3, 3)

    def layer(experts, weight):
        out = moe_permute(tokens, experts, num_experts=len(weight), backend=backend)
        y = grouped_matmul(out.tokens, weight, counts=out.counts, backend=backend)
        return moe_unpermute(y, out.rows, probs=probs, backend=backend)

    whole = layer(EXPERTS, weight)
    low = layer(EXPERTS.where(EXPERTS < 2, -1), weight[:2])
    high = layer((EXPERTS - 2).where(EXPERTS >= 2, -1), weight[2:])
    assert low.any()
    assert high.any()
    assert_close(low + high, whole, 1e-6)


def test_dropped_slots_and_rows_read_nothing(backend):
    tokens, probs = sample()
    expected = moe_permute(tokens, EXPERTS, num_experts=E, probs=probs, backend=backend)
    tokens[4], probs[EXPERTS < 0] = math.nan, math.nan
    wild = EXPERTS.masked_fill(EXPERTS < 0, 2**62)
    tokens, probs = leaves(tokens, probs)
    out = moe_permute(tokens, wild, num_experts=E, probs=probs, backend=backend)
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
def test_rows_out_of_range_read_nothing(backend, wild):
    x, probs = torch.randn(12, 3), sample()[1]
    rows = moe_permute(sample()[0], EXPERTS, num_experts=E).rows
    expected = moe_unpermute(x, rows, probs=probs, backend=backend)
    x[9:], probs[rows < 0] = math.nan, math.nan
    x, probs = leaves(x, probs)
    y = moe_unpermute(x, rows.masked_fill(rows < 0, wild), probs=probs, backend=backend)
    assert torch.equal(y, expected)
    upstream = torch.ones(6, 3)
    upstream[4] = math.nan  # of a token without slots
    d_x, d_probs = torch.autograd.grad(y, (x, probs), upstream)
    assert (d_x[9:] == 0).all()
    assert (d_probs[rows < 0] == 0).all()
    assert d_x.isfinite().all()
    assert d_probs.isfinite().all()


def test_without_probs_the_rows_are_not_kept():
    x = torch.randn(12, 3, requires_grad=True)
    rows = moe_permute(sample()[0], EXPERTS, num_experts=E).rows
    kept = []
    for probs in (None, sample()[1]):
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, shapes=shapes: shapes.append(t.shape) or t, lambda t: t
        ):
            moe_unpermute(x, rows, probs=probs, backend="torch")
        kept.append(x.shape in shapes)
    assert kept == [False, True]


def test_half_precision():
    rows = torch.stack([torch.randperm(64)[:48].view(16, 3)]).squeeze(0).int()
    x, probs = torch.randn(64, 32), torch.rand(16, 3)

    def eager(x, probs):
        total = torch.zeros(16, 32, dtype=x.dtype)
        for j in range(3):
            total = total + x[rows[:, j].long()] * probs[:, j, None]
        return total

    assert_rounds_less_than(
        eager,
        lambda x, p, backend: moe_unpermute(x, rows, probs=p, backend=backend),
        lambda x, p: definition.moe_unpermute(x, rows, p),
        [x, probs],
    )

    def eager_permute(tokens, probs):
        order = experts.flatten().argsort(stable=True)
        return tokens[order // 3], probs.flatten()[order]

    experts = torch.randint(0, E, (16, 3), generator=torch.Generator().manual_seed(0))
    assert_rounds_less_than(
        eager_permute,
        lambda t, p, backend: moe_permute(t, experts, num_experts=E, probs=p, backend=backend),
        lambda t, p: definition.moe_permute(t, p, experts, E),
        [x[:16], probs],
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_with_fp32_probs(backend, dtype):
    tokens, probs = sample()
    out = moe_permute(tokens.to(dtype), EXPERTS, num_experts=E, probs=probs, backend=backend)
    assert (out.tokens.dtype, out.probs.dtype) == (dtype, torch.float32)
    actual = values_and_gradients(
        lambda x, p: moe_unpermute(x, out.rows, probs=p, backend=backend), (out.tokens, probs)
    )
    expected = values_and_gradients(
        lambda x, p: definition.moe_unpermute(x, out.rows, p),
        (out.tokens.double(), probs.double()),
    )
    assert [a.dtype for a in actual] == [dtype, dtype, torch.float32]
    for a, e, eps in zip(actual, expected, (*[torch.finfo(dtype).eps] * 2, 1e-6), strict=True):
        assert_close(a, e, eps)


def test_many_tied_slots_keep_their_order_on_every_run(backend):
    tokens = torch.arange(600.0).view(300, 2)
    experts = torch.arange(600).view(300, 2) // 7 % 3
    runs = [moe_permute(tokens, experts, num_experts=3, backend=backend) for _ in range(5)]
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run[2:], runs[0][2:], strict=True))
    slot = torch.empty(600, dtype=torch.int64)
    slot[runs[0].rows.flatten().long()] = torch.arange(600)
    for part in slot.split(runs[0].counts.tolist()):
        assert (part.diff() > 0).all()


def test_deterministic_algorithms_are_honoured(backend):
    tokens, probs = sample()
    torch.use_deterministic_algorithms(True)
    try:
        first = values_and_gradients(layer_of(backend), [tokens, probs])
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(first, values_and_gradients(layer_of(backend), [tokens, probs]), strict=True):
        assert torch.equal(a, b)


def layer_of(backend):
    def layer(tokens, probs):
        out = moe_permute(tokens, EXPERTS, num_experts=E, probs=probs, backend=backend)
        return moe_unpermute(out.tokens * out.probs[:, None], out.rows, probs=probs)

    return layer


def test_gradcheck(backend):
    inputs = leaves(*sample(), dtype=torch.float64)
    rows = moe_permute(*sample()[:1], EXPERTS, num_experts=E).rows

    def permute(tokens, probs):
        return moe_permute(tokens, EXPERTS, num_experts=E, probs=probs, backend=backend)[:2]

    assert torch.autograd.gradcheck(permute, inputs)
    x = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, p: moe_unpermute(x, rows, probs=p, backend=backend), (x, inputs[1])
    )


def test_gradient_of_one_output_alone(backend):
    tokens, probs = leaves(*sample())
    out = moe_permute(tokens, EXPERTS, num_experts=E, probs=probs, backend=backend)
    d_tokens, d_probs = torch.autograd.grad(
        out.tokens.sum(), (tokens, probs), retain_graph=True, materialize_grads=True
    )
    assert d_tokens.any()
    assert not d_probs.any()
    d_tokens, d_probs = torch.autograd.grad(
        out.probs.sum(), (tokens, probs), materialize_grads=True
    )
    assert not d_tokens.any()
    assert d_probs.any()


def test_non_contiguous(backend):
    tokens, probs = sample()
    expected = moe_permute(tokens, EXPERTS, num_experts=E, probs=probs, backend=backend)
    strided = [t.T.contiguous().T for t in (tokens, EXPERTS, probs)]
    out = moe_permute(strided[0], strided[1], num_experts=E, probs=strided[2], backend=backend)
    for a, b in zip(out, expected, strict=True):
        assert torch.equal(a, b)
    back = moe_unpermute(
        out.tokens.T.contiguous().T, out.rows.T.contiguous().T, probs=strided[2], backend=backend
    )
    assert torch.equal(back, moe_unpermute(out.tokens, out.rows, probs=probs, backend=backend))


@pytest.mark.parametrize(("N", "D", "M"), [(0, 3, None), (0, 3, 2), (4, 0, None), (4, 3, 0)])
def test_empty(backend, N, D, M):
    tokens, probs = leaves(torch.randn(N, D), torch.rand(N, 2))
    experts = torch.zeros(N, 2, dtype=torch.int32)
    out = moe_permute(
        tokens, experts, num_experts=2, probs=probs, num_out_tokens=M, backend=backend
    )
    assert out.tokens.shape == (2 * N if M is None else M, D)
    assert int(out.counts.sum()) == (2 * N if M is None else 0)
    back = moe_unpermute(out.tokens, out.rows, probs=probs, backend=backend)
    assert back.shape == (N, D)
    d_tokens, d_probs = torch.autograd.grad(back.sum() + out.probs.sum(), (tokens, probs))
    assert d_tokens.shape == (N, D)
    assert d_probs.shape == (N, 2)


def test_double_backward_is_refused():
    tokens, probs = leaves(*sample())
    out = moe_permute(tokens, EXPERTS, num_experts=E, probs=probs, backend="torch")
    (d_tokens,) = torch.autograd.grad(out.tokens.square().sum(), tokens, create_graph=True)
    with pytest.raises(RuntimeError, match="moe_permute: double backward is not implemented"):
        d_tokens.sum().backward()
    x = out.tokens.detach().requires_grad_()
    y = moe_unpermute(x, out.rows, probs=probs, backend="torch")
    (d_x,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="moe_unpermute: double backward is not implemented"):
        d_x.sum().backward()


TOKENS, PROBS = sample()
ROWS = torch.arange(12).view(6, 2).int()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": TOKENS[0]}, r"tokens: got shape \(3,\); expected 2 dimensions \[N, D\]"),
        ({"tokens": TOKENS.int()}, r"tokens: got torch.int32; expected float64"),
        ({"experts": EXPERTS[:, 0]}, r"experts: got shape \(6,\); expected 2 dimensions \[N, k"),
        ({"experts": EXPERTS[:4]}, r"experts: got shape \(4, 2\); expected \[N=6, k=2\]"),
        ({"experts": EXPERTS[:, :0]}, r"experts: got shape \(6, 0\); expected k"),
        ({"experts": EXPERTS.short()}, r"experts: got torch.int16; expected int32 or int64"),
        ({"experts": EXPERTS.to("meta")}, r"experts: got device meta; expected cpu"),
        ({"experts": EXPERTS + 2, "validate": True}, r"experts: got values in \[1, 4\]; expected"),
        ({"experts": EXPERTS - 1, "validate": True}, r"experts: got values in \[-2, 1\]; expec"),
        ({"num_experts": 0}, r"num_experts: got 0; expected an int in \[1, 2147483647\]"),
        ({"num_experts": 2.0}, r"num_experts: got 2.0; expected an int"),
        ({"probs": PROBS[:, :1]}, r"probs: got shape \(6, 1\); expected \[N=6, k=2\]"),
        ({"probs": PROBS.int()}, r"probs: got torch.int32; expected float64"),
        ({"probs": PROBS.to("meta")}, r"probs: got device meta; expected cpu"),
        ({"num_out_tokens": -1}, r"num_out_tokens: got -1; expected an int in \[0"),
        ({"num_out_tokens": True}, r"num_out_tokens: got True; expected an int in \[0"),
        ({"num_out_tokens": 2**31}, r"num_out_tokens: got 2147483648; expected an int in \[0"),
        ({"backend": "fast"}, r"backend: got 'fast'; expected one of reference"),
    ],
)
def test_permute_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        moe_permute(**{"tokens": TOKENS, "experts": EXPERTS, "num_experts": E} | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": TOKENS[0]}, r"x: got shape \(3,\); expected 2 dimensions \[M, D\]"),
        ({"x": TOKENS.int()}, r"x: got torch.int32; expected float64"),
        ({"rows": ROWS[0]}, r"rows: got shape \(2,\); expected 2 dimensions \[N, k\]"),
        ({"rows": ROWS.float()}, r"rows: got torch.float32; expected int32 or int64"),
        ({"rows": ROWS.to("meta")}, r"rows: got device meta; expected cpu"),
        ({"rows": ROWS + 1, "validate": True}, r"rows: got values in \[1, 12\]; expected -1"),
        ({"rows": ROWS // 2, "validate": True}, r"rows: got row 0 more than once"),
        ({"probs": PROBS[:3]}, r"probs: got shape \(3, 2\); expected \[N=6, k=2\]"),
        ({"probs": PROBS.half()}, r"probs: got torch.float16; expected float32, to go with x"),
        ({"probs": PROBS.to("meta")}, r"probs: got device meta; expected cpu"),
        ({"backend": "fast"}, r"backend: got 'fast'; expected one of reference"),
    ],
)
def test_unpermute_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        moe_unpermute(**{"x": torch.randn(12, 3), "rows": ROWS} | change)


def test_more_slots_than_int32_counts():
    tokens = torch.empty(2**29, 1, device="meta")
    experts = torch.empty(2**29, 4, device="meta", dtype=torch.int32)
    with pytest.raises(ValueError, match=r"experts: got shape .*; expected at most 2147483647 sl"):
        moe_permute(tokens, experts, num_experts=2)
    with pytest.raises(ValueError, match=r"rows: got shape .*; expected at most 2147483647 sl"):
        moe_unpermute(tokens, experts)


def test_validate_accepts_what_permute_returns(backend):
    out = moe_permute(TOKENS, EXPERTS, num_experts=E, validate=True, backend=backend)
    moe_unpermute(out.tokens, out.rows, validate=True, backend=backend)
    grouped_matmul(out.tokens, torch.randn(E, 3, 2), counts=out.counts, validate=True)

"""Base operators of backend "npu" against the reference, on an emulation of the operators."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsa_definitions import assert_close, leaves
from npu_dsa_kernels import (
    grouped_matmul,
    hadamard,
    moe_permute,
    moe_unpermute,
    rms_norm,
    rotary_mul,
    swiglu,
)
from npu_dsa_kernels.backends.npu import limits
from npu_emulation import emulated

OPS = torch.ops.npu_dsa


@pytest.fixture
def calls():
    with emulated() as names:
        yield names


def normal(*shape, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)


def both(fn, *tensors, tolerance=1e-5):
    """Outputs and gradients of `fn(*tensors, backend=...)` on "npu" must be the reference's."""
    results = []
    for name in ("npu", "reference"):
        mine = leaves(*tensors)
        out = fn(*mine, backend=name)
        out = out if isinstance(out, tuple) else (out,)
        grads = [normal(*x.shape, seed=7).to(x.dtype) for x in out]
        results.append((*out, *torch.autograd.grad(out, mine, grads)))
    for i, (actual, expected) in enumerate(zip(*results, strict=True)):
        assert actual.dtype == expected.dtype
        assert_close(actual, expected, tolerance, f"result {i}")
    return results[0]


@pytest.mark.parametrize("shape", [(3, 8), (8,), (2, 3, 4, 8), (0, 8)])
def test_rms_norm(calls, shape):
    both(lambda x, w, backend: rms_norm(x, w, backend=backend), normal(*shape), normal(8))
    both(lambda x, backend: rms_norm(x, None, eps=0.1, backend=backend), normal(*shape))
    assert set(calls) == ({"npu_rms_norm", "npu_rms_norm_backward"} if shape[0] else set())


@pytest.mark.parametrize("angles", ["S D", "B S D"])
@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_mul(calls, interleaved, angles):
    # Of no symmetry: cos and sin of the two elements of a pair need not be equal.
    B, S, H, D = 2, 5, 3, 8
    shape = (S, D) if angles == "S D" else (B, S, D)
    cos, sin = normal(*shape, seed=1), normal(*shape, seed=2)
    x = normal(B, S, H, D)
    both(lambda x, backend: rotary_mul(x, cos, sin, interleaved=interleaved, backend=backend), x)
    assert set(calls) == {"npu_rotary_mul"}
    # Angles keep their precision: nothing but the result is rounded to bf16.
    half = x.bfloat16()
    y = rotary_mul(half, cos, sin, interleaved=interleaved, backend="npu")
    expected = rotary_mul(half, cos, sin, interleaved=interleaved, backend="reference")
    assert torch.equal(y, expected)


@pytest.mark.parametrize(("shape", "dim"), [((3, 8), -1), ((4, 5, 6), 0), ((2, 4, 3), -2)])
def test_swiglu(calls, shape, dim):
    both(lambda x, backend: swiglu(x, dim=dim, backend=backend), normal(*shape))
    both(
        lambda x, backend: swiglu(x.transpose(0, 1), dim=dim % 2, backend=backend),
        normal(4, 6, 2),
    )


@pytest.mark.parametrize(
    "counts",
    [[3, 4, 5], [0, 12, 0], [0, 0, 0], [5, 0, 3], [12, 0, 0], [1, 1, 1]],
    ids=str,
)
def test_grouped_matmul(calls, counts):
    x, weight = normal(12, 6), normal(3, 6, 4)
    sizes = torch.tensor(counts)
    y, dx, dw = both(
        lambda x, w, backend: grouped_matmul(x, w, counts=sizes, backend=backend), x, weight
    )
    beyond = sum(counts)
    for out in (y, dx):
        assert (out[beyond:] == 0).all()
    for g, count in enumerate(counts):
        assert count or (dw[g] == 0).all()
    both(
        lambda x, w, backend: grouped_matmul(x, w, offsets=sizes.cumsum(0).int(), backend=backend),
        x,
        weight,
    )
    # Rows beyond the groups are not read, whatever they are.
    x[beyond:] = math.nan
    again = both(
        lambda x, w, backend: grouped_matmul(x, w, counts=sizes, backend=backend), x, weight
    )
    assert_close(again[2], dw, 1e-6)


def test_grouped_matmul_of_one_group_and_of_no_rows(calls):
    for rows, count in ((4, [4]), (4, [2]), (0, [0])):
        sizes = torch.tensor(count)
        both(
            lambda x, w, backend, sizes=sizes: grouped_matmul(x, w, counts=sizes, backend=backend),
            normal(rows, 6),
            normal(1, 6, 5),
        )


@st.composite
def routings(draw):
    N, k, E = draw(st.integers(1, 7)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    slots = draw(st.lists(st.integers(-1, E), min_size=N * k, max_size=N * k))
    M = draw(st.sampled_from([None, 0, 1, N * k // 2, N * k, N * k + 3]))
    return torch.tensor(slots).view(N, k), E, M


@given(case=routings(), with_probs=st.booleans())
def test_moe_permute_and_back(case, with_probs):
    experts, num_experts, M = case
    N, k = experts.shape
    tokens, probs = normal(N, 3), normal(N, k)
    with emulated():
        results = []
        for name in ("npu", "reference"):
            mine = leaves(tokens, probs)
            out = moe_permute(
                mine[0],
                experts,
                num_experts=num_experts,
                probs=mine[1] if with_probs else None,
                num_out_tokens=M,
                backend=name,
            )
            there = [out.tokens, out.probs] if with_probs else [out.tokens]
            grads = [normal(*x.shape, seed=5) for x in there]
            back = torch.autograd.grad(there, mine[: len(there)], grads)
            results.append((*there, out.rows, out.counts, *back))
        for actual, expected in zip(*results, strict=True):
            assert actual.dtype == expected.dtype
            assert_close(actual, expected, 1e-6)
        permuted, rows = results[0][0].detach(), results[0][-3 if not with_probs else -4]
        if with_probs:
            both(
                lambda x, p, backend: moe_unpermute(x, rows, probs=p, backend=backend),
                permuted,
                probs,
            )
        else:
            both(lambda x, backend: moe_unpermute(x, rows, backend=backend), permuted)


@pytest.mark.parametrize("M", [4, 6, 9], ids=["fewer", "as many", "more rows than slots"])
@pytest.mark.parametrize("with_probs", [True, False])
def test_moe_unpermute_of_any_map(calls, M, with_probs):
    # Distinct rows with gaps, in no order; what no slot names may be anything.
    rows = torch.tensor([[3, -1], [0, M - 1 if M > 4 else 2], [-1, 1]])
    x = normal(M, 5)
    named = torch.zeros(M, dtype=torch.bool)
    named[rows[rows >= 0]] = True
    x[~named] = math.nan
    probs = normal(3, 2)
    if with_probs:
        _, dx, dp = both(
            lambda x, p, backend: moe_unpermute(x, rows, probs=p, backend=backend), x, probs
        )
        assert (dp[rows < 0] == 0).all()
    else:
        _, dx = both(lambda x, backend: moe_unpermute(x, rows, backend=backend), x)
    assert (dx[~named] == 0).all()
    assert set(calls) == {"npu_moe_token_unpermute", "npu_moe_token_unpermute_grad_v2"}


def test_moe_unpermute_keeps_what_is_dropped_out_of_it(calls):
    # Token 0 has a slot without a row, whose probability is NaN, and an infinite gradient.
    rows = torch.tensor([[2, -1], [0, 3]])
    x, probs = leaves(normal(4, 5), torch.tensor([[0.5, math.nan], [0.25, 0.75]]))
    y = moe_unpermute(x, rows, probs=probs, backend="npu")
    assert y.isfinite().all()
    d_y = torch.ones_like(y)
    d_y[0] = math.inf
    dx, dp = torch.autograd.grad(y, (x, probs), d_y)
    assert (dx[1] == 0).all()  # the row that no slot names
    assert dp[0, 1] == 0


def test_hadamard_is_a_matmul_with_the_cached_matrix(calls):
    both(lambda x, backend: hadamard(x, backend=backend), normal(3, 8))
    assert not calls


def test_opcheck(calls):
    x, w = leaves(normal(6, 4), normal(2, 4, 4))
    ends, rows = torch.tensor([2, 5]), torch.tensor([[2, -1], [0, 1]], dtype=torch.int32)
    probs = normal(2, 2).requires_grad_()
    cos, sin = normal(5, 4), normal(5, 4)
    samples = {
        "rms_norm": (x, normal(4).requires_grad_(), 1e-6, "npu"),
        "rotary_mul": (normal(2, 5, 3, 4).requires_grad_(), cos, sin, True, "npu"),
        "swiglu": (x, -1, "npu"),
        "grouped_matmul": (x, w, ends, "npu"),
        "moe_permute": (x[:2], rows % 2, probs, 2, 4, "npu"),
        "moe_unpermute": (x, rows, probs, "npu"),
        "hadamard": (x, 0.5, "npu"),
    }
    for name, arguments in samples.items():
        torch.library.opcheck(getattr(OPS, name).default, arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: rms_norm(x.double(), None, backend="npu"), r"x: got torch.float64; .*bfloat16"),
        (
            lambda x: rms_norm(x.bfloat16(), torch.ones(4), backend="npu"),
            r"weight: got torch.float32; .*takes bfloat16, the dtype of x",
        ),
        (
            lambda x: rotary_mul(
                torch.zeros(1, 1, 1, 896), *torch.zeros(2, 1, 896), backend="npu"
            ),
            r"x: got D=896; .*at most D=894",
        ),
        (
            lambda x: rotary_mul(
                torch.zeros(1, 1, 1000, 2), *torch.zeros(2, 1, 2), backend="npu"
            ),
            r"x: got H=1000; .*at most 999 heads",
        ),
        (
            lambda x: rotary_mul(
                torch.zeros(1, 2, 1, 2), *torch.zeros(2, 2, 2).double(), backend="npu"
            ),
            r"cos: got torch.float64; .*takes bfloat16 or float16 or float32",
        ),
        (lambda x: swiglu(x[(None,) * 7], backend="npu"), r"x: got 9 dimensions; .*at most 8"),
        (
            lambda x: grouped_matmul(
                x, torch.zeros(1024, 4, 1), counts=torch.zeros(1024).long(), backend="npu"
            ),
            r"weight: got G=1024; .*at most 1023 groups",
        ),
        (
            lambda x: grouped_matmul(
                torch.zeros(1, 65536), torch.zeros(1, 65536, 1), counts=torch.ones(1).long(),
                backend="npu",
            ),
            r"weight: got I=65536, O=1; .*at most 65535",
        ),
        (
            lambda x: moe_permute(
                x, torch.zeros(6, 513).long(), num_experts=2, backend="npu"
            ),
            r"experts: got k=513; .*at most 512 experts of a token",
        ),
        (
            lambda x: moe_permute(
                torch.zeros(2**22, 1), torch.zeros(2**22, 4).long(), num_experts=2, backend="npu"
            ),
            r"experts: got N \* k = 16777216; .*at most 16777214",
        ),
    ],
)  # fmt: skip
def test_limits_are_checked_before_the_call(calls, call, message):
    with pytest.raises(ValueError, match=message + r".*; backend='torch' runs it"):
        call(normal(6, 4))
    assert not calls


def test_limits_are_those_of_the_documentation():
    assert limits.current() == limits.Limits()

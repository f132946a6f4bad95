import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import base_definitions as definition
from base_definitions import assert_follows, assert_rounds_less_than, values_and_gradients
from dsa_definitions import assert_close, leaves
from npu_dsa_kernels import grouped_matmul
from npu_dsa_kernels.backends import base

COUNTS = [3, 0, 2, 4]


def sample(N=9, G=4, I=5, O=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(N, I, generator=g), torch.randn(G, I, O, generator=g)]


@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    beyond=st.integers(0, 3),
    features=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    cumulative=st.booleans(),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**20),
)
def test_values_and_gradients(counts, beyond, features, cumulative, dtype, seed):
    N = sum(counts) + beyond
    if N == 0:
        return
    groups = torch.tensor(counts, dtype=dtype)
    groups = {"offsets": groups.cumsum(0).to(dtype)} if cumulative else {"counts": groups}
    assert_follows(
        lambda *x, backend: grouped_matmul(*x, **groups, validate=True, backend=backend),
        lambda *x: definition.grouped_matmul(*x, counts),
        sample(N, len(counts), *features, seed),
    )


def test_half_precision():
    def eager(x, w):
        # What bf16 sums without an fp32 accumulator look like: one rounding a term.
        parts = []
        for g, rows in enumerate(x.split(COUNTS)):
            total = rows.new_zeros(rows.shape[0], w.shape[2])
            for i in range(x.shape[1]):
                total = total + rows[:, i, None] * w[g, i]
            parts.append(total)
        return torch.cat(parts)

    assert_rounds_less_than(
        eager,
        lambda *x, backend: grouped_matmul(*x, counts=torch.tensor(COUNTS), backend=backend),
        lambda *x: definition.grouped_matmul(*x, COUNTS),
        sample(9, 4, 32, 16),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_summed_in_fp32(backend, dtype):
    # 1 + 1000 / 1024: in half precision alone the small terms would vanish one by one.
    x = torch.full((2, 1001), 2.0**-10, dtype=dtype)
    x[:, 0] = 1
    y = grouped_matmul(
        x, torch.ones(1, 1001, 3, dtype=dtype), counts=torch.tensor([2]), backend=backend
    )
    assert y.dtype == dtype
    assert_close(y, torch.full((2, 3), 1 + 1000 / 1024), torch.finfo(dtype).eps)


def test_rows_of_no_group_are_not_read_and_get_no_gradient(backend):
    x, w = leaves(*sample())
    with torch.no_grad():
        x[5:] = math.nan
    y = grouped_matmul(x, w, counts=torch.tensor([3, 0, 2, 0]), backend=backend)
    assert (y[5:] == 0).all()
    upstream = torch.ones_like(y)
    upstream[5:] = math.nan
    d_x, d_w = torch.autograd.grad(y, (x, w), upstream)
    assert (d_x[5:] == 0).all()
    assert d_x[:5].isfinite().all()
    assert (d_w[[1, 3]] == 0).all()
    assert d_w.isfinite().all()


def test_a_group_sees_no_other_weight(backend):
    x, w = leaves(*sample())
    with torch.no_grad():
        w[[1, 3]] = math.nan
    y = grouped_matmul(x, w, counts=torch.tensor([3, 0, 6, 0]), backend=backend)
    assert y.isfinite().all()
    (d_x,) = torch.autograd.grad(y.sum(), x)
    assert d_x.isfinite().all()


@pytest.mark.parametrize(
    "groups",
    [
        {"counts": [5, -3, 99, 2]},
        {"counts": [2**62, 2**62, 2**62, 2**62]},
        {"offsets": [4, 2, 100, 7]},
        {"offsets": [-5, -5, -5, -5]},
    ],
)
def test_wrong_sizes_reach_no_memory_beyond(backend, groups):
    x, w = leaves(*sample())
    groups = {name: torch.tensor(values) for name, values in groups.items()}
    y = grouped_matmul(x, w, **groups, backend=backend)
    grads = torch.autograd.grad(y.sum(), (x, w))
    assert all(t.isfinite().all() and t.abs().max() < 1e3 for t in (y, *grads))


def test_all_groups_empty(backend):
    x, w = leaves(*sample())
    y = grouped_matmul(x, w, counts=torch.zeros(4, dtype=torch.int32), backend=backend)
    d_x, d_w = torch.autograd.grad(y.sum(), (x, w))
    assert not (y.any() or d_x.any() or d_w.any())


@pytest.mark.parametrize(("N", "I", "O"), [(0, 5, 6), (4, 0, 6), (4, 5, 0)])
def test_empty(backend, N, I, O):
    x, w = leaves(torch.randn(N, I), torch.randn(2, I, O))
    y = grouped_matmul(x, w, counts=torch.tensor([N // 2, N // 2]), backend=backend)
    assert y.shape == (N, O)
    d_x, d_w = torch.autograd.grad(y.sum(), (x, w))
    assert (d_x.shape, d_w.shape) == (x.shape, w.shape)
    assert not (y.any() or d_w.any())


def test_non_contiguous(backend):
    x, w = sample()
    counts = torch.tensor(COUNTS)
    expected = grouped_matmul(x, w, counts=counts, backend=backend)
    x_s, w_s = x.T.contiguous().T.requires_grad_(), w.mT.contiguous().mT.requires_grad_()
    counts_s = torch.stack([counts, counts], 1)[:, 0]
    y = grouped_matmul(x_s, w_s, counts=counts_s, backend=backend)
    assert_close(y, expected, 1e-6)
    grads = torch.autograd.grad(y.sum(), (x_s, w_s))  # stride 0 upstream
    x, w = leaves(x, w)
    y = grouped_matmul(x, w, counts=counts, backend=backend)
    for a, b in zip(grads, torch.autograd.grad(y, (x, w), torch.ones_like(y)), strict=True):
        assert_close(a, b, 1e-6)


def test_gradcheck(backend):
    inputs = leaves(*sample(5, 3, 2, 3), dtype=torch.float64)
    counts = torch.tensor([2, 0, 2])
    assert torch.autograd.gradcheck(
        lambda *x: grouped_matmul(*x, counts=counts, backend=backend), inputs
    )


def test_one_kernel_gives_what_the_loop_does(monkeypatch):
    # The path of bf16 on CUDA: torch's grouped kernel has a CPU form with the same signature.
    x, w = (t.bfloat16() for t in sample(11, 4, 16, 8))
    counts = torch.tensor(COUNTS)

    def run():
        return values_and_gradients(lambda *t: grouped_matmul(*t, counts=counts), (x, w))

    loop = run()
    calls = []
    kernel = torch._grouped_mm
    monkeypatch.setattr(base, "_one_kernel", lambda *t: True)
    monkeypatch.setattr(torch, "_grouped_mm", lambda *t, **k: calls.append(1) or kernel(*t, **k))
    for a, b in zip(run(), loop, strict=True):
        assert_close(a, b, torch.finfo(torch.bfloat16).eps)
    assert len(calls) == 3


def test_autocast_does_not_lower_the_precision(backend):
    x, w = sample()
    counts = torch.tensor(COUNTS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = grouped_matmul(x, w, counts=counts, backend=backend)
    assert torch.equal(y, grouped_matmul(x, w, counts=counts, backend=backend))


def test_double_backward_is_refused():
    x, w = leaves(*sample())
    y = grouped_matmul(x, w, counts=torch.tensor(COUNTS), backend="torch")
    (d_x,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="grouped_matmul: double backward is not implemented"):
        d_x.sum().backward()


X, W, C = torch.randn(9, 5), torch.randn(4, 5, 6), torch.tensor(COUNTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": X[0]}, r"x: got shape \(5,\); expected 2 dimensions \[N, I\]"),
        ({"x": X.int()}, r"x: got torch.int32; expected float64"),
        ({"weight": W[0]}, r"weight: got shape \(5, 6\); expected 3 dimensions \[G, I, O\]"),
        ({"weight": W[:, :4]}, r"weight: got shape \(4, 4, 6\); expected \[G=4, I=5, O=6\]"),
        ({"weight": W[:0], "counts": C[:0]}, r"weight: got shape \(0, 5, 6\); expected G"),
        ({"weight": W.bfloat16()}, r"weight: got torch.bfloat16; expected float32, the dtype"),
        ({"weight": W.to("meta")}, r"weight: got device meta; expected cpu, where x is"),
        ({"counts": None}, r"counts: got neither it nor offsets; expected one of the two"),
        ({"offsets": C}, r"counts: got both it and offsets; expected one of the two"),
        ({"counts": C[:3]}, r"counts: got shape \(3,\); expected \[G=4\]"),
        ({"counts": C.float()}, r"counts: got torch.float32; expected int32 or int64"),
        ({"counts": C[None]}, r"counts: got shape \(1, 4\); expected 1 dimensions \[G\]"),
        ({"counts": C.to("meta")}, r"counts: got device meta; expected cpu, where x is"),
        ({"counts": None, "offsets": C[:3]}, r"offsets: got shape \(3,\); expected \[G=4\]"),
        ({"counts": -C, "validate": True}, r"counts: got -3 at \[0\]; expected values >= 0"),
        ({"counts": 2 * C, "validate": True}, r"counts: got 18 rows in all; expected at most N=9"),
        (
            {"counts": None, "offsets": C, "validate": True},
            r"offsets: got 0 at \[1\]; expected values >= 0 and none below the one before it",
        ),
        ({"counts": None, "offsets": C.cumsum(0) + 1, "validate": True}, r"offsets: got 10 rows"),
        ({"backend": "fast"}, r"backend: got 'fast'; expected one of reference"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        grouped_matmul(**{"x": X, "weight": W, "counts": C} | change)

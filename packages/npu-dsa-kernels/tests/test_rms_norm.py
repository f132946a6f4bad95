import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import base_definitions as definition
from base_definitions import assert_follows, assert_rounds_less_than, values_and_gradients
from dsa_definitions import assert_close, leaves
from npu_dsa_kernels import rms_norm
from npu_dsa_kernels.backends import base


def tensors(seed, shape, weighted=True):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=g)
    return [x, torch.randn(shape[-1], generator=g)] if weighted else [x]


def apply(x, weight=None, **kwargs):
    return rms_norm(x, weight, **kwargs)


@given(
    # With one or two features the gradient is what is left of a cancellation.
    shape=st.tuples(
        st.lists(st.integers(1, 4), max_size=3), st.lists(st.integers(3, 7), min_size=1, max_size=1)
    ).map(lambda x: [*x[0], *x[1]]),
    eps=st.sampled_from([1e-6, 1e-3, 1.0]),
    weighted=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_values_and_gradients(shape, eps, weighted, seed):
    assert_follows(
        lambda *x, backend: apply(*x, eps=eps, backend=backend),
        lambda *x: definition.rms_norm(*x, eps=eps),
        tensors(seed, shape, weighted),
    )


def test_many_blocks(monkeypatch):
    monkeypatch.setattr(base, "_CPU_BLOCK_BYTES", 100)
    assert_follows(apply, definition.rms_norm, tensors(0, (3, 7, 5)))


def eager(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def test_half_precision():
    assert_rounds_less_than(eager, apply, definition.rms_norm, tensors(0, (16, 64)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_in_fp32_also_with_an_fp32_weight(backend, dtype):
    x, w = tensors(0, (16, 64))
    x = (100 * x).to(dtype)  # squares of fp16 leave its range
    actual = values_and_gradients(lambda x, w: rms_norm(x, w, backend=backend), (x, w))
    expected = values_and_gradients(definition.rms_norm, (x.double(), w.double()))
    assert [a.dtype for a in actual] == [dtype, dtype, torch.float32]
    for a, e, eps in zip(actual, expected, (*[torch.finfo(dtype).eps] * 2, 1e-5), strict=True):
        assert_close(a, e, eps)


def test_gradcheck(backend):
    x, w = leaves(*tensors(1, (3, 6)), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *x: apply(*x, backend=backend), (x, w))
    assert torch.autograd.gradcheck(lambda x: apply(x, backend=backend), (x,))


def test_non_contiguous(backend):
    x, w = tensors(0, (4, 3, 6))
    expected = values_and_gradients(lambda x, w: rms_norm(x, w, backend=backend), (x, w))
    x_s = x.transpose(0, 1).contiguous().transpose(0, 1)
    w_s = torch.stack([w, w], 1)[:, 0]
    x_s, w_s = x_s.requires_grad_(), w_s.requires_grad_()
    y = rms_norm(x_s, w_s, backend=backend)
    assert_close(y, expected[0], 1e-6)
    # Of a sum: an upstream gradient of stride 0.
    d_x, d_w = torch.autograd.grad(y.sum(), (x_s, w_s))
    x, w = leaves(x, w)
    y = rms_norm(x, w, backend=backend)
    for a, b in zip((d_x, d_w), torch.autograd.grad(y, (x, w), torch.ones_like(y)), strict=True):
        assert_close(a, b, 1e-6)


def test_rows_of_zeros_are_finite(backend):
    x, w = torch.zeros(3, 4, requires_grad=True), torch.ones(4, requires_grad=True)
    y = rms_norm(x, w, backend=backend)
    assert (y == 0).all()
    d_x, d_w = torch.autograd.grad(y.sum(), (x, w))
    assert_close(d_x, torch.full((3, 4), 1000.0), 1e-6)  # eps ** -0.5
    assert (d_w == 0).all()


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4)])
def test_empty(backend, shape):
    x, w = torch.zeros(shape, requires_grad=True), torch.ones(4, requires_grad=True)
    y = rms_norm(x, w, backend=backend)
    assert y.shape == shape
    d_x, d_w = torch.autograd.grad(y.sum(), (x, w))
    assert d_x.shape == shape
    assert (d_w == 0).all()


def test_autocast_does_not_lower_the_precision(backend):
    x, w = tensors(0, (4, 6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = rms_norm(x, w, backend=backend)
    assert torch.equal(y, rms_norm(x, w, backend=backend))


def test_double_backward():
    for backend in ("reference", "torch"):
        x, w = leaves(*tensors(0, (3, 6)))
        (d_x,) = torch.autograd.grad(
            rms_norm(x, w, backend=backend).square().sum(), x, create_graph=True
        )
        if backend == "reference":
            assert torch.autograd.grad(d_x.sum(), x)[0].isfinite().all()
        else:
            with pytest.raises(RuntimeError, match="rms_norm: double backward is not implem"):
                torch.autograd.grad(d_x.sum(), x)


X, W = torch.randn(2, 4), torch.randn(4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.tensor(1.0)}, r"x: got shape \(\); expected at least one dimension"),
        ({"x": X.int()}, r"x: got torch.int32; expected float64"),
        ({"x": X[:, :0]}, r"x: got shape \(2, 0\); expected D"),
        ({"weight": W[:3]}, r"weight: got shape \(3,\); expected \[D=4\]"),
        ({"weight": W[None]}, r"weight: got shape \(1, 4\); expected 1 dimensions \[D\]"),
        ({"weight": W.double()}, r"weight: got torch.float64; expected float32, to go with x"),
        ({"weight": W.to("meta")}, r"weight: got device meta; expected cpu, where x is"),
        ({"eps": -1e-6}, r"eps: got -1e-06; expected a finite float >= 0"),
        ({"eps": math.nan}, r"eps: got nan; expected a finite float >= 0"),
        ({"eps": "1"}, r"eps: got '1'; expected a finite float >= 0"),
        ({"backend": "fast"}, r"backend: got 'fast'; expected one of reference"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        rms_norm(**{"x": X, "weight": W} | change)


def test_not_a_tensor():
    with pytest.raises(TypeError, match=r"x: got float; expected a torch.Tensor"):
        rms_norm(1.0, None)
    with pytest.raises(TypeError, match=r"weight: got list; expected a torch.Tensor"):
        rms_norm(X, [1.0])

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import base_definitions as definition
from base_definitions import assert_follows, assert_rounds_less_than, values_and_gradients
from dsa_definitions import assert_close, leaves
from npu_dsa_kernels import swiglu
from npu_dsa_kernels.backends import base


def sample(*shape, seed=0):
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def shapes(draw):
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] *= 2
    return shape, dim


@given(shape=shapes(), seed=st.integers(0, 2**20))
def test_values_and_gradients(shape, seed):
    shape, dim = shape
    assert_follows(
        lambda x, backend: swiglu(x, dim=dim, backend=backend),
        lambda x: definition.swiglu(x, dim),
        [sample(*shape, seed=seed)],
    )


def test_many_blocks(monkeypatch):
    monkeypatch.setattr(base, "_CPU_BLOCK_BYTES", 50)
    assert_follows(swiglu, definition.swiglu, [sample(7, 3, 10)])


def test_half_precision():
    def eager(x):
        a, b = x.chunk(2, -1)
        return a * a.sigmoid() * b

    assert_rounds_less_than(eager, swiglu, definition.swiglu, [sample(16, 64)])


def test_extreme_values_saturate(backend):
    x = torch.tensor([[-1e4, 1.0], [1e4, 1.0], [-200.0, 1.0]], requires_grad=True)
    y = swiglu(x, backend=backend)
    assert_close(y, torch.tensor([[0.0], [1e4], [0.0]]), 1e-7)
    (d_x,) = torch.autograd.grad(y.sum(), x)
    assert_close(d_x, torch.tensor([[0, 0], [1, 1e4], [0, 0]]), 1e-7)


def test_gradcheck(backend):
    x = sample(3, 6).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: swiglu(x, backend=backend), (x,))


def test_non_contiguous(backend):
    x = sample(4, 3, 6)
    expected = values_and_gradients(lambda x: swiglu(x, backend=backend), [x])
    strided = x.permute(2, 0, 1).contiguous().permute(1, 2, 0).requires_grad_()
    y = swiglu(strided, backend=backend)
    assert torch.equal(y, expected[0])
    (d_x,) = torch.autograd.grad(y.sum(), strided)  # stride 0 upstream
    (plain,) = leaves(x)
    y = swiglu(plain, backend=backend)
    assert torch.equal(d_x, torch.autograd.grad(y, plain, torch.ones_like(y))[0])


@pytest.mark.parametrize(("shape", "half"), [((0, 4), (0, 2)), ((3, 0), (3, 0))])
def test_empty(backend, shape, half):
    x = torch.zeros(shape, requires_grad=True)
    y = swiglu(x, backend=backend)
    y.sum().backward()
    assert y.shape == half
    assert x.grad.shape == shape


def test_double_backward_is_refused():
    x = sample(3, 6).requires_grad_()
    (d_x,) = torch.autograd.grad(swiglu(x, backend="torch").sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="swiglu: double backward is not implemented"):
        d_x.sum().backward()
    (d_x,) = torch.autograd.grad(swiglu(x, backend="reference").sum(), x, create_graph=True)
    assert torch.autograd.grad(d_x.sum(), x)[0].isfinite().all()


@pytest.mark.parametrize(
    ("x", "dim", "message"),
    [
        (torch.tensor(1.0), -1, r"x: got shape \(\); expected at least one dimension"),
        (torch.ones(2, 4).int(), -1, r"x: got torch.int32; expected float64"),
        (torch.ones(2, 5), -1, r"x: got shape \(2, 5\); expected dimension -1 to be even"),
        (torch.ones(3, 4), 0, r"x: got shape \(3, 4\); expected dimension 0 to be even"),
        (torch.ones(2, 4), 2, r"dim: got 2; expected an int in \[-2, 1\]"),
        (torch.ones(2, 4), -3, r"dim: got -3; expected an int in \[-2, 1\]"),
        (torch.ones(2, 4), 1.0, r"dim: got 1.0; expected an int in"),
    ],
)
def test_bad_input(x, dim, message):
    with pytest.raises(ValueError, match=message):
        swiglu(x, dim=dim)


def test_unknown_backend():
    with pytest.raises(ValueError, match="backend: got 'fast'; expected one of reference"):
        swiglu(torch.ones(2, 4), backend="fast")

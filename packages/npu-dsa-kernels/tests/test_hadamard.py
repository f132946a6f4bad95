import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from base_definitions import assert_follows, assert_rounds_less_than
from dsa_definitions import assert_close
from npu_dsa_kernels import hadamard


def sign(i: int, j: int) -> int:
    """Entry of Sylvester's matrix: the parity of the bits that i and j share."""
    return -1 if (i & j).bit_count() % 2 else 1


@pytest.mark.parametrize("D", [1, 2, 8, 128])
def test_definition(backend, dtype, D):
    x = torch.randn(3, 2, D, dtype=dtype)
    matrix = torch.tensor([[sign(i, j) for j in range(D)] for i in range(D)]).double()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6}[dtype]
    assert_close(hadamard(x, backend=backend), x.double() @ matrix / math.sqrt(D), tolerance)
    assert_close(hadamard(x, scale=3.0, backend=backend), x.double() @ matrix * 3, tolerance)


def test_orthonormal_and_not_the_identity(backend):
    # The scores of an indexer do not change, so only a test of the transform sees its absence.
    q, k = torch.randn(5, 128, dtype=torch.float64), torch.randn(5, 128, dtype=torch.float64)
    tq, tk = hadamard(q, backend=backend), hadamard(k, backend=backend)
    assert_close(tq @ tk.T, q @ k.T, 1e-13)
    assert_close(hadamard(tq, backend=backend), q, 1e-13)
    assert (tq - q).abs().max() > 0.1
    spike = torch.zeros(128, dtype=torch.float64)
    spike[77] = 1
    assert_close(hadamard(spike, backend=backend).abs(), torch.full((128,), 128**-0.5), 1e-7)


def test_gradients(backend):
    x = torch.randn(2, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: hadamard(x, backend=backend), (x,))
    assert torch.autograd.gradgradcheck(lambda x: hadamard(x, backend=backend).sin(), (x,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_once(backend, dtype):
    x = torch.randn(4, 128).to(dtype)
    y = hadamard(x, backend=backend)
    assert y.dtype == dtype
    assert_close(y, hadamard(x.double(), backend="reference"), torch.finfo(dtype).eps)


def test_non_contiguous(backend):
    x = torch.randn(8, 3)
    assert_close(hadamard(x.T, backend=backend), hadamard(x.T.contiguous(), backend=backend), 1e-7)
    x.requires_grad_()
    (d_x,) = torch.autograd.grad(hadamard(x.T, backend=backend).sum(), x)  # stride 0 upstream
    assert_close(d_x.T, hadamard(torch.ones(3, 8)), 1e-7)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)])
def test_empty(backend, shape):
    x = torch.zeros(shape, requires_grad=True)
    hadamard(x, backend=backend).sum().backward()
    assert x.grad.shape == shape


def test_half_precision_rounds_less_than_the_formula_in_it():
    D = 64
    matrix = torch.tensor([[sign(i, j) for j in range(D)] for i in range(D)]).double()

    def eager(x):
        total = torch.zeros_like(x)
        for i in range(D):
            total = total + x[:, i, None] * matrix[i].to(x.dtype)
        return total * D**-0.5

    assert_rounds_less_than(eager, hadamard, lambda x: x @ matrix * D**-0.5, [torch.randn(4, D)])


@given(
    shape=st.lists(st.integers(1, 4), max_size=3),
    log_D=st.integers(0, 5),
    scale=st.one_of(st.none(), st.sampled_from([1.0, -0.3])),
    seed=st.integers(0, 2**20),
)
def test_values_and_gradients(shape, log_D, scale, seed):
    D = 2**log_D
    matrix = torch.tensor([[sign(i, j) for j in range(D)] for i in range(D)]).double()
    factor = D**-0.5 if scale is None else scale
    assert_follows(
        lambda x, backend: hadamard(x, scale=scale, backend=backend),
        lambda x: x @ matrix * factor,
        [torch.randn(*shape, D, generator=torch.Generator().manual_seed(seed))],
    )


def test_inference_mode_first(backend):
    # A cached matrix that was made in inference mode must not break a later training step.
    with torch.inference_mode():
        hadamard(torch.randn(2, 32), backend=backend)
    x = torch.randn(2, 32, requires_grad=True)
    hadamard(x, backend=backend).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("x", "scale", "message"),
    [
        (torch.randn(2, 12), None, r"x: got shape \(2, 12\); expected a last dim of a power of"),
        (torch.randn(2, 0), None, r"x: got shape \(2, 0\); expected a last dim"),
        (torch.tensor(1.0), None, r"x: got shape \(\); expected a last dim"),
        (torch.ones(2, 4).int(), None, r"x: got torch.int32; expected float64"),
        (torch.ones(2, 4), math.inf, r"scale: got inf; expected a finite float"),
    ],
)
def test_bad_input(x, scale, message):
    with pytest.raises(ValueError, match=message):
        hadamard(x, scale=scale)

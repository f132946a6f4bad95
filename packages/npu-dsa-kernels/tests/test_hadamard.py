import math

import pytest
import torch

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

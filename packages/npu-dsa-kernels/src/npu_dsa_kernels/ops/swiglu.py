"""The gated activation of the feed-forward layers."""

import torch
from torch import Tensor

from npu_dsa_kernels import checks
from npu_dsa_kernels.backends import kernels, reference, resolve
from npu_dsa_kernels.backends.precision import no_autocast
from npu_dsa_kernels.ops._autograd import no_forward_mode, once_differentiable

# F features of either half


def swiglu(x: Tensor, *, dim: int = -1, backend: str | None = None) -> Tensor:
    """``silu(a) * b`` of the halves ``a, b = x.chunk(2, dim)``, ``silu(a) = a * sigmoid(a)``.

    (Shazeer 2020, GLU Variants Improve Transformer, eq. 6.) Differentiable.

    Args:
        x: [..., 2F], float64, float32, bfloat16 or float16.
        dim: the dimension to halve.
        backend: see `backends`.

    Returns:
        [..., F] in the dtype of `x`; computed in float32 at least and rounded once.

    Raises:
        ValueError: `dim` out of range or of odd size, wrong dtype, unknown backend.
        RuntimeError: at a double backward through any backend but "reference".
    """
    checks.at_least_1d("x", x)
    checks.floating("x", x)
    checks.whole_number("dim", dim, -x.dim(), x.dim() - 1)
    if x.shape[dim] % 2:
        raise checks.bad("x", f"shape {tuple(x.shape)}", f"expected dimension {dim} to be even")
    name = resolve(backend, x.device)
    if name == "reference":
        with no_autocast(x):
            return reference.swiglu(x, dim)
    no_forward_mode("swiglu", x)
    return _swiglu(x, dim, name)


@torch.library.custom_op("npu_dsa::swiglu", mutates_args=())
def _swiglu(x: Tensor, dim: int, backend: str) -> Tensor:
    with no_autocast(x):
        return kernels(backend).swiglu(x, dim)


@_swiglu.register_fake
def _(x: Tensor, dim: int, backend: str) -> Tensor:
    shape = list(x.shape)
    shape[dim] //= 2
    return x.new_empty(shape)


@torch.library.custom_op("npu_dsa::swiglu_backward", mutates_args=())
def _swiglu_backward(d_y: Tensor, x: Tensor, dim: int, backend: str) -> Tensor:
    with no_autocast(x):
        return kernels(backend).swiglu_backward(d_y, x, dim)


@_swiglu_backward.register_fake
def _(d_y: Tensor, x: Tensor, dim: int, backend: str) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx, inputs, output) -> None:
    x, ctx.dim, ctx.backend = inputs
    ctx.save_for_backward(x)


def _backward(ctx, d_y: Tensor):
    return _swiglu_backward(d_y, *ctx.saved_tensors, ctx.dim, ctx.backend), None, None


_swiglu.register_autograd(_backward, setup_context=_setup_context)
once_differentiable(_swiglu_backward, "swiglu")

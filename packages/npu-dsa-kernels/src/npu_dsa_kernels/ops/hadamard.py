"""The Hadamard transform that spreads the indexer's queries and keys over their dimensions."""

import torch
from torch import Tensor

from npu_dsa_kernels import checks
from npu_dsa_kernels.backends import kernels, reference, resolve
from npu_dsa_kernels.backends.precision import no_autocast
from npu_dsa_kernels.ops._autograd import no_forward_mode

# D transformed dim


def hadamard(x: Tensor, *, scale: float | None = None, backend: str | None = None) -> Tensor:
    """``scale * x @ H`` over the last dimension, H the Hadamard matrix in Sylvester's order.

    With the default scale ``D ** -0.5`` the transform is orthonormal and its own inverse: applied
    to q_index and k_index it leaves their dot products unchanged in exact arithmetic.

    Args:
        x: [..., D], D a power of two; float64, float32, bfloat16 or float16.
        scale: factor of the result; ``D ** -0.5`` if None.
        backend: see `backends`.

    Returns:
        Shape and dtype of `x`; sums are taken in float32 at least. Differentiable.

    Raises:
        ValueError: D is not a power of two, wrong dtype, scale not finite, unknown backend.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x: got {type(x).__name__}; expected a torch.Tensor")
    checks.floating("x", x)
    D = x.shape[-1] if x.dim() else 0
    if D < 1 or D & (D - 1):
        raise checks.bad("x", f"shape {tuple(x.shape)}", "expected a last dim of a power of two")
    if scale is None:
        scale = D**-0.5
    checks.scale(scale)
    name = resolve(backend, x.device)
    if name == "reference":
        with no_autocast(x):
            return reference.hadamard(x, scale)
    no_forward_mode("hadamard", x)
    return _hadamard(x, float(scale), name)


@torch.library.custom_op("npu_dsa::hadamard", mutates_args=())
def _hadamard(x: Tensor, scale: float, backend: str) -> Tensor:
    with no_autocast(x):
        return kernels(backend).hadamard(x, scale)


@_hadamard.register_fake
def _(x: Tensor, scale: float, backend: str) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx, inputs, output) -> None:
    _, ctx.scale, ctx.backend = inputs


def _backward(ctx, d_y: Tensor):
    # H is symmetric.
    return _hadamard(d_y, ctx.scale, ctx.backend), None, None


_hadamard.register_autograd(_backward, setup_context=_setup_context)

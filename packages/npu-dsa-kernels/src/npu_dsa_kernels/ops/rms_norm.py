"""Root-mean-square normalisation."""

import torch
from torch import Tensor

from npu_dsa_kernels import checks
from npu_dsa_kernels.backends import kernels, reference, resolve
from npu_dsa_kernels.backends.precision import compute_dtype, no_autocast
from npu_dsa_kernels.ops._autograd import no_forward_mode, once_differentiable

# D normalised dim


def rms_norm(
    x: Tensor, weight: Tensor | None, *, eps: float = 1e-6, backend: str | None = None
) -> Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension.

    (Zhang and Sennrich 2019, Root Mean Square Layer Normalization, eq. 4.) Differentiable in `x`
    and `weight`.

    Args:
        x: [..., D], float64, float32, bfloat16 or float16.
        weight: [D], of the same dtype or float32; None for no weight.
        eps: added to the mean square, >= 0.
        backend: see `backends`.

    Returns:
        Shape and dtype of `x`. Statistics and products are float32 at least, rounded once.

    Raises:
        ValueError: wrong shape, dtype or device, eps negative or not finite, unknown backend.
        RuntimeError: at a double backward through any backend but "reference".
    """
    checks.at_least_1d("x", x)
    checks.floating("x", x)
    checks.not_empty("x", x, D=-1)
    if weight is not None:
        checks.tensor("weight", weight, "D")
        wide = compute_dtype(x.dtype)
        checks.dtype("weight", weight, (x.dtype, wide), ", to go with x")
        checks.shape("weight", weight, D=x.shape[-1])
    checks.same_device("x", x, weight=weight)
    checks.eps(eps)
    name = resolve(backend, x.device)
    if name == "reference":
        with no_autocast(x):
            return reference.rms_norm(x, weight, eps)
    no_forward_mode("rms_norm", x, weight)
    return _rms_norm(x, weight, float(eps), name)[0]


@torch.library.custom_op("npu_dsa::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, backend: str) -> tuple[Tensor, Tensor]:
    """The result, and the reciprocal root mean square [..., 1] that the backward needs."""
    with no_autocast(x):
        return kernels(backend).rms_norm(x, weight, eps)


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor | None, eps: float, backend: str) -> tuple[Tensor, Tensor]:
    rstd = x.new_empty((*x.shape[:-1], 1), dtype=compute_dtype(x.dtype))
    return x.new_empty(x.shape), rstd


@torch.library.custom_op("npu_dsa::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    d_y: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, backend: str
) -> tuple[Tensor, Tensor]:
    """Gradients of `x` and of `weight` ([0] where there is none)."""
    with no_autocast(x):
        return kernels(backend).rms_norm_backward(d_y, x, weight, rstd)


@_rms_norm_backward.register_fake
def _(
    d_y: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, backend: str
) -> tuple[Tensor, Tensor]:
    d_weight = x.new_empty(0) if weight is None else weight.new_empty(weight.shape)
    return x.new_empty(x.shape), d_weight


def _setup_context(ctx, inputs, output) -> None:
    x, weight, _, ctx.backend = inputs
    ctx.save_for_backward(x, weight, output[1])


def _backward(ctx, d_y: Tensor, d_rstd: Tensor):
    x, weight, rstd = ctx.saved_tensors
    dx, dw = _rms_norm_backward(d_y, x, weight, rstd, ctx.backend)
    return dx, None if weight is None else dw, None, None


_rms_norm.register_autograd(_backward, setup_context=_setup_context)
once_differentiable(_rms_norm_backward, "rms_norm")

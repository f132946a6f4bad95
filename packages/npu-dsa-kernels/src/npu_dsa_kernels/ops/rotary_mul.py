"""Rotary position embedding."""

import torch
from torch import Tensor

from npu_dsa_kernels import checks
from npu_dsa_kernels.backends import kernels, reference, resolve
from npu_dsa_kernels.backends.precision import no_autocast
from npu_dsa_kernels.ops._autograd import no_forward_mode

# B batch, S sequence, H heads, D head dim


def rotary_mul(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    backend: str | None = None,
) -> Tensor:
    """``x * cos + rotate(x) * sin``, the same angles for all heads.

    (Su et al. 2021, RoFormer, eq. 34.) With ``rotate``, the other half of each pair with its sign:

    - half: pairs are ``(x[i], x[i + D/2])``, ``rotate(x) = [-x2 || x1]`` of the halves; cos and sin
      are ``cat(f, f)`` of the D/2 angles.
    - interleaved: pairs are ``(x[2i], x[2i+1])``, ``rotate(x) = (-x[1], x[0], -x[3], x[2], ...)``;
      cos and sin are ``repeat_interleave(f, 2)``.

    DeepSeek-V3.2's main attention is interleaved, its indexer is not.

    Args:
        x: [B, S, H, D], D even, float64, float32, bfloat16 or float16. Differentiable.
        cos, sin: [S, D] or [B, S, D], floating, of any precision; no gradient.
        interleaved: which dimensions are a pair.
        backend: see `backends`.

    Returns:
        Shape and dtype of `x`; products are taken in float32 at least and rounded once.

    Raises:
        ValueError: D is odd, wrong shape, dtype or device, `cos` or `sin` requires grad, unknown
            backend.
    """
    checks.tensor("x", x, "B S H D")
    checks.floating("x", x)
    B, S, _, D = x.shape
    if D % 2:
        raise checks.bad("x", f"shape {tuple(x.shape)}", "expected an even last dimension D")
    for name, table in (("cos", cos), ("sin", sin)):
        if isinstance(table, Tensor) and table.dim() == 2:
            checks.shape(name, table, S=S, D=D)
        else:
            checks.tensor(name, table, "B S D")
            checks.shape(name, table, B=B, S=S, D=D)
        checks.floating(name, table)
        checks.no_gradient(name, table, "angles have no gradient")
    checks.same_device("x", x, cos=cos, sin=sin)
    if not isinstance(interleaved, bool):
        raise checks.bad("interleaved", repr(interleaved), "expected True or False")
    name = resolve(backend, x.device)
    if name == "reference":
        with no_autocast(x):
            return reference.rotary_mul(x, cos, sin, interleaved)
    no_forward_mode("rotary_mul", x)
    return _rotary_mul(x, cos, sin, interleaved, name)


@torch.library.custom_op("npu_dsa::rotary_mul", mutates_args=())
def _rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backend: str) -> Tensor:
    with no_autocast(x):
        return kernels(backend).rotary_mul(x, cos, sin, interleaved)


@_rotary_mul.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backend: str) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("npu_dsa::rotary_mul_backward", mutates_args=())
def _rotary_mul_backward(
    d_y: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backend: str
) -> Tensor:
    with no_autocast(d_y):
        return kernels(backend).rotary_mul_backward(d_y, cos, sin, interleaved)


@_rotary_mul_backward.register_fake
def _(d_y: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backend: str) -> Tensor:
    return d_y.new_empty(d_y.shape)


def _setup_context(ctx, inputs, output) -> None:
    _, cos, sin, ctx.interleaved, ctx.backend = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx, d_y: Tensor):
    dx = _rotary_mul_backward(d_y, *ctx.saved_tensors, ctx.interleaved, ctx.backend)
    return dx, None, None, None, None


def _backward_backward(ctx, dd_x: Tensor):
    # Linear in x: the backward's backward is the forward.
    dd_y = _rotary_mul(dd_x, *ctx.saved_tensors, ctx.interleaved, ctx.backend)
    return dd_y, None, None, None, None


_rotary_mul.register_autograd(_backward, setup_context=_setup_context)
_rotary_mul_backward.register_autograd(_backward_backward, setup_context=_setup_context)

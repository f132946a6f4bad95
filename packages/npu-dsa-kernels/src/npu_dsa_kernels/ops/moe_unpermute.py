"""Rows sorted by expert, back to tokens."""

import torch
from torch import Tensor

from npu_dsa_kernels import checks
from npu_dsa_kernels.backends import kernels, reference, resolve
from npu_dsa_kernels.backends.precision import compute_dtype, no_autocast
from npu_dsa_kernels.ops._autograd import no_forward_mode, once_differentiable

# N tokens, D features, k experts of a token, M rows of the permuted tokens


def moe_unpermute(
    x: Tensor,
    rows: Tensor,
    *,
    probs: Tensor | None = None,
    backend: str | None = None,
    validate: bool = False,
) -> Tensor:
    """``y[n] = sum_j probs[n, j] * x[rows[n, j]]``, the way back from `moe_permute`.

    Differentiable in `x` and `probs`. A row of -1, or any other outside of [0, M), contributes 0
    and reads nothing; rows of `x` that no slot names get zero gradients. The same row in two slots
    is undefined (the gradient gathers, it never scatters).

    Args:
        x: [M, D], float64, float32, bfloat16 or float16.
        rows: int32 or int64 [N, k], as `moe_permute` returns them.
        probs: [N, k], of the dtype of `x` or float32; None for all ones.
        backend: see `backends`.
        validate: check the values of `rows` too (synchronises with the device).

    Returns:
        [N, D] in the dtype of `x`; sums are taken in float32 at least and rounded once.

    Raises:
        ValueError: wrong shape, dtype or device, rows outside of [-1, M) or repeated (with
            `validate`), unknown backend.
        RuntimeError: at a double backward through any backend but "reference".
    """
    checks.tensor("x", x, "M D")
    checks.floating("x", x)
    checks.key_count("x", x.shape[0])
    checks.slots("rows", rows, x.shape[0], distinct=True, validate=validate)
    if probs is not None:
        checks.tensor("probs", probs, "N k")
        checks.dtype("probs", probs, (x.dtype, compute_dtype(x.dtype)), ", to go with x")
        checks.shape("probs", probs, N=rows.shape[0], k=rows.shape[1])
    checks.same_device("x", x, rows=rows, probs=probs)
    name = resolve(backend, x.device)
    if name == "reference":
        with no_autocast(x):
            return reference.moe_unpermute(x, rows, probs)
    no_forward_mode("moe_unpermute", x, probs)
    return _moe_unpermute(x, rows, probs, name)


@torch.library.custom_op("npu_dsa::moe_unpermute", mutates_args=())
def _moe_unpermute(x: Tensor, rows: Tensor, probs: Tensor | None, backend: str) -> Tensor:
    with no_autocast(x):
        return kernels(backend).moe_unpermute(x, rows, probs)


@_moe_unpermute.register_fake
def _(x: Tensor, rows: Tensor, probs: Tensor | None, backend: str) -> Tensor:
    return x.new_empty(rows.shape[0], x.shape[1])


@torch.library.custom_op("npu_dsa::moe_unpermute_backward", mutates_args=())
def _moe_unpermute_backward(
    d_y: Tensor,
    x: Tensor | None,
    rows: Tensor,
    probs: Tensor | None,
    num_rows: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of x [M, D] and probs ([0] where there are none); `x` goes with `probs`."""
    with no_autocast(d_y):
        return kernels(backend).moe_unpermute_backward(d_y, x, rows, probs, num_rows)


@_moe_unpermute_backward.register_fake
def _(
    d_y: Tensor,
    x: Tensor | None,
    rows: Tensor,
    probs: Tensor | None,
    num_rows: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    d_x = d_y.new_empty(num_rows, d_y.shape[1])
    return d_x, d_y.new_empty(0) if probs is None else probs.new_empty(probs.shape)


def _setup_context(ctx, inputs, output) -> None:
    x, rows, probs, ctx.backend = inputs
    ctx.num_rows = x.shape[0]
    # Only the gradient of probs needs the rows themselves.
    ctx.save_for_backward(None if probs is None else x, rows, probs)


def _backward(ctx, d_y: Tensor):
    x, rows, probs = ctx.saved_tensors
    d_x, d_probs = _moe_unpermute_backward(d_y, x, rows, probs, ctx.num_rows, ctx.backend)
    return d_x, None, None if probs is None else d_probs, None


_moe_unpermute.register_autograd(_backward, setup_context=_setup_context)
once_differentiable(_moe_unpermute_backward, "moe_unpermute")

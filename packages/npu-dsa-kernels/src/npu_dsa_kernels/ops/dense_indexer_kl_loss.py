"""The indexer's warm-up loss, over every visible key instead of a selection."""

import torch
from torch import Tensor

from npu_dsa_kernels import checks
from npu_dsa_kernels.backends import kernels, reference, resolve
from npu_dsa_kernels.backends.precision import compute_dtype, no_autocast
from npu_dsa_kernels.ops._autograd import no_forward_mode, once_differentiable
from npu_dsa_kernels.ops._fused_kl import fused_dense_kl_loss
from npu_dsa_kernels.ops.lightning_indexer import _check

# B batch, S queries, T keys, H heads, D head dim (of the indexer and of the attention)


def dense_indexer_kl_loss(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    q: Tensor,
    kv: Tensor,
    *,
    scale: float,
    bounds: Tensor | None = None,
    reduction: str = "none",
    backend: str | None = None,
    validate: bool = False,
) -> Tensor:
    """KL divergence of each query over all its visible keys; differentiable in the first three.

    With V the visible keys of query t, ``p`` the L1-normalised ``sum_h softmax over s in V of
    (scale * q[t, h] . kv[s])`` and ``y = softmax over s in V of I[t, s]`` (I as in
    `lightning_indexer`): ``loss[t] = sum_s p (log p - log y)``, with 0 log 0 = 0 (DeepSeek-V3.2,
    section 2.1.1, dense warm-up stage, eq. 3). As in `indexer_kl_loss`, ``dI = y - p`` exactly.

    `q` and `kv` are constants here, whatever they require: the attention is the teacher. A row
    without visible keys gives 0 and zero gradients. Memory is linear in S and T; the work is that
    of dense attention, and the backward computes the attention again.

    Args:
        q_index: [B, S, Hi, Di]; k_index: [B, T, Di]; weights: [B, S, Hi]: see `lightning_indexer`.
        q: [B, S, H, D], float64, float32, bfloat16 or float16, with all the heads.
        kv: [B, T, D], of the same dtype, one key for all heads (matrix-absorbed attention); or
            [B, T, H, D], keys of each head's own, as attention has them before absorption.
        scale: factor of the attention's logits.
        bounds: see `lightning_indexer`.
        reduction: "none", or "sum" over B and S.
        backend: see `backends`. "npu" has only the sum, and only for keys of each head's own.
        validate: check the values of `bounds` too (synchronises with the device).

    Returns:
        [B, S], or a scalar of their sum; float32 (float64 for float64 indexer inputs).

    Raises:
        ValueError: wrong rank, shape, dtype or device, scale not finite, bounds outside of [0, T]
            or reversed (with `validate`), unknown reduction or backend.
        RuntimeError: at a double backward through any backend but "reference".
    """
    _check(q_index, k_index, weights)
    B, S, _, _ = q_index.shape
    T = k_index.shape[1]
    checks.tensor("q", q, "B S H D")
    checks.floating("q", q)
    checks.not_empty("q", q, H=2, D=3)
    H, D = q.shape[2:]
    checks.shape("q", q, B=B, S=S, H=H, D=D)
    if isinstance(kv, Tensor) and kv.dim() == 4:
        checks.shape("kv", kv, B=B, T=T, H=H, D=D)
    else:
        checks.tensor("kv", kv, "B T D")
        checks.shape("kv", kv, B=B, T=T, D=D)
    checks.dtype("kv", kv, (q.dtype,), ", the dtype of q")
    checks.scale(scale)
    checks.bounds(bounds, B, S, T, validate=validate)
    checks.same_device("q_index", q_index, q=q, kv=kv, bounds=bounds)
    checks.choice("reduction", reduction, ("none", "sum"))
    name = resolve(backend, q_index.device)
    if name == "npu" and reduction != "sum":
        want = "expected 'sum' on backend 'npu', whose operator sums over the tokens; "
        raise checks.bad(
            "reduction", repr(reduction), want + "backend='torch' has the loss of each"
        )
    q, kv = q.detach(), kv.detach()
    if name == "npu":
        return fused_dense_kl_loss(q_index, k_index, weights, q, kv, bounds, float(scale), name)
    if name == "reference":
        with no_autocast(q_index):
            loss = reference.dense_indexer_kl_loss(q_index, k_index, weights, q, kv, bounds, scale)
    else:
        no_forward_mode("dense_indexer_kl_loss", q_index, k_index, weights)
        loss = _dense_indexer_kl_loss(q_index, k_index, weights, q, kv, bounds, float(scale), name)
    return loss.sum() if reduction == "sum" else loss


@torch.library.custom_op("npu_dsa::dense_indexer_kl_loss", mutates_args=())
def _dense_indexer_kl_loss(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    q: Tensor,
    kv: Tensor,
    bounds: Tensor | None,
    scale: float,
    backend: str,
) -> Tensor:
    with no_autocast(q_index):
        return kernels(backend).dense_indexer_kl_loss(
            q_index, k_index, weights, q, kv, bounds, scale
        )


@_dense_indexer_kl_loss.register_fake
def _(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    q: Tensor,
    kv: Tensor,
    bounds: Tensor | None,
    scale: float,
    backend: str,
) -> Tensor:
    return q_index.new_empty(q_index.shape[:2], dtype=compute_dtype(q_index.dtype))


@torch.library.custom_op("npu_dsa::dense_indexer_kl_loss_backward", mutates_args=())
def _dense_indexer_kl_loss_backward(
    d_loss: Tensor,
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    q: Tensor,
    kv: Tensor,
    bounds: Tensor | None,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    with no_autocast(q_index):
        return kernels(backend).dense_indexer_kl_loss_backward(
            d_loss, q_index, k_index, weights, q, kv, bounds, scale
        )


@_dense_indexer_kl_loss_backward.register_fake
def _(
    d_loss: Tensor,
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    q: Tensor,
    kv: Tensor,
    bounds: Tensor | None,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        q_index.new_empty(q_index.shape),
        k_index.new_empty(k_index.shape),
        weights.new_empty(weights.shape),
    )


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.scale, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, d_loss: Tensor):
    dq, dk, dw = _dense_indexer_kl_loss_backward(d_loss, *ctx.saved_tensors, ctx.scale, ctx.backend)
    return dq, dk, dw, None, None, None, None, None


_dense_indexer_kl_loss.register_autograd(_backward, setup_context=_setup_context)
once_differentiable(_dense_indexer_kl_loss_backward, "dense_indexer_kl_loss")

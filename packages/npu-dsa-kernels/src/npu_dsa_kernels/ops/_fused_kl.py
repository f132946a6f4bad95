"""The indexer's loss where one operator computes target, loss and gradients together."""

import torch
from torch import Tensor

from npu_dsa_kernels.backends import kernels
from npu_dsa_kernels.backends.precision import no_autocast
from npu_dsa_kernels.ops._autograd import once_differentiable

# B batch, S queries, T keys, K selected keys


def fused_kl_loss(
    q: Tensor,
    kv: Tensor,
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    indices: Tensor,
    lse: Tensor,
    bounds: Tensor | None,
    scale: float,
    backend: str,
) -> Tensor:
    """`attention_target` and `indexer_kl_loss`, summed; differentiable in the indexer's tensors.

    The gradients come with the loss, in the forward, also where nothing asks for them; the backward
    scales them. `indices` and `lse` are those of the layer's own indexer and attention.
    """
    q, kv, lse = q.detach(), kv.detach(), lse.detach()
    return _fused_kl_loss(
        q, kv, q_index, k_index, weights, indices, lse, bounds, float(scale), backend
    )[0]


@torch.library.custom_op("npu_dsa::fused_kl_loss", mutates_args=())
def _fused_kl_loss(
    q: Tensor,
    kv: Tensor,
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    indices: Tensor,
    lse: Tensor,
    bounds: Tensor | None,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss [], and its gradients for q_index, k_index and weights."""
    with no_autocast(q):
        return kernels(backend).fused_kl_loss(
            q, kv, q_index, k_index, weights, indices, lse, bounds, scale
        )


@_fused_kl_loss.register_fake
def _(
    q: Tensor,
    kv: Tensor,
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    indices: Tensor,
    lse: Tensor,
    bounds: Tensor | None,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        lse.new_empty(()),
        q_index.new_empty(q_index.shape),
        k_index.new_empty(k_index.shape),
        weights.new_empty(weights.shape),
    )


def fused_dense_kl_loss(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    q: Tensor,
    k: Tensor,
    bounds: Tensor | None,
    scale: float,
    backend: str,
) -> Tensor:
    """`dense_indexer_kl_loss` summed, with its gradients in the forward as well."""
    return _fused_dense_kl_loss(q_index, k_index, weights, q, k, bounds, scale, backend)[0]


@torch.library.custom_op("npu_dsa::fused_dense_kl_loss", mutates_args=())
def _fused_dense_kl_loss(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    q: Tensor,
    k: Tensor,
    bounds: Tensor | None,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss [], and its gradients for q_index, k_index and weights."""
    with no_autocast(q):
        return kernels(backend).fused_dense_kl_loss(q_index, k_index, weights, q, k, bounds, scale)


@_fused_dense_kl_loss.register_fake
def _(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    q: Tensor,
    k: Tensor,
    bounds: Tensor | None,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        q.new_empty((), dtype=torch.float32),
        q_index.new_empty(q_index.shape),
        k_index.new_empty(k_index.shape),
        weights.new_empty(weights.shape),
    )


@torch.library.custom_op("npu_dsa::fused_kl_loss_backward", mutates_args=())
def _fused_kl_loss_backward(
    d_loss: Tensor, dq: Tensor, dk: Tensor, dw: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return dq * d_loss, dk * d_loss, dw * d_loss


@_fused_kl_loss_backward.register_fake
def _(d_loss: Tensor, dq: Tensor, dk: Tensor, dw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return dq.new_empty(dq.shape), dk.new_empty(dk.shape), dw.new_empty(dw.shape)


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output[1:])


def _backward(ctx, d_loss: Tensor, *d_gradients: Tensor):
    dq, dk, dw = _fused_kl_loss_backward(d_loss, *ctx.saved_tensors)
    return None, None, dq, dk, dw, None, None, None, None, None


def _dense_backward(ctx, d_loss: Tensor, *d_gradients: Tensor):
    return *_fused_kl_loss_backward(d_loss, *ctx.saved_tensors), None, None, None, None, None


_fused_kl_loss.register_autograd(_backward, setup_context=_setup_context)
_fused_dense_kl_loss.register_autograd(_dense_backward, setup_context=_setup_context)
once_differentiable(_fused_kl_loss_backward, "fused_kl_loss")

"""The indexer's loss: KL divergence from the attention's distribution to the indexer's."""

import torch
from torch import Tensor

from npu_dsa_kernels import checks
from npu_dsa_kernels.backends import kernels, reference, resolve
from npu_dsa_kernels.backends.precision import compute_dtype, no_autocast
from npu_dsa_kernels.ops._autograd import no_forward_mode, once_differentiable
from npu_dsa_kernels.ops.lightning_indexer import _check

# B batch, S queries, T keys, H indexer heads, D indexer head dim, K selected keys


def indexer_kl_loss(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    indices: Tensor,
    target: Tensor,
    *,
    scores: Tensor | None = None,
    backend: str | None = None,
    validate: bool = False,
) -> Tensor:
    """KL divergence of each query over its selected keys; differentiable in the first three.

    With T the selected keys of query t, ``p = target[t] / sum(target[t])`` and ``y = softmax over s
    in T of I[t, s]`` (I as in `lightning_indexer`): ``loss[t] = sum_s p (log p - log y)``, with
    0 log 0 = 0 (DeepSeek-V3.2, section 2.1.1, eq. 4). The logarithm is a log-softmax, without an
    epsilon, so the gradient is ``dI[t, s] = y[t, s] - p[t, s]`` whatever the scores' spread.

    Rows without keys, or whose target is zero on all of them, contribute 0 and zero gradients.
    Empty slots are as in `sparse_attention`; their target is not read.

    Args:
        q_index: [B, S, H, D], float64, float32, bfloat16 or float16.
        k_index: [B, T, D], of the same dtype.
        weights: [B, S, H], of the same dtype or float32.
        indices: int32 [B, S, K].
        target: floating [B, S, K], not negative, any normalisation (see `attention_target`).
        scores: [B, S, K], as `lightning_indexer` returned them with `indices`. The loss is then
            taken from them, and only its gradient computes scores; it saves a third of the
            products. "reference" computes them all the same. No gradient.
        backend: see `backends`.
        validate: check the values of `indices` and `target` too (synchronises with the device).

    Returns:
        [B, S], float32 (float64 for float64 inputs). No mean is taken.

    Raises:
        ValueError: wrong rank, shape, dtype or device, bad values (with `validate`), unknown
            backend.
        RuntimeError: at a double backward through the "torch" backend.
    """
    _check(q_index, k_index, weights)
    B, S, _, _ = q_index.shape
    checks.indices(indices, B, S, k_index.shape[1], validate=validate)
    checks.tensor("target", target, "B S K")
    checks.floating("target", target)
    checks.shape("target", target, B=B, S=S, K=indices.shape[2])
    checks.target(target, validate=validate)
    if scores is not None:
        checks.tensor("scores", scores, "B S K")
        wide = compute_dtype(q_index.dtype)
        checks.dtype("scores", scores, (wide,), ", as lightning_indexer returns them")
        checks.shape("scores", scores, B=B, S=S, K=indices.shape[2])
        scores = scores.detach()
    checks.same_device("q_index", q_index, indices=indices, target=target, scores=scores)
    name = resolve(backend, q_index.device)
    target = target.detach()
    if name == "reference":
        with no_autocast(q_index):
            return reference.indexer_kl_loss(q_index, k_index, weights, indices, target)
    no_forward_mode("indexer_kl_loss", q_index, k_index, weights)
    return _indexer_kl_loss(q_index, k_index, weights, indices, target, scores, name)


@torch.library.custom_op("npu_dsa::indexer_kl_loss", mutates_args=())
def _indexer_kl_loss(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    indices: Tensor,
    target: Tensor,
    scores: Tensor | None,
    backend: str,
) -> Tensor:
    with no_autocast(q_index):
        return kernels(backend).indexer_kl_loss(q_index, k_index, weights, indices, target, scores)


@_indexer_kl_loss.register_fake
def _(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    indices: Tensor,
    target: Tensor,
    scores: Tensor | None,
    backend: str,
) -> Tensor:
    return q_index.new_empty(q_index.shape[:2], dtype=compute_dtype(q_index.dtype))


@torch.library.custom_op("npu_dsa::indexer_kl_loss_backward", mutates_args=())
def _indexer_kl_loss_backward(
    d_loss: Tensor,
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    indices: Tensor,
    target: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    with no_autocast(q_index):
        return kernels(backend).indexer_kl_loss_backward(
            d_loss, q_index, k_index, weights, indices, target
        )


@_indexer_kl_loss_backward.register_fake
def _(
    d_loss: Tensor,
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    indices: Tensor,
    target: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        q_index.new_empty(q_index.shape),
        k_index.new_empty(k_index.shape),
        weights.new_empty(weights.shape),
    )


def _setup_context(ctx, inputs, output) -> None:
    *tensors, _, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, d_loss: Tensor):
    dq, dk, dw = _indexer_kl_loss_backward(d_loss, *ctx.saved_tensors, ctx.backend)
    return dq, dk, dw, None, None, None, None


_indexer_kl_loss.register_autograd(_backward, setup_context=_setup_context)
once_differentiable(_indexer_kl_loss_backward, "indexer_kl_loss")

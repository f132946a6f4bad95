"""The lightning indexer: index scores of all visible keys, and the best K of them."""

import torch
from torch import Tensor

from npu_dsa_kernels import checks
from npu_dsa_kernels.backends import kernels, reference, resolve
from npu_dsa_kernels.backends.precision import compute_dtype, no_autocast

# B batch, S queries, T keys, H indexer heads, D indexer head dim, K top-k


def lightning_indexer(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    *,
    topk: int,
    bounds: Tensor | None = None,
    backend: str | None = None,
    validate: bool = False,
) -> tuple[Tensor, Tensor]:
    """The `topk` visible keys of each query with the highest index score.

    ``I[t, s] = sum_h weights[t, h] * relu(q_index[t, h] . k_index[s])`` (DeepSeek-V3.2, section
    2.1, eq. 1), over the keys ``s`` inside the query's bounds.

    The result is a function of the inputs alone: best score first, equal scores by the lower key.
    NaN counts as the best score, so that it shows in the loss instead of vanishing. Nothing here is
    differentiable, `scores` included: `indexer_kl_loss` computes the scores of the selected keys
    again, and trains the indexer through them.

    Args:
        q_index: [B, S, H, D], float64, float32, bfloat16 or float16.
        k_index: [B, T, D], of the same dtype; one head shared by all query heads.
        weights: [B, S, H], of the same dtype or float32.
        topk: K >= 1; may exceed T.
        bounds: int32 [B, S, 2], visible keys ``[lo, hi)`` of each query (see `causal_bounds`).
            None: causal, with T == S. The range is taken as far as it lies in [0, T).
        backend: see `backends`.
        validate: check the values of `bounds` too (synchronises with the device).

    Returns:
        indices: int32 [B, S, K], -1 where fewer than K keys are visible.
        scores: [B, S, K], float32 (float64 for float64 inputs), -inf where the index is -1.

    Raises:
        ValueError: wrong rank, shape, dtype or device, ``topk < 1``, bounds outside of [0, T] or
            reversed (with `validate`), unknown backend.
    """
    _check(q_index, k_index, weights)
    B, S, _, _ = q_index.shape
    checks.top_k(topk, B, S)
    checks.bounds(bounds, B, S, k_index.shape[1], validate=validate)
    checks.same_device("q_index", q_index, bounds=bounds)
    name = resolve(backend, q_index.device)
    q_index, k_index, weights = q_index.detach(), k_index.detach(), weights.detach()
    if name == "reference":
        with no_autocast(q_index):
            return reference.lightning_indexer(q_index, k_index, weights, bounds, topk)
    return _lightning_indexer(q_index, k_index, weights, bounds, topk, name)


def _check(q_index: Tensor, k_index: Tensor, weights: Tensor) -> None:
    """The checks of an indexer's three tensors, shared with the KL loss."""
    checks.tensor("q_index", q_index, "B S H D")
    checks.floating("q_index", q_index)
    checks.not_empty("q_index", q_index, H=2, D=3)
    B, S, H, D = q_index.shape
    checks.tensor("k_index", k_index, "B T D")
    checks.dtype("k_index", k_index, (q_index.dtype,), ", the dtype of q_index")
    checks.shape("k_index", k_index, B=B, T=k_index.shape[1], D=D)
    checks.key_count("k_index", k_index.shape[1])
    checks.tensor("weights", weights, "B S H")
    wide = compute_dtype(q_index.dtype)
    checks.dtype("weights", weights, (q_index.dtype, wide), ", to go with q_index")
    checks.shape("weights", weights, B=B, S=S, H=H)
    checks.same_device("q_index", q_index, k_index=k_index, weights=weights)


@torch.library.custom_op("npu_dsa::lightning_indexer", mutates_args=())
def _lightning_indexer(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    bounds: Tensor | None,
    topk: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    with no_autocast(q_index):
        return kernels(backend).lightning_indexer(q_index, k_index, weights, bounds, topk)


@_lightning_indexer.register_fake
def _(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    bounds: Tensor | None,
    topk: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    B, S, _, _ = q_index.shape
    indices = q_index.new_empty(B, S, topk, dtype=torch.int32)
    return indices, q_index.new_empty(B, S, topk, dtype=compute_dtype(q_index.dtype))

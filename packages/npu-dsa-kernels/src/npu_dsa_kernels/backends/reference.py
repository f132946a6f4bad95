"""The "reference" backend: formulas as written, differentiated by autograd, fp64-capable.

It holds all S x T scores and all S x K x D gathered rows at once: for tests and small sizes.
"""

import torch
from torch import Tensor

from npu_dsa_kernels.backends.precision import compute_dtype

# B batch, S queries, T keys, H heads, D head dim, K selected keys (indexer heads and dim likewise)


def lightning_indexer(
    q_BSHD: Tensor, k_BTD: Tensor, w_BSH: Tensor, bounds_BS2: Tensor | None, topk: int
) -> tuple[Tensor, Tensor]:
    B, S, T = q_BSHD.shape[0], q_BSHD.shape[1], k_BTD.shape[1]
    dtype = compute_dtype(q_BSHD.dtype)
    dots_BSHT = torch.einsum("bshd,btd->bsht", q_BSHD.to(dtype), k_BTD.to(dtype))
    scores_BST = (w_BSH.to(dtype).unsqueeze(-1) * dots_BSHT.relu()).sum(2)

    key_T = torch.arange(T, device=q_BSHD.device)
    if bounds_BS2 is None:
        visible_BST = (key_T <= torch.arange(S, device=q_BSHD.device)[:, None]).expand(B, S, T)
    else:
        visible_BST = (key_T >= bounds_BS2[..., :1]) & (key_T < bounds_BS2[..., 1:])
    return sorted_topk(scores_BST, visible_BST, topk)


def sorted_topk(scores: Tensor, visible: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Exact top-k over the last dimension: best first, ties to the lower position, NaN first.

    Two stable sorts, by score and then by visibility, so that a visible score of -inf still
    comes before a hidden key.
    """
    by_score = scores.sort(dim=-1, descending=True, stable=True).indices
    seen = visible.gather(-1, by_score)
    order = seen.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices
    best = by_score.gather(-1, order)[..., :topk]
    empty = ~visible.gather(-1, best)
    indices = best.to(torch.int32).masked_fill(empty, -1)
    top_scores = scores.gather(-1, best).masked_fill(empty, float("-inf"))
    missing = (0, topk - best.shape[-1])
    return (
        torch.nn.functional.pad(indices, missing, value=-1),
        torch.nn.functional.pad(top_scores, missing, value=float("-inf")),
    )


def gather_rows(x_BTD: Tensor, indices_BSK: Tensor) -> tuple[Tensor, Tensor]:
    """Rows x[b, indices[b, s, k]] as [B, S, K, D], zero where empty, and the validity [B, S, K]."""
    B, T = x_BTD.shape[:2]
    valid_BSK = (indices_BSK >= 0) & (indices_BSK < T)
    # A row of zeros at position T stands for every empty slot.
    x_BTD = torch.cat([x_BTD, x_BTD.new_zeros(B, 1, x_BTD.shape[2])], dim=1)
    slot_BSK = torch.where(valid_BSK, indices_BSK, T).long()
    batch_B11 = torch.arange(B, device=x_BTD.device)[:, None, None]
    return x_BTD[batch_B11, slot_BSK], valid_BSK


def sparse_attention(
    q_BSHD: Tensor, kv_BTD: Tensor, indices_BSK: Tensor, scale: float, v_dim: int
) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(q_BSHD.dtype)
    kv_BSKD, valid_BSK = gather_rows(kv_BTD.to(dtype), indices_BSK)
    logits_BSHK = scale * torch.einsum("bshd,bskd->bshk", q_BSHD.to(dtype), kv_BSKD)
    logits_BSHK = logits_BSHK.masked_fill(~valid_BSK.unsqueeze(2), float("-inf"))

    # Rows without keys go through the softmax as zeros, so that no NaN reaches their gradients.
    empty_BS11 = ~valid_BSK.any(-1)[..., None, None]
    logits_BSHK = logits_BSHK.masked_fill(empty_BS11, 0.0)
    p_BSHK = logits_BSHK.softmax(-1).masked_fill(empty_BS11, 0.0)
    lse_BSH = logits_BSHK.logsumexp(-1).masked_fill(empty_BS11[..., 0], float("-inf"))
    out_BSHV = torch.einsum("bshk,bskv->bshv", p_BSHK, kv_BSKD[..., :v_dim])
    return out_BSHV.to(q_BSHD.dtype), lse_BSH


def attention_target(
    q_BSHD: Tensor, kv_BTD: Tensor, indices_BSK: Tensor, lse_BSH: Tensor, scale: float
) -> Tensor:
    dtype = compute_dtype(q_BSHD.dtype)
    kv_BSKD, valid_BSK = gather_rows(kv_BTD.to(dtype), indices_BSK)
    logits_BSHK = scale * torch.einsum("bshd,bskd->bshk", q_BSHD.to(dtype), kv_BSKD)
    p_BSHK = (logits_BSHK - lse_BSH.to(dtype).unsqueeze(-1)).exp()
    return p_BSHK.masked_fill(~valid_BSK.unsqueeze(2), 0.0).sum(2)


def indexer_kl_loss(
    q_BSHD: Tensor, k_BTD: Tensor, w_BSH: Tensor, indices_BSK: Tensor, target_BSK: Tensor
) -> Tensor:
    dtype = compute_dtype(q_BSHD.dtype)
    k_BSKD, valid_BSK = gather_rows(k_BTD.to(dtype), indices_BSK)
    dots_BSHK = torch.einsum("bshd,bskd->bshk", q_BSHD.to(dtype), k_BSKD)
    scores_BSK = (w_BSH.to(dtype).unsqueeze(-1) * dots_BSHK.relu()).sum(2)

    target_BSK = target_BSK.detach().to(dtype).masked_fill(~valid_BSK, 0.0)
    total_BS1 = target_BSK.sum(-1, keepdim=True)
    dead_BS1 = total_BS1 == 0  # no keys, or no attention mass on them
    p_BSK = target_BSK / total_BS1.masked_fill(dead_BS1, 1.0)

    scores_BSK = scores_BSK.masked_fill(~valid_BSK, float("-inf")).masked_fill(dead_BS1, 0.0)
    log_y_BSK = scores_BSK.log_softmax(-1)
    nothing_BSK = p_BSK == 0  # 0 log 0 = 0
    log_ratio_BSK = p_BSK.masked_fill(nothing_BSK, 1.0).log() - log_y_BSK
    return (p_BSK * log_ratio_BSK.masked_fill(nothing_BSK, 0.0)).sum(-1)


def hadamard(x: Tensor, scale: float) -> Tensor:
    """Butterflies: log2(D) passes of sums and differences."""
    D = x.shape[-1]
    y = x.to(compute_dtype(x.dtype))
    half = 1
    while half < D:
        pairs = y.reshape(*x.shape[:-1], D // (2 * half), 2, half)
        a, b = pairs.unbind(-2)
        y = torch.stack([a + b, a - b], dim=-2).reshape(x.shape)
        half *= 2
    return (y * scale).to(x.dtype)

"""The "reference" backend: formulas as written, differentiated by autograd, fp64-capable.

It holds all S x T scores and all S x K x D gathered rows at once: for tests and small sizes.
"""

import torch
from torch import Tensor

from npu_dsa_kernels.backends.precision import compute_dtype

# B batch, S queries, T keys, H heads, D head dim, V value dim,
# K selected keys (indexer heads and dim likewise)
# N rows or tokens, G groups, I and O input and output features, E experts, k experts of a token,
# M rows of the permuted tokens, S = N * k slots


def lightning_indexer(
    q_BSHD: Tensor, k_BTD: Tensor, w_BSH: Tensor, bounds_BS2: Tensor | None, topk: int
) -> tuple[Tensor, Tensor]:
    B, S, T = q_BSHD.shape[0], q_BSHD.shape[1], k_BTD.shape[1]
    dtype = compute_dtype(q_BSHD.dtype)
    dots_BSHT = torch.einsum("bshd,btd->bsht", q_BSHD.to(dtype), k_BTD.to(dtype))
    scores_BST = (w_BSH.to(dtype).unsqueeze(-1) * dots_BSHT.relu()).sum(2)

    visible_BST = _visible(bounds_BS2, B, S, T, q_BSHD.device)
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


def dense_attention(
    q_BSHD: Tensor, k_BTHD: Tensor, v_BTHV: Tensor, bounds_BS2: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    B, S, T = q_BSHD.shape[0], q_BSHD.shape[1], k_BTHD.shape[1]
    out_dtype, dtype = q_BSHD.dtype, compute_dtype(q_BSHD.dtype)
    visible_BST = _visible(bounds_BS2, B, S, T, q_BSHD.device)
    # Queries and keys that take no part may hold anything, NaN included.
    empty_BS11 = ~visible_BST.any(2)[..., None, None]
    unseen_BT11 = ~visible_BST.any(1)[..., None, None]
    q_BSHD = q_BSHD.to(dtype).masked_fill(empty_BS11, 0.0)
    k_BTHD = k_BTHD.to(dtype).masked_fill(unseen_BT11, 0.0)
    v_BTHV = v_BTHV.to(dtype).masked_fill(unseen_BT11, 0.0)
    logits_BSHT = scale * torch.einsum("bshd,bthd->bsht", q_BSHD, k_BTHD)
    logits_BSHT = logits_BSHT.masked_fill(~visible_BST.unsqueeze(2), float("-inf"))
    logits_BSHT = logits_BSHT.masked_fill(empty_BS11, 0.0)
    lse_BSH = logits_BSHT.logsumexp(-1).masked_fill(empty_BS11[..., 0], float("-inf"))
    out_BSHV = torch.einsum("bsht,bthv->bshv", logits_BSHT.softmax(-1), v_BTHV)
    return out_BSHV.to(out_dtype).masked_fill(empty_BS11, 0.0), lse_BSH


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
    outside_BSK = (indices_BSK < 0) | (indices_BSK >= k_BTD.shape[1])
    target_BSK = target_BSK.detach().to(dtype).masked_fill(outside_BSK, 0.0)
    total_BS1 = target_BSK.sum(-1, keepdim=True)
    dead_BS1 = total_BS1 == 0  # no keys, or no attention mass on them
    p_BSK = target_BSK / total_BS1.masked_fill(dead_BS1, 1.0)

    # Rows that take no part may hold anything, NaN included: their gradient would be 0 * NaN.
    q_BSHD = q_BSHD.to(dtype).masked_fill(dead_BS1.unsqueeze(-1), 0.0)
    w_BSH = w_BSH.to(dtype).masked_fill(dead_BS1, 0.0)
    indices_BSK = indices_BSK.masked_fill(dead_BS1, -1)
    k_BSKD, valid_BSK = gather_rows(k_BTD.to(dtype), indices_BSK)
    dots_BSHK = torch.einsum("bshd,bskd->bshk", q_BSHD, k_BSKD)
    scores_BSK = (w_BSH.unsqueeze(-1) * dots_BSHK.relu()).sum(2)

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


def dense_indexer_kl_loss(
    q_index_BSHD: Tensor,
    k_index_BTD: Tensor,
    w_BSH: Tensor,
    q_BSHD: Tensor,
    kv_BTD: Tensor,
    bounds_BS2: Tensor | None,
    scale: float,
) -> Tensor:
    """The sparse loss with every visible key selected."""
    B, S, T = q_BSHD.shape[0], q_BSHD.shape[1], kv_BTD.shape[1]
    visible_BST = _visible(bounds_BS2, B, S, T, q_BSHD.device)
    key_T = torch.arange(T, device=q_BSHD.device, dtype=torch.int32)
    indices_BST = torch.where(visible_BST, key_T, -1)
    if kv_BTD.dim() == 4:  # keys of each head's own
        dtype = compute_dtype(q_BSHD.dtype)
        logits_BSHT = scale * torch.einsum("bshd,bthd->bsht", q_BSHD.to(dtype), kv_BTD.to(dtype))
        hidden_BS1T = ~visible_BST.unsqueeze(2)
        p_BSHT = logits_BSHT.masked_fill(hidden_BS1T, float("-inf")).softmax(-1)
        target_BST = p_BSHT.masked_fill(hidden_BS1T, 0.0).sum(2)
    else:
        _, lse_BSH = sparse_attention(q_BSHD, kv_BTD, indices_BST, scale, v_dim=1)
        target_BST = attention_target(q_BSHD, kv_BTD, indices_BST, lse_BSH, scale)
    return indexer_kl_loss(q_index_BSHD, k_index_BTD, w_BSH, indices_BST, target_BST)


def _visible(bounds_BS2: Tensor | None, B: int, S: int, T: int, device: torch.device) -> Tensor:
    key_T = torch.arange(T, device=device)
    if bounds_BS2 is None:
        return (key_T <= torch.arange(S, device=device)[:, None]).expand(B, S, T)
    return (key_T >= bounds_BS2[..., :1]) & (key_T < bounds_BS2[..., 1:])


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x.to(compute_dtype(x.dtype))
    y = y / (y.square().mean(-1, keepdim=True) + eps).sqrt()
    return (y if weight is None else y * weight).to(x.dtype)


def rotary_mul(x_BSHD: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    dtype = compute_dtype(x_BSHD.dtype)
    cos, sin = cos.to(dtype).unsqueeze(-2), sin.to(dtype).unsqueeze(-2)
    y_BSHD = x_BSHD.to(dtype)
    if interleaved:
        pairs = y_BSHD.unflatten(-1, (-1, 2))
        rotated_BSHD = torch.stack([-pairs[..., 1], pairs[..., 0]], -1).flatten(-2)
    else:
        first, second = y_BSHD.chunk(2, -1)
        rotated_BSHD = torch.cat([-second, first], -1)
    return (y_BSHD * cos + rotated_BSHD * sin).to(x_BSHD.dtype)


def swiglu(x: Tensor, dim: int) -> Tensor:
    a, b = x.to(compute_dtype(x.dtype)).chunk(2, dim)
    return (a * a.sigmoid() * b).to(x.dtype)


def grouped_matmul(x_NI: Tensor, w_GIO: Tensor, ends_G: Tensor) -> Tensor:
    """Every row with a weight of its own: the group is the number of ends at or before it."""
    dtype, G = compute_dtype(x_NI.dtype), w_GIO.shape[0]
    row_N = torch.arange(x_NI.shape[0], device=x_NI.device)
    group_N = (row_N[:, None] >= ends_G).sum(-1)
    beyond_N1 = (group_N == G)[:, None]
    w_NIO = w_GIO.to(dtype)[group_N.clamp(max=G - 1)]
    x_NI = x_NI.to(dtype).masked_fill(beyond_N1, 0.0)
    y_NO = torch.einsum("ni,nio->no", x_NI, w_NIO)
    return y_NO.masked_fill(beyond_N1, 0.0).to(w_GIO.dtype)


def moe_permute(
    tokens_ND: Tensor, experts_Nk: Tensor, probs_Nk: Tensor | None, E: int, M: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A slot's row: the slots of smaller experts, and those before it of its own."""
    N, k = experts_Nk.shape
    expert_E = torch.arange(E, device=experts_Nk.device)
    mine_SE = experts_Nk.reshape(-1, 1) == expert_E
    counts_E = mine_SE.sum(0)
    starts_E = counts_E.cumsum(0) - counts_E
    row_SE = starts_E + mine_SE.cumsum(0) - 1
    row_S = row_SE.masked_fill(~mine_SE, 0).sum(-1)
    row_S = torch.where(mine_SE.any(-1) & (row_S < M), row_S, M)  # row M takes what is dropped

    def permuted(x: Tensor) -> Tensor:
        return x.new_zeros(M + 1, *x.shape[1:]).index_put((row_S,), x)[:M]

    return (
        permuted(tokens_ND.repeat_interleave(k, 0)),
        tokens_ND.new_empty(0) if probs_Nk is None else permuted(probs_Nk.reshape(-1)),
        torch.where(row_S == M, -1, row_S).int().view(N, k),
        (starts_E + counts_E).clamp(max=M) - starts_E.clamp(max=M),
    )


def moe_unpermute(x_MD: Tensor, rows_Nk: Tensor, probs_Nk: Tensor | None) -> Tensor:
    dtype = compute_dtype(x_MD.dtype)
    x_1MD = x_MD.to(dtype).unsqueeze(0)
    parts_1NkD, valid_1Nk = gather_rows(x_1MD, rows_Nk.unsqueeze(0))
    parts_NkD, valid_Nk = parts_1NkD[0], valid_1Nk[0]
    if probs_Nk is not None:
        probs_Nk = probs_Nk.to(dtype).masked_fill(~valid_Nk, 0.0)
        parts_NkD = parts_NkD * probs_Nk.unsqueeze(-1)
    return parts_NkD.sum(1).to(x_MD.dtype)

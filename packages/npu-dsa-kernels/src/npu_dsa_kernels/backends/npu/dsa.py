"""The DSA operators on torch_npu's fused ones.

What the fused operators do not say, or not in our terms, is settled here: rows without keys, the
order of the selected keys, one statistic (log-sum-exp) for their two (maximum and sum), values that
are columns of the keys, and a mask for each query where they know sequences.
"""

from typing import NoReturn

import torch
from torch import Tensor

from npu_dsa_kernels import checks
from npu_dsa_kernels.backends.npu import limits, sequences

# B batch, S queries, T keys, H heads, D key dim, L latent (value) dim, R rope dim, K selected keys
# W slots of the fused attention (K at most), n queries and m keys of the sequences
# N and 1: the fused operators' key head, of which there is one

_SCORES_CAUSAL = 3  # the last query sees all keys of its sequence
_ONLY_INDICES = 0  # no mask besides the indices
_ABSORBED = 2  # latent and rope parts side by side, values are the latent keys
_FAR = torch.finfo(torch.float32).max / 2


def lightning_indexer(
    q_BSHD: Tensor, k_BTD: Tensor, w_BSH: Tensor, bounds_BS2: Tensor | None, topk: int
) -> tuple[Tensor, Tensor]:
    """Top-k by `npu_lightning_indexer`, put into the order of the contract.

    The operator rounds the scores to the dtype of the queries, so "best first, ties to the lower
    key" holds for the rounded scores. Which of several keys it keeps whose scores tie for the last
    place, and what it does with NaN, is its own affair.
    """
    limits.indexer(q_BSHD, k_BTD, w_BSH)
    (B, S), T = q_BSHD.shape[:2], k_BTD.shape[1]
    limits.topk(topk, B, S)
    indices_BSK = q_BSHD.new_full((B, S, topk), -1, dtype=torch.int32)
    scores_BSK = q_BSHD.new_full((B, S, topk), float("-inf"), dtype=torch.float32)
    if B * S * T == 0:
        return indices_BSK, scores_BSK
    if bounds_BS2 is None:
        index_BS1K, score_BS1K = torch.ops.npu.npu_lightning_indexer(
            q_BSHD.contiguous(),
            k_BTD.unsqueeze(2).contiguous(),
            w_BSH.contiguous(),
            layout_query="BSND",
            layout_key="BSND",
            sparse_count=topk,
            sparse_mode=_SCORES_CAUSAL,
            return_value=True,
        )
        visible_S1 = torch.arange(1, S + 1, dtype=torch.int32, device=q_BSHD.device).unsqueeze(1)
        return _best_first(index_BS1K.squeeze(2), score_BS1K.squeeze(2), visible_S1)

    plan = sequences.plan(bounds_BS2, T)
    q_nHD, w_nH = plan.queries(q_BSHD), plan.queries(w_BSH)
    k_m1D = plan.keys(k_BTD).unsqueeze(1)
    indices, scores = [], []
    for part in plan.parts:
        index_n1K, score_n1K = torch.ops.npu.npu_lightning_indexer(
            q_nHD[part.queries],
            k_m1D[part.keys],
            w_nH[part.queries],
            actual_seq_lengths_query=part.query_ends_R,
            actual_seq_lengths_key=part.key_ends_R,
            layout_query="TND",
            layout_key="TND",
            sparse_count=topk,
            sparse_mode=_SCORES_CAUSAL,
            return_value=True,
        )
        indices.append(index_n1K.squeeze(1))
        scores.append(score_n1K.squeeze(1))
    if not indices:
        return indices_BSK, scores_BSK
    index_nK, score_nK = _best_first(torch.cat(indices), torch.cat(scores), plan.visible_n1)
    index_nK = torch.where(index_nK < 0, -1, index_nK + plan.first_key_n1)
    return (
        plan.put_queries(index_nK, q_BSHD, -1),
        plan.put_queries(score_nK, q_BSHD, float("-inf")),
    )


def _best_first(index: Tensor, score: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Sort rows by falling score, then by rising key; empty slots come last."""
    empty = (index < 0) | (index >= visible)
    key, order = index.masked_fill(empty, checks.INT32_MAX).sort(dim=-1)
    score = score.float().masked_fill(empty, float("-inf")).gather(-1, order)
    score, order = score.sort(dim=-1, descending=True, stable=True)
    key = key.gather(-1, order)
    return key.masked_fill(key == checks.INT32_MAX, -1), score


def sparse_attention(
    q_BSHD: Tensor, kv_BTD: Tensor, indices_BSK: Tensor, scale: float, v_dim: int
) -> tuple[Tensor, Tensor]:
    limits.attention(q_BSHD, kv_BTD, v_dim, limits.current().heads)
    limits.slots(indices_BSK)
    B, S, H, _ = q_BSHD.shape
    T = kv_BTD.shape[1]
    if B * S * T == 0:
        lse_BSH = q_BSHD.new_full((B, S, H), float("-inf"), dtype=torch.float32)
        return q_BSHD.new_zeros(B, S, H, v_dim), lse_BSH
    slots_BSW, alone_BS1 = _attended_slots(indices_BSK, T)
    q_BSHL, q_BSHR = _split(q_BSHD, v_dim)
    k_BT1L, k_BT1R = _split(kv_BTD.unsqueeze(2), v_dim)
    out_BSHL, peak_BNSH, total_BNSH = torch.ops.npu.npu_sparse_flash_attention(
        q_BSHL,
        k_BT1L,
        k_BT1L,
        slots_BSW.unsqueeze(2),
        scale,
        query_rope=q_BSHR,
        key_rope=k_BT1R,
        sparse_block_size=1,
        layout_query="BSND",
        layout_kv="BSND",
        sparse_mode=_ONLY_INDICES,
        attention_mode=_ABSORBED,
        return_softmax_lse=True,
    )
    lse_BSH = (peak_BNSH + total_BNSH.log()).squeeze(1)
    return (
        out_BSHL.masked_fill(alone_BS1.unsqueeze(-1), 0.0),
        lse_BSH.masked_fill(alone_BS1, float("-inf")),
    )


def sparse_attention_backward(
    d_out_BSHL: Tensor,
    d_lse_BSH: Tensor | None,
    q_BSHD: Tensor,
    kv_BTD: Tensor,
    indices_BSK: Tensor,
    out_BSHL: Tensor,
    lse_BSH: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    if d_lse_BSH is not None:
        raise RuntimeError(
            "sparse_attention: torch_npu's operator has no gradient of lse; detach lse where no "
            "gradient is wanted, or use backend='torch' on the same device"
        )
    L, T = out_BSHL.shape[3], kv_BTD.shape[1]
    if q_BSHD.numel() * T == 0:
        return torch.zeros_like(q_BSHD), torch.zeros_like(kv_BTD)
    slots_BSW, alone_BS1 = _attended_slots(indices_BSK, T)
    q_BSHL, q_BSHR = _split(q_BSHD, L)
    k_BT1L, k_BT1R = _split(kv_BTD.unsqueeze(2), L)
    peak_BNSH, total_BNSH = _statistics(lse_BSH.masked_fill(alone_BS1, _FAR))
    dq_BSHL, dk_BT1L, dv_BT1L, dq_BSHR, dk_BT1R = torch.ops.npu.npu_sparse_flash_attention_grad(
        q_BSHL,
        k_BT1L,
        k_BT1L,
        slots_BSW.unsqueeze(2),
        d_out_BSHL.masked_fill(alone_BS1.unsqueeze(-1), 0.0).contiguous(),
        out_BSHL.contiguous(),
        peak_BNSH,
        total_BNSH,
        scale,
        1,
        query_rope=q_BSHR,
        key_rope=k_BT1R,
        layout="BSND",
        sparse_mode=_ONLY_INDICES,
        attention_mode=_ABSORBED,
    )
    dkv_BT1D = torch.cat([dk_BT1L + dv_BT1L, dk_BT1R], dim=-1)
    return torch.cat([dq_BSHL, dq_BSHR], dim=-1), dkv_BT1D.squeeze(2)


def fused_kl_loss(
    q_BSHD: Tensor,
    kv_BTD: Tensor,
    q_index_BSHD: Tensor,
    k_index_BTD: Tensor,
    w_BSH: Tensor,
    indices_BSK: Tensor,
    lse_BSH: Tensor,
    bounds_BS2: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss summed over all tokens, and its gradients, in one operator.

    `indices` are those of `lightning_indexer` with the same bounds, `lse` of `sparse_attention`.

    Returns:
        loss [], and the gradients of q_index, k_index and weights.
    """
    limits.attention(q_BSHD, kv_BTD, None, limits.current().loss_heads)
    limits.indexer(q_index_BSHD, k_index_BTD, w_BSH)
    limits.same_dtype("q_index", q_index_BSHD, "q", q_BSHD)
    limits.slots(indices_BSK)
    L, T = limits.current().latent, kv_BTD.shape[1]
    nothing = (
        q_BSHD.new_zeros((), dtype=torch.float32),
        torch.zeros_like(q_index_BSHD),
        torch.zeros_like(k_index_BTD),
        torch.zeros_like(w_BSH),
    )
    if q_BSHD.numel() * T == 0:
        return nothing
    loss = torch.ops.npu.npu_sparse_lightning_indexer_grad_kl_loss
    if bounds_BS2 is None:
        q_BSHL, q_BSHR = _split(q_BSHD, L)
        k_BT1L, k_BT1R = _split(kv_BTD.unsqueeze(2), L)
        dq, dk, dw, loss_1 = loss(
            q_BSHL,
            k_BT1L,
            q_index_BSHD.contiguous(),
            k_index_BTD.unsqueeze(2).contiguous(),
            w_BSH.contiguous(),
            _slots(indices_BSK, T).unsqueeze(2),
            *_statistics(lse_BSH),
            scale,
            query_rope=q_BSHR,
            key_rope=k_BT1R,
            layout="BSND",
            sparse_mode=_SCORES_CAUSAL,
        )
        return loss_1.squeeze(0), dq, dk.squeeze(2), dw

    plan = sequences.plan(bounds_BS2, T)
    if not plan.parts:
        return nothing
    q_nHL, q_nHR = _split(plan.queries(q_BSHD), L)
    k_m1L, k_m1R = _split(plan.keys(kv_BTD).unsqueeze(1), L)
    q_index_nHD, w_nH = plan.queries(q_index_BSHD), plan.queries(w_BSH)
    k_index_m1D = plan.keys(k_index_BTD).unsqueeze(1)
    index_nK = plan.queries(indices_BSK)
    within_nK = torch.where(index_nK < 0, -1, index_nK - plan.first_key_n1)
    slots_n1W = _slots(within_nK, T).unsqueeze(1)
    lse_nH = plan.queries(lse_BSH)
    parts = []
    for part in plan.parts:
        peak_1nH, total_1nH = _statistics(lse_nH[part.queries], dim=0)
        parts.append(
            loss(
                q_nHL[part.queries],
                k_m1L[part.keys],
                q_index_nHD[part.queries],
                k_index_m1D[part.keys],
                w_nH[part.queries],
                slots_n1W[part.queries],
                peak_1nH,
                total_1nH,
                scale,
                query_rope=q_nHR[part.queries],
                key_rope=k_m1R[part.keys],
                actual_seq_qlen=part.query_ends,
                actual_seq_klen=part.key_ends,
                layout="TND",
                sparse_mode=_SCORES_CAUSAL,
            )
        )
    dqs, dks, dws, losses = zip(*parts, strict=True)
    return (
        torch.cat(losses).sum(),
        plan.put_queries(torch.cat(dqs), q_index_BSHD, 0.0),
        plan.add_keys(torch.cat(dks).squeeze(1), k_index_BTD),
        plan.put_queries(torch.cat(dws), w_BSH, 0.0),
    )


def _no_target(name: str) -> NoReturn:
    raise ValueError(
        f"{name}: torch_npu has no operator for it, its loss keeps the target to itself; call "
        "dsa_attention(kl_reduction='sum'), which runs the fused loss, or pass backend='torch' "
        "(dsa_attention: kl_backend='torch'), which runs blocks on the same device"
    )


def attention_target(*arguments: object) -> NoReturn:
    _no_target("attention_target")


def indexer_kl_loss(*arguments: object) -> NoReturn:
    _no_target("indexer_kl_loss")


def indexer_kl_loss_backward(*arguments: object) -> NoReturn:
    _no_target("indexer_kl_loss")


def _split(x: Tensor, latent: int) -> tuple[Tensor, Tensor]:
    return x[..., :latent].contiguous(), x[..., latent:].contiguous()


def _statistics(lse: Tensor, dim: int = 1) -> tuple[Tensor, Tensor]:
    """Maximum and sum for which ``exp(x - max) / sum`` is ``exp(x - lse)``, with a key head."""
    peak = lse.unsqueeze(dim).contiguous()
    return peak, torch.ones_like(peak)


def _slots(index: Tensor, T: int) -> Tensor:
    """Index rows as the operators want them: keys first, then -1, as wide as they are."""
    width = limits.current().slots
    valid = (index >= 0) & (index < T)
    if index.shape[-1] < width:
        missing = (0, width - index.shape[-1])
        index = torch.nn.functional.pad(index, missing, value=-1)
        valid = torch.nn.functional.pad(valid, missing, value=False)
    # A stable partition without a sort: where each slot goes is a permutation of the row.
    rank = valid.cumsum(-1)
    hole = torch.arange(width, device=index.device) - rank + rank[..., -1:]
    place = torch.where(valid, rank - 1, hole)
    return torch.empty_like(index).scatter_(-1, place, index.masked_fill(~valid, -1))


def _attended_slots(index: Tensor, T: int) -> tuple[Tensor, Tensor]:
    """`_slots`, and which rows have no key; those get key 0, what comes of it is masked."""
    slots = _slots(index, T)
    alone = slots[..., :1] < 0
    slots[..., :1].clamp_(min=0)
    return slots, alone

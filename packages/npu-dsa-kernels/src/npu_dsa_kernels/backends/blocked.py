"""The "torch" backend: blocks of queries, plain torch calls, memory linear in S.

Every function walks the queries in blocks sized by a byte budget, gathers the rows a block needs
and works on them with batched matmuls. The backwards recompute the probabilities; the gradients of
shared rows are accumulated in block order, so the same inputs give the same bits.

Gathered tables carry one extra row of zeros, where all empty slots point. An empty slot thereby
reads nothing of the caller's (0 * NaN of a hidden row is NaN), and its gradient lands in that row.
"""

import functools
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from npu_dsa_kernels.backends import compiled
from npu_dsa_kernels.backends.base import (  # noqa: F401 - this module is the whole backend
    grouped_matmul,
    grouped_matmul_backward,
    moe_permute,
    moe_permute_backward,
    moe_unpermute,
    moe_unpermute_backward,
    rms_norm,
    rms_norm_backward,
    rotary_mul,
    rotary_mul_backward,
    swiglu,
    swiglu_backward,
)
from npu_dsa_kernels.backends.precision import compute_dtype

# B batch, S queries, T keys, H heads, D head dim, V value dim, K selected keys
# N = B * S queries in a row, n queries of a block, R = B * T + 1 rows of a gathered table,
# C keys in the column range of a block, h heads of a block

# Bytes of a block's largest buffers: on CPU a part of the shared cache, in which they stay between
# the calls, elsewhere large enough to fill the device.
_CPU_BLOCK_BYTES = 8 * 2**20
_DEVICE_BLOCK_BYTES = 256 * 2**20

# Queries of a block of dense attention, at most: of what a block computes, up to half its square is
# hidden by causality.
_DENSE_ROWS = 256

_INT64_MIN = -(2**63)


def lightning_indexer(
    q_BSHD: Tensor, k_BTD: Tensor, w_BSH: Tensor, bounds_BS2: Tensor | None, topk: int
) -> tuple[Tensor, Tensor]:
    if compiled.takes(q_BSHD, k_BTD):
        return compiled.lightning_indexer(q_BSHD, k_BTD, w_BSH, bounds_BS2, topk)
    B, S, H, D = q_BSHD.shape
    T = k_BTD.shape[1]
    dtype = compute_dtype(q_BSHD.dtype)
    indices_BSK = q_BSHD.new_full((B, S, topk), -1, dtype=torch.int32)
    scores_BSK = q_BSHD.new_full((B, S, topk), float("-inf"), dtype=dtype)
    step = _block_rows(S, T * (H + 4) * dtype.itemsize, q_BSHD.device)
    for b in range(B):
        k_TD = k_BTD[b].to(dtype)
        for s in range(0, S, step):
            rows = slice(s, min(s + step, S))
            lo_n, hi_n, first, last = _key_range(bounds_BS2, b, rows, T, q_BSHD.device)
            if first >= last:
                continue
            q_nHD, w_nH = q_BSHD[b, rows].to(dtype), w_BSH[b, rows].to(dtype)
            dots_nHC = (q_nHD.reshape(-1, D) @ k_TD[first:last].T).view(-1, H, last - first)
            scores_nC = torch.bmm(w_nH.unsqueeze(1), dots_nHC.relu_()).squeeze(1)
            key_C = torch.arange(first, last, device=q_BSHD.device)
            hidden_nC = (key_C < lo_n[:, None]) | (key_C >= hi_n[:, None])
            best_nk, top_nk = _ordered_topk(scores_nC, hidden_nC, min(topk, last - first))
            k = best_nk.shape[1]
            indices_BSK[b, rows, :k] = torch.where(best_nk < 0, -1, best_nk + first).int()
            scores_BSK[b, rows, :k] = top_nk
    return indices_BSK, scores_BSK


def _key_range(
    bounds_BS2: Tensor | None, b: int, rows: slice, T: int, device: torch.device
) -> tuple[Tensor, Tensor, int, int]:
    """Per-row bounds of a block, and the range of keys that any of its rows may see."""
    if bounds_BS2 is None:
        hi_n = torch.arange(rows.start + 1, rows.stop + 1, device=device)
        return torch.zeros_like(hi_n), hi_n, 0, rows.stop
    lo_n, hi_n = bounds_BS2[b, rows].unbind(-1)
    if device.type != "cpu":  # reading the values would wait for the device
        return lo_n, hi_n, 0, T
    return lo_n, hi_n, max(int(lo_n.min()), 0), min(int(hi_n.max()), T)


def _ordered_topk(scores_nC: Tensor, hidden_nC: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Exact top-k: best first, ties to the lower column, NaN above everything; -1 / -inf if empty.

    torch.topk leaves the order of ties open. For fp32, score and column go into one int64 key that
    has no ties: the score's bits mapped to an integer of the same order, above the column counted
    down. A topk of such keys takes a third of the time of a stable sort. fp64 has no room for the
    column and is sorted.
    """
    if scores_nC.dtype == torch.float64:
        by_score = scores_nC.sort(dim=-1, descending=True, stable=True).indices
        seen = (~hidden_nC.gather(-1, by_score)).to(torch.int8)
        order = seen.sort(dim=-1, descending=True, stable=True).indices
        best_nk = by_score.gather(-1, order)[:, :k]
        empty_nk = hidden_nC.gather(-1, best_nk)
    else:
        # + 0.0 makes one zero of the two; NaNs of either sign become the one above +inf.
        canonical_nC = (scores_nC + 0.0).masked_fill_(scores_nC.isnan(), float("nan"))
        bits_nC = canonical_nC.view(torch.int32)
        rank_nC = bits_nC ^ ((bits_nC >> 31) & 0x7FFFFFFF)
        C = scores_nC.shape[1]
        column_C = torch.arange(C - 1, -1, -1, device=scores_nC.device)
        key_nC = rank_nC.long().bitwise_left_shift_(32).bitwise_or_(column_C)
        key_nk, best_nk = key_nC.masked_fill_(hidden_nC, _INT64_MIN).topk(k, dim=-1)
        empty_nk = key_nk == _INT64_MIN
    top_nk = scores_nC.gather(-1, best_nk).masked_fill_(empty_nk, float("-inf"))
    return best_nk.masked_fill(empty_nk, -1), top_nk


def sparse_attention(
    q_BSHD: Tensor, kv_BTD: Tensor, indices_BSK: Tensor, scale: float, v_dim: int
) -> tuple[Tensor, Tensor]:
    return _sparse_attention(q_BSHD, kv_BTD, indices_BSK, scale, v_dim, None)


def sparse_attention_with_target(
    q_BSHD: Tensor, kv_BTD: Tensor, indices_BSK: Tensor, scale: float, v_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    target_BSK = q_BSHD.new_empty(indices_BSK.shape, dtype=compute_dtype(q_BSHD.dtype))
    out_BSHV, lse_BSH = _sparse_attention(q_BSHD, kv_BTD, indices_BSK, scale, v_dim, target_BSK)
    return out_BSHV, lse_BSH, target_BSK


def _sparse_attention(
    q_BSHD: Tensor,
    kv_BTD: Tensor,
    indices_BSK: Tensor,
    scale: float,
    v_dim: int,
    target_BSK: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Fills `target_BSK` too if there is one."""
    if compiled.takes(q_BSHD, kv_BTD):
        return compiled.sparse_attention(q_BSHD, kv_BTD, indices_BSK, scale, v_dim, target_BSK)
    B, S, H, D = q_BSHD.shape
    K = indices_BSK.shape[2]
    dtype = compute_dtype(q_BSHD.dtype)
    out_NHV = q_BSHD.new_empty(B * S, H, v_dim)
    lse_NH = q_BSHD.new_empty(B * S, H, dtype=dtype)
    q_NHD = q_BSHD.reshape(B * S, H, D)
    table_RD = _table(kv_BTD, dtype)
    rows_of = _Rows(table_RD)
    for rows, slot_nK, empty_nK in _blocks(indices_BSK, kv_BTD.shape[1], K * (D + 2 * H), dtype):
        kv_nKD = _gather(table_RD, slot_nK, rows_of(slot_nK))
        q_nHD = q_NHD[rows].to(dtype)
        logits_nHK = _logits(q_nHD, kv_nKD, empty_nK, scale)
        peak_nH1 = logits_nHK.amax(-1, keepdim=True)
        peak_nH1 = peak_nH1.masked_fill(peak_nH1 == float("-inf"), 0.0)
        e_nHK = logits_nHK.sub_(peak_nH1).exp_()
        total_nH1 = e_nHK.sum(-1, keepdim=True)
        lse_NH[rows] = (total_nH1.log() + peak_nH1).squeeze(-1)
        # A row without keys has total 0 and a numerator of 0.
        total_nH1 = total_nH1.masked_fill_(total_nH1 == 0, 1.0)
        out_NHV[rows] = torch.bmm(e_nHK, kv_nKD[..., :v_dim]).div_(total_nH1)
        if target_BSK is not None:
            target_BSK.view(B * S, K)[rows] = e_nHK.div_(total_nH1).sum(1)
    return out_NHV.view(B, S, H, v_dim), lse_NH.view(B, S, H)


def sparse_attention_backward(
    d_out_BSHV: Tensor,
    d_lse_BSH: Tensor,
    q_BSHD: Tensor,
    kv_BTD: Tensor,
    indices_BSK: Tensor,
    out_BSHV: Tensor,
    lse_BSH: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    if compiled.takes(q_BSHD, kv_BTD):
        return compiled.sparse_attention_backward(
            d_out_BSHV, d_lse_BSH, q_BSHD, kv_BTD, indices_BSK, lse_BSH, scale
        )
    B, S, H, D = q_BSHD.shape
    T, K, V = kv_BTD.shape[1], indices_BSK.shape[2], out_BSHV.shape[3]
    dtype = compute_dtype(q_BSHD.dtype)
    dq_NHD = q_BSHD.new_empty(B * S, H, D)
    q_NHD = q_BSHD.reshape(B * S, H, D)
    d_out_NHV = d_out_BSHV.reshape(B * S, H, V)
    d_lse_NH, lse_NH = d_lse_BSH.reshape(B * S, H), lse_BSH.reshape(B * S, H)
    table_RD = _table(kv_BTD, dtype)
    rows_of = _Rows(table_RD)
    d_table_RD, d_rows = torch.zeros_like(table_RD), _Rows(table_RD)
    for rows, slot_nK, empty_nK in _blocks(indices_BSK, T, K * (2 * D + 5 * H), dtype):
        kv_nKD = _gather(table_RD, slot_nK, rows_of(slot_nK))
        n = kv_nKD.shape[0]
        d_out_nHV, lse_nH = d_out_NHV[rows].to(dtype), lse_NH[rows].to(dtype)
        # The gradient of the rows is P^T dOut (values) + scale dS^T q (keys): one matmul over 2H.
        left_n2HK = kv_nKD.new_empty(n, 2 * H, K)
        right_n2HD = kv_nKD.new_zeros(n, 2 * H, D)
        right_n2HD[:, :H, :V] = d_out_nHV
        right_n2HD[:, H:] = q_NHD[rows]

        alone_nH = lse_nH == float("-inf")  # rows without keys
        logits_nHK = _logits(right_n2HD[:, H:], kv_nKD, empty_nK, scale)
        p_nHK = logits_nHK.sub_(lse_nH.masked_fill(alone_nH, 0.0).unsqueeze(-1)).exp_()
        left_n2HK[:, :H] = p_nHK
        ds_nHK = torch.bmm(d_out_nHV, kv_nKD[..., :V].transpose(1, 2))
        # rowsum(P * dP) is rowsum(dOut * out), without the rounding of a bf16 out.
        delta_nH = (p_nHK * ds_nHK).sum(-1) - d_lse_NH[rows]
        ds_nHK.sub_(delta_nH.masked_fill(alone_nH, 0.0).unsqueeze(-1)).mul_(p_nHK).mul_(scale)
        left_n2HK[:, H:] = ds_nHK
        dq_NHD[rows] = torch.bmm(ds_nHK, kv_nKD)
        d_kv_nKD = torch.bmm(left_n2HK.transpose(1, 2), right_n2HD, out=d_rows(slot_nK))
        d_table_RD.index_add_(0, slot_nK.flatten(), d_kv_nKD.flatten(0, 1))
    return dq_NHD.view(B, S, H, D), _untable(d_table_RD, kv_BTD)


def dense_attention(
    q_BSHD: Tensor, k_BTHD: Tensor, v_BTHV: Tensor, bounds_BS2: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    B, S, H, _ = q_BSHD.shape
    dtype = compute_dtype(q_BSHD.dtype)
    out_BSHV = q_BSHD.new_zeros(B, S, H, v_BTHV.shape[3])
    lse_BSH = q_BSHD.new_full((B, S, H), float("-inf"), dtype=dtype)
    for b, heads in _attention_heads(q_BSHD, v_BTHV):
        (k_hTD, k_taint_hT1), (v_hTV, v_taint_hT1) = (
            _untainted(x[b, :, heads].transpose(0, 1), dtype) for x in (k_BTHD, v_BTHV)
        )
        taint_h1T = (k_taint_hT1 + v_taint_hT1).transpose(1, 2)
        for rows, keys, hidden_nC, alone_n1 in _attention_rows(q_BSHD, v_BTHV, bounds_BS2, b):
            q_hnD, q_taint_hn1 = _untainted(q_BSHD[b, rows, heads].transpose(0, 1), dtype)
            logits_hnC = torch.baddbmm(
                taint_h1T[..., keys], q_hnD, k_hTD[:, keys].transpose(1, 2), alpha=scale
            ).masked_fill_(hidden_nC, float("-inf"))
            peak_hn1 = logits_hnC.amax(-1, keepdim=True).masked_fill_(alone_n1, 0.0)
            e_hnC = logits_hnC.sub_(peak_hn1).exp_()
            total_hn1 = e_hnC.sum(-1, keepdim=True).add_(q_taint_hn1.masked_fill_(alone_n1, 0.0))
            lse_hn = (total_hn1.log() + peak_hn1).squeeze(-1)
            out_hnV = torch.bmm(e_hnC, v_hTV[:, keys]).div_(total_hn1.masked_fill_(alone_n1, 1.0))
            lse_BSH[b, rows, heads] = lse_hn.T
            out_BSHV[b, rows, heads] = out_hnV.transpose(0, 1).to(out_BSHV.dtype)
    return out_BSHV, lse_BSH


def dense_attention_backward(
    d_out_BSHV: Tensor,
    d_lse_BSH: Tensor | None,
    q_BSHD: Tensor,
    k_BTHD: Tensor,
    v_BTHV: Tensor,
    bounds_BS2: Tensor | None,
    out_BSHV: Tensor,
    lse_BSH: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(q_BSHD.dtype)
    dq_BSHD = q_BSHD.new_zeros(q_BSHD.shape)
    dk_BTHD, dv_BTHV = k_BTHD.new_empty(k_BTHD.shape), v_BTHV.new_empty(v_BTHV.shape)
    if d_lse_BSH is None:
        d_lse_BSH = torch.zeros_like(lse_BSH)
    for b, heads in _attention_heads(q_BSHD, v_BTHV):
        (k_hTD, _), (v_hTV, _) = (
            _untainted(x[b, :, heads].transpose(0, 1), dtype) for x in (k_BTHD, v_BTHV)
        )
        dk_hTD, dv_hTV = k_hTD.new_zeros(k_hTD.shape), v_hTV.new_zeros(v_hTV.shape)
        for rows, keys, hidden_nC, alone_n1 in _attention_rows(q_BSHD, v_BTHV, bounds_BS2, b):
            q_hnD, _ = _untainted(q_BSHD[b, rows, heads].transpose(0, 1), dtype)
            d_out_hnV, taint_hn1 = _untainted(d_out_BSHV[b, rows, heads].transpose(0, 1), dtype)
            lse_hn1, d_lse_hn1 = (x[b, rows, heads].T.unsqueeze(-1) for x in (lse_BSH, d_lse_BSH))
            # lse is NaN where anything that the row sees is not finite: of what is upstream, too.
            lse_hn1 = (lse_hn1 + taint_hn1 + d_lse_hn1 * 0).masked_fill_(alone_n1, 0.0)
            logits_hnC = torch.bmm(q_hnD, k_hTD[:, keys].transpose(1, 2)).mul_(scale)
            p_hnC = logits_hnC.sub_(lse_hn1).masked_fill_(hidden_nC, float("-inf")).exp_()
            dv_hTV[:, keys].baddbmm_(p_hnC.transpose(1, 2), d_out_hnV)
            ds_hnC = torch.bmm(d_out_hnV, v_hTV[:, keys].transpose(1, 2))
            # rowsum(P * dP) is rowsum(dOut * out), without the rounding of a bf16 out.
            delta_hn1 = (p_hnC * ds_hnC).sum(-1, keepdim=True) - d_lse_hn1
            # P alone carries NaN: in delta it would reach hidden keys, as 0 * NaN.
            ds_hnC.sub_(delta_hn1.nan_to_num_(0.0, 0.0, 0.0)).mul_(p_hnC).mul_(scale)
            dq_hnD = torch.bmm(ds_hnC, k_hTD[:, keys])
            dq_BSHD[b, rows, heads] = dq_hnD.transpose(0, 1).to(dq_BSHD.dtype)
            dk_hTD[:, keys].baddbmm_(ds_hnC.transpose(1, 2), q_hnD)
        dk_BTHD[b, :, heads] = dk_hTD.transpose(0, 1).to(dk_BTHD.dtype)
        dv_BTHV[b, :, heads] = dv_hTV.transpose(0, 1).to(dv_BTHV.dtype)
    return dq_BSHD, dk_BTHD, dv_BTHV


def _attention_heads(q_BSHD: Tensor, v_BTHV: Tensor) -> Iterator[tuple[int, slice]]:
    """A batch row and some heads at a time, as many as the budget has logits and keys for."""
    B, _, H, D = q_BSHD.shape
    (T, V), itemsize = v_BTHV.shape[1::2], compute_dtype(q_BSHD.dtype).itemsize
    step = _block_rows(H, T * (_attention_step(q_BSHD, T) + D + V) * itemsize, q_BSHD.device)
    for b, h in itertools.product(range(B), range(0, H, step)):
        yield b, slice(h, min(h + step, H))


def _attention_rows(
    q_BSHD: Tensor, v_BTHV: Tensor, bounds_BS2: Tensor | None, b: int
) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Blocks of queries with the keys any of them sees: queries, keys, hidden pairs [n, C], rows
    without keys [n, 1].
    """
    S, T, device = q_BSHD.shape[1], v_BTHV.shape[1], q_BSHD.device
    step = _attention_step(q_BSHD, T)
    for s in range(0, S, step):
        rows = slice(s, min(s + step, S))
        lo_n, hi_n, first, last = _key_range(bounds_BS2, b, rows, T, device)
        if first < last:
            key_C = torch.arange(first, last, device=device)
            hidden_nC = (key_C < lo_n[:, None]) | (key_C >= hi_n[:, None])
            yield rows, slice(first, last), hidden_nC, hidden_nC.all(-1, keepdim=True)


def _attention_step(q_BSHD: Tensor, T: int) -> int:
    row_bytes = T * compute_dtype(q_BSHD.dtype).itemsize
    return _block_rows(min(q_BSHD.shape[1], _DENSE_ROWS), row_bytes, q_BSHD.device)


def _untainted(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x` with zeros for what is not finite, and [..., 1]: NaN for the vectors that had such, or 0.

    In a matmul, 0 * NaN would carry the NaN of a hidden pair to the pairs that count.
    """
    x = x.to(dtype)
    return x.nan_to_num(0.0, 0.0, 0.0), (x * 0).sum(-1, keepdim=True)


def attention_target(
    q_BSHD: Tensor, kv_BTD: Tensor, indices_BSK: Tensor, lse_BSH: Tensor, scale: float
) -> Tensor:
    if compiled.takes(q_BSHD, kv_BTD):
        return compiled.attention_target(q_BSHD, kv_BTD, indices_BSK, lse_BSH, scale)
    B, S, H, D = q_BSHD.shape
    K = indices_BSK.shape[2]
    dtype = compute_dtype(q_BSHD.dtype)
    target_NK = q_BSHD.new_empty(B * S, K, dtype=dtype)
    q_NHD, lse_NH = q_BSHD.reshape(B * S, H, D), lse_BSH.reshape(B * S, H)
    table_RD = _table(kv_BTD, dtype)
    rows_of = _Rows(table_RD)
    for rows, slot_nK, empty_nK in _blocks(indices_BSK, kv_BTD.shape[1], K * (D + 2 * H), dtype):
        logits_nHK = _logits(
            q_NHD[rows].to(dtype), _gather(table_RD, slot_nK, rows_of(slot_nK)), empty_nK, scale
        )
        lse_nH = lse_NH[rows].to(dtype)
        lse_nH = lse_nH.masked_fill(lse_nH == float("-inf"), 0.0)
        target_NK[rows] = logits_nHK.sub_(lse_nH.unsqueeze(-1)).exp_().sum(1)
    return target_NK.view(B, S, K)


def indexer_kl_loss(
    q_BSHD: Tensor,
    k_BTD: Tensor,
    w_BSH: Tensor,
    indices_BSK: Tensor,
    target_BSK: Tensor,
    scores_BSK: Tensor | None,
) -> Tensor:
    if scores_BSK is not None:
        empty_BSK = (indices_BSK < 0) | (indices_BSK >= k_BTD.shape[1])
        return _divergence(scores_BSK.clone(), target_BSK.to(scores_BSK.dtype), empty_BSK)
    if compiled.takes(q_BSHD, k_BTD):
        return compiled.indexer_kl_loss(q_BSHD, k_BTD, w_BSH, indices_BSK, target_BSK)
    B, S, H, D = q_BSHD.shape
    K = indices_BSK.shape[2]
    dtype = compute_dtype(q_BSHD.dtype)
    loss_N = q_BSHD.new_empty(B * S, dtype=dtype)
    q_NHD, w_NH = q_BSHD.reshape(B * S, H, D), w_BSH.reshape(B * S, H)
    target_NK = target_BSK.reshape(B * S, K)
    table_RD = _table(k_BTD, dtype)
    rows_of = _Rows(table_RD)
    for rows, slot_nK, empty_nK in _blocks(indices_BSK, k_BTD.shape[1], K * (D + 2 * H), dtype):
        k_nKD = _gather(table_RD, slot_nK, rows_of(slot_nK))
        relu_nHK = torch.bmm(q_NHD[rows].to(dtype), k_nKD.transpose(1, 2)).relu_()
        scores_nK = torch.bmm(w_NH[rows].to(dtype).unsqueeze(1), relu_nHK).squeeze(1)
        loss_N[rows] = _divergence(scores_nK, target_NK[rows].to(dtype), empty_nK)
    return loss_N.view(B, S)


def indexer_kl_loss_backward(
    d_loss_BS: Tensor,
    q_BSHD: Tensor,
    k_BTD: Tensor,
    w_BSH: Tensor,
    indices_BSK: Tensor,
    target_BSK: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    if compiled.takes(q_BSHD, k_BTD):
        return compiled.indexer_kl_loss_backward(
            d_loss_BS, q_BSHD, k_BTD, w_BSH, indices_BSK, target_BSK
        )
    B, S, H, D = q_BSHD.shape
    K = indices_BSK.shape[2]
    dtype = compute_dtype(q_BSHD.dtype)
    dq_NHD = q_BSHD.new_empty(B * S, H, D)
    dw_NH = w_BSH.new_empty(B * S, H)
    q_NHD, w_NH = q_BSHD.reshape(B * S, H, D), w_BSH.reshape(B * S, H)
    target_NK, d_loss_N = target_BSK.reshape(B * S, K), d_loss_BS.reshape(B * S)
    table_RD = _table(k_BTD, dtype)
    rows_of = _Rows(table_RD)
    d_table_RD, d_rows = torch.zeros_like(table_RD), _Rows(table_RD)
    budget = K * (2 * D + 4 * H)
    for rows, slot_nK, empty_nK in _blocks(indices_BSK, k_BTD.shape[1], budget, dtype):
        k_nKD = _gather(table_RD, slot_nK, rows_of(slot_nK))
        q_nHD, w_nH = q_NHD[rows].to(dtype), w_NH[rows].to(dtype)
        relu_nHK = torch.bmm(q_nHD, k_nKD.transpose(1, 2)).relu_()
        scores_nK = torch.bmm(w_nH.unsqueeze(1), relu_nHK).squeeze(1)
        p_nK, log_y_nK, dead_n1 = _distributions(scores_nK, target_NK[rows].to(dtype), empty_nK)
        # Rows that take no part may hold anything, NaN included: 0 * NaN must not come of it.
        q_nHD = q_nHD.masked_fill(dead_n1.unsqueeze(-1), 0.0)
        w_nH = w_nH.masked_fill(dead_n1, 0.0)
        # dI = y - p, exactly: empty slots have y = p = 0.
        di_nK = log_y_nK.exp_().sub_(p_nK).mul_(d_loss_N[rows].to(dtype).unsqueeze(-1))
        di_nK.masked_fill_(dead_n1, 0.0)
        dw_nH = torch.bmm(relu_nHK, di_nK.unsqueeze(-1)).squeeze(-1)
        dw_NH[rows] = dw_nH.masked_fill_(dead_n1, 0.0)
        ds_nHK = (di_nK.unsqueeze(1) * w_nH.unsqueeze(-1)).mul_(relu_nHK > 0)
        dq_NHD[rows] = torch.bmm(ds_nHK, k_nKD).masked_fill_(dead_n1.unsqueeze(-1), 0.0)
        dk_nKD = torch.bmm(ds_nHK.transpose(1, 2), q_nHD, out=d_rows(slot_nK))
        d_table_RD.index_add_(0, slot_nK.flatten(), dk_nKD.flatten(0, 1))
    return dq_NHD.view(B, S, H, D), _untable(d_table_RD, k_BTD), dw_NH.view(B, S, H)


def dense_indexer_kl_loss(
    q_index_BSHD: Tensor,
    k_index_BTD: Tensor,
    w_BSH: Tensor,
    q_BSHD: Tensor,
    kv_BTD: Tensor,
    bounds_BS2: Tensor | None,
    scale: float,
) -> Tensor:
    dtype = compute_dtype(q_index_BSHD.dtype)
    loss_BS = q_index_BSHD.new_zeros(q_index_BSHD.shape[:2], dtype=dtype)
    blocks = _dense_blocks(q_index_BSHD, k_index_BTD, w_BSH, q_BSHD, kv_BTD, bounds_BS2, scale)
    for b, rows, _, p_nC, log_y_nC, _ in blocks:
        terms_nC = p_nC.log().sub_(log_y_nC).mul_(p_nC)
        loss_BS[b, rows] = terms_nC.masked_fill_(p_nC == 0, 0.0).sum(-1)  # 0 log 0 = 0
    return loss_BS


def dense_indexer_kl_loss_backward(
    d_loss_BS: Tensor,
    q_index_BSHD: Tensor,
    k_index_BTD: Tensor,
    w_BSH: Tensor,
    q_BSHD: Tensor,
    kv_BTD: Tensor,
    bounds_BS2: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    H, D = q_index_BSHD.shape[2:]
    dtype = compute_dtype(q_index_BSHD.dtype)
    dq_BSHD = torch.zeros_like(q_index_BSHD, memory_format=torch.contiguous_format)
    dw_BSH = torch.zeros_like(w_BSH, memory_format=torch.contiguous_format)
    dk_BTD = k_index_BTD.new_zeros(k_index_BTD.shape, dtype=dtype)
    blocks = _dense_blocks(q_index_BSHD, k_index_BTD, w_BSH, q_BSHD, kv_BTD, bounds_BS2, scale)
    for b, rows, keys, p_nC, log_y_nC, hidden_nC in blocks:
        # dI = y - p, exactly.
        di_nC = log_y_nC.exp_().sub_(p_nC).mul_(d_loss_BS[b, rows].to(dtype).unsqueeze(-1))
        di_nC.masked_fill_(hidden_nC, 0.0)
        # A pair that counts has its NaN in dI. In the factors below it would reach hidden pairs,
        # whose dI is 0, as 0 * NaN.
        q_nHD, w_nH = _finite(q_index_BSHD[b, rows], dtype), _finite(w_BSH[b, rows], dtype)
        k_CD = _finite(k_index_BTD[b, keys], dtype)
        for heads in _head_blocks(H, di_nC):
            q_mD = q_nHD[:, heads].reshape(-1, D)
            relu_nhC = (q_mD @ k_CD.T).view(di_nC.shape[0], -1, di_nC.shape[1]).relu_()
            dw_BSH[b, rows, heads] = (
                torch.bmm(relu_nhC, di_nC.unsqueeze(-1)).squeeze(-1).to(w_BSH.dtype)
            )
            ds_nhC = relu_nhC.sign_().mul_(di_nC.unsqueeze(1)).mul_(w_nH[:, heads].unsqueeze(-1))
            ds_mC = ds_nhC.flatten(0, 1)
            dq_BSHD[b, rows, heads] = (ds_mC @ k_CD).view(q_nHD[:, heads].shape).to(dq_BSHD.dtype)
            dk_BTD[b, keys].addmm_(ds_mC.T, q_mD)
    return dq_BSHD, dk_BTD.to(k_index_BTD.dtype), dw_BSH


def _dense_blocks(
    q_index_BSHD: Tensor,
    k_index_BTD: Tensor,
    w_BSH: Tensor,
    q_BSHD: Tensor,
    kv_BTD: Tensor,
    bounds_BS2: Tensor | None,
    scale: float,
) -> Iterator[tuple[int, slice, slice, Tensor, Tensor, Tensor]]:
    """Blocks of queries with all the keys any of them sees: batch, queries, keys, target p [n, C],
    log of the prediction y [n, C], and hidden pairs [n, C], whose p is 0.

    Heads are taken a few at a time, so a block holds n x C whatever their number.
    """
    (S, H, D), T, device = q_BSHD.shape[1:], kv_BTD.shape[1], q_BSHD.device
    dtype, target_dtype = compute_dtype(q_index_BSHD.dtype), compute_dtype(q_BSHD.dtype)
    step = _block_rows(S, T * dtype.itemsize, device)
    for b, s in itertools.product(range(q_BSHD.shape[0]), range(0, S, step)):
        rows = slice(s, min(s + step, S))
        n = rows.stop - rows.start
        lo_n, hi_n, first, last = _key_range(bounds_BS2, b, rows, T, device)
        if first >= last:
            continue
        keys = slice(first, last)
        key_C = torch.arange(first, last, device=device)
        hidden_nC = (key_C < lo_n[:, None]) | (key_C >= hi_n[:, None])
        # Rows without keys go through the softmax as they are: hidden_nC takes them out after it.
        masked_nC = hidden_nC & ~hidden_nC.all(-1, keepdim=True)

        q_nHD, kv_CD = q_BSHD[b, rows].to(target_dtype) * scale, kv_BTD[b, keys]
        own = kv_CD.dim() == 3  # keys [C, H, D] of each head's own
        kv_CD = kv_CD if own else kv_CD.to(target_dtype)
        p_nC = q_nHD.new_zeros(hidden_nC.shape)
        for heads in _head_blocks(H, p_nC):
            if own:
                kv_hDC = kv_CD[:, heads].to(target_dtype).permute(1, 2, 0)
                logits_nhC = torch.bmm(q_nHD[:, heads].transpose(0, 1), kv_hDC).transpose(0, 1)
            else:
                logits_nhC = (q_nHD[:, heads].reshape(-1, D) @ kv_CD.T).view(n, -1, last - first)
            logits_nhC.masked_fill_(masked_nC.unsqueeze(1), float("-inf"))
            p_nC += logits_nhC.softmax(-1).sum(1)
        p_nC = p_nC.div_(p_nC.sum(-1, keepdim=True)).masked_fill_(hidden_nC, 0.0).to(dtype)

        q_nHD, w_nH = q_index_BSHD[b, rows].to(dtype), w_BSH[b, rows].to(dtype)
        k_CD = k_index_BTD[b, keys].to(dtype)
        scores_nC = k_CD.new_zeros(hidden_nC.shape)
        for heads in _head_blocks(q_nHD.shape[1], scores_nC):
            dots_mC = q_nHD[:, heads].reshape(-1, k_CD.shape[1]) @ k_CD.T
            relu_nhC = dots_mC.view(n, -1, last - first).relu_()
            scores_nC += torch.bmm(w_nH[:, heads].unsqueeze(1), relu_nhC).squeeze(1)
        log_y_nC = scores_nC.masked_fill_(masked_nC, float("-inf")).log_softmax(-1)
        yield b, rows, keys, p_nC, log_y_nC, hidden_nC


def _head_blocks(H: int, x_nC: Tensor) -> Iterator[slice]:
    step = _block_rows(H, x_nC.nbytes // 2, x_nC.device)
    for start in range(0, H, step):
        yield slice(start, min(start + step, H))


def _finite(x: Tensor, dtype: torch.dtype) -> Tensor:
    """No NaN and no infinity; products of what stands for infinity keep its sign and are finite."""
    return x.to(dtype).nan_to_num(0.0, 1e18, -1e18)


def hadamard(x: Tensor, scale: float) -> Tensor:
    """One matmul with the cached matrix of +-1: D is small, the matmul beats log2(D) passes."""
    dtype = compute_dtype(x.dtype)
    return (x.to(dtype) @ _hadamard_matrix(x.shape[-1], dtype, x.device)).mul_(scale).to(x.dtype)


@functools.lru_cache(maxsize=16)
def _hadamard_matrix(D: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    h = torch.ones(1, 1, dtype=dtype, device=device)
    while h.shape[0] < D:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h


def _divergence(scores_nK: Tensor, target_nK: Tensor, empty_nK: Tensor) -> Tensor:
    """Loss of each row; `scores` are spent."""
    p_nK, log_y_nK, _ = _distributions(scores_nK, target_nK, empty_nK)
    terms_nK = p_nK * (p_nK.log() - log_y_nK)
    return terms_nK.masked_fill_(p_nK == 0, 0.0).sum(-1)  # 0 log 0 = 0


def _distributions(
    scores_nK: Tensor, target_nK: Tensor, empty_nK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Target p, log of the prediction y, and the rows [n, 1] that take no part in the loss."""
    target_nK = target_nK.masked_fill(empty_nK, 0.0)
    total_n1 = target_nK.sum(-1, keepdim=True)
    dead_n1 = total_n1 == 0  # no keys, or no attention mass on them
    p_nK = target_nK.div_(total_n1.masked_fill(dead_n1, 1.0))
    scores_nK = scores_nK.masked_fill_(empty_nK, float("-inf")).masked_fill_(dead_n1, 0.0)
    return p_nK, scores_nK.log_softmax(-1), dead_n1


def _logits(q_nHD: Tensor, kv_nKD: Tensor, empty_nK: Tensor, scale: float) -> Tensor:
    logits_nHK = torch.bmm(q_nHD, kv_nKD.transpose(1, 2)).mul_(scale)
    return logits_nHK.masked_fill_(empty_nK.unsqueeze(1), float("-inf"))


def _table(x_BTD: Tensor, dtype: torch.dtype) -> Tensor:
    """All rows of `x` as [B * T + 1, D] in the compute dtype; the last one is zero."""
    B, T, D = x_BTD.shape
    table_RD = x_BTD.new_empty(B * T + 1, D, dtype=dtype)
    table_RD[:-1].view(B, T, D).copy_(x_BTD)
    table_RD[-1].zero_()
    return table_RD


def _untable(d_table_RD: Tensor, x_BTD: Tensor) -> Tensor:
    # A copy, not a view: a view would keep the extra row's storage alive as the gradient.
    return d_table_RD[:-1].view(x_BTD.shape).to(x_BTD.dtype, copy=True)


def _gather(table_RD: Tensor, slot_nK: Tensor, out_nKD: Tensor) -> Tensor:
    torch.index_select(table_RD, 0, slot_nK.flatten(), out=out_nKD.flatten(0, 1))
    return out_nKD


class _Rows:
    """Memory for the gathered rows of one block after the other.

    Taken anew for every block, its pages would cost as much as filling them.
    """

    def __init__(self, table_RD: Tensor) -> None:
        self.table_RD = table_RD
        self.buffer = table_RD.new_empty(0)

    def __call__(self, slot_nK: Tensor) -> Tensor:
        """Uninitialised [n, K, D]."""
        size = slot_nK.numel() * self.table_RD.shape[1]
        if self.buffer.numel() < size:
            self.buffer = self.table_RD.new_empty(size)
        return self.buffer[:size].view(*slot_nK.shape, -1)


def _blocks(
    indices_BSK: Tensor, T: int, elements_per_row: int, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Blocks of the N queries: their rows, table slots [n, K] (int64) and empty slots [n, K]."""
    B, S, K = indices_BSK.shape
    N = B * S
    indices_NK = indices_BSK.reshape(N, K)
    step = _block_rows(N, elements_per_row * dtype.itemsize, indices_BSK.device)
    if indices_BSK.device.type == "cpu":
        # torch.bmm gives whole matrices to the threads: as many for each of them.
        threads = torch.get_num_threads()
        step = -(-step // threads) * threads
    for start in range(0, N, step):
        rows = slice(start, min(start + step, N))
        index_nK = indices_NK[rows]
        batch_n = torch.arange(rows.start, rows.stop, device=indices_BSK.device) // S
        empty_nK = (index_nK < 0) | (index_nK >= T)
        slot_nK = (index_nK + (batch_n * T).unsqueeze(-1)).masked_fill_(empty_nK, B * T)
        yield rows, slot_nK, empty_nK


def _block_rows(rows: int, bytes_per_row: int, device: torch.device) -> int:
    budget = _CPU_BLOCK_BYTES if device.type == "cpu" else _DEVICE_BLOCK_BYTES
    return max(1, min(rows, budget // max(bytes_per_row, 1)))

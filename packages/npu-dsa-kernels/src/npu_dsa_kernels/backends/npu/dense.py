"""The indexer's warm-up loss on torch_npu's fused operators.

They take the attention as it is before absorption, every head with keys of its own, ``[nope ||
rope]``; and they want the statistics of both softmaxes beforehand: of the indexer's, which has an
operator for it, and of the attention's, which the dense attention gives along with its output.
"""

import torch
from torch import Tensor

from npu_dsa_kernels.backends.npu import attention, limits, sequences

# B batch, S queries, T keys, H heads, D head dim, E and R its nope and rope parts
# n queries and m keys of the sequences; 1: the indexer's key head, of which there is one

_CAUSAL = 3  # the last query sees all keys of its sequence


def fused_dense_kl_loss(
    q_index_BSHD: Tensor,
    k_index_BTD: Tensor,
    w_BSH: Tensor,
    q_BSHD: Tensor,
    k_BTHD: Tensor,
    bounds_BS2: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss summed over all tokens, and the gradients of q_index, k_index and weights."""
    limits.dense_attention(q_BSHD, k_BTHD)
    limits.indexer(q_index_BSHD, k_index_BTD, w_BSH)
    limits.same_dtype("q_index", q_index_BSHD, "q", q_BSHD)
    T = k_BTHD.shape[1]
    nothing = (
        q_BSHD.new_zeros((), dtype=torch.float32),
        torch.zeros_like(q_index_BSHD),
        torch.zeros_like(k_index_BTD),
        torch.zeros_like(w_BSH),
    )
    if q_BSHD.numel() * T == 0:
        return nothing
    if bounds_BS2 is None:
        loss_1, dq, dk, dw = _loss(
            q_index_BSHD.contiguous(),
            k_index_BTD.unsqueeze(2).contiguous(),
            w_BSH.contiguous(),
            q_BSHD.contiguous(),
            k_BTHD.contiguous(),
            None,
            scale,
        )
        return loss_1.squeeze(0), dq, dk.squeeze(2), dw

    plan = sequences.plan(bounds_BS2, T)
    if not plan.parts:
        return nothing
    q_index_nHD, w_nH, q_nHD = (plan.queries(x) for x in (q_index_BSHD, w_BSH, q_BSHD))
    k_index_m1D, k_mHD = plan.keys(k_index_BTD).unsqueeze(1), plan.keys(k_BTHD)
    parts = [
        _loss(
            q_index_nHD[part.queries],
            k_index_m1D[part.keys],
            w_nH[part.queries],
            q_nHD[part.queries],
            k_mHD[part.keys],
            part,
            scale,
        )
        for part in plan.parts
    ]
    losses, dqs, dks, dws = zip(*parts, strict=True)
    return (
        torch.cat(losses).sum(),
        plan.put_queries(torch.cat(dqs), q_index_BSHD, 0.0),
        plan.add_keys(torch.cat(dks).squeeze(1), k_index_BTD),
        plan.put_queries(torch.cat(dws), w_BSH, 0.0),
    )


def _loss(
    q_index: Tensor,
    k_index: Tensor,
    w: Tensor,
    q: Tensor,
    k: Tensor,
    part: sequences.Part | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One call, over [B, S, ...] rows or, with a `part`, over [n, ...] rows of its sequences."""
    layout = {"layout": "BSND", "sparse_mode": _CAUSAL}
    if part is not None:
        layout = {
            "layout": "TND",
            "sparse_mode": _CAUSAL,
            "actual_seq_qlen": part.query_ends,
            "actual_seq_klen": part.key_ends,
        }
    peak_index, total_index = torch.ops.npu.npu_dense_lightning_indexer_softmax_lse(
        q_index, k_index, w, **layout
    )
    E = limits.current().dense_head_dim
    dq, dk, dw, loss_1 = torch.ops.npu.npu_dense_lightning_indexer_grad_kl_loss(
        q[..., :E].contiguous(),
        k[..., :E].contiguous(),
        q_index,
        k_index,
        w,
        *_attention_statistics(q, k, part, scale),
        peak_index,
        total_index,
        scale,
        query_rope=q[..., E:].contiguous(),
        key_rope=k[..., E:].contiguous(),
        **layout,
    )
    return loss_1, dq, dk, dw


def _attention_statistics(
    q: Tensor, k: Tensor, part: sequences.Part | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Maximum and sum of the attention's softmax: [B, H, S, 1], or [H, n, 1] with a `part`.

    The attention's output is of no use here, so any values will do: the nope parts of the keys.
    """
    E = limits.current().dense_head_dim
    _, peak, total = attention.attend(q, k, k[..., :E].contiguous(), part, scale)
    if part is not None:
        peak, total = peak.transpose(0, 1), total.transpose(0, 1)
    return peak.contiguous(), total.contiguous()

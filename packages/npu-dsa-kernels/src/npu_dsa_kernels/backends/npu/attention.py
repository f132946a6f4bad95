"""Dense attention on torch_npu's fused operator.

It is called below autograd, and its gradient by itself: the statistics of the softmax then cross
the operator as one log-sum-exp a row, and rows without keys, of which the operator says nothing,
stay outside of both calls.
"""

from typing import Any

import torch
from torch import Tensor

from npu_dsa_kernels.backends.npu import limits, sequences

# B batch, S queries, T keys, H heads, D key dim, V value dim
# n queries and m keys of the sequences

_CAUSAL = 3  # the last query sees all keys of its sequence
_MASK = 2048  # side of the mask that stands for any causal one
_COPIES = 8  # of each statistic


def dense_attention(
    q_BSHD: Tensor, k_BTHD: Tensor, v_BTHV: Tensor, bounds_BS2: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    limits.fusion_attention(q_BSHD, k_BTHD, v_BTHV)
    B, S, H, _ = q_BSHD.shape
    T = k_BTHD.shape[1]
    nothing = B * S * T == 0
    plan = None if nothing or bounds_BS2 is None else _plan(bounds_BS2, T)
    if nothing or (plan is not None and not plan.parts):
        out_BSHV = q_BSHD.new_zeros(B, S, H, v_BTHV.shape[3])
        return out_BSHV, q_BSHD.new_full((B, S, H), float("-inf"), dtype=torch.float32)
    if plan is None:
        out_BSHV, peak_BHS1, total_BHS1 = attend(
            q_BSHD.contiguous(), k_BTHD.contiguous(), v_BTHV.contiguous(), None, scale
        )
        lse_BHS = (total_BHS1.log() + peak_BHS1).squeeze(-1)
        return out_BSHV, lse_BHS.transpose(1, 2).clone(memory_format=torch.contiguous_format)

    q_nHD, k_mHD, v_mHV = plan.queries(q_BSHD), plan.keys(k_BTHD), plan.keys(v_BTHV)
    outs, lses = [], []
    for part in plan.parts:
        out_nHV, peak_nH1, total_nH1 = attend(
            q_nHD[part.queries], k_mHD[part.keys], v_mHV[part.keys], part, scale
        )
        outs.append(out_nHV)
        lses.append((total_nH1.log() + peak_nH1).squeeze(-1))
    return (
        plan.put_queries(torch.cat(outs), q_BSHD, 0.0),
        plan.put_queries(torch.cat(lses), q_BSHD, float("-inf")),
    )


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
    if d_lse_BSH is not None:
        raise RuntimeError(
            "dense_attention: torch_npu's operator has no gradient of lse; detach lse where no "
            "gradient is wanted, or use backend='torch' on the same device"
        )
    T = k_BTHD.shape[1]
    nothing = q_BSHD.numel() * T == 0
    plan = None if nothing or bounds_BS2 is None else _plan(bounds_BS2, T)
    if nothing or (plan is not None and not plan.parts):
        dq, dk, dv = (x.new_zeros(x.shape) for x in (q_BSHD, k_BTHD, v_BTHV))
        return dq, dk, dv
    rows, keys = (d_out_BSHV, q_BSHD, out_BSHV, lse_BSH), (k_BTHD, v_BTHV)
    if plan is None:
        d_out, q, out, lse = (x.contiguous() for x in rows)
        k, v = (x.contiguous() for x in keys)
        return _attend_backward(d_out, q, k, v, out, lse.transpose(1, 2), None, scale)

    d_out, q, out, lse = (plan.queries(x) for x in rows)
    k, v = (plan.keys(x) for x in keys)
    parts = [
        _attend_backward(
            d_out[part.queries],
            q[part.queries],
            k[part.keys],
            v[part.keys],
            out[part.queries],
            lse[part.queries],
            part,
            scale,
        )
        for part in plan.parts
    ]
    dqs, dks, dvs = zip(*parts, strict=True)
    return (
        plan.put_queries(torch.cat(dqs), q_BSHD, 0.0),
        plan.add_keys(torch.cat(dks), k_BTHD),
        plan.add_keys(torch.cat(dvs), v_BTHV),
    )


def attend(
    q: Tensor, k: Tensor, v: Tensor, part: sequences.Part | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """One call, over [B, S, ...] rows or, with a `part`, over [n, ...] rows of its sequences.

    Returns:
        The output, and maximum and sum of the softmax: [B, H, S, 1], or [n, H, 1] with a `part`.
    """
    out, peak, total, *_ = torch.ops.npu.npu_fusion_attention(
        q, k, v, q.shape[-2], scale=scale, **_sequences(q, part)
    )
    return out, peak[..., :1], total[..., :1]


def _attend_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    part: sequences.Part | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """One call; `lse` in the shape of the statistics, without their last dimension."""
    # Maximum and sum for which exp(x - max) / sum is exp(x - lse).
    peak = lse.unsqueeze(-1).expand(*lse.shape, _COPIES).contiguous()
    dq, dk, dv, *_ = torch.ops.npu.npu_fusion_attention_grad(
        q,
        k,
        v,
        d_out,
        q.shape[-2],
        softmax_max=peak,
        softmax_sum=torch.ones_like(peak),
        attention_in=out,
        scale_value=scale,
        **_sequences(q, part),
    )
    return dq, dk, dv


def _sequences(q: Tensor, part: sequences.Part | None) -> dict[str, Any]:
    """What both operators are told of the layout and the mask."""
    mask = torch.ones(_MASK, _MASK, dtype=torch.bool, device=q.device).triu_(1)
    causal = {"atten_mask": mask, "sparse_mode": _CAUSAL}
    if part is None:
        return causal | {"input_layout": "BSND"}
    return causal | {
        "input_layout": "TND",
        "actual_seq_qlen": part.query_ends,
        "actual_seq_kvlen": part.key_ends,
        "softmax_layout": "TND",  # else of that shape, but in another order
    }


def _plan(bounds_BS2: Tensor, T: int) -> sequences.Plan:
    plan = sequences.plan(bounds_BS2, T)
    for part in plan.parts:
        limits.fusion_rows("q", part.query_ends[-1])
        limits.fusion_rows("k", part.key_ends[-1])
    return plan

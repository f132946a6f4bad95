"""Attention over selected keys, forward: online softmax over blocks of gathered rows."""

import triton
import triton.language as tl

# H heads of a tile, K keys of a block, V value columns, R the columns of a key after its value,
# each as wide as its constant says: a power of two at or above the tensor's own size


@triton.jit
def sparse_attention(
    q_ptr,  # [N, heads, v_dim + r_dim]
    kv_ptr,  # [N / S, T, v_dim + r_dim]
    indices_ptr,  # int32 [N, K]
    out_ptr,  # [N, heads, v_dim]
    lse_ptr,  # fp32 [N, heads]
    scale,
    work,
    S,
    T,
    K,
    heads,
    V_DIM: tl.constexpr,
    R_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    V_WIDE: tl.constexpr,
    R_WIDE: tl.constexpr,
):
    D: tl.constexpr = V_DIM + R_DIM
    v_V = tl.arange(0, V_WIDE)
    r_R = tl.arange(0, R_WIDE)
    tiles = tl.cdiv(heads, HEADS)
    for item in range(tl.program_id(0), work, tl.num_programs(0)):
        n = item // tiles
        h_H = (item % tiles) * HEADS + tl.arange(0, HEADS)
        # Offsets of whole tensors exceed 32 bits at real sizes.
        row_H = n.to(tl.int64) * heads + h_H
        kv_batch_ptr = kv_ptr + (n // S).to(tl.int64) * T * D
        q_HV = tl.load(
            q_ptr + row_H[:, None] * D + v_V[None, :],
            mask=(h_H < heads)[:, None] & (v_V < V_DIM)[None, :],
            other=0.0,
        )
        if R_DIM > 0:
            q_HR = tl.load(
                q_ptr + row_H[:, None] * D + V_DIM + r_R[None, :],
                mask=(h_H < heads)[:, None] & (r_R < R_DIM)[None, :],
                other=0.0,
            )
        peak_H = tl.full((HEADS,), -3.0e38, tl.float32)
        total_H = tl.zeros((HEADS,), tl.float32)
        sum_HV = tl.zeros((HEADS, V_WIDE), tl.float32)
        for start in range(0, K, KEYS):
            k_K = start + tl.arange(0, KEYS)
            index_K = tl.load(indices_ptr + n.to(tl.int64) * K + k_K, mask=k_K < K, other=-1)
            valid_K = (index_K >= 0) & (index_K < T)
            index_K = tl.where(valid_K, index_K, 0)
            kv_KV = tl.load(
                kv_batch_ptr + index_K[:, None] * D + v_V[None, :],
                mask=valid_K[:, None] & (v_V < V_DIM)[None, :],
                other=0.0,
            )
            logits_HK = tl.dot(q_HV, tl.trans(kv_KV), input_precision="ieee")
            if R_DIM > 0:
                kv_KR = tl.load(
                    kv_batch_ptr + index_K[:, None] * D + V_DIM + r_R[None, :],
                    mask=valid_K[:, None] & (r_R < R_DIM)[None, :],
                    other=0.0,
                )
                logits_HK = tl.dot(q_HR, tl.trans(kv_KR), logits_HK, input_precision="ieee")
            logits_HK = tl.where(valid_K[None, :], logits_HK * scale, -3.0e38)
            new_H = tl.maximum(peak_H, tl.max(logits_HK, 1))
            p_HK = tl.where(valid_K[None, :], tl.exp(logits_HK - new_H[:, None]), 0.0)
            shrink_H = tl.exp(peak_H - new_H)
            total_H = total_H * shrink_H + tl.sum(p_HK, 1)
            sum_HV = sum_HV * shrink_H[:, None]
            sum_HV += tl.dot(p_HK.to(kv_KV.dtype), kv_KV, input_precision="ieee")
            peak_H = new_H
        empty_H = total_H == 0.0
        lse_H = tl.where(empty_H, -float("inf"), peak_H + tl.log(total_H))
        out_HV = sum_HV / tl.where(empty_H, 1.0, total_H)[:, None]
        tl.store(lse_ptr + row_H, lse_H, mask=h_H < heads)
        tl.store(
            out_ptr + row_H[:, None] * V_DIM + v_V[None, :],
            out_HV.to(out_ptr.dtype.element_ty),
            mask=(h_H < heads)[:, None] & (v_V < V_DIM)[None, :],
        )

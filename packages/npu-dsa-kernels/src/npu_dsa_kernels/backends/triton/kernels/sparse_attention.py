"""Attention over selected keys, forward: online softmax over blocks of gathered rows."""

import triton
import triton.language as tl

from npu_dsa_kernels.backends.triton.kernels.rows import (
    key_rows,
    load_heads,
    load_indices,
    spare_key,
    store_heads,
)

# H heads of a tile, K keys of a block; V value columns and R the columns of a key after its value,
# as wide as powers of two


@triton.jit(do_not_specialize=["work"])
def sparse_attention(
    q_ptr,  # [N, heads, V_DIM + R_DIM]
    kv_ptr,  # [N / S, T, V_DIM + R_DIM], or the keys of each slot: [N, slots, V_DIM + R_DIM]
    indices_ptr,  # int32 [N, K]
    out_ptr,  # [N, heads, V_DIM]
    lse_ptr,  # fp32 [N, heads]
    scale,
    work,  # N * cdiv(heads, HEADS)
    S,
    T,
    K,
    slots,  # K, rounded up to whole blocks
    heads,
    V_DIM: tl.constexpr,
    R_DIM: tl.constexpr,
    V_WIDE: tl.constexpr,
    R_WIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    ALL_HEADS: tl.constexpr,
    GATHERED: tl.constexpr,
):
    D: tl.constexpr = V_DIM + R_DIM
    v_V = tl.arange(0, V_WIDE)
    r_R = tl.arange(0, R_WIDE)
    tiles = tl.cdiv(heads, HEADS)
    for item in range(tl.program_id(0), work, tl.num_programs(0)):
        n = tl.cast(item // tiles, tl.int64)  # offsets exceed 32 bits at real sizes
        h_H = (item % tiles) * HEADS + tl.arange(0, HEADS)
        q_row_ptr = q_ptr + n * heads * D
        if GATHERED:
            kv_row = n * slots
        else:
            kv_row = n // S * T
        kv_row_ptr = kv_ptr + kv_row * D
        indices_row_ptr = indices_ptr + n * K
        q_HV = load_heads(q_row_ptr, h_H, heads, v_V, D, V_DIM, ALL_HEADS)
        if R_DIM > 0:
            q_HR = load_heads(q_row_ptr + V_DIM, h_H, heads, r_R, D, R_DIM, ALL_HEADS)
        peak_H = tl.full((HEADS,), -3.0e38, tl.float32)
        total_H = tl.zeros((HEADS,), tl.float32)
        sum_HV = tl.zeros((HEADS, V_WIDE), tl.float32)
        spare = spare_key(indices_row_ptr, T, K, 512)
        for start in range(0, tl.where(spare < 0, 0, K), KEYS):
            slot_K = start + tl.arange(0, KEYS)
            index_K, valid_K = load_indices(indices_row_ptr, slot_K, spare, T, K)
            kv_KV = key_rows(kv_row_ptr, index_K, slot_K, v_V, D, V_DIM, GATHERED)
            logits_HK = tl.dot(q_HV, tl.trans(kv_KV), input_precision="ieee")
            if R_DIM > 0:
                kv_KR = key_rows(kv_row_ptr + V_DIM, index_K, slot_K, r_R, D, R_DIM, GATHERED)
                logits_HK += tl.dot(q_HR, tl.trans(kv_KR), input_precision="ieee")
            logits_HK = tl.where(valid_K[None, :], logits_HK * scale, -3.0e38)
            new_H = tl.maximum(peak_H, tl.max(logits_HK, 1))
            p_HK = tl.where(valid_K[None, :], tl.exp(logits_HK - new_H[:, None]), 0.0)
            shrink_H = tl.exp(peak_H - new_H)
            total_H = total_H * shrink_H + tl.sum(p_HK, 1)
            pv_HV = tl.dot(p_HK.to(kv_KV.dtype), kv_KV, input_precision="ieee")
            sum_HV = sum_HV * shrink_H[:, None] + pv_HV
            peak_H = new_H
        lse_H = tl.where(spare < 0, -float("inf"), peak_H + tl.log(total_H))
        out_HV = sum_HV / tl.where(spare < 0, 1.0, total_H)[:, None]
        tl.store(lse_ptr + n * heads + h_H, lse_H, mask=h_H < heads)
        out_row_ptr = out_ptr + n * heads * V_DIM
        store_heads(out_row_ptr, out_HV, h_H, heads, v_V, V_DIM, V_DIM, ALL_HEADS)

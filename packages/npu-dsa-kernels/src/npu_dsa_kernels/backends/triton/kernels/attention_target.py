"""The attention's distribution over the selected keys, summed over heads."""

import triton
import triton.language as tl

from npu_dsa_kernels.backends.triton.kernels.rows import (
    key_rows,
    load_heads,
    load_indices,
    spare_key,
)

# H heads of a tile, K keys of a block; V value columns and R the columns of a key after its value,
# as wide as powers of two


@triton.jit(do_not_specialize=["work"])
def attention_target(
    q_ptr,  # [N, heads, V_DIM + R_DIM]
    kv_ptr,  # [N / S, T, V_DIM + R_DIM], or the keys of each slot: [N, slots, V_DIM + R_DIM]
    indices_ptr,  # int32 [N, K]
    lse_ptr,  # fp32 [N, heads]
    target_ptr,  # fp32 [N, K]
    scale,
    work,  # N * cdiv(K, KEYS)
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
    blocks = tl.cdiv(K, KEYS)
    for item in range(tl.program_id(0), work, tl.num_programs(0)):
        n = tl.cast(item // blocks, tl.int64)  # offsets exceed 32 bits at real sizes
        q_row_ptr = q_ptr + n * heads * D
        if GATHERED:
            kv_row = n * slots
        else:
            kv_row = n // S * T
        kv_row_ptr = kv_ptr + kv_row * D
        indices_row_ptr = indices_ptr + n * K
        spare = spare_key(indices_row_ptr, T, K, 512)
        slot_K = (item % blocks) * KEYS + tl.arange(0, KEYS)
        index_K, valid_K = load_indices(indices_row_ptr, slot_K, tl.maximum(spare, 0), T, K)
        kv_KV = key_rows(kv_row_ptr, index_K, slot_K, v_V, D, V_DIM, GATHERED)
        if R_DIM > 0:
            kv_KR = key_rows(kv_row_ptr + V_DIM, index_K, slot_K, r_R, D, R_DIM, GATHERED)
        target_K = tl.zeros((KEYS,), tl.float32)
        for first in range(0, heads, HEADS):
            h_H = first + tl.arange(0, HEADS)
            q_HV = load_heads(q_row_ptr, h_H, heads, v_V, D, V_DIM, ALL_HEADS)
            logits_HK = tl.dot(q_HV, tl.trans(kv_KV), input_precision="ieee")
            if R_DIM > 0:
                q_HR = load_heads(q_row_ptr + V_DIM, h_H, heads, r_R, D, R_DIM, ALL_HEADS)
                logits_HK += tl.dot(q_HR, tl.trans(kv_KR), input_precision="ieee")
            lse_H = tl.load(lse_ptr + n * heads + h_H, mask=h_H < heads, other=0.0)
            p_HK = tl.exp(logits_HK * scale - lse_H[:, None])
            if not ALL_HEADS:
                p_HK = tl.where((h_H < heads)[:, None], p_HK, 0.0)
            target_K += tl.sum(p_HK, 0)
        target_K = tl.where(valid_K, target_K, 0.0)
        tl.store(target_ptr + n * K + slot_K, target_K, mask=slot_K < K)

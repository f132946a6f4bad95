"""Attention over selected keys, backward: probabilities again from lse, gradients in one pass."""

import triton
import triton.language as tl

from npu_dsa_kernels.backends.triton.kernels.rows import (
    add_key_rows,
    key_rows,
    load_heads,
    load_indices,
    spare_key,
    store_heads,
)

# H heads of a tile, K keys of a block; V value columns and R the columns of a key after its value,
# as wide as powers of two


@triton.jit(do_not_specialize=["work"])
def sparse_attention_backward(
    d_out_ptr,  # [N, heads, V_DIM]
    d_lse_ptr,  # fp32 [N, heads]
    q_ptr,  # [N, heads, V_DIM + R_DIM]
    kv_ptr,  # [N / S, T, V_DIM + R_DIM], or the keys of each slot: [N, slots, V_DIM + R_DIM]
    indices_ptr,  # int32 [N, K]
    out_ptr,  # [N, heads, V_DIM]
    lse_ptr,  # fp32 [N, heads]
    dq_ptr,  # like q
    dkv_ptr,  # fp32, like kv, zero
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
        inside_H = h_H < heads
        q_row_ptr = q_ptr + n * heads * D
        if GATHERED:
            kv_row = n * slots
        else:
            kv_row = n // S * T
        kv_row_ptr = kv_ptr + kv_row * D
        dkv_row_ptr = dkv_ptr + kv_row * D
        indices_row_ptr = indices_ptr + n * K
        q_HV = load_heads(q_row_ptr, h_H, heads, v_V, D, V_DIM, ALL_HEADS)
        if R_DIM > 0:
            q_HR = load_heads(q_row_ptr + V_DIM, h_H, heads, r_R, D, R_DIM, ALL_HEADS)
        d_out_row_ptr = d_out_ptr + n * heads * V_DIM
        out_row_ptr = out_ptr + n * heads * V_DIM
        d_out_HV = load_heads(d_out_row_ptr, h_H, heads, v_V, V_DIM, V_DIM, ALL_HEADS)
        out_HV = load_heads(out_row_ptr, h_H, heads, v_V, V_DIM, V_DIM, ALL_HEADS)
        delta_H = tl.sum(d_out_HV.to(tl.float32) * out_HV.to(tl.float32), 1)
        delta_H -= tl.load(d_lse_ptr + n * heads + h_H, mask=inside_H, other=0.0)
        lse_H = tl.load(lse_ptr + n * heads + h_H, mask=inside_H, other=0.0)
        dq_HV = tl.zeros((HEADS, V_WIDE), tl.float32)
        dq_HR = tl.zeros((HEADS, R_WIDE), tl.float32)
        spare = spare_key(indices_row_ptr, T, K, 512)
        for start in range(0, tl.where(spare < 0, 0, K), KEYS):
            slot_K = start + tl.arange(0, KEYS)
            index_K, valid_K = load_indices(indices_row_ptr, slot_K, spare, T, K)
            kv_KV = key_rows(kv_row_ptr, index_K, slot_K, v_V, D, V_DIM, GATHERED)
            logits_HK = tl.dot(q_HV, tl.trans(kv_KV), input_precision="ieee")
            if R_DIM > 0:
                kv_KR = key_rows(kv_row_ptr + V_DIM, index_K, slot_K, r_R, D, R_DIM, GATHERED)
                logits_HK += tl.dot(q_HR, tl.trans(kv_KR), input_precision="ieee")
            p_HK = tl.where(valid_K[None, :], tl.exp(logits_HK * scale - lse_H[:, None]), 0.0)
            dp_HK = tl.dot(d_out_HV, tl.trans(kv_KV), input_precision="ieee")
            ds_HK = p_HK * (dp_HK - delta_H[:, None]) * scale
            if not ALL_HEADS:  # an infinite key times the zeros of a head that is not there is NaN
                p_HK = tl.where(inside_H[:, None], p_HK, 0.0)
                ds_HK = tl.where(inside_H[:, None], ds_HK, 0.0)
            p_HK, ds_HK = p_HK.to(kv_KV.dtype), ds_HK.to(kv_KV.dtype)
            dq_HV += tl.dot(ds_HK, kv_KV, input_precision="ieee")
            # Transposed, the wide operand is the one on the left: on CUDA it stays where it is, and
            # a tile of 64 heads fits into shared memory.
            dkv_VK = tl.dot(tl.trans(q_HV), ds_HK, input_precision="ieee")
            dkv_VK += tl.dot(tl.trans(d_out_HV), p_HK, input_precision="ieee")
            dkv_KV = tl.trans(dkv_VK)
            add_key_rows(dkv_row_ptr, dkv_KV, index_K, valid_K, slot_K, v_V, D, V_DIM, GATHERED)
            if R_DIM > 0:
                dq_HR += tl.dot(ds_HK, kv_KR, input_precision="ieee")
                dkv_KR = tl.trans(tl.dot(tl.trans(q_HR), ds_HK, input_precision="ieee"))
                add_key_rows(
                    dkv_row_ptr + V_DIM, dkv_KR, index_K, valid_K, slot_K, r_R, D, R_DIM, GATHERED
                )
        dq_row_ptr = dq_ptr + n * heads * D
        store_heads(dq_row_ptr, dq_HV, h_H, heads, v_V, D, V_DIM, ALL_HEADS)
        if R_DIM > 0:
            store_heads(dq_row_ptr + V_DIM, dq_HR, h_H, heads, r_R, D, R_DIM, ALL_HEADS)

"""A row for every slot: gathered before the attention's kernels, scattered after them.

A tile of heads is far less than all of them, and each would gather the same keys again. Where
gathering is dear, these kernels do it once for all heads, for a block of queries at a time.
"""

import triton
import triton.language as tl

from npu_dsa_kernels.backends.triton.kernels.rows import (
    gather_rows,
    load_indices,
    scatter_add_rows,
    spare_key,
)

# K slots of a block; V value columns and R the columns of a key after its value, as wide as powers
# of two


@triton.jit(do_not_specialize=["first", "work"])
def gather_slots(
    kv_ptr,  # [N / S, T, V_DIM + R_DIM]
    indices_ptr,  # int32 [queries, K]
    rows_ptr,  # [queries, slots, V_DIM + R_DIM], not written for a query without keys
    first,  # the block's first query
    work,  # queries * slots / SLOTS
    S,
    T,
    K,
    slots,
    V_DIM: tl.constexpr,
    R_DIM: tl.constexpr,
    V_WIDE: tl.constexpr,
    R_WIDE: tl.constexpr,
    SLOTS: tl.constexpr,
):
    D: tl.constexpr = V_DIM + R_DIM
    v_V = tl.arange(0, V_WIDE)
    r_R = tl.arange(0, R_WIDE)
    blocks = slots // SLOTS
    for item in range(tl.program_id(0), work, tl.num_programs(0)):
        query = tl.cast(item // blocks, tl.int64)  # offsets exceed 32 bits at real sizes
        spare = spare_key(indices_ptr + query * K, T, K, 512)
        kv_batch_ptr = kv_ptr + (first + query) // S * T * D
        rows_query_ptr = rows_ptr + query * slots * D
        # One step, or none for a query without keys.
        for start in range((item % blocks) * SLOTS, tl.where(spare < 0, 0, slots), slots):
            slot_K = start + tl.arange(0, SLOTS)
            index_K, _ = load_indices(indices_ptr + query * K, slot_K, spare, T, K)
            at_KV = slot_K[:, None] * D + v_V[None, :]
            kv_KV = gather_rows(kv_batch_ptr, index_K, v_V, D, V_DIM)
            if V_WIDE == V_DIM:
                tl.store(rows_query_ptr + at_KV, kv_KV)
            else:
                tl.store(rows_query_ptr + at_KV, kv_KV, mask=(v_V < V_DIM)[None, :])
            if R_DIM > 0:
                at_KR = slot_K[:, None] * D + V_DIM + r_R[None, :]
                kv_KR = gather_rows(kv_batch_ptr + V_DIM, index_K, r_R, D, R_DIM)
                if R_WIDE == R_DIM:
                    tl.store(rows_query_ptr + at_KR, kv_KR)
                else:
                    tl.store(rows_query_ptr + at_KR, kv_KR, mask=(r_R < R_DIM)[None, :])


@triton.jit(do_not_specialize=["first", "work"])
def scatter_slots(
    rows_ptr,  # fp32 [queries, slots, V_DIM + R_DIM]
    indices_ptr,  # int32 [queries, K]
    dkv_ptr,  # fp32 [N / S, T, V_DIM + R_DIM], added to
    first,  # the block's first query
    work,  # queries * slots / SLOTS
    S,
    T,
    K,
    slots,
    V_DIM: tl.constexpr,
    R_DIM: tl.constexpr,
    V_WIDE: tl.constexpr,
    R_WIDE: tl.constexpr,
    SLOTS: tl.constexpr,
):
    D: tl.constexpr = V_DIM + R_DIM
    v_V = tl.arange(0, V_WIDE)
    r_R = tl.arange(0, R_WIDE)
    blocks = slots // SLOTS
    for item in range(tl.program_id(0), work, tl.num_programs(0)):
        query = tl.cast(item // blocks, tl.int64)  # offsets exceed 32 bits at real sizes
        spare = spare_key(indices_ptr + query * K, T, K, 512)
        dkv_batch_ptr = dkv_ptr + (first + query) // S * T * D
        rows_query_ptr = rows_ptr + query * slots * D
        for start in range((item % blocks) * SLOTS, tl.where(spare < 0, 0, slots), slots):
            slot_K = start + tl.arange(0, SLOTS)
            index_K, valid_K = load_indices(indices_ptr + query * K, slot_K, spare, T, K)
            rows_KV = gather_rows(rows_query_ptr, slot_K, v_V, D, V_DIM)
            scatter_add_rows(dkv_batch_ptr, rows_KV, index_K, valid_K, v_V, D, V_DIM)
            if R_DIM > 0:
                rows_KR = gather_rows(rows_query_ptr + V_DIM, slot_K, r_R, D, R_DIM)
                scatter_add_rows(dkv_batch_ptr + V_DIM, rows_KR, index_K, valid_K, r_R, D, R_DIM)

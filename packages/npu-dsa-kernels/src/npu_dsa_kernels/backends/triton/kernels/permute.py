"""Tokens sorted by expert, and back: a stable counting sort of the slots, then copies of rows."""

import triton
import triton.language as tl

# N tokens, D features, k experts of a token, M rows of the permuted tokens, E experts, slots
# n * k + j; S slots of a block, X experts of a block, C columns of a block, K at least k


@triton.jit
def count_slots(
    experts_ptr,  # int32 [slots]
    counts_ptr,  # int32 [blocks, E]: of each block's slots, those of each expert
    work,
    slots,
    E,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    for block in range(tl.program_id(0), work, tl.num_programs(0)):
        s_S = block * SLOTS + tl.arange(0, SLOTS)
        expert_S = tl.load(experts_ptr + s_S, mask=s_S < slots, other=-1)
        for start in range(0, E, EXPERTS):
            e_X = start + tl.arange(0, EXPERTS)
            count_X = tl.sum((expert_S[:, None] == e_X[None, :]).to(tl.int32), 0)
            tl.store(counts_ptr + tl.cast(block, tl.int64) * E + e_X, count_X, mask=e_X < E)


@triton.jit
def place_slots(
    experts_ptr,  # int32 [slots]
    first_ptr,  # int32 [E, blocks]: the row of the first of a block's slots of each expert
    rows_ptr,  # int32 [slots]
    work,
    slots,
    blocks,
    E,
    M,
    SLOTS: tl.constexpr,
):
    i_S = tl.arange(0, SLOTS)
    for block in range(tl.program_id(0), work, tl.num_programs(0)):
        s_S = block * SLOTS + i_S
        expert_S = tl.load(experts_ptr + s_S, mask=s_S < slots, other=-1)
        here_S = (expert_S >= 0) & (expert_S < E)
        # Earlier slots of the block with the same expert.
        earlier_SS = (expert_S[:, None] == expert_S[None, :]) & (i_S[:, None] < i_S[None, :])
        rank_S = tl.sum(earlier_SS.to(tl.int32), 0)
        expert_S = tl.where(here_S, expert_S, 0)
        row_S = tl.load(first_ptr + expert_S.to(tl.int64) * blocks + block) + rank_S
        row_S = tl.where(here_S & (row_S < M), row_S, -1)
        tl.store(rows_ptr + s_S, row_S, mask=s_S < slots)


@triton.jit
def invert_rows(
    rows_ptr,  # int32 [slots]
    slots_ptr,  # int32 [M + 1], -1; the last entry takes what slots without a row write
    work,
    slots,
    M,
    SLOTS: tl.constexpr,
):
    for block in range(tl.program_id(0), work, tl.num_programs(0)):
        s_S = block * SLOTS + tl.arange(0, SLOTS)
        row_S = tl.load(rows_ptr + s_S, mask=s_S < slots, other=-1)
        here_S = (row_S >= 0) & (row_S < M)
        # All of them write the same, so the order of writes cannot show.
        tl.store(slots_ptr + tl.where(here_S, row_S, M), tl.where(here_S, s_S, -1))


@triton.jit
def take(
    x_ptr,  # [length]
    index_ptr,  # int32 [count]
    out_ptr,  # [count]: 0 where the index is outside of [0, length)
    work,
    count,
    length,
    COUNT: tl.constexpr,
):
    for block in range(tl.program_id(0), work, tl.num_programs(0)):
        i_S = block * COUNT + tl.arange(0, COUNT)
        index_S = tl.load(index_ptr + i_S, mask=i_S < count, other=-1)
        here_S = (index_S >= 0) & (index_S < length)
        x_S = tl.load(x_ptr + tl.where(here_S, index_S, 0))
        tl.store(out_ptr + i_S, tl.where(here_S, x_S, 0.0), mask=i_S < count)


@triton.jit
def gather_tokens(
    x_ptr,  # [N, D]
    slots_ptr,  # int32 [M]: the slot of each row, -1 where it has none
    scale_ptr,  # [N, k]
    out_ptr,  # [M, D]: 0 in rows without a slot
    work,
    k,
    D: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    for row in range(tl.program_id(0), work, tl.num_programs(0)):
        slot = tl.load(slots_ptr + row)
        here = slot >= 0
        slot = tl.where(here, slot, 0)
        # Offsets of whole tensors exceed 32 bits at real sizes.
        x_row_ptr = x_ptr + (slot // k).to(tl.int64) * D
        out_row_ptr = out_ptr + tl.cast(row, tl.int64) * D
        scale = tl.full((), 1.0, tl.float32)
        if HAS_SCALE:
            scale = tl.load(scale_ptr + slot).to(tl.float32)
        for start in range(0, D, COLUMNS):
            d_C = start + tl.arange(0, COLUMNS)
            out_C = tl.load(x_row_ptr + d_C, mask=d_C < D, other=0.0)
            if HAS_SCALE:
                out_C = (out_C.to(tl.float32) * scale).to(out_ptr.dtype.element_ty)
            # Not a product with 0, which keeps what is not finite.
            tl.store(out_row_ptr + d_C, tl.where(here, out_C, 0.0), mask=d_C < D)


@triton.jit
def sum_rows(
    x_ptr,  # [M, D]
    rows_ptr,  # int32 [N, k]
    scale_ptr,  # [N, k]
    out_ptr,  # [N, D]
    work,
    M,
    k,
    D: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    for n in range(tl.program_id(0), work, tl.num_programs(0)):
        out_row_ptr = out_ptr + tl.cast(n, tl.int64) * D
        for start in range(0, D, COLUMNS):
            d_C = start + tl.arange(0, COLUMNS)
            sum_C = tl.zeros((COLUMNS,), tl.float32)
            for j in range(k):
                row = tl.load(rows_ptr + n * k + j)
                here = (row >= 0) & (row < M)
                row = tl.where(here, row, 0)
                part_C = tl.load(x_ptr + row.to(tl.int64) * D + d_C, mask=d_C < D, other=0.0)
                part_C = part_C.to(tl.float32)
                if HAS_SCALE:
                    part_C *= tl.load(scale_ptr + n * k + j).to(tl.float32)
                sum_C += tl.where(here, part_C, 0.0)
            tl.store(out_row_ptr + d_C, sum_C.to(out_ptr.dtype.element_ty), mask=d_C < D)


@triton.jit
def dot_rows(
    x_ptr,  # [M, D]
    y_ptr,  # [N, D]
    rows_ptr,  # int32 [N, k]
    out_ptr,  # [N, k]: products of a token with each of its rows
    work,
    M,
    k,
    D: tl.constexpr,
    K_WIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    j_K = tl.arange(0, K_WIDE)
    for n in range(tl.program_id(0), work, tl.num_programs(0)):
        y_row_ptr = y_ptr + tl.cast(n, tl.int64) * D
        out_K = tl.zeros((K_WIDE,), tl.float32)
        for start in range(0, D, COLUMNS):
            d_C = start + tl.arange(0, COLUMNS)
            y_C = tl.load(y_row_ptr + d_C, mask=d_C < D, other=0.0).to(tl.float32)
            for j in range(k):
                row = tl.load(rows_ptr + n * k + j)
                row = tl.where((row >= 0) & (row < M), row, 0)
                x_C = tl.load(x_ptr + row.to(tl.int64) * D + d_C, mask=d_C < D, other=0.0)
                out_K += tl.where(j_K == j, tl.sum(x_C.to(tl.float32) * y_C), 0.0)
        row_K = tl.load(rows_ptr + n * k + j_K, mask=j_K < k, other=-1)
        out_K = tl.where((row_K >= 0) & (row_K < M), out_K, 0.0)
        tl.store(out_ptr + n * k + j_K, out_K.to(out_ptr.dtype.element_ty), mask=j_K < k)

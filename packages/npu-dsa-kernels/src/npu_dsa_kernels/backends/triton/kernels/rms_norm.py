"""Root-mean-square normalisation, forward and backward: whole rows at a time."""

import triton
import triton.language as tl

# N rows, D features; R rows of a tile, C columns: a power of two at or above D


@triton.jit
def rms_norm(
    x_ptr,  # [N, D]
    weight_ptr,  # [D]
    y_ptr,  # [N, D]
    rstd_ptr,  # fp32 [N]
    eps,
    work,
    N,
    D: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    d_C = tl.arange(0, COLUMNS)
    w_C = tl.zeros((COLUMNS,), tl.float32)
    if HAS_WEIGHT:
        w_C = tl.load(weight_ptr + d_C, mask=d_C < D, other=0.0).to(tl.float32)
    for item in range(tl.program_id(0), work, tl.num_programs(0)):
        n_R = item * ROWS + tl.arange(0, ROWS)
        # Offsets of whole tensors exceed 32 bits at real sizes.
        at_RC = n_R.to(tl.int64)[:, None] * D + d_C[None, :]
        inside_RC = (n_R < N)[:, None] & (d_C < D)[None, :]
        x_RC = tl.load(x_ptr + at_RC, mask=inside_RC, other=0.0).to(tl.float32)
        rstd_R = tl.rsqrt(tl.sum(x_RC * x_RC, 1) / D + eps)
        y_RC = x_RC * rstd_R[:, None]
        if HAS_WEIGHT:
            y_RC *= w_C[None, :]
        tl.store(rstd_ptr + n_R, rstd_R, mask=n_R < N)
        tl.store(y_ptr + at_RC, y_RC.to(y_ptr.dtype.element_ty), mask=inside_RC)


@triton.jit
def rms_norm_backward(
    d_y_ptr,  # [N, D]
    x_ptr,  # [N, D]
    weight_ptr,  # [D]
    rstd_ptr,  # fp32 [N]
    d_x_ptr,  # [N, D]
    d_weight_ptr,  # fp32 [programs, D]: what each program adds
    work,
    N,
    D: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    d_C = tl.arange(0, COLUMNS)
    w_C = tl.zeros((COLUMNS,), tl.float32)
    d_weight_C = tl.zeros((COLUMNS,), tl.float32)
    if HAS_WEIGHT:
        w_C = tl.load(weight_ptr + d_C, mask=d_C < D, other=0.0).to(tl.float32)
    for item in range(tl.program_id(0), work, tl.num_programs(0)):
        n_R = item * ROWS + tl.arange(0, ROWS)
        at_RC = n_R.to(tl.int64)[:, None] * D + d_C[None, :]
        inside_RC = (n_R < N)[:, None] & (d_C < D)[None, :]
        rstd_R = tl.load(rstd_ptr + n_R, mask=n_R < N, other=0.0)
        hat_RC = tl.load(x_ptr + at_RC, mask=inside_RC, other=0.0).to(tl.float32)
        hat_RC *= rstd_R[:, None]
        g_RC = tl.load(d_y_ptr + at_RC, mask=inside_RC, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            d_weight_C += tl.sum(g_RC * hat_RC, 0)
            g_RC *= w_C[None, :]
        mean_R = tl.sum(g_RC * hat_RC, 1) / D
        d_x_RC = (g_RC - hat_RC * mean_R[:, None]) * rstd_R[:, None]
        tl.store(d_x_ptr + at_RC, d_x_RC.to(d_x_ptr.dtype.element_ty), mask=inside_RC)
    if HAS_WEIGHT:
        # Summed afterwards, in the order of the programs: atomics would add in any order.
        row_ptr = d_weight_ptr + tl.program_id(0).to(tl.int64) * D
        tl.store(row_ptr + d_C, d_weight_C, mask=d_C < D)

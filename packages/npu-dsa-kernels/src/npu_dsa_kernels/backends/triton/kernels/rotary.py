"""Rotary position embedding, forward and backward."""

import triton
import triton.language as tl

# B batch, S sequence; T tokens of a tile, H heads, P pairs of a head's features, each as wide as
# its constant says: a power of two


@triton.jit
def rotary_mul(
    x_ptr,  # [B, S, heads, 2 * PAIRS]
    cos_ptr,  # [S, 2 * PAIRS], or with a batch
    sin_ptr,  # as cos
    y_ptr,  # as x
    work,
    S,
    heads,
    cos_stride,  # from the angles of a batch row to the next one's, 0 where they share them
    sin_stride,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS_WIDE: tl.constexpr,
):
    D: tl.constexpr = 2 * PAIRS
    token_tiles = tl.cdiv(S, TOKENS)
    head_tiles = tl.cdiv(heads, HEADS)
    for item in range(tl.program_id(0), work, tl.num_programs(0)):
        b = item // head_tiles // token_tiles
        t_T = (item // head_tiles) % token_tiles * TOKENS + tl.arange(0, TOKENS)
        h_H = item % head_tiles * HEADS + tl.arange(0, HEADS)
        # Offsets of whole tensors exceed 32 bits at real sizes.
        b = b.to(tl.int64)
        inside_T1 = (t_T < S)[:, None]
        cos_T1 = b * cos_stride + t_T[:, None] * D
        cos1_T1P, cos2_T1P = _load_pairs(cos_ptr, cos_T1, inside_T1, PAIRS, INTERLEAVED, PAIRS_WIDE)
        sin_T1 = b * sin_stride + t_T[:, None] * D
        sin1_T1P, sin2_T1P = _load_pairs(sin_ptr, sin_T1, inside_T1, PAIRS, INTERLEAVED, PAIRS_WIDE)
        head_TH = ((b * S + t_T)[:, None] * heads + h_H[None, :]) * D
        inside_TH = inside_T1 & (h_H < heads)[None, :]
        x1_THP, x2_THP = _load_pairs(x_ptr, head_TH, inside_TH, PAIRS, INTERLEAVED, PAIRS_WIDE)
        if BACKWARD:
            # The transposed rotation: the sines change sign and places.
            y1_THP = x1_THP * cos1_T1P + x2_THP * sin2_T1P
            y2_THP = x2_THP * cos2_T1P - x1_THP * sin1_T1P
        else:
            y1_THP = x1_THP * cos1_T1P - x2_THP * sin1_T1P
            y2_THP = x2_THP * cos2_T1P + x1_THP * sin2_T1P
        if INTERLEAVED:
            d_D = tl.arange(0, 2 * PAIRS_WIDE)
            y_THD = tl.reshape(tl.join(y1_THP, y2_THP), (TOKENS, HEADS, 2 * PAIRS_WIDE))
            tl.store(
                y_ptr + head_TH[:, :, None] + d_D[None, None, :],
                y_THD.to(y_ptr.dtype.element_ty),
                mask=inside_TH[:, :, None] & (d_D < D)[None, None, :],
            )
        else:
            p_P = tl.arange(0, PAIRS_WIDE)
            y1_ptrs = y_ptr + head_TH[:, :, None] + p_P[None, None, :]
            inside_THP = inside_TH[:, :, None] & (p_P < PAIRS)[None, None, :]
            tl.store(y1_ptrs, y1_THP.to(y_ptr.dtype.element_ty), mask=inside_THP)
            tl.store(y1_ptrs + PAIRS, y2_THP.to(y_ptr.dtype.element_ty), mask=inside_THP)


@triton.jit
def _load_pairs(
    ptr,
    row_TH,
    inside_TH,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIRS_WIDE: tl.constexpr,
):
    """fp32 [T, H, P] twice: the first and the second element of every pair of the rows."""
    if INTERLEAVED:
        # Whole rows, split after: loads of every other element fill the buffers of Ascend, whose
        # smallest piece of memory is 32 bytes.
        d_D = tl.arange(0, 2 * PAIRS_WIDE)
        x_THD = tl.load(
            ptr + row_TH[:, :, None] + d_D[None, None, :],
            mask=inside_TH[:, :, None] & (d_D < 2 * PAIRS)[None, None, :],
            other=0.0,
        ).to(tl.float32)
        x1_THP, x2_THP = tl.split(
            tl.reshape(x_THD, (row_TH.shape[0], row_TH.shape[1], PAIRS_WIDE, 2))
        )
    else:
        p_P = tl.arange(0, PAIRS_WIDE)
        x1_ptrs = ptr + row_TH[:, :, None] + p_P[None, None, :]
        inside_THP = inside_TH[:, :, None] & (p_P < PAIRS)[None, None, :]
        x1_THP = tl.load(x1_ptrs, mask=inside_THP, other=0.0).to(tl.float32)
        x2_THP = tl.load(x1_ptrs + PAIRS, mask=inside_THP, other=0.0).to(tl.float32)
    return x1_THP, x2_THP

"""The base operators: what the kernels are given, and what they write to."""

from typing import Any

import torch
from torch import Tensor

from npu_dsa_kernels import checks
from npu_dsa_kernels.backends.blocked import hadamard
from npu_dsa_kernels.backends.triton.kernels import permute, rotary
from npu_dsa_kernels.backends.triton.kernels import rms_norm as norm
from npu_dsa_kernels.backends.triton.launch import cdiv, launch, launcher, tiles, wide
from npu_dsa_kernels.backends.triton.tiles import Tiles

__all__ = [
    "hadamard",  # one matmul with a cached matrix: the device needs no kernel of ours
    "moe_permute",
    "moe_permute_backward",
    "moe_unpermute",
    "moe_unpermute_backward",
    "rms_norm",
    "rms_norm_backward",
    "rotary_mul",
    "rotary_mul_backward",
]

# N rows or tokens, D features, E experts, k experts of a token, M rows of the permuted tokens,
# S = N * k slots, B blocks of slots, X = E * B; P programs

_WIDEST_ROW = 8192
"""Features of a row that every target can hold at once, and RMSNorm does."""


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    x_ND = x.reshape(-1, x.shape[-1]).contiguous()
    y_ND = torch.empty_like(x_ND)
    rstd_N = x.new_empty(x_ND.shape[0], dtype=torch.float32)
    work, constants, tile = _whole_rows(norm.rms_norm, x_ND)
    launch(
        norm.rms_norm, work, x_ND, _or(weight, x_ND), y_ND, rstd_N, eps, work, x_ND.shape[0],
        tile=tile, HAS_WEIGHT=weight is not None, **constants,
    )  # fmt: skip
    return y_ND.view(x.shape), rstd_N.view(*x.shape[:-1], 1)


def rms_norm_backward(
    d_y: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    D = x.shape[-1]
    x_ND, d_y_ND = x.reshape(-1, D).contiguous(), d_y.reshape(-1, D).contiguous()
    d_x_ND = torch.empty_like(x_ND)
    work, constants, tile = _whole_rows(norm.rms_norm_backward, x_ND)
    # A row for each program: their sum has an order of its own, that of atomics has none.
    P = 0 if weight is None else min(work, launcher(x.device).programs)
    d_weight_PD = x.new_empty(P, D, dtype=torch.float32)
    launch(
        norm.rms_norm_backward, work, d_y_ND, x_ND, _or(weight, x_ND), rstd.contiguous(), d_x_ND,
        d_weight_PD, work, x_ND.shape[0],
        tile=tile, HAS_WEIGHT=weight is not None, **constants,
    )  # fmt: skip
    d_weight = x.new_empty(0) if weight is None else d_weight_PD.sum(0).to(weight.dtype)
    return d_x_ND.view(x.shape), d_weight


def _whole_rows(kernel: Any, x_ND: Tensor) -> tuple[int, dict[str, int], Tiles]:
    """How many tiles there are, the constants of a tile, and the table's entry."""
    (N, D), tile = x_ND.shape, tiles(kernel, x_ND, "x")
    rows = _rows(tile, D, _WIDEST_ROW)
    return cdiv(N, rows), {"D": D, "ROWS": rows, "COLUMNS": wide(D, 1)}, tile


def rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return _rotate(x, cos, sin, interleaved, False)


def rotary_mul_backward(d_y: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return _rotate(d_y, cos, sin, interleaved, True)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backward: bool) -> Tensor:
    B, S, H, D = x.shape
    y = x.new_empty(x.shape)
    if y.numel() == 0:
        return y
    tile = tiles(rotary.rotary_mul, x, "x")
    rows = _rows(tile, D, tile.columns)
    heads = min(rows, wide(H, 1))
    tokens = min(rows // heads, wide(S, 1))
    work = B * cdiv(S, tokens) * cdiv(H, heads)
    cos_stride, sin_stride = (S * D if table.dim() == 3 else 0 for table in (cos, sin))
    launch(
        rotary.rotary_mul, work, x.contiguous(), _angles(cos), _angles(sin), y, work, S, H,
        cos_stride, sin_stride, tile=tile, PAIRS=D // 2, INTERLEAVED=interleaved,
        BACKWARD=backward, TOKENS=tokens, HEADS=heads, PAIRS_WIDE=wide(D // 2, 1),
    )  # fmt: skip
    return y


def _angles(table: Tensor) -> Tensor:
    return (table.float() if table.dtype == torch.float64 else table).contiguous()


def _rows(tile: Tiles, D: int, limit: int) -> int:
    """Rows of D features of a tile, whose columns are the elements of several rows at a time.

    Raises:
        ValueError: D is above `limit`, where not even one row fits.
    """
    if limit < D:
        want = f"backend 'triton' takes at most {limit} features; backend='torch' takes any number"
        raise checks.bad("x", f"a last dimension of {D}", want)
    return max(1, min(tile.rows, tile.columns // wide(D, 1)))


def moe_permute(
    tokens_ND: Tensor, experts_Nk: Tensor, probs_Nk: Tensor | None, E: int, M: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    N, k = experts_Nk.shape
    rows_S, ends_E = _sort(_int32(experts_Nk, E).view(-1), E, M)
    slots_M = _slot_of_row(rows_S, M)
    return (
        _gather(tokens_ND, slots_M, None, k),
        tokens_ND.new_empty(0) if probs_Nk is None else _take(probs_Nk.reshape(-1), slots_M),
        rows_S.view(N, k),
        ends_E.diff(prepend=ends_E.new_zeros(1)),
    )


def _sort(expert_S: Tensor, E: int, M: int) -> tuple[Tensor, Tensor]:
    """The row of each slot, -1 where it has none, and int64 [E], where each expert's rows end."""
    S, rows_S = expert_S.shape[0], torch.empty_like(expert_S)
    if S == 0:
        return rows_S, torch.zeros(E, dtype=torch.int64, device=expert_S.device)
    tile = tiles(permute.count_slots, expert_S, "experts")
    B = cdiv(S, tile.rows)
    counts_BE = expert_S.new_empty(B, E)
    launch(
        permute.count_slots, B, expert_S, counts_BE, B, S, E,
        tile=tile, SLOTS=tile.rows, EXPERTS=tile.columns,
    )  # fmt: skip
    # Experts in order, and of each the blocks in order: the order of the rows.
    counts_X = counts_BE.t().flatten()
    ends_X = counts_X.cumsum(0, dtype=torch.int32)
    launch(
        permute.place_slots, B, expert_S, ends_X - counts_X, rows_S, B, S, B, E, M,
        tile=tile, SLOTS=tile.rows,
    )  # fmt: skip
    return rows_S, ends_X.view(E, B)[:, -1].long().clamp(max=M)


def moe_permute_backward(
    d_tokens_MD: Tensor, d_probs_M: Tensor | None, rows_Nk: Tensor
) -> tuple[Tensor, Tensor]:
    # A token's gradient is the sum over its slots: what unpermute computes.
    d_in_ND = moe_unpermute(d_tokens_MD, rows_Nk, None)
    if d_probs_M is None:
        return d_in_ND, d_tokens_MD.new_empty(0)
    return d_in_ND, _take(d_probs_M, rows_Nk)


def moe_unpermute(x_MD: Tensor, rows_Nk: Tensor, probs_Nk: Tensor | None) -> Tensor:
    (N, k), (M, D) = rows_Nk.shape, x_MD.shape
    if 0 in (N, M, D):
        return x_MD.new_zeros(N, D)
    y_ND, tile = x_MD.new_empty(N, D), tiles(permute.sum_rows, x_MD, "x")
    launch(
        permute.sum_rows, N, x_MD.contiguous(), _int32(rows_Nk, M), _or(probs_Nk, x_MD), y_ND, N,
        M, k, tile=tile, D=D, HAS_SCALE=probs_Nk is not None, COLUMNS=_columns(tile, D),
    )  # fmt: skip
    return y_ND


def moe_unpermute_backward(
    d_y_ND: Tensor,
    x_MD: Tensor | None,
    rows_Nk: Tensor,
    probs_Nk: Tensor | None,
    M: int,
) -> tuple[Tensor, Tensor]:
    (N, k), D, rows_Nk = rows_Nk.shape, d_y_ND.shape[1], _int32(rows_Nk, M)
    d_x_MD = _gather(d_y_ND, _slot_of_row(rows_Nk.view(-1), M), probs_Nk, k)
    if x_MD is None or probs_Nk is None:
        return d_x_MD, d_y_ND.new_empty(0)
    d_probs_Nk = probs_Nk.new_zeros(N, k)
    if 0 in (N, M, D):
        return d_x_MD, d_probs_Nk
    tile = tiles(permute.dot_rows, x_MD, "x")
    launch(
        permute.dot_rows, N, x_MD.contiguous(), d_y_ND.contiguous(), rows_Nk, d_probs_Nk, N, M, k,
        tile=tile, D=D, K_WIDE=wide(k, 1), COLUMNS=_columns(tile, D),
    )  # fmt: skip
    return d_x_MD, d_probs_Nk


def _gather(x_ND: Tensor, slots_M: Tensor, scale_Nk: Tensor | None, k: int) -> Tensor:
    """[M, D], the token of each row's slot, times the slot's scale; 0 where it has no slot."""
    (N, D), M = x_ND.shape, slots_M.shape[0]
    if 0 in (N, M, D):
        return x_ND.new_zeros(M, D)
    out_MD, tile = x_ND.new_empty(M, D), tiles(permute.gather_tokens, x_ND, "tokens")
    launch(
        permute.gather_tokens, M, x_ND.contiguous(), slots_M, _or(scale_Nk, x_ND), out_MD, M, k,
        tile=tile, D=D, HAS_SCALE=scale_Nk is not None, COLUMNS=_columns(tile, D),
    )  # fmt: skip
    return out_MD


def _slot_of_row(rows_S: Tensor, M: int) -> Tensor:
    """int32 [M], the inverse of `rows`: the slot of each row, -1 where none names it."""
    slots, S = rows_S.new_full((M + 1,), -1), rows_S.shape[0]
    tile = tiles(permute.invert_rows, rows_S, "rows")
    work = cdiv(S, tile.rows)
    launch(permute.invert_rows, work, rows_S, slots, work, S, M, tile=tile, SLOTS=tile.rows)
    return slots[:M]


def _take(x_M: Tensor, index: Tensor) -> Tensor:
    """x[index], 0 where the index is outside of [0, M)."""
    M, out = x_M.shape[0], x_M.new_zeros(index.shape)
    if M == 0:
        return out
    index = _int32(index, M)
    count, tile = index.numel(), tiles(permute.take, index, "rows")
    work = cdiv(count, tile.rows)
    launch(
        permute.take, work, x_M.contiguous(), index, out, work, count, M,
        tile=tile, COUNT=tile.rows,
    )  # fmt: skip
    return out


def _int32(index: Tensor, limit: int) -> Tensor:
    """`index` as contiguous int32; what is outside of [0, limit) stays outside."""
    if index.dtype != torch.int32:
        index = index.clamp(-1, limit).int()
    return index.contiguous()


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """`x` for a kernel, which is given some tensor also where it reads none."""
    return other if x is None else x.contiguous()


def _columns(tile: Tiles, D: int) -> int:
    return min(tile.columns, wide(D, 1))

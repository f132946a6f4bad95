"""The "torch" backend of the base operators: plain torch calls with the backwards written out.

Rows are taken in blocks, so that what is computed in float32 for half precision inputs never exists
for the whole tensor at once, and stays in the cache on CPU. Nothing here waits for the device,
except a grouped matmul that the device has no kernel for.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from npu_dsa_kernels.backends.precision import compute_dtype

# N rows or tokens, D features, G groups, I and O input and output features, E experts,
# k experts of a token, M rows of the permuted tokens, S = N * k slots; n, m rows of a block

_CPU_BLOCK_BYTES = 2**20
_DEVICE_BLOCK_BYTES = 256 * 2**20


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    dtype, D = compute_dtype(x.dtype), x.shape[-1]
    x_ND, y_ND = x.reshape(-1, D), x.new_empty(x.numel() // D, D)
    rstd_N1 = x.new_empty(y_ND.shape[0], 1, dtype=dtype)
    w_D = None if weight is None else weight.to(dtype)
    for rows in _row_blocks(y_ND.shape[0], D * dtype.itemsize, x.device):
        x_nD = x_ND[rows].to(dtype)
        rstd_N1[rows] = x_nD.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        y_nD = x_nD * rstd_N1[rows]
        y_ND[rows] = y_nD if w_D is None else y_nD.mul_(w_D)
    return y_ND.view(x.shape), rstd_N1.view(*x.shape[:-1], 1)


def rms_norm_backward(
    d_y: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    dtype, D = compute_dtype(x.dtype), x.shape[-1]
    x_ND, d_y_ND, rstd_N1 = x.reshape(-1, D), d_y.reshape(-1, D), rstd.reshape(-1, 1)
    dx_ND = x.new_empty(x.numel() // D, D)
    w_D = None if weight is None else weight.to(dtype)
    dw_D = x.new_zeros(D, dtype=dtype)
    for rows in _row_blocks(dx_ND.shape[0], D * dtype.itemsize, x.device):
        rstd_n1, g_nD = rstd_N1[rows].to(dtype), d_y_ND[rows].to(dtype)
        hat_nD = x_ND[rows].to(dtype) * rstd_n1
        if w_D is not None:
            dw_D += (g_nD * hat_nD).sum(0)
            g_nD = g_nD * w_D
        mean_n1 = (g_nD * hat_nD).mean(-1, keepdim=True)
        dx_ND[rows] = hat_nD.mul_(mean_n1).neg_().add_(g_nD).mul_(rstd_n1)
    dw = x.new_empty(0) if weight is None else dw_D.to(weight.dtype)
    return dx_ND.view(x.shape), dw


def rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    sin1, sin2 = _pairs(sin, interleaved)
    return _rotate(x, cos, sin1, sin2, interleaved)


def rotary_mul_backward(d_y: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    # The transposed rotation: the sines change sign and places.
    sin1, sin2 = _pairs(sin, interleaved)
    return _rotate(d_y, cos, -sin2, -sin1, interleaved)


def _rotate(x: Tensor, cos: Tensor, sin1: Tensor, sin2: Tensor, interleaved: bool) -> Tensor:
    dtype = compute_dtype(x.dtype)
    cos1, cos2, sin1, sin2 = (
        angle.to(dtype).unsqueeze(-2) for angle in (*_pairs(cos, interleaved), sin1, sin2)
    )
    y = x.new_empty(x.shape)
    y1, y2 = _pairs(y, interleaved)
    x1, x2 = (half.to(dtype) for half in _pairs(x, interleaved))
    y1.copy_((x1 * cos1).addcmul_(x2, sin1, value=-1))
    y2.copy_((x2 * cos2).addcmul_(x1, sin2))
    return y


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and of the second element of every pair."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def swiglu(x: Tensor, dim: int) -> Tensor:
    dtype = compute_dtype(x.dtype)
    x_N2D, shape = _halves(x, dim)
    y_ND = x.new_empty(x_N2D.shape[0], x_N2D.shape[2])
    for rows in _row_blocks(y_ND.shape[0], y_ND.shape[1] * dtype.itemsize, x.device):
        a_nD, b_nD = x_N2D[rows].to(dtype).unbind(1)
        y_ND[rows] = torch.nn.functional.silu(a_nD).mul_(b_nD)
    return y_ND.view(shape)


def swiglu_backward(d_y: Tensor, x: Tensor, dim: int) -> Tensor:
    dtype = compute_dtype(x.dtype)
    x_N2D, _ = _halves(x, dim)
    dx_N2D = torch.empty_like(x_N2D, memory_format=torch.contiguous_format)
    N, _, D = x_N2D.shape
    d_y_ND = d_y.reshape(N, D)
    for rows in _row_blocks(N, D * dtype.itemsize, x.device):
        a_nD, b_nD = x_N2D[rows].to(dtype).unbind(1)
        g_nD, gate_nD = d_y_ND[rows].to(dtype), a_nD.sigmoid()
        silu_nD = a_nD * gate_nD
        dx_N2D[rows, 1] = g_nD * silu_nD
        # silu' = gate + silu (1 - gate)
        slope_nD = silu_nD.mul_(1 - gate_nD).add_(gate_nD)
        dx_N2D[rows, 0] = slope_nD.mul_(g_nD).mul_(b_nD)
    return dx_N2D.view(x.shape)


def _halves(x: Tensor, dim: int) -> tuple[Tensor, list[int]]:
    """`x` as [N, 2, D], N all dimensions before `dim`; and the shape of a half."""
    shape = list(x.shape)
    shape[dim] //= 2
    dim %= x.dim()
    N, D = 1, 1
    for size in shape[:dim]:
        N *= size
    for size in shape[dim:]:
        D *= size
    return x.reshape(N, 2, D), shape


def grouped_matmul(x_NI: Tensor, w_GIO: Tensor, ends_G: Tensor) -> Tensor:
    if _one_kernel(x_NI, w_GIO):
        y_NO = torch._grouped_mm(x_NI, w_GIO, offs=ends_G.int())
        return y_NO.masked_fill_(_beyond(ends_G, x_NI.shape[0]), 0.0)
    y_NO = x_NI.new_empty(x_NI.shape[0], w_GIO.shape[2])
    start = 0
    for g, end in enumerate(ends_G.tolist()):
        torch.mm(x_NI[start:end], w_GIO[g], out=y_NO[start:end])
        start = end
    y_NO[start:].zero_()
    return y_NO


def grouped_matmul_backward(
    d_y_NO: Tensor, x_NI: Tensor, w_GIO: Tensor, ends_G: Tensor
) -> tuple[Tensor, Tensor]:
    if _one_kernel(x_NI, w_GIO):
        d_y_NO, ends = d_y_NO.contiguous(), ends_G.int()
        dx_NI = torch._grouped_mm(d_y_NO, w_GIO.transpose(1, 2), offs=ends)
        dw_GIO = torch._grouped_mm(x_NI.t(), d_y_NO, offs=ends)
        # What the kernel leaves in the weight gradient of an empty group is not said.
        empty_G = ends_G.diff(prepend=ends_G.new_zeros(1)) == 0
        return (
            dx_NI.masked_fill_(_beyond(ends_G, x_NI.shape[0]), 0.0),
            dw_GIO.masked_fill_(empty_G[:, None, None], 0.0),
        )
    dx_NI, dw_GIO = x_NI.new_empty(x_NI.shape), w_GIO.new_empty(w_GIO.shape)
    start = 0
    for g, end in enumerate(ends_G.tolist()):
        torch.mm(d_y_NO[start:end], w_GIO[g].t(), out=dx_NI[start:end])
        torch.mm(x_NI[start:end].t(), d_y_NO[start:end], out=dw_GIO[g])
        start = end
    dx_NI[start:].zero_()
    return dx_NI, dw_GIO


def _one_kernel(x_NI: Tensor, w_GIO: Tensor) -> bool:
    """Whether torch's grouped kernel takes the operands: CUDA, bf16, rows of whole 16 bytes.

    On CPU it is a loop of matmuls, too, and elsewhere it reads the group sizes on the host.
    """
    return (
        x_NI.is_cuda
        and x_NI.dtype == torch.bfloat16
        and x_NI.numel() > 0
        and w_GIO.numel() > 0
        and x_NI.is_contiguous()
        and w_GIO.is_contiguous()
        and w_GIO.shape[1] % 8 == 0
        and w_GIO.shape[2] % 8 == 0
    )


def _beyond(ends_G: Tensor, N: int) -> Tensor:
    """[N, 1], rows of no group."""
    return (torch.arange(N, device=ends_G.device) >= ends_G[-1]).unsqueeze(1)


def moe_permute(
    tokens_ND: Tensor, experts_Nk: Tensor, probs_Nk: Tensor | None, E: int, M: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    N, k = experts_Nk.shape
    expert_S = experts_Nk.reshape(-1)
    here_S = (expert_S >= 0) & (expert_S < E)
    # Dropped slots sort behind all experts.
    sorted_S, slot_S = torch.where(here_S, expert_S, E).sort(stable=True)
    expert_E = torch.arange(E, dtype=sorted_S.dtype, device=sorted_S.device)
    # Not bincount, which waits for the device and adds with atomics there.
    ends_E = torch.searchsorted(sorted_S, expert_E, right=True).clamp(max=M)

    row_S = torch.empty_like(slot_S)
    row_S[slot_S] = torch.arange(N * k, device=slot_S.device)
    row_S = row_S.masked_fill(~here_S | (row_S >= M), -1)

    slot_M = slot_S.new_full((M,), -1)
    slot_M[: N * k] = slot_S[:M]
    slot_M.masked_fill_(torch.arange(M, device=slot_M.device) >= ends_E[-1], -1)
    out_MD = tokens_ND.new_zeros(M, tokens_ND.shape[1])
    if N:
        for rows in _row_blocks(M, out_MD.shape[1] * out_MD.itemsize, out_MD.device):
            slot_m = slot_M[rows]
            part_mD = tokens_ND.index_select(0, slot_m.clamp(min=0) // k)
            out_MD[rows] = part_mD.masked_fill_((slot_m < 0).unsqueeze(1), 0.0)
    return (
        out_MD,
        tokens_ND.new_empty(0) if probs_Nk is None else _take(probs_Nk.reshape(-1), slot_M),
        row_S.int().view(N, k),
        ends_E.diff(prepend=ends_E.new_zeros(1)),
    )


def moe_permute_backward(
    d_tokens_MD: Tensor, d_probs_M: Tensor | None, rows_Nk: Tensor
) -> tuple[Tensor, Tensor]:
    # A token's gradient is the sum over its slots: what unpermute computes.
    d_in_ND = moe_unpermute(d_tokens_MD, rows_Nk, None)
    if d_probs_M is None:
        return d_in_ND, d_tokens_MD.new_empty(0)
    return d_in_ND, _take(d_probs_M, rows_Nk.long())


def _take(x_M: Tensor, index: Tensor) -> Tensor:
    """x[index], 0 where the index is outside of [0, M)."""
    M = x_M.shape[0]
    outside = (index < 0) | (index >= M)
    return torch.cat([x_M, x_M.new_zeros(1)])[index.masked_fill(outside, M)]


def moe_unpermute(x_MD: Tensor, rows_Nk: Tensor, probs_Nk: Tensor | None) -> Tensor:
    (N, k), (M, D) = rows_Nk.shape, x_MD.shape
    dtype = compute_dtype(x_MD.dtype)
    y_ND = x_MD.new_zeros(N, D)
    if M == 0:
        return y_ND
    row_kN, absent_kN = _rows_by_slot(rows_Nk, M)
    for rows in _row_blocks(N, D * dtype.itemsize, x_MD.device):
        sum_nD = x_MD.new_zeros(rows.stop - rows.start, D, dtype=dtype)
        for j in range(k):
            part_nD = x_MD.index_select(0, row_kN[j, rows])
            part_nD.masked_fill_(absent_kN[j, rows].unsqueeze(1), 0.0)
            if probs_Nk is None:
                sum_nD += part_nD
            else:
                p_n = probs_Nk[rows, j].to(dtype).masked_fill(absent_kN[j, rows], 0.0)
                sum_nD.addcmul_(part_nD.to(dtype), p_n.unsqueeze(1))
        y_ND[rows] = sum_nD
    return y_ND


def moe_unpermute_backward(
    d_y_ND: Tensor,
    x_MD: Tensor | None,
    rows_Nk: Tensor,
    probs_Nk: Tensor | None,
    M: int,
) -> tuple[Tensor, Tensor]:
    (N, k), D = rows_Nk.shape, d_y_ND.shape[1]
    dtype = compute_dtype(d_y_ND.dtype)
    dx_MD = d_y_ND.new_zeros(M, D)
    d_probs_Nk = d_y_ND.new_empty(0) if probs_Nk is None else torch.zeros_like(probs_Nk)
    if M == 0 or N == 0:
        return dx_MD, d_probs_Nk
    row_kN, absent_kN = _rows_by_slot(rows_Nk, M)

    slot_M = _slot_of_row(rows_Nk, M)
    p_M = None if probs_Nk is None else _take(probs_Nk.reshape(-1), slot_M).to(dtype)
    for rows in _row_blocks(M, D * dtype.itemsize, d_y_ND.device):
        slot_m = slot_M[rows]
        part_mD = d_y_ND.index_select(0, slot_m.clamp(min=0) // k)
        if p_M is not None:
            part_mD = part_mD.to(dtype).mul_(p_M[rows].unsqueeze(1))
        dx_MD[rows] = part_mD.masked_fill_((slot_m < 0).unsqueeze(1), 0.0)

    if x_MD is not None and probs_Nk is not None:
        for rows in _row_blocks(N, D * dtype.itemsize, d_y_ND.device):
            d_y_nD = d_y_ND[rows].to(dtype)
            for j in range(k):
                part_nD = x_MD.index_select(0, row_kN[j, rows]).to(dtype)
                dot_n = part_nD.mul_(d_y_nD).sum(-1)
                d_probs_Nk[rows, j] = dot_n.masked_fill_(absent_kN[j, rows], 0.0).to(probs_Nk.dtype)
    return dx_MD, d_probs_Nk


def _rows_by_slot(rows_Nk: Tensor, M: int) -> tuple[Tensor, Tensor]:
    """[k, N]: rows to read (0 where there is none), and where there is none."""
    rows_kN = rows_Nk.t().long()
    absent_kN = (rows_kN < 0) | (rows_kN >= M)
    return rows_kN.masked_fill(absent_kN, 0), absent_kN


def _slot_of_row(rows_Nk: Tensor, M: int) -> Tensor:
    """[M], the inverse of `rows`: the slot ``n * k + j`` of each row, -1 where none names it."""
    row_S = rows_Nk.reshape(-1).long()
    slot_S = torch.arange(row_S.shape[0], device=row_S.device)
    absent_S = (row_S < 0) | (row_S >= M)
    # A place of its own for every absent slot: one-to-one, so the order of writes cannot show.
    slot_R = slot_S.new_full((M + row_S.shape[0],), -1)
    slot_R[torch.where(absent_S, M + slot_S, row_S)] = slot_S
    return slot_R[:M]


def _row_blocks(rows: int, bytes_per_row: int, device: torch.device) -> Iterator[slice]:
    budget = _CPU_BLOCK_BYTES if device.type == "cpu" else _DEVICE_BLOCK_BYTES
    step = max(1, budget // max(bytes_per_row, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))

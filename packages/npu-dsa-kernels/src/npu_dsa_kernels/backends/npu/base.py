"""The base operators on torch_npu's fused ones."""

import torch
from torch import Tensor

from npu_dsa_kernels.backends.blocked import hadamard
from npu_dsa_kernels.backends.npu import limits

__all__ = [
    "grouped_matmul",
    "grouped_matmul_backward",
    "hadamard",  # one matmul with a cached matrix: the device needs no operator of its own
    "moe_permute",
    "moe_permute_backward",
    "moe_unpermute",
    "moe_unpermute_backward",
    "rms_norm",
    "rms_norm_backward",
    "rotary_mul",
    "rotary_mul_backward",
    "swiglu",
    "swiglu_backward",
]

# B batch, S sequence, H heads, D features
# N rows or tokens, G groups, I and O input and output features, k experts of a token, M rows of
# the permuted tokens, E experts, P = N * k slots

_RUNNING_SUM = 0  # the groups are given by where they end
_ROW_GROUPS = 0  # group the rows of x
_SUM_GROUPS = 2  # group the dimension that is summed over
_ONE_TENSOR = 3  # all groups in one output


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    x_ND, weight_D = _normalised(x, weight)
    if x_ND.numel() == 0:
        return torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    y_ND, rstd_N1 = torch.ops.npu.npu_rms_norm(x_ND, weight_D, eps)
    return y_ND.view(x.shape), rstd_N1.view(*x.shape[:-1], 1)


def rms_norm_backward(
    d_y: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    x_ND, weight_D = _normalised(x, weight)
    if x_ND.numel() == 0:
        return torch.empty_like(x), x.new_zeros(0 if weight is None else weight.shape)
    d_y_ND = d_y.reshape(x_ND.shape).contiguous()
    dx_ND, dw_D = torch.ops.npu.npu_rms_norm_backward(
        d_y_ND, x_ND, weight_D, rstd.reshape(-1, 1).contiguous()
    )
    return dx_ND.view(x.shape), x.new_empty(0) if weight is None else dw_D.to(weight.dtype)


def _normalised(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    limits.dtype("x", x, limits.current().wide_dtypes)
    if weight is None:
        weight = x.new_ones(x.shape[-1])
    limits.same_dtype("weight", weight, "x", x)
    return x.reshape(-1, x.shape[-1]).contiguous(), weight.contiguous()


def rotary_mul(x_BSHD: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    B, S, H, D = x_BSHD.shape
    if limits.current().rotary_heads < H:
        raise limits.unsupported("x", f"H={H}", f"at most {limits.current().rotary_heads} heads")
    if limits.current().rotary_dim < D:
        raise limits.unsupported("x", f"D={D}", f"at most D={limits.current().rotary_dim}")
    if x_BSHD.numel() == 0:
        return torch.empty_like(x_BSHD)
    # One dtype for all three, the widest: angles are not rounded to bfloat16.
    wide = torch.promote_types(x_BSHD.dtype, torch.promote_types(cos.dtype, sin.dtype))
    for name, tensor in (("x", x_BSHD), ("cos", cos), ("sin", sin)):
        limits.dtype(name, tensor, limits.current().wide_dtypes)
    # As one long row: the operator takes angles for each row of a batch in one of its modes only.
    y_1NHD = torch.ops.npu.npu_rotary_mul(
        x_BSHD.to(wide).reshape(1, B * S, H, D).contiguous(),
        cos.to(wide).expand(B, S, D).reshape(1, B * S, 1, D).contiguous(),
        sin.to(wide).expand(B, S, D).reshape(1, B * S, 1, D).contiguous(),
        "interleave" if interleaved else "half",
    )
    return y_1NHD.view(B, S, H, D).to(x_BSHD.dtype)


def rotary_mul_backward(d_y_BSHD: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The transpose of the rotation is one: of the other element's sine, negative.

    `npu_rotary_mul_backward` would also work out gradients of the angles, which nobody wants.
    """
    shape = (-1, 2) if interleaved else (2, -1)
    other = sin.unflatten(-1, shape).flip(-1 if interleaved else -2).flatten(-2)
    return rotary_mul(d_y_BSHD, cos, -other, interleaved)


def swiglu(x: Tensor, dim: int) -> Tensor:
    limits.dtype("x", x, limits.current().wide_dtypes)
    if x.dim() > 8:
        raise limits.unsupported("x", f"{x.dim()} dimensions", "at most 8 dimensions")
    if x.numel() == 0:
        return torch.empty_like(x.narrow(dim, 0, x.shape[dim] // 2))
    return torch.ops.npu.npu_swiglu(x.contiguous(), dim)


def swiglu_backward(d_y: Tensor, x: Tensor, dim: int) -> Tensor:
    if x.numel() == 0:
        return torch.empty_like(x)
    return torch.ops.npu.npu_swiglu_backward(d_y.contiguous(), x.contiguous(), dim)


def grouped_matmul(x_NI: Tensor, weight_GIO: Tensor, ends_G: Tensor) -> Tensor:
    _check_groups(x_NI, weight_GIO)
    y_NO = _grouped(x_NI.contiguous(), weight_GIO.contiguous(), ends_G)
    return y_NO.masked_fill_(_beyond(ends_G, len(x_NI)), 0.0)


def grouped_matmul_backward(
    d_y_NO: Tensor, x_NI: Tensor, weight_GIO: Tensor, ends_G: Tensor
) -> tuple[Tensor, Tensor]:
    N = len(x_NI)
    d_y_NO = d_y_NO.contiguous()
    dx_NI = _grouped(d_y_NO, weight_GIO.contiguous().transpose(1, 2), ends_G)
    dx_NI = dx_NI.masked_fill_(_beyond(ends_G, N), 0.0)
    if x_NI.numel() * d_y_NO.numel() == 0:
        return dx_NI, torch.zeros_like(weight_GIO)
    # Rows beyond the groups are one group more, whose gradient is left out.
    (dw_FIO,) = torch.ops.npu.npu_grouped_matmul(
        [x_NI.contiguous().T],
        [d_y_NO],
        group_list=torch.cat([ends_G, ends_G.new_full((1,), N)]),
        split_item=_ONE_TENSOR,
        group_type=_SUM_GROUPS,
        group_list_type=_RUNNING_SUM,
    )
    empty_G = ends_G.diff(prepend=ends_G.new_zeros(1)) == 0
    return dx_NI, dw_FIO[:-1].masked_fill_(empty_G[:, None, None], 0.0)


def _grouped(x_NI: Tensor, weight_GIO: Tensor, ends_G: Tensor) -> Tensor:
    """Rows beyond the groups go with the last group: the operator wants every row in one."""
    N, O = len(x_NI), weight_GIO.shape[2]
    if N * O == 0 or x_NI.shape[1] == 0:
        return x_NI.new_zeros(N, O)
    (y_NO,) = torch.ops.npu.npu_grouped_matmul(
        [x_NI],
        [weight_GIO],
        group_list=torch.cat([ends_G[:-1], ends_G.new_full((1,), N)]),
        split_item=_ONE_TENSOR,
        group_type=_ROW_GROUPS,
        group_list_type=_RUNNING_SUM,
    )
    return y_NO


def _beyond(ends_G: Tensor, N: int) -> Tensor:
    return (torch.arange(N, device=ends_G.device) >= ends_G[-1]).unsqueeze(1)


def _check_groups(x_NI: Tensor, weight_GIO: Tensor) -> None:
    limits.dtype("x", x_NI, limits.current().wide_dtypes)
    G, I, O = weight_GIO.shape
    most, inner = limits.current().groups - 1, limits.current().inner
    if most < G:
        raise limits.unsupported(
            "weight", f"G={G}", f"at most {most} groups (one more in backward)"
        )
    if max(I, O) > inner:
        raise limits.unsupported("weight", f"I={I}, O={O}", f"at most {inner} of each")


def moe_permute(
    tokens_ND: Tensor,
    experts_Nk: Tensor,
    probs_Nk: Tensor | None,
    num_experts: int,
    num_out_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    limits.dtype("tokens", tokens_ND, limits.current().wide_dtypes)
    _check_slots("experts", experts_Nk)
    if num_experts >= limits.current().slots_per_call:
        want = f"fewer than {limits.current().slots_per_call}"
        raise limits.unsupported("num_experts", num_experts, want)
    if tokens_ND.shape[1] == 0:
        raise limits.unsupported("tokens", f"shape {tuple(tokens_ND.shape)}", "D >= 1")
    M, P = num_out_tokens, experts_Nk.numel()
    here_Nk = (experts_Nk >= 0) & (experts_Nk < num_experts)
    expert_Nk = experts_Nk.long().masked_fill(~here_Nk, num_experts)  # sorts last
    count_F = expert_Nk.new_zeros(num_experts + 1)
    count_F.scatter_add_(0, expert_Nk.flatten(), torch.ones_like(expert_Nk).flatten())
    ends_E = count_F[:-1].cumsum(0).clamp(max=M)
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    if P == 0 or M == 0:
        permuted_MD = tokens_ND.new_zeros(M, tokens_ND.shape[1])
        place_Nk = torch.zeros_like(experts_Nk, dtype=torch.int32)
    else:
        permuted_MD, place_P = torch.ops.npu.npu_moe_token_permute(
            tokens_ND.contiguous(), expert_Nk, min(M, P)
        )
        if M > P:
            permuted_MD = torch.nn.functional.pad(permuted_MD, (0, 0, 0, M - P))
        place_Nk = place_P.view(experts_Nk.shape)
        permuted_MD.masked_fill_(_beyond(ends_E, M), 0.0)
    rows_Nk = torch.where(here_Nk & (place_Nk < M), place_Nk, -1)
    if probs_Nk is None:
        return permuted_MD, tokens_ND.new_empty(0), rows_Nk, counts_E
    kept_Nk = rows_Nk >= 0
    probs_M = probs_Nk.new_zeros(M + 1).scatter_(
        0,
        torch.where(kept_Nk, rows_Nk, M).long().flatten(),
        probs_Nk.masked_fill(~kept_Nk, 0.0).flatten(),
    )
    return permuted_MD, probs_M[:-1].clone(), rows_Nk, counts_E


def moe_permute_backward(
    d_tokens_MD: Tensor, d_probs_M: Tensor | None, rows_Nk: Tensor
) -> tuple[Tensor, Tensor]:
    N, k = rows_Nk.shape
    kept_Nk = rows_Nk >= 0
    if d_tokens_MD.numel() == 0 or rows_Nk.numel() == 0:
        d_in_ND = d_tokens_MD.new_zeros(N, d_tokens_MD.shape[1])
    else:
        place_P, free_P = _permutation(rows_Nk, len(d_tokens_MD))
        d_in_ND = torch.ops.npu.npu_moe_token_permute_grad_v2(
            _table(d_tokens_MD, free_P), place_P, N, d_tokens_MD.dtype, k
        )
    if d_probs_M is None:
        return d_in_ND, d_tokens_MD.new_empty(0)
    if len(d_probs_M) == 0:
        return d_in_ND, d_probs_M.new_zeros(N, k)
    d_probs_Nk = d_probs_M[rows_Nk.clamp(min=0).long()]
    return d_in_ND, d_probs_Nk.masked_fill(~kept_Nk, 0.0)


def moe_unpermute(x_MD: Tensor, rows_Nk: Tensor, probs_Nk: Tensor | None) -> Tensor:
    limits.dtype("x", x_MD, limits.current().wide_dtypes)
    _check_slots("rows", rows_Nk)
    if x_MD.numel() == 0 or rows_Nk.numel() == 0:
        return x_MD.new_zeros(len(rows_Nk), x_MD.shape[1])
    x_MD, rows_Nk = _near(x_MD, rows_Nk)
    place_P, free_P = _permutation(rows_Nk, len(x_MD))
    probs_Nk = _weights(x_MD, rows_Nk, probs_Nk)
    return torch.ops.npu.npu_moe_token_unpermute(_table(x_MD, free_P), place_P, probs_Nk)


def moe_unpermute_backward(
    d_y_ND: Tensor, x_MD: Tensor | None, rows_Nk: Tensor, probs_Nk: Tensor | None, num_rows: int
) -> tuple[Tensor, Tensor]:
    D = d_y_ND.shape[1]
    if num_rows * D == 0 or rows_Nk.numel() == 0:
        d_probs = d_y_ND.new_empty(0) if probs_Nk is None else torch.zeros_like(probs_Nk)
        return d_y_ND.new_zeros(num_rows, D), d_probs
    kept_Nk = (rows_Nk >= 0) & (rows_Nk < num_rows)
    near_Nk, P = rows_Nk, rows_Nk.numel()
    if num_rows > P:
        near_Nk = torch.arange(P, device=rows_Nk.device).view(rows_Nk.shape)
        near_Nk = near_Nk.masked_fill(~kept_Nk, -1)
        x_MD = None if x_MD is None else _near(x_MD, rows_Nk)[0]
    place_P, free_P = _permutation(near_Nk, min(num_rows, P))
    d_x_PD, d_probs_Nk = torch.ops.npu.npu_moe_token_unpermute_grad_v2(
        d_y_ND.contiguous(),
        place_P,
        P,
        d_y_ND.dtype,
        _weights(d_y_ND, near_Nk, probs_Nk),
        permuted_tokens=d_y_ND.new_zeros(P, D) if x_MD is None else _table(x_MD, free_P),
    )
    d_x_PD.masked_fill_(free_P.unsqueeze(1), 0.0)
    if num_rows > P:
        row_P = torch.where(kept_Nk, rows_Nk, num_rows).long().flatten()
        d_x_MD = d_x_PD.new_zeros(num_rows + 1, D).index_copy_(0, row_P, d_x_PD)[:-1].clone()
    else:
        d_x_MD = d_x_PD[:num_rows]
    if probs_Nk is None:
        return d_x_MD, d_y_ND.new_empty(0)
    return d_x_MD, d_probs_Nk.masked_fill(~kept_Nk, 0.0)


def _check_slots(name: str, slots_Nk: Tensor) -> None:
    known = limits.current()
    if slots_Nk.shape[1] > known.experts_per_token:
        want = f"at most {known.experts_per_token} experts of a token"
        raise limits.unsupported(name, f"k={slots_Nk.shape[1]}", want)
    if slots_Nk.numel() > known.slots_per_call:
        want = f"at most {known.slots_per_call} slots"
        raise limits.unsupported(name, f"N * k = {slots_Nk.numel()}", want)


def _near(x_MD: Tensor, rows_Nk: Tensor) -> tuple[Tensor, Tensor]:
    """No more rows than slots: the operators number rows by slots."""
    M, P = len(x_MD), rows_Nk.numel()
    if M <= P:
        return x_MD, rows_Nk
    kept_Nk = (rows_Nk >= 0) & (rows_Nk < M)
    x_PD = x_MD.index_select(0, rows_Nk.masked_fill(~kept_Nk, 0).long().flatten())
    place_Nk = torch.arange(P, device=rows_Nk.device).view(rows_Nk.shape)
    return x_PD, place_Nk.masked_fill(~kept_Nk, -1)


def _permutation(rows_Nk: Tensor, M: int) -> tuple[Tensor, Tensor]:
    """A row for every slot, as the operators want it: those without one get the free rows.

    Returns:
        int32 [P], a permutation; bool [P], which of the P rows no slot named.
    """
    row_P = rows_Nk.flatten().long()
    P = len(row_P)
    named_P = (row_P >= 0) & (row_P < M)
    free_F = torch.ones(P + 1, dtype=torch.bool, device=row_P.device)
    free_F.scatter_(0, torch.where(named_P, row_P, P), False)
    free_P = free_F[:-1]
    # The i-th slot without a row gets the i-th free row; both are as many.
    order_P = free_P.to(torch.int32).sort(descending=True, stable=True).indices
    rank_P = (~named_P).cumsum(0) - 1
    place_P = torch.where(named_P, row_P, order_P[rank_P.clamp(min=0)])
    return place_P.int(), free_P


def _table(x_MD: Tensor, free_P: Tensor) -> Tensor:
    """P rows, zero where no slot reads: the operators multiply what they read by 0."""
    missing = len(free_P) - len(x_MD)
    if missing >= 0:
        x_MD = torch.nn.functional.pad(x_MD, (0, 0, 0, missing)) if missing else x_MD
    else:
        x_MD = x_MD[: len(free_P)]
    return x_MD.masked_fill(free_P.unsqueeze(1), 0.0).contiguous()


def _weights(x_MD: Tensor, rows_Nk: Tensor, probs_Nk: Tensor | None) -> Tensor:
    if probs_Nk is None:
        probs_Nk = x_MD.new_ones(rows_Nk.shape)
    return probs_Nk.masked_fill(rows_Nk < 0, 0.0).contiguous()

"""DSA's operators: what the kernels are given, and what they write to.

Gradients of keys are sums over all queries, taken in fp32 in no fixed order where programs run at
the same time: they differ in the last bits from run to run. All else is the same on every run.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from npu_dsa_kernels import checks
from npu_dsa_kernels.backends.triton.kernels.attention_target import (
    attention_target as target_kernel,
)
from npu_dsa_kernels.backends.triton.kernels.indexer_kl_loss import (
    indexer_kl_loss as loss_kernel,
)
from npu_dsa_kernels.backends.triton.kernels.indexer_kl_loss import (
    indexer_kl_loss_backward as loss_backward_kernel,
)
from npu_dsa_kernels.backends.triton.kernels.lightning_indexer import (
    index_scores as scores_kernel,
)
from npu_dsa_kernels.backends.triton.kernels.lightning_indexer import (
    order_topk as order_kernel,
)
from npu_dsa_kernels.backends.triton.kernels.lightning_indexer import (
    select_topk as select_kernel,
)
from npu_dsa_kernels.backends.triton.kernels.slot_rows import gather_slots as gather_kernel
from npu_dsa_kernels.backends.triton.kernels.slot_rows import scatter_slots as scatter_kernel
from npu_dsa_kernels.backends.triton.kernels.sparse_attention import (
    sparse_attention as attention_kernel,
)
from npu_dsa_kernels.backends.triton.kernels.sparse_attention_backward import (
    sparse_attention_backward as attention_backward_kernel,
)
from npu_dsa_kernels.backends.triton.launch import (
    Tiles,
    cdiv,
    check_width,
    find_tiles,
    launch,
    tiles,
    wide,
)
from npu_dsa_kernels.bounds import causal_bounds

# B batch, S queries, T keys, H heads, D head dim, V value dim, K selected keys
# N = B * S queries in a row, n queries of a block

# Bytes of a workspace: the indexer's has a row of T ranks for each query of a block, and where keys
# are gathered first, the attention's has a row of a key for each slot of a block's queries.
_WORKSPACE_BYTES = 128 * 2**20

# Slots of a query in a workspace come in multiples of this: no tile has more keys.
_SLOTS = 128


def lightning_indexer(
    q_BSHD: Tensor, k_BTD: Tensor, w_BSH: Tensor, bounds_BS2: Tensor | None, topk: int
) -> tuple[Tensor, Tensor]:
    B, S, H, _ = q_BSHD.shape
    T, K, N = k_BTD.shape[1], topk, B * S
    indices_BSK = q_BSHD.new_empty(B, S, K, dtype=torch.int32)
    scores_BSK = q_BSHD.new_empty(B, S, K, dtype=torch.float32)
    tile, constants = _indexer(scores_kernel, q_BSHD, k_BTD)
    if N == 0:
        return indices_BSK, scores_BSK
    select_tile = tiles(select_kernel, q_BSHD, "q_index")
    order_tile = tiles(order_kernel, q_BSHD, "q_index")
    if bounds_BS2 is None:
        position_BS = torch.arange(S, device=q_BSHD.device).expand(B, S)
        bounds_BS2 = causal_bounds(position_BS)
    q, k, w, bounds = _contiguous(q_BSHD, k_BTD, w_BSH, bounds_BS2)
    queries = min(N, max(1, _WORKSPACE_BYTES // (4 * T + 8 * K)))
    ranks_nT = q.new_empty(queries, max(T, 1), dtype=torch.int32)
    best_n2K = q.new_empty(queries, 2, K, dtype=torch.int32)
    count_n = q.new_empty(queries, dtype=torch.int32)
    for first in range(0, N, queries):
        n = min(queries, N - first)
        launch(scores_kernel, n, q, k, w, bounds, ranks_nT, first, n, S, T, H,
               tile=tile, **constants)  # fmt: skip
        launch(select_kernel, n, ranks_nT, bounds, best_n2K, count_n, first, n, T, K,
               tile=select_tile, PACK=select_tile.rows, BLOCK=select_tile.columns)  # fmt: skip
        work = n * cdiv(K, order_tile.rows)
        launch(order_kernel, work, best_n2K, count_n, indices_BSK, scores_BSK, first, work, K,
               tile=order_tile, BLOCK=order_tile.rows)  # fmt: skip
    return indices_BSK, scores_BSK


def sparse_attention(
    q_BSHD: Tensor, kv_BTD: Tensor, indices_BSK: Tensor, scale: float, v_dim: int
) -> tuple[Tensor, Tensor]:
    return _sparse_attention(q_BSHD, kv_BTD, indices_BSK, scale, v_dim, None)


def sparse_attention_with_target(
    q_BSHD: Tensor, kv_BTD: Tensor, indices_BSK: Tensor, scale: float, v_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    target_BSK = q_BSHD.new_empty(indices_BSK.shape, dtype=torch.float32)
    out_BSHV, lse_BSH = _sparse_attention(q_BSHD, kv_BTD, indices_BSK, scale, v_dim, target_BSK)
    return out_BSHV, lse_BSH, target_BSK


def _sparse_attention(
    q_BSHD: Tensor,
    kv_BTD: Tensor,
    indices_BSK: Tensor,
    scale: float,
    v_dim: int,
    target_BSK: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Fills `target_BSK` too if there is one."""
    tiles(attention_kernel, q_BSHD, "q")  # refuses a dtype, also where there is nothing to do
    B, S, H, _ = q_BSHD.shape
    out_BSHV = q_BSHD.new_empty(B, S, H, v_dim)
    lse_BSH = q_BSHD.new_empty(B, S, H, dtype=torch.float32)
    keys = _Keys(kv_BTD, indices_BSK, v_dim)
    q_NHD, out_NHV, lse_NH = _rows(q_BSHD), out_BSHV.flatten(0, 1), lse_BSH.flatten(0, 1)
    for rows in keys.blocks():
        _attend(q_NHD[rows], keys, rows, out_NHV[rows], lse_NH[rows], scale)
        if target_BSK is not None:
            target_NK = target_BSK.flatten(0, 1)
            _sum_heads(q_NHD[rows], keys, rows, lse_NH[rows], target_NK[rows], scale)
    return out_BSHV, lse_BSH


def attention_target(
    q_BSHD: Tensor, kv_BTD: Tensor, indices_BSK: Tensor, lse_BSH: Tensor, scale: float
) -> Tensor:
    tiles(target_kernel, q_BSHD, "q")
    target_BSK = q_BSHD.new_empty(indices_BSK.shape, dtype=torch.float32)
    # The target knows no values: a key is split where a power of two ends.
    keys = _Keys(kv_BTD, indices_BSK, 1 << (kv_BTD.shape[2].bit_length() - 1))
    q_NHD, lse_NH, target_NK = _rows(q_BSHD), _rows(lse_BSH), target_BSK.flatten(0, 1)
    for rows in keys.blocks():
        _sum_heads(q_NHD[rows], keys, rows, lse_NH[rows], target_NK[rows], scale)
    return target_BSK


def sparse_attention_backward(
    d_out_BSHV: Tensor,
    d_lse_BSH: Tensor,
    q_BSHD: Tensor,
    kv_BTD: Tensor,
    indices_BSK: Tensor,
    out_BSHV: Tensor,
    lse_BSH: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    _sums_in_no_order("sparse_attention", q_BSHD)
    dq_BSHD = q_BSHD.new_empty(q_BSHD.shape)
    keys = _Keys(kv_BTD, indices_BSK, out_BSHV.shape[3], with_gradient=True)
    d_out_NHV, d_lse_NH, q_NHD = _rows(d_out_BSHV), _rows(d_lse_BSH), _rows(q_BSHD)
    out_NHV, lse_NH, dq_NHD = _rows(out_BSHV), _rows(lse_BSH), dq_BSHD.flatten(0, 1)
    for rows in keys.blocks():
        q = q_NHD[rows]
        tile, constants = _heads(attention_backward_kernel, q, keys)
        work = q.shape[0] * cdiv(q.shape[1], constants["HEADS"])
        launch(attention_backward_kernel, work, d_out_NHV[rows], d_lse_NH[rows], q, keys.read,
               keys.indices_NK[rows], out_NHV[rows], lse_NH[rows], dq_NHD[rows], keys.added, scale,
               work, *keys.sizes, q.shape[1], tile=tile, **constants)  # fmt: skip
        keys.scatter(rows)
    return dq_BSHD, keys.gradient_BTD.to(kv_BTD.dtype)


def _attend(
    q_nHD: Tensor, keys: "_Keys", rows: slice, out_nHV: Tensor, lse_nH: Tensor, scale: float
) -> None:
    tile, constants = _heads(attention_kernel, q_nHD, keys)
    n, H = q_nHD.shape[:2]
    work = n * cdiv(H, constants["HEADS"])
    launch(attention_kernel, work, q_nHD, keys.read, keys.indices_NK[rows], out_nHV, lse_nH, scale,
           work, *keys.sizes, H, tile=tile, **constants)  # fmt: skip


def _sum_heads(
    q_nHD: Tensor, keys: "_Keys", rows: slice, lse_nH: Tensor, target_nK: Tensor, scale: float
) -> None:
    if keys.read.numel() == 0:  # no keys at all
        target_nK.zero_()
        return
    tile, constants = _heads(target_kernel, q_nHD, keys)
    work = q_nHD.shape[0] * cdiv(target_nK.shape[1], constants["KEYS"])
    launch(target_kernel, work, q_nHD, keys.read, keys.indices_NK[rows], lse_nH, target_nK, scale,
           work, *keys.sizes, q_nHD.shape[1], tile=tile, **constants)  # fmt: skip


class _Keys:
    """The keys of an attention, as its kernels read them and add to their gradients.

    Where the table has tiles for `gather_slots`, that is a copy with a row for every slot, for a
    block of queries at a time; elsewhere the keys themselves, for all queries.
    """

    def __init__(
        self, kv_BTD: Tensor, indices_BSK: Tensor, v_dim: int, *, with_gradient: bool = False
    ) -> None:
        _check_offsets("kv", kv_BTD)
        D = kv_BTD.shape[2]
        check_width("v_dim", "a value of", v_dim, "value", kv_BTD)
        check_width("kv", "columns after the value:", max(D - v_dim, 1), "rest", kv_BTD)
        self.kv_BTD, self.indices_NK = kv_BTD.contiguous(), _rows(indices_BSK)
        (N, K), S, T = self.indices_NK.shape, indices_BSK.shape[1], kv_BTD.shape[1]
        self.widths = {
            "V_DIM": v_dim,
            "R_DIM": D - v_dim,
            "V_WIDE": wide(v_dim),
            "R_WIDE": wide(max(D - v_dim, 1)),
        }
        shape = kv_BTD.shape if with_gradient else (0,)
        self.read, self.gradient_BTD = self.kv_BTD, kv_BTD.new_zeros(shape, dtype=torch.float32)
        self.added = self.gradient_BTD
        self.tile = find_tiles(gather_kernel, kv_BTD) if T else None
        self.queries, slots = N, K
        if self.tile is not None:
            slots = cdiv(K, _SLOTS) * _SLOTS
            row_bytes = D * (kv_BTD.element_size() + 4 * with_gradient)
            self.queries = max(1, min(N, _WORKSPACE_BYTES // (slots * row_bytes)))
            self.read = kv_BTD.new_empty(self.queries, slots, D)
            if with_gradient:
                self.added = self.read.new_empty(self.read.shape, dtype=torch.float32)
        self.sizes = S, T, K, slots

    def blocks(self) -> Iterator[slice]:
        """Blocks of queries, with their keys in place."""
        for first in range(0, len(self.indices_NK), max(self.queries, 1)):
            rows = slice(first, min(first + self.queries, len(self.indices_NK)))
            if self.tile is not None:
                self._launch(gather_kernel, rows, self.kv_BTD, self.indices_NK[rows], self.read)
                if self.added is not self.gradient_BTD:
                    self.added.zero_()
            yield rows

    def scatter(self, rows: slice) -> None:
        """Add what a block's kernel left at its slots to the gradient of the keys."""
        if self.tile is not None:
            self._launch(scatter_kernel, rows, self.added, self.indices_NK[rows], self.gradient_BTD)

    def _launch(self, kernel: Any, rows: slice, *tensors: Tensor) -> None:
        tile = tiles(kernel, self.kv_BTD, "kv")
        work = (rows.stop - rows.start) * (self.sizes[3] // tile.rows)
        launch(kernel, work, *tensors, rows.start, work, *self.sizes,
               tile=tile, SLOTS=tile.rows, **self.widths)  # fmt: skip


def indexer_kl_loss(
    q_BSHD: Tensor,
    k_BTD: Tensor,
    w_BSH: Tensor,
    indices_BSK: Tensor,
    target_BSK: Tensor,
    scores_BSK: Tensor | None,
) -> Tensor:
    B, S, H, _ = q_BSHD.shape
    T, K = k_BTD.shape[1], indices_BSK.shape[2]
    tile, constants = _indexer(loss_kernel, q_BSHD, k_BTD)
    loss_BS = q_BSHD.new_empty(B, S, dtype=torch.float32)
    q, k, w, indices, target = _contiguous(q_BSHD, k_BTD, w_BSH, indices_BSK, target_BSK)
    have_scores = scores_BSK is not None
    scores = target if scores_BSK is None else scores_BSK.contiguous()  # not read if there are none
    launch(loss_kernel, B * S, q, k, w, indices, target, scores, loss_BS, B * S, S, T, K, H,
           tile=tile, HAVE_SCORES=have_scores, **constants)  # fmt: skip
    return loss_BS


def indexer_kl_loss_backward(
    d_loss_BS: Tensor,
    q_BSHD: Tensor,
    k_BTD: Tensor,
    w_BSH: Tensor,
    indices_BSK: Tensor,
    target_BSK: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    B, S, H, _ = q_BSHD.shape
    T, K = k_BTD.shape[1], indices_BSK.shape[2]
    _sums_in_no_order("indexer_kl_loss", q_BSHD)
    tile, constants = _indexer(loss_backward_kernel, q_BSHD, k_BTD)
    dq_BSHD, dw_BSH = q_BSHD.new_empty(q_BSHD.shape), w_BSH.new_empty(w_BSH.shape)
    dk_BTD = k_BTD.new_zeros(k_BTD.shape, dtype=torch.float32)
    d_loss, q, k, w = _contiguous(d_loss_BS, q_BSHD, k_BTD, w_BSH)
    indices, target = _contiguous(indices_BSK, target_BSK)
    launch(loss_backward_kernel, B * S, d_loss, q, k, w, indices, target, dq_BSHD, dk_BTD, dw_BSH,
           B * S, S, T, K, H, tile=tile, **constants)  # fmt: skip
    return dq_BSHD, dk_BTD.to(k_BTD.dtype), dw_BSH


def _sums_in_no_order(operator: str, x: Tensor) -> None:
    """Heed torch.use_deterministic_algorithms as torch's own operators do."""
    if x.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        return
    message = (
        f"{operator}: the backward of backend 'triton' adds up the gradients of keys in no fixed "
        "order, and torch.use_deterministic_algorithms(True) is on; use backend='torch'"
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(message)
    warnings.warn(message, stacklevel=2)


def _contiguous(*tensors: Tensor) -> list[Tensor]:
    return [x.contiguous() for x in tensors]


def _rows(x: Tensor) -> Tensor:
    """[B, S, ...] as [N, ...]."""
    return x.contiguous().flatten(0, 1)


def _heads(kernel: Any, q_NHD: Tensor, keys: _Keys) -> tuple[Tiles, dict[str, Any]]:
    """Tiles and constants of a kernel over the attention's heads."""
    tile = tiles(kernel, q_NHD, "q")
    H = q_NHD.shape[1]
    heads = min(tile.rows, wide(H))
    return tile, keys.widths | {
        "HEADS": heads,
        "KEYS": tile.columns,
        "ALL_HEADS": H % heads == 0,
        "GATHERED": keys.tile is not None,
    }


def _check_offsets(name: str, x_BTD: Tensor) -> None:
    """Within a row of the batch, kernels count in 32 bits."""
    T, D = x_BTD.shape[1:]
    if T * D > checks.INT32_MAX:
        want = f"backend 'triton' takes T * D <= {checks.INT32_MAX}; backend='torch' takes more"
        raise checks.bad(name, f"T={T}, D={D}", want)


def _indexer(kernel: Any, q_BSHD: Tensor, k_BTD: Tensor) -> tuple[Tiles, dict[str, Any]]:
    """Tiles and constants of a kernel over the indexer's heads, which it takes all at once."""
    _check_offsets("k_index", k_BTD)
    check_width("q_index", "heads:", q_BSHD.shape[2], "index_heads", q_BSHD)
    check_width("q_index", "a head of", q_BSHD.shape[3], "index_dim", q_BSHD)
    tile = tiles(kernel, q_BSHD, "q_index")
    H, D = q_BSHD.shape[2:]
    return tile, {
        "DIM": D,
        "WIDE": wide(D),
        "HEADS": wide(H),
        "KEYS": tile.columns,
        "ALL_HEADS": wide(H) == H,
    }

"""DSA's operators: what the kernels are given, and what they write to.

Gradients of keys are sums over all queries, taken in fp32 in no fixed order where programs run at
the same time: they differ in the last bits from run to run. All else is the same on every run.
"""

from typing import Any

import torch
from torch import Tensor

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
from npu_dsa_kernels.backends.triton.kernels.sparse_attention import (
    sparse_attention as attention_kernel,
)
from npu_dsa_kernels.backends.triton.kernels.sparse_attention_backward import (
    sparse_attention_backward as attention_backward_kernel,
)
from npu_dsa_kernels.backends.triton.launch import Tiles, cdiv, launch, tiles, wide
from npu_dsa_kernels.bounds import causal_bounds

# B batch, S queries, T keys, H heads, D head dim, V value dim, K selected keys, n queries of a block

# Bytes of the indexer's workspace, which holds a row of T ranks for each query of a block.
_WORKSPACE_BYTES = 128 * 2**20


def lightning_indexer(
    q_BSHD: Tensor, k_BTD: Tensor, w_BSH: Tensor, bounds_BS2: Tensor | None, topk: int
) -> tuple[Tensor, Tensor]:
    B, S, H, D = q_BSHD.shape
    T, K, N = k_BTD.shape[1], topk, B * S
    indices_BSK = q_BSHD.new_empty(B, S, K, dtype=torch.int32)
    scores_BSK = q_BSHD.new_empty(B, S, K, dtype=torch.float32)
    if N == 0:
        return indices_BSK, scores_BSK
    tile, constants = _indexer(scores_kernel, q_BSHD)
    select_tile = tiles(select_kernel, q_BSHD, "q_index")
    order_tile = tiles(order_kernel, q_BSHD, "q_index")
    if bounds_BS2 is None:
        position_BS = torch.arange(S, device=q_BSHD.device).expand(B, S)
        bounds_BS2 = causal_bounds(position_BS)
    q, k, w, bounds = _contiguous(q_BSHD, k_BTD, w_BSH, bounds_BS2)
    queries = min(N, max(1, _WORKSPACE_BYTES // (4 * max(T, 1))))
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
    B, S, H, _ = q_BSHD.shape
    T, K = kv_BTD.shape[1], indices_BSK.shape[2]
    tile, constants = _attention(attention_kernel, q_BSHD, v_dim)
    out_BSHV = q_BSHD.new_empty(B, S, H, v_dim)
    lse_BSH = q_BSHD.new_empty(B, S, H, dtype=torch.float32)
    q, kv, indices = _contiguous(q_BSHD, kv_BTD, indices_BSK)
    work = B * S * cdiv(H, constants["HEADS"])
    launch(attention_kernel, work, q, kv, indices, out_BSHV, lse_BSH, scale, work, S, T, K, H,
           tile=tile, **constants)  # fmt: skip
    return out_BSHV, lse_BSH


def sparse_attention_with_target(
    q_BSHD: Tensor, kv_BTD: Tensor, indices_BSK: Tensor, scale: float, v_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    out_BSHV, lse_BSH = sparse_attention(q_BSHD, kv_BTD, indices_BSK, scale, v_dim)
    return out_BSHV, lse_BSH, attention_target(q_BSHD, kv_BTD, indices_BSK, lse_BSH, scale)


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
    B, S, H, _ = q_BSHD.shape
    T, K = kv_BTD.shape[1], indices_BSK.shape[2]
    tile, constants = _attention(attention_backward_kernel, q_BSHD, out_BSHV.shape[3])
    dq_BSHD = q_BSHD.new_empty(q_BSHD.shape)
    dkv_BTD = kv_BTD.new_zeros(kv_BTD.shape, dtype=torch.float32)
    d_out, d_lse, q, kv = _contiguous(d_out_BSHV, d_lse_BSH, q_BSHD, kv_BTD)
    indices, out, lse = _contiguous(indices_BSK, out_BSHV, lse_BSH)
    work = B * S * cdiv(H, constants["HEADS"])
    launch(attention_backward_kernel, work, d_out, d_lse, q, kv, indices, out, lse, dq_BSHD,
           dkv_BTD, scale, work, S, T, K, H, tile=tile, **constants)  # fmt: skip
    return dq_BSHD, dkv_BTD.to(kv_BTD.dtype)


def attention_target(
    q_BSHD: Tensor, kv_BTD: Tensor, indices_BSK: Tensor, lse_BSH: Tensor, scale: float
) -> Tensor:
    B, S, H, D = q_BSHD.shape
    T, K = kv_BTD.shape[1], indices_BSK.shape[2]
    # The target knows no values: a key is split where a power of two ends.
    tile, constants = _attention(target_kernel, q_BSHD, 1 << (D.bit_length() - 1))
    target_BSK = q_BSHD.new_empty(B, S, K, dtype=torch.float32)
    if T == 0:
        return target_BSK.zero_()
    q, kv, indices, lse = _contiguous(q_BSHD, kv_BTD, indices_BSK, lse_BSH)
    work = B * S * cdiv(K, constants["KEYS"])
    launch(target_kernel, work, q, kv, indices, lse, target_BSK, scale, work, S, T, K, H,
           tile=tile, **constants)  # fmt: skip
    return target_BSK


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
    tile, constants = _indexer(loss_kernel, q_BSHD)
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
    tile, constants = _indexer(loss_backward_kernel, q_BSHD)
    dq_BSHD, dw_BSH = q_BSHD.new_empty(q_BSHD.shape), w_BSH.new_empty(w_BSH.shape)
    dk_BTD = k_BTD.new_zeros(k_BTD.shape, dtype=torch.float32)
    d_loss, q, k, w = _contiguous(d_loss_BS, q_BSHD, k_BTD, w_BSH)
    indices, target = _contiguous(indices_BSK, target_BSK)
    launch(loss_backward_kernel, B * S, d_loss, q, k, w, indices, target, dq_BSHD, dk_BTD, dw_BSH,
           B * S, S, T, K, H, tile=tile, **constants)  # fmt: skip
    return dq_BSHD, dk_BTD.to(k_BTD.dtype), dw_BSH


def _contiguous(*tensors: Tensor) -> list[Tensor]:
    return [x.contiguous() for x in tensors]


def _attention(kernel: Any, q_BSHD: Tensor, v_dim: int) -> tuple[Tiles, dict[str, Any]]:
    """Tiles and constants of a kernel over the attention's heads."""
    tile = tiles(kernel, q_BSHD, "q")
    H, D = q_BSHD.shape[2:]
    heads = min(tile.rows, wide(H))
    return tile, {
        "V_DIM": v_dim,
        "R_DIM": D - v_dim,
        "V_WIDE": wide(v_dim),
        "R_WIDE": wide(max(D - v_dim, 1)),
        "HEADS": heads,
        "KEYS": tile.columns,
        "ALL_HEADS": H % heads == 0,
    }


def _indexer(kernel: Any, q_BSHD: Tensor) -> tuple[Tiles, dict[str, Any]]:
    """Tiles and constants of a kernel over the indexer's heads, which it takes all at once."""
    tile = tiles(kernel, q_BSHD, "q_index")
    H, D = q_BSHD.shape[2:]
    return tile, {
        "DIM": D,
        "WIDE": wide(D),
        "HEADS": wide(H),
        "KEYS": tile.columns,
        "ALL_HEADS": wide(H) == H,
    }

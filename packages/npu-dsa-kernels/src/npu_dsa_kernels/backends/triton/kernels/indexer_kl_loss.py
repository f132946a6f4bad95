"""The indexer's loss over its selected keys, forward and backward.

Nothing is kept between the passes over a query's keys: scores are cheaper computed again than
written and read.
"""

import triton
import triton.language as tl

from npu_dsa_kernels.backends.triton.kernels.rows import (
    gather_rows,
    load_heads,
    load_indices,
    relu,
    scatter_add_rows,
    spare_key,
    store_heads,
)

# H indexer heads, C their dim, as wide as powers of two; K keys of a block


@triton.jit
def load_target(target_ptr, slot_K, valid_K, K):
    target_K = tl.load(target_ptr + slot_K, mask=slot_K < K, other=0.0).to(tl.float32)
    return tl.where(valid_K, target_K, 0.0)


@triton.jit
def total_target(indices_ptr, target_ptr, T, K, BLOCK: tl.constexpr):
    """A query's sum of the target over its valid slots."""
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, K, BLOCK):
        slot_K = start + tl.arange(0, BLOCK)
        _, valid_K = load_indices(indices_ptr, slot_K, 0, T, K)
        total += tl.sum(load_target(target_ptr, slot_K, valid_K, K), 0)
    return total


@triton.jit
def index_dots(q_HC, k_ptr, index_K, c_C, DIM: tl.constexpr):
    """relu(q . k) [H, K], and the gathered keys."""
    k_KC = gather_rows(k_ptr, index_K, c_C, DIM, DIM)
    return relu(tl.dot(q_HC, tl.trans(k_KC), input_precision="ieee")), k_KC


@triton.jit(do_not_specialize=["N"])
def indexer_kl_loss(
    q_ptr,  # [N, heads, DIM]
    k_ptr,  # [N / S, T, DIM]
    w_ptr,  # [N, heads]
    indices_ptr,  # int32 [N, K]
    target_ptr,  # [N, K]
    scores_ptr,  # fp32 [N, K], read instead of computed if HAVE_SCORES
    loss_ptr,  # fp32 [N]
    N,
    S,
    T,
    K,
    heads,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    ALL_HEADS: tl.constexpr,
    HAVE_SCORES: tl.constexpr,
):
    h_H = tl.arange(0, HEADS)
    c_C = tl.arange(0, WIDE)
    for n in range(tl.program_id(0), N, tl.num_programs(0)):
        row = tl.cast(n, tl.int64)
        indices_row_ptr = indices_ptr + row * K
        target_row_ptr = target_ptr + row * K
        spare = spare_key(indices_row_ptr, T, K, 512)
        total = total_target(indices_row_ptr, target_row_ptr, T, K, 512)
        dead = total == 0.0  # no keys, or no attention mass on them
        total = tl.where(dead, 1.0, total)
        if not HAVE_SCORES:
            q_HC = load_heads(q_ptr + row * heads * DIM, h_H, heads, c_C, DIM, DIM, ALL_HEADS)
            w_H = tl.load(w_ptr + row * heads + h_H, mask=h_H < heads, other=0.0).to(tl.float32)
        # Kept relative to the highest score so far: sum of exp(score), sum of p (log p - score).
        peak = tl.full((), -3.0e38, tl.float32)
        mass = tl.full((), 0.0, tl.float32)
        loss = tl.full((), 0.0, tl.float32)
        seen = tl.full((), 0.0, tl.float32)  # sum of p so far
        for start in range(0, tl.where(dead, 0, K), KEYS):
            slot_K = start + tl.arange(0, KEYS)
            index_K, valid_K = load_indices(indices_row_ptr, slot_K, spare, T, K)
            p_K = load_target(target_row_ptr, slot_K, valid_K, K) / total
            if HAVE_SCORES:
                score_K = tl.load(scores_ptr + row * K + slot_K, mask=slot_K < K, other=0.0)
            else:
                relu_HK, _ = index_dots(q_HC, k_ptr + row // S * T * DIM, index_K, c_C, DIM)
                score_K = tl.sum(w_H[:, None] * relu_HK, 0)
            new = tl.maximum(peak, tl.max(tl.where(valid_K, score_K, -3.0e38), 0))
            mass *= tl.exp(peak - new)
            mass += tl.sum(tl.where(valid_K, tl.exp(score_K - new), 0.0), 0)
            loss += seen * (new - peak)
            some_K = p_K > 0.0  # 0 log 0 = 0
            log_p_K = tl.log(tl.where(some_K, p_K, 1.0))
            log_y_K = tl.where(some_K, score_K - new, 0.0)
            loss += tl.sum(p_K * (log_p_K - log_y_K), 0)
            seen += tl.sum(p_K, 0)
            peak = new
        loss += seen * tl.log(tl.where(dead, 1.0, mass))
        tl.store(loss_ptr + row, loss)


@triton.jit(do_not_specialize=["N"])
def indexer_kl_loss_backward(
    d_loss_ptr,  # fp32 [N]
    q_ptr,  # [N, heads, DIM]
    k_ptr,  # [N / S, T, DIM]
    w_ptr,  # [N, heads]
    indices_ptr,  # int32 [N, K]
    target_ptr,  # [N, K]
    dq_ptr,  # like q
    dk_ptr,  # fp32, like k, zero
    dw_ptr,  # like w
    N,
    S,
    T,
    K,
    heads,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    ALL_HEADS: tl.constexpr,
):
    h_H = tl.arange(0, HEADS)
    c_C = tl.arange(0, WIDE)
    for n in range(tl.program_id(0), N, tl.num_programs(0)):
        row = tl.cast(n, tl.int64)
        indices_row_ptr = indices_ptr + row * K
        target_row_ptr = target_ptr + row * K
        k_batch_ptr = k_ptr + row // S * T * DIM
        spare = spare_key(indices_row_ptr, T, K, 512)
        total = total_target(indices_row_ptr, target_row_ptr, T, K, 512)
        dead = total == 0.0
        total = tl.where(dead, 1.0, total)
        steps = tl.where(dead, 0, K)
        q_HC = load_heads(q_ptr + row * heads * DIM, h_H, heads, c_C, DIM, DIM, ALL_HEADS)
        w_H = tl.load(w_ptr + row * heads + h_H, mask=h_H < heads, other=0.0).to(tl.float32)
        d_loss = tl.load(d_loss_ptr + row)
        peak = tl.full((), -3.0e38, tl.float32)
        mass = tl.full((), 0.0, tl.float32)
        for start in range(0, steps, KEYS):
            slot_K = start + tl.arange(0, KEYS)
            index_K, valid_K = load_indices(indices_row_ptr, slot_K, spare, T, K)
            relu_HK, _ = index_dots(q_HC, k_batch_ptr, index_K, c_C, DIM)
            score_K = tl.where(valid_K, tl.sum(w_H[:, None] * relu_HK, 0), -3.0e38)
            new = tl.maximum(peak, tl.max(score_K, 0))
            mass *= tl.exp(peak - new)
            mass += tl.sum(tl.where(valid_K, tl.exp(score_K - new), 0.0), 0)
            peak = new
        dq_HC = tl.zeros((HEADS, WIDE), tl.float32)
        dw_H = tl.zeros((HEADS,), tl.float32)
        for start in range(0, steps, KEYS):
            slot_K = start + tl.arange(0, KEYS)
            index_K, valid_K = load_indices(indices_row_ptr, slot_K, spare, T, K)
            relu_HK, k_KC = index_dots(q_HC, k_batch_ptr, index_K, c_C, DIM)
            score_K = tl.sum(w_H[:, None] * relu_HK, 0)
            # dI = y - p, exactly: of log-softmax, without an epsilon.
            y_K = tl.exp(score_K - peak) / mass
            p_K = load_target(target_row_ptr, slot_K, valid_K, K) / total
            di_K = tl.where(valid_K, (y_K - p_K) * d_loss, 0.0)
            dw_H += tl.sum(relu_HK * di_K[None, :], 1)
            ds_HK = tl.where(relu_HK > 0.0, di_K[None, :] * w_H[:, None], 0.0).to(k_KC.dtype)
            dq_HC += tl.dot(ds_HK, k_KC, input_precision="ieee")
            dk_KC = tl.dot(tl.trans(ds_HK), q_HC, input_precision="ieee")
            scatter_add_rows(dk_ptr + row // S * T * DIM, dk_KC, index_K, valid_K, c_C, DIM, DIM)
        store_heads(dq_ptr + row * heads * DIM, dq_HC, h_H, heads, c_C, DIM, DIM, ALL_HEADS)
        dw_H = dw_H.to(dw_ptr.dtype.element_ty)
        tl.store(dw_ptr + row * heads + h_H, dw_H, mask=h_H < heads)

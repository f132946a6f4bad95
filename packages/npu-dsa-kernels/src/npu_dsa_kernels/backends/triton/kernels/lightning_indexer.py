"""The lightning indexer in three kernels: scores of a block of queries, their top-k, its order.

Between the first two lies a row of T for each query of the block, which no core could hold. Scores
are kept there as ranks: integers of the same order, equal for equal scores, with NaN above
everything and `HIDDEN` below. The k-th rank is found by bisection, bit by bit, which counts and
never sorts; ties at it go to the lower keys. What was selected, in the order of the keys, is then
put in order by counting for each key how many beat it.
"""

import triton
import triton.language as tl

from npu_dsa_kernels.backends.triton.kernels.rows import load_heads, relu

# H indexer heads, C their dim, as wide as powers of two; K keys of a block, I and J the same keys
# as rows and columns

HIDDEN = tl.constexpr(-(2**31))
NAN = tl.constexpr(0x7FC00000)
LOW_BITS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def rank_of(score):
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(score != score, NAN, bits ^ ((bits >> 31) & LOW_BITS))


@triton.jit
def score_of(rank):
    return (rank ^ ((rank >> 31) & LOW_BITS)).to(tl.float32, bitcast=True)


@triton.jit
def visible_range(bounds_ptr, n, T):
    low = tl.load(bounds_ptr + 2 * n)
    high = tl.load(bounds_ptr + 2 * n + 1)
    return tl.minimum(tl.maximum(low, 0), T), tl.minimum(tl.maximum(high, 0), T)


@triton.jit(do_not_specialize=["first", "queries"])
def index_scores(
    q_ptr,  # [N, heads, DIM]
    k_ptr,  # [N / S, T, DIM]
    w_ptr,  # [N, heads]
    bounds_ptr,  # int32 [N, 2]
    ranks_ptr,  # int32 [queries, T], written where visible
    first,  # the block's first query
    queries,
    S,
    T,
    heads,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    ALL_HEADS: tl.constexpr,
):
    h_H = tl.arange(0, HEADS)
    c_C = tl.arange(0, WIDE)
    for query in range(tl.program_id(0), queries, tl.num_programs(0)):
        n = tl.cast(first + query, tl.int64)
        low, high = visible_range(bounds_ptr, n, T)
        q_HC = load_heads(q_ptr + n * heads * DIM, h_H, heads, c_C, DIM, DIM, ALL_HEADS)
        w_H = tl.load(w_ptr + n * heads + h_H, mask=h_H < heads, other=0.0).to(tl.float32)
        for start in range(low // KEYS * KEYS, high, KEYS):
            key_K = start + tl.arange(0, KEYS)
            k_KC = load_heads(k_ptr + n // S * T * DIM, key_K, T, c_C, DIM, DIM, False)
            dots_HK = tl.dot(q_HC, tl.trans(k_KC), input_precision="ieee")
            terms_HK = w_H[:, None] * relu(dots_HK)
            if not ALL_HEADS:  # an infinite key times the zeros of a head that is not there is NaN
                terms_HK = tl.where((h_H < heads)[:, None], terms_HK, 0.0)
            score_K = tl.sum(terms_HK, 0)
            inside_K = (key_K >= low) & (key_K < high)
            tl.store(
                ranks_ptr + tl.cast(query, tl.int64) * T + key_K, rank_of(score_K), mask=inside_K
            )


@triton.jit
def count_at_least(ranks_ptr, low, high, rank, BLOCK: tl.constexpr):
    """How many of ranks[low:high] are at or above `rank`."""
    count = tl.full((), 0, tl.int32)
    for start in range(low, high, BLOCK):
        key_K = start + tl.arange(0, BLOCK)
        rank_K = tl.load(ranks_ptr + key_K, mask=key_K < high, other=HIDDEN)
        count += tl.sum(((rank_K >= rank) & (key_K < high)).to(tl.int32), 0)
    return count


@triton.jit
def places(chosen_J, I: tl.constexpr):
    """Of each key of a block, how many before it are chosen."""
    before_IJ = tl.arange(0, I)[:, None] > tl.arange(0, I)[None, :]
    return tl.sum(tl.where(before_IJ, chosen_J[None, :], 0), 1)


@triton.jit
def packed(values_J, chosen_J, place_J, I: tl.constexpr):
    """The chosen values, each at its place."""
    here_IJ = (tl.arange(0, I)[:, None] == place_J[None, :]) & (chosen_J > 0)[None, :]
    return tl.sum(tl.where(here_IJ, values_J[None, :], 0), 1)


@triton.jit(do_not_specialize=["first", "queries"])
def select_topk(
    ranks_ptr,  # int32 [queries, T]
    bounds_ptr,  # int32 [N, 2]
    best_ptr,  # int32 [queries, 2, K]: ranks and keys, in the order of the keys
    counts_ptr,  # int32 [queries], how many there are
    first,
    queries,
    T,
    K,
    BLOCK: tl.constexpr,
    PACK: tl.constexpr,
):
    for query in range(tl.program_id(0), queries, tl.num_programs(0)):
        row = tl.cast(query, tl.int64)
        ranks_row_ptr = ranks_ptr + row * T
        low, high = visible_range(bounds_ptr, first + row, T)
        # The highest rank that K keys reach. HIDDEN, that all reach, if there are fewer.
        last = tl.full((), HIDDEN, tl.int32)
        for step in range(tl.where(high - low > K, 32, 0)):
            higher = last + (tl.full((), 1, tl.int32) << (31 - step))
            enough = count_at_least(ranks_row_ptr, low, high, higher, BLOCK) >= K
            last = tl.where(enough, higher, last)
        ties = K - count_at_least(ranks_row_ptr, low, high, last + 1, BLOCK)
        found = tl.full((), 0, tl.int32)
        tied = tl.full((), 0, tl.int32)
        for start in range(low, high, PACK):
            key_J = start + tl.arange(0, PACK)
            rank_J = tl.load(ranks_row_ptr + key_J, mask=key_J < high, other=HIDDEN)
            tie_J = ((rank_J == last) & (key_J < high)).to(tl.int32)
            first_ties_J = (tie_J > 0) & (tied + places(tie_J, PACK) < ties)
            chosen_J = ((rank_J > last) | first_ties_J).to(tl.int32)
            place_J = places(chosen_J, PACK)
            chosen = tl.sum(chosen_J, 0)
            slot_I = tl.arange(0, PACK)
            out_ptr = best_ptr + row * 2 * K + found
            tl.store(
                out_ptr + slot_I, packed(rank_J, chosen_J, place_J, PACK), mask=slot_I < chosen
            )
            tl.store(
                out_ptr + K + slot_I, packed(key_J, chosen_J, place_J, PACK), mask=slot_I < chosen
            )
            found += chosen
            tied += tl.sum(tie_J, 0)
        tl.store(counts_ptr + row, found)


@triton.jit(do_not_specialize=["first", "work"])
def order_topk(
    best_ptr,  # int32 [queries, 2, K]
    counts_ptr,  # int32 [queries]
    indices_ptr,  # int32 [N, K]
    scores_ptr,  # fp32 [N, K]
    first,
    work,  # queries * cdiv(K, BLOCK)
    K,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(K, BLOCK)
    for item in range(tl.program_id(0), work, tl.num_programs(0)):
        query = tl.cast(item // blocks, tl.int64)
        count = tl.load(counts_ptr + query)
        best_row_ptr = best_ptr + query * 2 * K
        i_I = (item % blocks) * BLOCK + tl.arange(0, BLOCK)
        filled_I = i_I < count
        rank_I = tl.load(best_row_ptr + i_I, mask=filled_I, other=HIDDEN)
        key_I = tl.load(best_row_ptr + K + i_I, mask=filled_I, other=-1)
        place_I = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, count, BLOCK):
            j_J = start + tl.arange(0, BLOCK)
            rank_J = tl.load(best_row_ptr + j_J, mask=j_J < count, other=HIDDEN)
            earlier_IJ = j_J[None, :] < i_I[:, None]
            ties_IJ = (rank_J[None, :] == rank_I[:, None]) & earlier_IJ
            beaten_IJ = ((rank_J[None, :] > rank_I[:, None]) | ties_IJ) & (j_J < count)[None, :]
            place_I += tl.sum(beaten_IJ.to(tl.int32), 1)
        place_I = tl.where(filled_I, place_I, i_I)  # empty slots follow
        score_I = tl.where(filled_I, score_of(rank_I), -float("inf"))
        out = (first + query) * K
        tl.store(indices_ptr + out + place_I, key_I, mask=i_I < K)
        tl.store(scores_ptr + out + place_I, score_I, mask=i_I < K)

"""What the kernels over selected keys share: loading heads, and rows at given indices.

A gather with a mask becomes, on Ascend, a read without one and a select after it. So no pointer is
ever formed from an index or a column that is not one of the tensor, and no wide select is spent on
rows either: an empty slot reads a row that its query has selected anyway. Its probability is zero,
and zero times that row is harmless, unless the row is not finite and the query's results are not
either. A query without any key has no such row and takes no step at all.
"""

import triton
import triton.language as tl

# H heads of a tile, K keys of a block, C columns as wide as a power of two


@triton.jit
def spare_key(indices_ptr, T, K, BLOCK: tl.constexpr):
    """The highest valid index of a query, or -1 if it has none. `indices_ptr`: its first slot."""
    spare = tl.full((), -1, tl.int32)
    for start in range(0, K, BLOCK):
        slot_K = start + tl.arange(0, BLOCK)
        index_K = tl.load(indices_ptr + slot_K, mask=slot_K < K, other=-1)
        index_K = tl.where(index_K < T, index_K, -1)
        spare = tl.maximum(spare, tl.max(index_K, 0))
    return spare


@triton.jit
def load_indices(indices_ptr, slot_K, spare, T, K):
    """Indices of slots, `spare` where there is none, and which are valid."""
    index_K = tl.load(indices_ptr + slot_K, mask=slot_K < K, other=-1)
    valid_K = (index_K >= 0) & (index_K < T)
    return tl.where(valid_K, index_K, spare), valid_K


@triton.jit
def gather_rows(x_ptr, index_K, column_C, ROW: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of x as [K, C], zero beyond COLUMNS. `x_ptr`: the first column wanted of row 0."""
    if column_C.shape[0] == COLUMNS:
        rows_KC = tl.load(x_ptr + index_K[:, None] * ROW + column_C[None, :])
    else:
        there_C = column_C < COLUMNS
        column_C = tl.minimum(column_C, COLUMNS - 1)
        pointers_KC = x_ptr + index_K[:, None] * ROW + column_C[None, :]
        rows_KC = tl.load(pointers_KC, mask=there_C[None, :], other=0.0)
    return rows_KC


@triton.jit
def key_rows(
    kv_ptr,
    index_K,
    slot_K,
    column_C,
    ROW: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATHERED: tl.constexpr,
):
    """Keys of slots as [K, C]: of all keys, or GATHERED, a copy with a row for every slot."""
    if GATHERED:
        row_K = slot_K
    else:
        row_K = index_K
    return gather_rows(kv_ptr, row_K, column_C, ROW, COLUMNS)


@triton.jit
def add_key_rows(
    dkv_ptr,
    rows_KC,
    index_K,
    valid_K,
    slot_K,
    column_C,
    ROW: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATHERED: tl.constexpr,
):
    """The gradient of what `key_rows` read."""
    if GATHERED:
        row_K = slot_K
    else:
        row_K = index_K
    scatter_add_rows(dkv_ptr, rows_KC, row_K, valid_K, column_C, ROW, COLUMNS)


@triton.jit
def load_heads(
    x_ptr, head_H, heads, column_C, ROW: tl.constexpr, COLUMNS: tl.constexpr, ALL: tl.constexpr
):
    """Heads of a query as [H, C], zero beyond them. ALL: no tile reaches beyond the last head."""
    pointers_HC = x_ptr + head_H[:, None] * ROW + column_C[None, :]
    if ALL and column_C.shape[0] == COLUMNS:
        x_HC = tl.load(pointers_HC)
    else:
        inside_HC = (head_H < heads)[:, None] & (column_C < COLUMNS)[None, :]
        x_HC = tl.load(pointers_HC, mask=inside_HC, other=0.0)
    return x_HC


@triton.jit
def store_heads(
    x_ptr,
    x_HC,
    head_H,
    heads,
    column_C,
    ROW: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALL: tl.constexpr,
):
    pointers_HC = x_ptr + head_H[:, None] * ROW + column_C[None, :]
    x_HC = x_HC.to(x_ptr.dtype.element_ty)
    if ALL and column_C.shape[0] == COLUMNS:
        tl.store(pointers_HC, x_HC)
    else:
        tl.store(pointers_HC, x_HC, mask=(head_H < heads)[:, None] & (column_C < COLUMNS)[None, :])


@triton.jit
def scatter_add_rows(
    x_ptr, rows_KC, index_K, valid_K, column_C, ROW: tl.constexpr, COLUMNS: tl.constexpr
):
    """Add rows [K, C] to rows of x, those of empty slots as zeros.

    With a mask over rows, Ascend would add element by element.
    """
    # Zero already; without it the Ascend compiler takes a product's rows for the cube core's.
    rows_KC = rows_KC * valid_K.to(tl.float32)[:, None]
    pointers_KC = x_ptr + index_K[:, None] * ROW + column_C[None, :]
    if column_C.shape[0] == COLUMNS:
        tl.atomic_add(pointers_KC, rows_KC, sem="relaxed")
    else:
        tl.atomic_add(pointers_KC, rows_KC, mask=(column_C < COLUMNS)[None, :], sem="relaxed")


@triton.jit
def relu(x):
    """NaN stays NaN, to show in the loss."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)

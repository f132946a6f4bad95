"""Kernels that the gate must fail, and two that it must not."""

import triton
import triton.language as tl


@triton.jit
def add_rows(x_ptr, index_ptr, y_ptr, work, D: tl.constexpr):
    """y[index[i]] += x[i], as it should be."""
    d = tl.arange(0, D)
    for i in range(tl.program_id(0), work, tl.num_programs(0)):
        row = tl.load(index_ptr + i)
        tl.atomic_add(y_ptr + row * D + d, tl.load(x_ptr + i * D + d))


@triton.jit
def writes_behind(x_ptr, y_ptr, work, D: tl.constexpr):
    """One element more than y has."""
    d = tl.arange(0, D)
    tl.store(y_ptr + 1 + d, tl.load(x_ptr + d))


@triton.jit
def writes_before(x_ptr, y_ptr, work, D: tl.constexpr):
    d = tl.arange(0, D) - work
    tl.store(y_ptr + d, tl.load(x_ptr + tl.arange(0, D)))


@triton.jit
def copies_half(x_ptr, y_ptr, work, D: tl.constexpr):
    """y = x, and zeros, as it should be."""
    d = tl.arange(0, D)
    tl.store(y_ptr + d, tl.load(x_ptr + d, mask=d < D // 2, other=0.0))


@triton.jit
def never_ends(x_ptr, y_ptr, work, D: tl.constexpr):
    d = tl.arange(0, D)
    left = work
    while left > 0:
        tl.store(y_ptr + d, tl.load(y_ptr + d) + 1.0)
        left = tl.where(left > 1, left - 1, work)


@triton.jit
def sorts(x_ptr, y_ptr, work, D: tl.constexpr):
    """Calls what only CANN has."""
    d = tl.arange(0, D)
    tl.store(y_ptr + d, tl.sort(tl.load(x_ptr + d)))

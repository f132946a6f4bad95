"""Kernels that the session must fail, and one that it must not."""

import triton
import triton.language as tl


@triton.jit
def multiplies(x_ptr, y_ptr, work, UPCAST: tl.constexpr, SIDE: tl.constexpr):
    """y = x @ x of a square x; in fp32 whatever the dtype if UPCAST."""
    i = tl.arange(0, SIDE)
    place = i[:, None] * SIDE + i[None, :]
    x = tl.load(x_ptr + place)
    if UPCAST:
        x = x.to(tl.float32)
    tl.store(y_ptr + place, tl.dot(x, x, input_precision="ieee"))


@triton.jit
def is_no_code(x_ptr, y_ptr, work, UPCAST: tl.constexpr, SIDE: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, SIDE), tl.load(x_ptr + tl.arange(0, 2 * SIDE)))

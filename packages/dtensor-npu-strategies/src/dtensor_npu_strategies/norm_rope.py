"""Operators that work on each token by itself: norms, rotary embedding, activations."""

from collections.abc import Iterator

from dtensor_npu_strategies.rules import Arguments, Rule, leading, linear, operator, sharded

# B batch, S sequence, H heads; a b c ... any dimensions, _ those that are computed across.


@operator("npu_dsa::rms_norm", group="norm_rope")
def rms_norm(a: Arguments) -> Iterator[Rule]:
    x, over = leading(a.ndim("x"), without=[-1])
    yield from sharded(a, f"x:{x} weight:_ -> {x} {x}", over)


@operator("npu_dsa::rms_norm_backward", group="norm_rope")
def rms_norm_backward(a: Arguments) -> Iterator[Rule]:
    x, over = leading(a.ndim("x"), without=[-1])
    dw = "=_" if a.weight is None else "_"
    yield from sharded(a, f"d_y:{x} x:{x} weight:_ rstd:{x} -> {x} {dw}", over)
    yield linear(["d_y"], True, a.weight is not None)


@operator("npu::npu_rms_norm", group="norm_rope")
def npu_rms_norm(a: Arguments) -> Iterator[Rule]:
    x, gamma, over = _normalised(a)
    yield from sharded(a, f"input:{x} gamma:{gamma} -> {x} {x}", over)


@operator("npu::npu_rms_norm_backward", group="norm_rope")
def npu_rms_norm_backward(a: Arguments) -> Iterator[Rule]:
    x, gamma, over = _normalised(a)
    yield from sharded(a, f"dy:{x} input:{x} gamma:{gamma} rstd:{x} -> {x} {gamma}", over)
    yield linear(["dy"], True, True)


def _normalised(a: Arguments) -> tuple[str, str, str]:
    """The norm is over as many last dimensions as gamma has."""
    count = a.ndim("gamma")
    x, over = leading(a.ndim("input"), without=range(-count, 0))
    return x, "_" * count, over


@operator("npu_dsa::rotary_mul", group="norm_rope")
def rotary_mul(a: Arguments) -> Iterator[Rule]:
    table = "S_" if a.ndim("cos") == 2 else "BS_"
    yield from sharded(a, f"x:BSH_ cos:{table} sin:{table} -> BSH_", "BSH")
    yield linear(["x"], True)


@operator("npu_dsa::rotary_mul_backward", group="norm_rope")
def rotary_mul_backward(a: Arguments) -> Iterator[Rule]:
    table = "S_" if a.ndim("cos") == 2 else "BS_"
    yield from sharded(a, f"d_y:BSH_ cos:{table} sin:{table} -> BSH_", "BSH")
    yield linear(["d_y"], True)


@operator("npu::npu_rotary_mul", group="norm_rope")
def npu_rotary_mul(a: Arguments) -> Iterator[Rule]:
    x, table, over = _repeated(a)
    yield from sharded(a, f"input:{x} r1:{table} r2:{table} rotate:__ -> {x}", over)
    yield linear(["input"], True)


@operator("npu::npu_rotary_mul_backward", group="norm_rope")
def npu_rotary_mul_backward(a: Arguments) -> Iterator[Rule]:
    x, table, over = _repeated(a)
    pattern = f"grad:{x} input:{x} r1:{table} r2:{table} -> {x} {table} {table}"
    yield from sharded(a, pattern, over)
    yield linear(["grad"], True, True, True)
    yield linear(["input"], False, True, True)


def _repeated(a: Arguments) -> tuple[str, str, str]:
    """The angles have size 1 where they are the same for all of the input's, heads mostly."""
    x, over = leading(a.ndim("input"), without=[-1])
    sizes = zip(x, a.input.shape, a.r1.shape, strict=True)
    return x, "".join("_" if n == 1 else dim for dim, _, n in sizes), over


@operator("npu_dsa::swiglu", group="norm_rope")
def swiglu(a: Arguments) -> Iterator[Rule]:
    x, over = leading(a.ndim("x"), without=[a.dim])
    yield from sharded(a, f"x:{x} -> {x}", over)


@operator("npu_dsa::swiglu_backward", group="norm_rope")
def swiglu_backward(a: Arguments) -> Iterator[Rule]:
    x, over = leading(a.ndim("x"), without=[a.dim])
    yield from sharded(a, f"d_y:{x} x:{x} -> {x}", over)
    yield linear(["d_y"], True)


@operator("npu::npu_swiglu", group="norm_rope")
def npu_swiglu(a: Arguments) -> Iterator[Rule]:
    x, over = leading(a.ndim("input"), without=[a.dim])
    yield from sharded(a, f"input:{x} -> {x}", over)


@operator("npu::npu_swiglu_backward", group="norm_rope")
def npu_swiglu_backward(a: Arguments) -> Iterator[Rule]:
    x, over = leading(a.ndim("input"), without=[a.dim])
    yield from sharded(a, f"grad_output:{x} input:{x} -> {x}", over)
    yield linear(["grad_output"], True)


@operator("npu_dsa::hadamard", group="norm_rope")
def hadamard(a: Arguments) -> Iterator[Rule]:
    x, over = leading(a.ndim("x"), without=[-1])
    yield from sharded(a, f"x:{x} -> {x}", over)
    yield linear(["x"], True)

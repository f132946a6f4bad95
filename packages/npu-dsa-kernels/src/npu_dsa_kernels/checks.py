"""Argument checks. Every message names the argument, what it got and what would work."""

import math
import numbers
from collections.abc import Sequence

import torch
from torch import Tensor

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
FLOAT32_MAX = (2 - 2**-23) * 2.0**127


def bad(name: str, got: object, want: str) -> ValueError:
    """The one form of an error: ``name: got <got>; <want>``."""
    return ValueError(f"{name}: got {got}; {want}")


def tensor(name: str, x: Tensor, dims: str) -> None:
    """`dims` is the expected layout as space separated letters, e.g. ``"B S H D"``."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}; expected a torch.Tensor")
    if x.dim() != len(dims.split()):
        layout = ", ".join(dims.split())
        raise bad(name, f"shape {_shape(x)}", f"expected {len(dims.split())} dimensions [{layout}]")


def at_least_1d(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}; expected a torch.Tensor")
    if x.dim() == 0:
        raise bad(name, "shape ()", "expected at least one dimension")


def floating(name: str, x: Tensor) -> None:
    if x.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise bad(name, x.dtype, "expected float64, float32, bfloat16 or float16")


def dtype(name: str, x: Tensor, allowed: Sequence[torch.dtype], why: str = "") -> None:
    if x.dtype not in allowed:
        names = " or ".join(str(d).removeprefix("torch.") for d in dict.fromkeys(allowed))
        raise bad(name, x.dtype, f"expected {names}{why}")


def no_gradient(name: str, x: Tensor, why: str) -> None:
    if x.requires_grad:
        raise bad(name, "a tensor that requires grad", f"{why}; pass {name}.detach()")


def choice(name: str, value: object, options: Sequence[str]) -> None:
    if value not in options:
        raise bad(name, repr(value), f"expected one of {', '.join(map(repr, options))}")


def whole_number(name: str, value: object, low: int, high: int) -> None:
    """An int in [low, high]; a symbolic size counts as one."""
    number = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    if not number or not low <= value <= high:
        raise bad(name, repr(value), f"expected an int in [{low}, {high}]")


def same_device(first_name: str, first: Tensor, **others: Tensor | None) -> None:
    for name, x in others.items():
        if x is not None and x.device != first.device:
            raise bad(name, f"device {x.device}", f"expected {first.device}, where {first_name} is")


def shape(name: str, x: Tensor, **sizes: int) -> None:
    """Check the shape of `x` against named sizes given in order, e.g. ``B=2, S=16``."""
    if any(x.shape[i] != size for i, size in enumerate(sizes.values())):
        want = ", ".join(f"{letter}={size}" for letter, size in sizes.items())
        raise bad(name, f"shape {_shape(x)}", f"expected [{want}] to fit the other arguments")


def not_empty(name: str, x: Tensor, **dims: int) -> None:
    for letter, dim in dims.items():
        if x.shape[dim] == 0:
            raise bad(name, f"shape {_shape(x)}", f"expected {letter} (dimension {dim}) >= 1")


def top_k(topk: int, B: int, S: int) -> None:
    if isinstance(topk, bool) or not isinstance(topk, (int, torch.SymInt)):
        raise bad("topk", repr(topk), "expected an int >= 1")
    if topk < 1:
        raise bad("topk", topk, "expected an int >= 1")
    if topk > INT32_MAX or B * S * topk > INT64_MAX:
        raise bad("topk", topk, f"expected B * S * topk to stay countable (B={B}, S={S})")


def key_count(name: str, T: int) -> None:
    if T > INT32_MAX:
        raise bad(name, f"T={T} keys", f"expected at most {INT32_MAX}, as indices are int32")


def scale(value: float) -> None:
    number = isinstance(value, (numbers.Real, torch.SymFloat, torch.SymInt))
    # Compared instead of math.isfinite, which cannot be traced.
    if isinstance(value, bool) or not number or not -FLOAT32_MAX <= value <= FLOAT32_MAX:
        raise bad("scale", repr(value), "expected a finite float, in the range of float32")


def bounds(x: Tensor | None, B: int, S: int, T: int, *, validate: bool) -> None:
    if x is None:
        if S != T:
            raise bad(
                "bounds",
                f"None with S={S} queries and T={T} keys",
                "None means causal with T == S; otherwise pass int32 bounds [B, S, 2]",
            )
        return
    tensor("bounds", x, "B S 2")
    dtype("bounds", x, (torch.int32,))
    shape("bounds", x, **{"B": B, "S": S, "2": 2})
    if validate:
        _readable()
        lo, hi = x.unbind(-1)
        if ((lo < 0) | (hi > T)).any():
            got = f"values in [{int(lo.min())}, {int(hi.max())}]"
            raise bad("bounds", got, f"expected 0 <= lo <= hi <= T={T}")
        if (lo > hi).any():
            b, s = (lo > hi).nonzero()[0].tolist()
            got = f"lo={int(lo[b, s])} > hi={int(hi[b, s])} at [{b}, {s}]"
            raise bad("bounds", got, "expected lo <= hi (lo == hi hides the row)")


def indices(x: Tensor, B: int, S: int, T: int, *, validate: bool) -> None:
    tensor("indices", x, "B S K")
    dtype("indices", x, (torch.int32,))
    shape("indices", x, B=B, S=S)
    not_empty("indices", x, K=2)
    if validate:
        _readable()
        if x.numel() == 0:
            return
        if ((x < -1) | (x >= T)).any():
            got = f"values in [{int(x.min())}, {int(x.max())}]"
            raise bad("indices", got, f"expected -1 (empty) or a key in [0, T={T})")
        ordered = x.sort(dim=-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        if twice.any():
            b, s, j = twice.nonzero()[0].tolist()
            got = f"key {int(ordered[b, s, j])} more than once in row [{b}, {s}]"
            raise bad("indices", got, "expected every key at most once in a row")


def eps(value: float) -> None:
    number = isinstance(value, (int, float, torch.SymFloat, torch.SymInt))
    if isinstance(value, bool) or not number or not 0 <= value < math.inf:
        raise bad("eps", repr(value), "expected a finite float >= 0")


def group_ends(name: str, x: Tensor, G: int, N: int, *, validate: bool) -> None:
    """`counts` or `offsets` of a grouped matmul over N rows."""
    tensor(name, x, "G")
    dtype(name, x, (torch.int32, torch.int64))
    shape(name, x, G=G)
    if validate:
        _readable()
        steps = x.diff(prepend=x.new_zeros(1)) if name == "offsets" else x
        if (steps < 0).any():
            g = int((steps < 0).nonzero()[0])
            order = ">= 0 and none below the one before it" if name == "offsets" else ">= 0"
            raise bad(name, f"{int(x[g])} at [{g}]", f"expected values {order}")
        total = int(steps.sum())
        if total > N:
            raise bad(name, f"{total} rows in all", f"expected at most N={N}, the rows of x")


def slots(name: str, x: Tensor, count: int, *, distinct: bool, validate: bool) -> None:
    """Numbers below `count` or -1: experts of tokens, or rows (`distinct`) of slots."""
    tensor(name, x, "N k")
    dtype(name, x, (torch.int32, torch.int64))
    not_empty(name, x, k=1)
    if x.numel() > INT32_MAX:
        want = f"expected at most {INT32_MAX} slots N * k, as rows are int32"
        raise bad(name, f"shape {_shape(x)}", want)
    if validate:
        _readable()
        if ((x < -1) | (x >= count)).any():
            got = f"values in [{int(x.min())}, {int(x.max())}]"
            raise bad(name, got, f"expected -1 (not here) or a number in [0, {count})")
        if distinct:
            ordered = x[x >= 0].sort().values
            twice = ordered[1:][ordered[1:] == ordered[:-1]]
            if twice.numel():
                got = f"row {int(twice[0])} more than once"
                raise bad(name, got, "expected every row in at most one slot")


def target(x: Tensor, *, validate: bool) -> None:
    if validate:
        _readable()
        if not (x.isfinite() & (x >= 0)).all():
            raise bad("target", "negative or non-finite entries", "expected finite values >= 0")


def _readable() -> None:
    if torch.compiler.is_compiling():
        raise bad("validate", True, "it reads values, so it cannot be traced; validate eagerly")


def _shape(x: Tensor) -> str:
    return str(tuple(x.shape))

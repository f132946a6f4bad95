"""The base operators as definitions: fp64, one number or row at a time, sharing no code with them.

Also what compares an operator with its definition, in values and gradients.
"""

import cmath
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dsa_definitions import EVERY, TOLERANCE, assert_close, leaves

# --- definitions ---------------------------------------------------------------------------------


def rms_norm(x, weight=None, eps=1e-6):
    rows = []
    for row in x.reshape(-1, x.shape[-1]):
        mean_square = sum(v * v for v in row) / len(row)
        rows.append(row / torch.sqrt(mean_square + eps))
    y = torch.stack(rows).view(x.shape)
    return y if weight is None else y * weight


def rotary_mul(x, angles, interleaved):
    """`angles` [B, S, D/2]: every pair is a complex number, turned by its angle."""
    B, S, H, D = x.shape
    out = []
    for b in range(B):
        for t in range(S):
            for h in range(H):
                numbers = [None] * D
                for i in range(D // 2):
                    re, im = (2 * i, 2 * i + 1) if interleaved else (i, i + D // 2)
                    turn = cmath.exp(1j * float(angles[b, t, i]))
                    a, c = x[b, t, h, re], x[b, t, h, im]
                    numbers[re] = a * turn.real - c * turn.imag
                    numbers[im] = a * turn.imag + c * turn.real
                out.append(torch.stack(numbers))
    return torch.stack(out).view(x.shape)


def swiglu(x, dim=-1):
    F = x.shape[dim] // 2
    parts = []
    for f in range(F):
        a, b = x.select(dim, f), x.select(dim, F + f)
        parts.append(a / (1 + torch.exp(-a)) * b)
    return torch.stack(parts, dim)


def grouped_matmul(x, weight, counts: Sequence[int]):
    group = [g for g, count in enumerate(counts) for _ in range(count)]
    rows = []
    for n in range(x.shape[0]):
        row = x.new_zeros(weight.shape[2])
        if n < len(group):
            for i in range(x.shape[1]):
                row = row + x[n, i] * weight[group[n], i]
        rows.append(row)
    return torch.stack(rows)


def permuted_slots(experts: Tensor, num_experts: int, M: int | None) -> list[tuple[int, int]]:
    """(n, j) of every permuted row that holds a slot, in order."""
    N, k = experts.shape
    slots = [
        (int(experts[n, j]), n, j)
        for n in range(N)
        for j in range(k)
        if 0 <= experts[n, j] < num_experts
    ]
    return [(n, j) for _, n, j in sorted(slots)][: N * k if M is None else M]


def moe_permute(tokens, probs, experts, num_experts, M=None):
    N, k = experts.shape
    M = N * k if M is None else M
    slots = permuted_slots(experts, num_experts, M)
    out, out_probs = [tokens[n] for n, _ in slots], [probs[n, j] for n, j in slots]
    out += [tokens.new_zeros(tokens.shape[1])] * (M - len(slots))
    out_probs += [probs.new_zeros(())] * (M - len(slots))
    return torch.stack(out), torch.stack(out_probs)


def moe_unpermute(x, rows, probs=None):
    N, k = rows.shape
    out = []
    for n in range(N):
        total = x.new_zeros(x.shape[1])
        for j in range(k):
            if 0 <= rows[n, j] < x.shape[0]:
                total = total + x[int(rows[n, j])] * (1 if probs is None else probs[n, j])
        out.append(total)
    return torch.stack(out)


# --- comparisons ---------------------------------------------------------------------------------


def values_and_gradients(op: Callable, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The floating outputs of `op` and the gradients of all its inputs."""
    inputs = leaves(*inputs)
    outputs = op(*inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else [x for x in outputs if x is not None]
    outputs = [x for x in outputs if x.is_floating_point()]
    g = torch.Generator().manual_seed(5)
    loss = sum((0 * x.sum() for x in inputs), torch.zeros((), dtype=torch.float64))
    for x in outputs:
        upstream = torch.randn(x.shape, generator=g, dtype=torch.float64)
        # Rounded to eighths, so that no dtype rounds them again.
        loss = loss + (x * upstream.mul(8).round().div(8).to(x.dtype)).sum()
    return [*outputs, *torch.autograd.grad(loss, inputs)]


def assert_follows(
    op: Callable, definition: Callable, inputs: Sequence[Tensor], floor: float = 1e-3
) -> None:
    """`op(*inputs, backend=...)` is `definition(*inputs)`, values and gradients, fp64 and fp32."""
    inputs = [x.float() for x in inputs]  # so that one definition serves both
    expected = values_and_gradients(definition, [x.double() for x in inputs])
    for backend, dtype in EVERY:
        actual = values_and_gradients(
            lambda *x, backend=backend: op(*x, backend=backend), [x.to(dtype) for x in inputs]
        )
        assert len(actual) == len(expected)
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert a.dtype == dtype
            assert_close(a, e, TOLERANCE[dtype], f"{backend} {dtype} number {i}", floor)


def assert_rounds_less_than(
    eager: Callable,
    op: Callable,
    definition: Callable,
    inputs: Sequence[Tensor],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """In half precision, `op` is at most twice as far off as the formula written in that dtype."""
    inputs = [x.to(dtype) for x in inputs]
    expected = values_and_gradients(definition, [x.double() for x in inputs])
    plain = values_and_gradients(eager, inputs)
    for backend in ("reference", "torch"):
        actual = values_and_gradients(lambda *x, b=backend: op(*x, backend=b), inputs)
        for i, (a, p, e) in enumerate(zip(actual, plain, expected, strict=True)):
            error, allowed = (a.double() - e).abs().max(), 2 * (p.double() - e).abs().max()
            assert error <= allowed, f"{backend} number {i}: off by {error}, allowed {allowed}"

"""What every operator is tried on, and what must come out.

Inputs are bfloat16 numbers, whatever the dtype they are given in, so that one result is right for
all. Small cases are compared with the definitions, those of real widths with the backend
"reference" in float64, which the package's tests compare with the definitions.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import base_definitions
import dsa_definitions
from dsa_definitions import PACKED
from npu_dsa_kernels.backends import reference

# Cases run in processes forked from this one, to which OpenMP's threads do not come along.
torch.set_num_threads(1)

# B batch, S queries, T keys, H heads, D head dim, V value dim, K selected keys
# N rows or tokens, D features, E experts, k experts of a token, M rows of the permuted tokens

LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest error allowed, of a tensor's largest value."""

Comparison = tuple[str, Tensor, Tensor]
"""A name, what came out, and what should have."""


@dataclass(frozen=True)
class Case:
    """An operator and its inputs. `check` runs it and yields what is to be compared."""

    operator: str
    inputs: str
    check: Callable[[Any, torch.dtype], Iterator[Comparison]]
    """Of a module with the operators, and the inputs' dtype."""


def error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, of the largest value; infinite where there is no comparing.

    Integers and infinities must be the same. Below 1e-3 of magnitude the error is absolute.
    """
    if actual.shape != expected.shape:
        return math.inf
    if not expected.is_floating_point():
        return 0.0 if torch.equal(actual, expected.to(actual.dtype)) else math.inf
    actual, expected = actual.double(), expected.double()
    infinite = expected.isinf()
    if not torch.equal(actual[infinite], expected[infinite]):
        return math.inf
    actual, expected = actual[~infinite], expected[~infinite]
    if actual.numel() == 0:
        return 0.0
    if not actual.isfinite().all():
        return math.inf
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-3)).item()


class _Numbers:
    """Random numbers that bfloat16 has."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        x = torch.randn(*shape, generator=self.generator) * scale
        return x.bfloat16().double()

    def whole(self, *shape: int) -> Tensor:
        """From -2 to 2: sums are exact in every dtype, and ties abound."""
        return torch.randint(-2, 3, shape, generator=self.generator).double()

    def indices(self, B: int, S: int, T: int, K: int) -> Tensor:
        """Distinct keys in random order, the last one among them.

        The first row also has -1, T and others outside; the last row has no key.
        """
        out = torch.full((B, S, K), -1, dtype=torch.int32)
        for b, s in itertools.product(range(B), range(S)):
            keys = torch.randperm(T - 1, generator=self.generator)[: K - 1].int()
            keys = torch.cat([keys, torch.tensor([T - 1], dtype=torch.int32)])
            out[b, s, : len(keys)] = keys
        out[0, 0, :4] = torch.tensor([-1, T, T + 3, -7])
        out[-1, -1] = -1
        return out


def _gradients(y: Tensor, upstream: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.autograd.grad((y * upstream).sum(), inputs)


def _in_blocks(
    check: Callable[[Any, torch.dtype], Iterator[Comparison]], workspace_bytes: int
) -> Callable[[Any, torch.dtype], Iterator[Comparison]]:
    """The same with a workspace that holds few queries: later blocks start inside of a batch."""

    def check_blocks(operators: Any, dtype: torch.dtype) -> Iterator[Comparison]:
        from npu_dsa_kernels.backends.triton import dsa

        before, dsa._WORKSPACE_BYTES = dsa._WORKSPACE_BYTES, workspace_bytes
        try:
            yield from check(operators, dtype)
        finally:
            dsa._WORKSPACE_BYTES = before

    return check_blocks


# --- sparse attention ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Attention:
    """Inputs of sparse attention, and its definition."""

    q: Tensor
    kv: Tensor
    indices: Tensor
    scale: float
    v_dim: int
    define: Any
    upstream: Tensor
    upstream_lse: Tensor

    def forward(self, operators: Any, dtype: torch.dtype) -> Iterator[Comparison]:
        q, kv = self.q.to(dtype), self.kv.to(dtype)
        out, lse = operators.sparse_attention(q, kv, self.indices, self.scale, self.v_dim)
        expected = self.define.sparse_attention(
            self.q, self.kv, self.indices, self.scale, self.v_dim
        )
        yield "out", out, expected[0]
        yield "lse", lse, expected[1]

    def backward(self, operators: Any, dtype: torch.dtype) -> Iterator[Comparison]:
        q, kv = dsa_definitions.leaves(self.q, self.kv)
        out, lse = self.define.sparse_attention(q, kv, self.indices, self.scale, self.v_dim)
        finite = lse.masked_fill(lse == -math.inf, 0.0)
        loss = (out * self.upstream).sum() + (finite * self.upstream_lse).sum()
        expected = torch.autograd.grad(loss, (q, kv))
        actual = operators.sparse_attention_backward(
            self.upstream.to(dtype), self.upstream_lse.float(), q.detach().to(dtype),
            kv.detach().to(dtype), self.indices, out.detach().to(dtype), lse.detach().float(),
            self.scale,
        )  # fmt: skip
        yield "dq", actual[0], expected[0]
        yield "dkv", actual[1], expected[1]

    def target(self, operators: Any, dtype: torch.dtype) -> Iterator[Comparison]:
        _, lse = reference.sparse_attention(self.q, self.kv, self.indices, self.scale, self.v_dim)
        arguments = (self.indices, lse.float(), self.scale)
        target = operators.attention_target(self.q.to(dtype), self.kv.to(dtype), *arguments)
        if self.define is reference:
            arguments = (self.indices, lse, self.scale)
        else:
            arguments = (self.indices, self.scale)
        yield "target", target, self.define.attention_target(self.q, self.kv, *arguments)


def _packed() -> _Attention:
    """Documents, hidden rows, empty slots anywhere."""
    numbers = _Numbers(1)
    B, S, T, H, V, R = PACKED.B, PACKED.S, PACKED.T, PACKED.H, 4, 2
    return _Attention(
        numbers(B, S, H, V + R), numbers(B, T, V + R), PACKED.indices(), 0.4, V, dsa_definitions,
        numbers(B, S, H, V), numbers(B, S, H),
    )  # fmt: skip


def _few_keys() -> _Attention:
    """More slots than keys."""
    numbers = _Numbers(2)
    B, S, T, H, V, R, K = 1, 3, 5, 20, 16, 3, 40
    return _Attention(
        numbers(B, S, H, V + R), numbers(B, T, V + R), numbers.indices(B, S, T, K), 0.3, V,
        dsa_definitions, numbers(B, S, H, V), numbers(B, S, H),
    )  # fmt: skip


def _wide(H: int, T: int, K: int, R: int) -> _Attention:
    """Real widths, three queries, the last without keys."""
    numbers = _Numbers(H + T + K)
    B, S, V = 1, 3, 512
    return _Attention(
        numbers(B, S, H, V + R), numbers(B, T, V + R), numbers.indices(B, S, T, K), 0.135234, V,
        reference, numbers(B, S, H, V), numbers(B, S, H),
    )  # fmt: skip


def _attention_cases() -> Iterator[Case]:
    made: list[tuple[str, Callable[[], _Attention]]] = [
        ("packed documents, rows without keys, H 3, D 6", _packed),
        ("T 5 < K 40, indices outside, H 20, D 19", _few_keys),
    ]
    for H, R, K, T in (
        (128, 64, 2048, 4096),
        (64, 64, 2048, 2304),
        (32, 64, 2048, 2304),
        (16, 64, 2048, 32768),
        (16, 0, 128, 256),
    ):
        name = f"H {H}, D {512 + R}, K {K}, T {T}, indices outside, an empty row"
        made.append((name, lambda H=H, T=T, K=K, R=R: _wide(H, T, K, R)))
    for (name, make), (operator, method) in itertools.product(
        made,
        (
            ("sparse_attention", _Attention.forward),
            ("sparse_attention_backward", _Attention.backward),
            ("attention_target", _Attention.target),
        ),
    ):

        def check(operators, dtype, make=make, method=method):
            return method(make(), operators, dtype)

        yield Case(operator, name, check)
        if make is _packed:  # of 32 queries
            yield Case(operator, f"{name}, in blocks", _in_blocks(check, 5 * 128 * 6 * 4))


# --- indexer -------------------------------------------------------------------------------------


def _lightning_indexer(
    q: Tensor, k: Tensor, w: Tensor, bounds: Tensor | None, topk: int, define: Any, exact: bool
) -> Callable[[Any, torch.dtype], Iterator[Comparison]]:
    def check(operators: Any, dtype: torch.dtype) -> Iterator[Comparison]:
        # Weights in float32, as the model's are; small cases have the inputs' own dtype.
        weights = w.float() if define is reference else w.to(dtype)
        indices, scores = operators.lightning_indexer(
            q.to(dtype), k.to(dtype), weights, bounds, topk
        )
        if define is reference:
            expected = define.lightning_indexer(q, k, w, bounds, topk)
        else:
            expected = define.lightning_indexer(q, k, w, topk, bounds)
        yield "scores", scores, expected[1]
        if exact:
            yield "indices", indices, expected[0]
            return
        # Scores closer than rounding may change places, so it is the scores that count.
        chosen = _scores_at(q, k, w, indices)
        yield "scores of the keys", chosen, expected[1]
        by_key = indices.sort(-1).values
        twice = (by_key[..., 1:] == by_key[..., :-1]) & (by_key[..., 1:] >= 0)
        yield "keys chosen twice", twice.any()[None], torch.tensor([False])

    return check


def _scores_at(q: Tensor, k: Tensor, w: Tensor, indices: Tensor) -> Tensor:
    k_BSKD, valid_BSK = reference.gather_rows(k, indices)
    dots_BSHK = torch.einsum("bshd,bskd->bshk", q, k_BSKD)
    scores_BSK = (w.unsqueeze(-1) * dots_BSHK.relu()).sum(2)
    return scores_BSK.masked_fill(~valid_BSK, -math.inf)


def _loss(
    q: Tensor, k: Tensor, w: Tensor, indices: Tensor, target: Tensor, define: Any
) -> Callable[[Any, torch.dtype], Iterator[Comparison]]:
    def check(operators: Any, dtype: torch.dtype) -> Iterator[Comparison]:
        inputs = [x.to(dtype) for x in (q, k, w)]
        expected = define.indexer_kl_loss(q, k, w, indices, target)
        loss = operators.indexer_kl_loss(*inputs, indices, target.float(), None)
        yield "loss", loss, expected
        # As the layer calls it: weights in float32, and the scores at hand.
        inputs[2], scores = w.float(), _scores_at(q, k, w, indices).float()
        loss = operators.indexer_kl_loss(*inputs, indices, target.float(), scores)
        yield "loss of known scores", loss, expected

    return check


def _loss_backward(
    q: Tensor, k: Tensor, w: Tensor, indices: Tensor, target: Tensor, define: Any
) -> Callable[[Any, torch.dtype], Iterator[Comparison]]:
    def check(operators: Any, dtype: torch.dtype) -> Iterator[Comparison]:
        leaves = dsa_definitions.leaves(q, k, w)
        loss = define.indexer_kl_loss(*leaves, indices, target)
        upstream = _Numbers(4)(*loss.shape)
        expected = _gradients(loss, upstream, tuple(leaves))
        for weights in (w.to(dtype), w.float()):
            actual = operators.indexer_kl_loss_backward(
                upstream.float(), q.to(dtype), k.to(dtype), weights, indices, target.float()
            )
            yield from zip(("dq", "dk", "dw"), actual, expected, strict=True)

    return check


def _indexer_cases() -> Iterator[Case]:
    numbers = _Numbers(11)

    def packed(draw: Callable[..., Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        B, S, T, H, D = PACKED.B, PACKED.S, PACKED.T, PACKED.H, PACKED.D
        return draw(B, S, H, D), draw(B, T, D), draw(B, S, H)

    def wide(draw: Callable[..., Tensor], S: int, T: int) -> tuple[Tensor, Tensor, Tensor]:
        # Weights as the layer's: scores of a few units.
        return draw(1, S, 64, 128), draw(1, T, 128), draw(1, S, 64)

    name = "lightning_indexer"
    inputs, bounds, K = packed(numbers.whole), PACKED.bounds, PACKED.topk
    yield Case(
        name,
        "packed documents, rows without keys, ties, H 3, D 5, K 4",
        _lightning_indexer(*inputs, bounds, K, dsa_definitions, True),
    )
    yield Case(
        name,
        "the same, in blocks",
        _in_blocks(_lightning_indexer(*inputs, bounds, K, dsa_definitions, True), 5 * 96),
    )
    yield Case(
        name,
        "causal, S 16 < K 21, ties",
        _lightning_indexer(*inputs, None, 21, dsa_definitions, True),
    )
    inputs = wide(numbers.whole, 2, 32768)
    bounds = torch.tensor([[[0, 32768], [1000, 30001]]], dtype=torch.int32)
    yield Case(
        name,
        "64 heads x 128, T 32768, K 2048, ties",
        _lightning_indexer(*inputs, bounds, 2048, reference, True),
    )
    inputs = wide(numbers, 3, 3000)
    bounds = torch.tensor([[[0, 3000], [10, 1500], [5, 5]]], dtype=torch.int32)
    yield Case(
        name,
        "64 heads x 128, T 3000, K 2048, random, a row of fewer keys, one of none",
        _lightning_indexer(*inputs, bounds, 2048, reference, False),
    )

    def with_target(q: Tensor, k: Tensor, w: Tensor, indices: Tensor, T: int) -> tuple[Tensor, ...]:
        valid = (indices >= 0) & (indices < T)
        target = _Numbers(12)(*indices.shape).exp().bfloat16().double()
        return q, k, w, indices, target.masked_fill(~valid, 0.0)

    small = with_target(*packed(numbers), PACKED.indices(), PACKED.T)
    q, k, w = wide(numbers, 3, 2304)
    large = with_target(q, k, w / 64, numbers.indices(1, 3, 2304, 2048), 2304)
    for operator, check in (
        ("indexer_kl_loss", _loss),
        ("indexer_kl_loss_backward", _loss_backward),
    ):
        yield Case(operator, "packed documents, rows without keys", check(*small, dsa_definitions))
        yield Case(
            operator,
            "64 heads x 128, K 2048, T 2304, indices outside, an empty row",
            check(*large, reference),
        )


# --- base operators ------------------------------------------------------------------------------


def _rms_norm(
    N: int, D: int, weighted: bool, define: Any
) -> Callable[[Any, torch.dtype], Iterator[Comparison]]:
    def check(operators: Any, dtype: torch.dtype) -> Iterator[Comparison]:
        numbers = _Numbers(N + D)
        x, weight = numbers(N, D), numbers(D) if weighted else None
        y, rstd = operators.rms_norm(x.to(dtype), _as(weight, dtype), 1e-6)
        yield "y", y, define.rms_norm(x, weight, 1e-6)
        yield "rstd", rstd, (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()

    return check


def _rms_norm_backward(
    N: int, D: int, weighted: bool, define: Any
) -> Callable[[Any, torch.dtype], Iterator[Comparison]]:
    def check(operators: Any, dtype: torch.dtype) -> Iterator[Comparison]:
        numbers = _Numbers(N + D + 1)
        x, upstream = numbers(N, D), numbers(N, D)
        leaves = dsa_definitions.leaves(x, *([numbers(D)] if weighted else []))
        weight = leaves[1] if weighted else None
        expected = _gradients(define.rms_norm(leaves[0], weight, 1e-6), upstream, tuple(leaves))
        rstd = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt().float()
        weight = None if weight is None else weight.detach()
        actual = operators.rms_norm_backward(
            upstream.to(dtype), x.to(dtype), _as(weight, dtype), rstd
        )
        yield from zip(("dx", "dweight"), actual, expected, strict=False)

    return check


def _as(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else x.to(dtype)


def _rotary(
    shape: tuple[int, int, int, int], interleaved: bool, backward: bool
) -> Callable[[Any, torch.dtype], Iterator[Comparison]]:
    def check(operators: Any, dtype: torch.dtype) -> Iterator[Comparison]:
        numbers = _Numbers(sum(shape) + interleaved)
        B, S, _, D = shape
        x = numbers(*shape)
        # Sines and cosines as the operator is given them.
        cos, sin = numbers(B, S, D), numbers(B, S, D)
        if backward:
            (leaf,) = dsa_definitions.leaves(x)
            upstream = numbers(*shape)
            y = reference.rotary_mul(leaf, cos, sin, interleaved)
            (expected,) = _gradients(y, upstream, (leaf,))
            given, run = upstream, operators.rotary_mul_backward
        else:
            expected = reference.rotary_mul(x, cos, sin, interleaved)
            given, run = x, operators.rotary_mul
        yield "y", run(given.to(dtype), cos.float(), sin.float(), interleaved), expected

    return check


def _permutation(N: int, k: int, E: int, seed: int) -> tuple[Tensor, Tensor]:
    """Experts of each token, some of them none; and probabilities."""
    numbers = _Numbers(seed)
    experts = torch.stack(
        [torch.randperm(E, generator=numbers.generator)[:k] for _ in range(N)]
    ).int()
    experts[torch.rand(N, k, generator=numbers.generator) < 0.2] = -1
    return experts, numbers(N, k)


def _moe_permute(
    N: int, D: int, k: int, E: int, M: int, probs_dtype: torch.dtype | None
) -> Callable[[Any, torch.dtype], Iterator[Comparison]]:
    def check(operators: Any, dtype: torch.dtype) -> Iterator[Comparison]:
        experts, probs = _permutation(N, k, E, N + D)
        tokens = _Numbers(5)(N, D)
        out, out_probs, rows, counts = operators.moe_permute(
            tokens.to(dtype), experts, probs.to(probs_dtype or dtype), E, M
        )
        expected = reference.moe_permute(tokens, experts, probs, E, M)
        names = ("tokens", "probs", "rows", "counts")
        yield from zip(names, (out, out_probs, rows, counts), expected, strict=True)
        if N * k <= 64:
            yield "tokens", out, base_definitions.moe_permute(tokens, probs, experts, E, M)[0]

    return check


def _moe_permute_backward(
    N: int, D: int, k: int, E: int, M: int, probs_dtype: torch.dtype | None
) -> Callable[[Any, torch.dtype], Iterator[Comparison]]:
    def check(operators: Any, dtype: torch.dtype) -> Iterator[Comparison]:
        experts, probs = _permutation(N, k, E, N + D)
        numbers = _Numbers(6)
        tokens, probs = dsa_definitions.leaves(numbers(N, D), probs)
        out, out_probs, rows, _ = reference.moe_permute(tokens, experts, probs, E, M)
        d_out, d_probs = numbers(*out.shape), numbers(*out_probs.shape)
        loss = (out * d_out).sum() + (out_probs * d_probs).sum()
        expected = torch.autograd.grad(loss, (tokens, probs))
        d_probs = d_probs.to(probs_dtype or dtype)
        actual = operators.moe_permute_backward(d_out.to(dtype), d_probs, rows)
        yield from zip(("d_tokens", "d_probs"), actual, expected, strict=True)

    return check


def _moe_unpermute(
    N: int,
    D: int,
    k: int,
    M: int,
    weighted: bool,
    probs_dtype: torch.dtype | None,
    backward: bool,
) -> Callable[[Any, torch.dtype], Iterator[Comparison]]:
    def check(operators: Any, dtype: torch.dtype) -> Iterator[Comparison]:
        numbers = _Numbers(N + D + M)
        # Every row at most once, as `moe_permute` gives them; some slots have none.
        rows = torch.full((N * k,), -1, dtype=torch.int32)
        some = torch.randperm(N * k, generator=numbers.generator)[: min(M, N * k - 2)]
        order = torch.randperm(M, generator=numbers.generator)[: len(some)]
        rows[some] = order.int()
        rows = rows.view(N, k)
        rows[rows == -1] = torch.tensor([-1, M]).repeat(N * k)[: int((rows == -1).sum())].int()
        x, probs = numbers(M, D), numbers(N, k) if weighted else None
        given = _as(probs, probs_dtype or dtype)
        if not backward:
            y = operators.moe_unpermute(x.to(dtype), rows, given)
            yield "y", y, reference.moe_unpermute(x, rows, probs)
            if N * k <= 64:
                yield "y", y, base_definitions.moe_unpermute(x, rows, probs)
            return
        leaves = dsa_definitions.leaves(x, *([] if probs is None else [probs]))
        y = reference.moe_unpermute(leaves[0], rows, leaves[1] if weighted else None)
        upstream = numbers(*y.shape)
        expected = _gradients(y, upstream, tuple(leaves))
        actual = operators.moe_unpermute_backward(
            upstream.to(dtype), x.to(dtype) if weighted else None, rows, given, M
        )
        yield from zip(("dx", "d_probs"), actual, expected, strict=False)

    return check


def _hadamard(N: int, D: int) -> Callable[[Any, torch.dtype], Iterator[Comparison]]:
    def check(operators: Any, dtype: torch.dtype) -> Iterator[Comparison]:
        x = _Numbers(D)(N, D)
        yield "y", operators.hadamard(x.to(dtype), D**-0.5), reference.hadamard(x, D**-0.5)

    return check


def _base_cases() -> Iterator[Case]:
    for operator, check in (("rms_norm", _rms_norm), ("rms_norm_backward", _rms_norm_backward)):
        yield Case(operator, "5 x 7, weight", check(5, 7, True, base_definitions))
        for N, D in ((7, 7168), (17, 1536), (33, 512)):
            yield Case(operator, f"{N} x {D}, weight", check(N, D, True, reference))
        yield Case(operator, "9 x 512", check(9, 512, False, reference))
    for backward in (False, True):
        operator = "rotary_mul_backward" if backward else "rotary_mul"
        for shape, interleaved in (
            ((2, 5, 3, 6), True),
            ((1, 3, 128, 64), True),
            ((2, 3, 64, 64), False),
            ((1, 9, 1, 64), False),
            ((2, 70, 1, 64), True),
        ):
            kind = "interleaved" if interleaved else "halves"
            name = f"{' x '.join(map(str, shape))}, {kind}"
            yield Case(operator, name, _rotary(shape, interleaved, backward))
    for N, D, k, E, M, probs_dtype in (
        (7, 5, 2, 4, 11, None),
        (40, 7168, 8, 256, 320, None),
        (33, 7168, 8, 64, 150, torch.float32),
        (200, 48, 8, 64, 1200, torch.float32),  # slots of many blocks
        (9, 48, 1, 4, 12, None),  # rows without a slot
    ):
        name = f"{N} x {D}, {k} of {E} experts, {M} rows, dropped slots"
        name += ", fp32 probs" * (probs_dtype is not None)
        yield Case("moe_permute", name, _moe_permute(N, D, k, E, M, probs_dtype))
        check = _moe_permute_backward(N, D, k, E, M, probs_dtype)
        yield Case("moe_permute_backward", name, check)
    for backward in (False, True):
        operator = "moe_unpermute_backward" if backward else "moe_unpermute"
        for N, D, k, M, weighted, probs_dtype in (
            (7, 5, 2, 9, True, None),
            (40, 7168, 8, 300, True, None),
            (40, 7168, 8, 330, False, None),
            (200, 48, 8, 1700, True, torch.float32),  # rows without a slot
        ):
            name = f"{N} x {D}, {k} slots, {M} rows, slots without one" + ", probs" * weighted
            name += " in fp32" * (probs_dtype is not None)
            check = _moe_unpermute(N, D, k, M, weighted, probs_dtype, backward)
            yield Case(operator, name, check)
    yield Case("hadamard", "9 x 128", _hadamard(9, 128))


CASES = (*_attention_cases(), *_indexer_cases(), *_base_cases())

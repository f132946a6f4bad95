"""The operators as definitions: fp64, one query and one key at a time, sharing no code with them.

Also the inputs they are tried on. Gradients of the definitions come from autograd over scalars'
worth of plain arithmetic, so they are independent of the operators' own backwards.
"""

import itertools
import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
EVERY = tuple(itertools.product(("reference", "torch"), TOLERANCE))
"""(backend, dtype): each random case runs on all of them against one run of the definition."""


# --- definitions ---------------------------------------------------------------------------------


def visible_keys(bounds: Tensor | None, b: int, t: int, T: int) -> range:
    lo, hi = (0, t + 1) if bounds is None else bounds[b, t].tolist()
    return range(max(lo, 0), min(hi, T))


def index_score(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """q [H, D], k [D], w [H] -> the score of one query and one key."""
    return sum(w[h] * torch.clamp((q[h] * k).sum(), min=0.0) for h in range(q.shape[0]))


def lightning_indexer(q, k, w, topk, bounds=None):
    q, k, w = q.double(), k.double(), w.double()
    (B, S), T = q.shape[:2], k.shape[1]
    indices = torch.full((B, S, topk), -1, dtype=torch.int32)
    scores = torch.full((B, S, topk), -math.inf, dtype=torch.float64)
    for b in range(B):
        for t in range(S):
            found = [
                (-index_score(q[b, t], k[b, s], w[b, t]).item(), s)
                for s in visible_keys(bounds, b, t, T)
            ]
            for j, (negative, s) in enumerate(sorted(found)[:topk]):
                indices[b, t, j], scores[b, t, j] = s, -negative
    return indices, scores


def slots(indices: Tensor, b: int, t: int, T: int) -> list[tuple[int, int]]:
    """(slot, key) of the slots of a row that hold a key."""
    return [(j, s) for j, s in enumerate(indices[b, t].tolist()) if 0 <= s < T]


def sparse_attention(q, kv, indices, scale, v_dim):
    B, S, H, _ = q.shape
    outs, lses = [], []
    for b in range(B):
        for t in range(S):
            keys = [s for _, s in slots(indices, b, t, kv.shape[1])]
            for h in range(H):
                if not keys:
                    outs.append(torch.zeros(v_dim, dtype=q.dtype))
                    lses.append(torch.tensor(-math.inf, dtype=q.dtype))
                    continue
                logits = torch.stack([scale * (q[b, t, h] * kv[b, s]).sum() for s in keys])
                peak = logits.max().detach()
                e = (logits - peak).exp()
                values = torch.stack([kv[b, s, :v_dim] for s in keys])
                outs.append((e[:, None] * values).sum(0) / e.sum())
                lses.append(peak + e.sum().log())
    return torch.stack(outs).view(B, S, H, v_dim), torch.stack(lses).view(B, S, H)


def dense_attention(q, k, v, scale, bounds=None):
    B, S, H, _ = q.shape
    outs, lses = [], []
    for b in range(B):
        for t in range(S):
            keys = visible_keys(bounds, b, t, k.shape[1])
            for h in range(H):
                if not keys:
                    outs.append(torch.zeros(v.shape[3], dtype=q.dtype))
                    lses.append(torch.tensor(-math.inf, dtype=q.dtype))
                    continue
                logits = scale * (k[b, keys.start : keys.stop, h] @ q[b, t, h])
                peak = logits.max().detach()
                e = (logits - peak).exp()
                outs.append(e @ v[b, keys.start : keys.stop, h] / e.sum())
                lses.append(peak + e.sum().log())
    return torch.stack(outs).view(B, S, H, -1), torch.stack(lses).view(B, S, H)


def attention_target(q, kv, indices, scale):
    B, S, H, _ = q.shape
    target = torch.zeros(indices.shape, dtype=torch.float64)
    for b in range(B):
        for t in range(S):
            for h in range(H):
                filled = slots(indices, b, t, kv.shape[1])
                weight = {j: scale * float(q[b, t, h].dot(kv[b, s])) for j, s in filled}
                peak = max(weight.values(), default=0.0)
                e = {j: math.exp(x - peak) for j, x in weight.items()}
                for j in e:
                    target[b, t, j] += e[j] / sum(e.values())
    return target


def indexer_kl_loss(q, k, w, indices, target):
    B, S = q.shape[:2]
    losses = []
    for b in range(B):
        for t in range(S):
            filled = slots(indices, b, t, k.shape[1])
            mass = sum(float(target[b, t, j]) for j, _ in filled)
            if mass == 0:
                losses.append(torch.zeros((), dtype=q.dtype))
                continue
            scores = torch.stack([index_score(q[b, t], k[b, s], w[b, t]) for _, s in filled])
            peak = scores.max().detach()
            log_y = scores - peak - (scores - peak).exp().sum().log()
            loss = torch.zeros((), dtype=q.dtype)
            for (j, _), log_y_j in zip(filled, log_y, strict=True):
                p = float(target[b, t, j]) / mass
                if p > 0:
                    loss = loss + p * (math.log(p) - log_y_j)
            losses.append(loss)
    return torch.stack(losses).view(B, S)


def dense_indexer_kl_loss(q_index, k_index, w, q, kv, scale, bounds=None):
    B, S = q_index.shape[:2]
    losses = []
    for b in range(B):
        for t in range(S):
            keys = visible_keys(bounds, b, t, kv.shape[1])
            loss = torch.zeros((), dtype=q_index.dtype)
            p = dict.fromkeys(keys, 0.0)
            for h in range(q.shape[2]):
                logits = {s: scale * float(q[b, t, h].detach().dot(kv[b, s])) for s in keys}
                peak = max(logits.values(), default=0.0)
                total = sum(math.exp(x - peak) for x in logits.values())
                for s in keys:
                    p[s] += math.exp(logits[s] - peak) / total / q.shape[2]
            if keys:
                scores = torch.stack(
                    [index_score(q_index[b, t], k_index[b, s], w[b, t]) for s in keys]
                )
                peak = scores.max().detach()
                log_y = scores - peak - (scores - peak).exp().sum().log()
                for s, log_y_s in zip(keys, log_y, strict=True):
                    if p[s] > 0:
                        loss = loss + p[s] * (math.log(p[s]) - log_y_s)
            losses.append(loss)
    return torch.stack(losses).view(B, S)


# --- comparisons ---------------------------------------------------------------------------------


def assert_close(
    actual: Tensor, expected: Tensor, tolerance: float, what: str = "", floor: float = 1e-3
) -> None:
    """Largest difference relative to the largest value; infinities must match exactly.

    Below `floor` of magnitude the error is absolute: a loss of 0 has no relative error.
    """
    assert actual.shape == expected.shape, what
    actual, expected = actual.detach().double(), expected.detach().double()
    infinite = expected.isinf()
    assert torch.equal(actual[infinite], expected[infinite]), what
    actual, expected = actual[~infinite], expected[~infinite]
    if actual.numel() == 0:
        return
    assert actual.isfinite().all(), f"{what} is not finite"
    error = (actual - expected).abs().max().item()
    bound = tolerance * max(expected.abs().max().item(), floor)
    assert error <= bound, f"{what}: off by {error:.3e}, allowed {bound:.3e}"


def leaves(*tensors: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Fresh copies that collect gradients."""
    return [x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for x in tensors]


# --- inputs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Sizes, a mask, and a seed."""

    B: int
    S: int
    T: int
    H: int
    D: int
    topk: int
    bounds: Tensor | None
    seed: int

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        g = torch.Generator().manual_seed(self.seed + 7919 * len(shape) + sum(shape))
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    def integers(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Small integers: sums are exact in every dtype, and ties abound."""
        g = torch.Generator().manual_seed(self.seed + 104729 * len(shape) + sum(shape))
        return torch.randint(-2, 3, shape, generator=g).to(dtype)

    def indexer(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
        B, S, T, H, D = self.B, self.S, self.T, self.H, self.D
        return (
            self.normal(B, S, H, D, dtype=dtype),
            self.normal(B, T, D, dtype=dtype),
            self.normal(B, S, H, dtype=dtype),
        )

    def attention(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        B, S, T, H, D = self.B, self.S, self.T, self.H, self.D
        return self.normal(B, S, H, D, dtype=dtype), self.normal(B, T, D, dtype=dtype)

    def indices(self) -> Tensor:
        """Random distinct visible keys in random order, empty slots anywhere among them."""
        g = torch.Generator().manual_seed(self.seed)
        out = torch.full((self.B, self.S, self.topk), -1, dtype=torch.int32)
        for b in range(self.B):
            for t in range(self.S):
                keys = torch.tensor(visible_keys(self.bounds, b, t, self.T), dtype=torch.int32)
                keys = keys[torch.randperm(len(keys), generator=g)][: self.topk]
                out[b, t, torch.randperm(self.topk, generator=g)[: len(keys)]] = keys
        return out


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Causal, packed, hidden rows, T != S; K from 1 to beyond T, most often at most S / 4."""
    B = draw(st.integers(1, 2))
    S = draw(st.integers(1, 13))
    H, D = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    topk = draw(st.one_of(st.integers(1, max(1, S // 4)), st.sampled_from([S, S + 3])))
    seed = draw(st.integers(0, 2**20))
    mask = draw(st.sampled_from(["causal", "packed", "ranges"]))
    if mask == "causal":
        return Case(B, S, S, H, D, topk, None, seed)
    if mask == "packed":
        length = draw(st.integers(1, S))
        lo = torch.arange(S) // length * length
        hidden = torch.tensor(draw(st.lists(st.booleans(), min_size=S, max_size=S)))
        hi = torch.where(hidden, lo, torch.arange(S) + 1)
        bounds = torch.stack([lo, hi], -1).int().expand(B, S, 2).contiguous()
        return Case(B, S, S, H, D, topk, bounds, seed)
    T = draw(st.integers(1, 17))
    g = torch.Generator().manual_seed(seed)
    bounds = torch.randint(0, T + 1, (B, S, 2), generator=g).sort(-1).values.int()
    return Case(B, S, T, H, D, topk, bounds, seed)


PACKED = Case(
    B=2,
    S=16,
    T=16,
    H=3,
    D=5,
    topk=4,
    bounds=torch.tensor(
        [
            [[0 if t < 7 else 7, t + 1] for t in range(16)],
            # the second row of the batch has hidden queries in front and inside
            [[0, 0] if t in (0, 1, 9) else [0 if t < 12 else 12, t + 1] for t in range(16)],
        ],
        dtype=torch.int32,
    ),
    seed=3,
)
"""Two packed documents, rows without keys, K = S / 4."""

"""Which keys attention looks at, which an indexer would choose, and how many of them agree.

The truth of a query t is what its heads look at together, over every visible key: p[t, :], the mean
over heads of softmax_{s visible}(scale * q[t, h] . k[s]). Recall is the share of the k keys with
the largest p that are among the k with the largest index score, over queries that see more than k
keys.

Shape letters: B batch, S sequence, Q some of its queries, N queries of a block, T keys, H heads,
A head dim, I index heads, C index head dim.
"""

from collections.abc import Iterator

import torch

__all__ = [
    "SAMPLED_QUERIES",
    "attention_logits",
    "found_keys",
    "index_scores",
    "mean_distribution",
    "query_blocks",
    "sampled_queries",
    "top_keys",
    "visible_keys",
]

SAMPLED_QUERIES = 32
"""Queries of a row on which training measures recall."""

_BLOCK_SCORES = 1 << 25  # fp32 attention scores at a time: 128 MiB


def attention_logits(q_BQHA: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """scale * q[t, h] . k[s], fp32 [B, Q, H, T]; keys [B, T, A] of all heads, or [B, T, H, A]."""
    product = "bqha,bta->bqht" if keys.dim() == 3 else "bqha,btha->bqht"
    return torch.einsum(product, q_BQHA.float(), keys.float()) * scale


def mean_distribution(logits_BQHT: torch.Tensor, seen_BQT: torch.Tensor) -> torch.Tensor:
    """What the heads together look at among the keys seen: the mean of their softmaxes, [B, Q, T].

    Rows that see no key are zero.
    """
    p_BQHT = logits_BQHT.masked_fill(~seen_BQT.unsqueeze(2), float("-inf")).softmax(-1)
    return p_BQHT.mean(2).masked_fill(~seen_BQT, 0.0)


def index_scores(
    q_index_BQIC: torch.Tensor, k_index_BTC: torch.Tensor, weights_BQI: torch.Tensor
) -> torch.Tensor:
    """I[t, s] = sum over index heads of w[t, h] * relu(q[t, h] . k[s]); fp32 [B, Q, T]."""
    products = torch.einsum("bqic,btc->bqit", q_index_BQIC.float(), k_index_BTC.float())
    return torch.einsum("bqit,bqi->bqt", products.relu(), weights_BQI.float())


def top_keys(score_BQT: torch.Tensor, seen_BQT: torch.Tensor, topk: int) -> torch.Tensor:
    """True at the ``topk`` best of the keys seen, ties to the lower key as in the model."""
    ranked_BQT = (
        score_BQT.masked_fill(~seen_BQT, float("-inf")).sort(stable=True, descending=True).indices
    )
    top_BQT = torch.zeros_like(seen_BQT).scatter_(-1, ranked_BQT[..., :topk], True)
    return top_BQT & seen_BQT


def visible_keys(bounds_BQ2: torch.Tensor, keys: int) -> torch.Tensor:
    """Which of so many keys each query may see, bool [B, Q, T]."""
    key_T = torch.arange(keys, device=bounds_BQ2.device)
    return (key_T >= bounds_BQ2[..., :1]) & (key_T < bounds_BQ2[..., 1:])


def query_blocks(q_BQHA: torch.Tensor, keys: int) -> Iterator[slice]:
    """Ranges of queries whose scores fit the memory set aside for them."""
    B, Q, H, _ = q_BQHA.shape
    size = max(1, _BLOCK_SCORES // (B * H * keys))
    for start in range(0, Q, size):
        yield slice(start, min(Q, start + size))


def sampled_queries(bounds_BQ2: torch.Tensor, keys: int) -> torch.Tensor:
    """Which of the queries at hand belong to the sample: int64, indices into Q.

    Evenly spread over the row of ``keys`` tokens, by a query's place in the row (its ``hi``), so
    that it does not matter which ranks have which queries. Waits for the device.
    """
    stride = max(1, keys // SAMPLED_QUERIES)
    return (bounds_BQ2[0, :, 1] % stride == 0).nonzero().flatten()


@torch.no_grad()
def found_keys(
    q_BQHA: torch.Tensor,
    keys: torch.Tensor,
    q_index_BQIC: torch.Tensor,
    k_index_BTC: torch.Tensor,
    weights_BQI: torch.Tensor,
    *,
    bounds_BQ2: torch.Tensor,
    counts_BQ: torch.Tensor,
    topk: int,
    scale: float,
) -> torch.Tensor:
    """How many of the true top-k keys the indexer finds, and how many there are: fp32 [2].

    Args:
        q_BQHA, keys: of all heads; see :func:`attention_logits`.
        q_index_BQIC, k_index_BTC, weights_BQI: see :func:`index_scores`.
        bounds_BQ2: int32, the keys ``[lo, hi)`` each query sees.
        counts_BQ: bool, the queries to measure; those that see ``topk`` keys or fewer are not.
        topk: keys the indexer selects.
        scale: of the attention's logits.
    """
    T = keys.size(1)
    long_BQ = counts_BQ & (bounds_BQ2[..., 1] - bounds_BQ2[..., 0] > topk)
    found = q_BQHA.new_zeros((), dtype=torch.float32)
    for block in query_blocks(q_BQHA, T):
        seen_BNT = visible_keys(bounds_BQ2[:, block], T)
        p_BNT = mean_distribution(attention_logits(q_BQHA[:, block], keys, scale), seen_BNT)
        scores_BNT = index_scores(q_index_BQIC[:, block], k_index_BTC, weights_BQI[:, block])
        both_BNT = top_keys(p_BNT, seen_BNT, topk) & top_keys(scores_BNT, seen_BNT, topk)
        found += (both_BNT.sum(-1) * long_BQ[:, block]).sum()
    return torch.stack([found, (long_BQ.sum() * topk).to(found.dtype)])

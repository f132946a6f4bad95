"""DeepSeek Sparse Attention of one layer: indexer, top-k, attention, indexer loss."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from npu_dsa_kernels import checks
from npu_dsa_kernels.backends import resolve
from npu_dsa_kernels.ops._fused_kl import fused_kl_loss
from npu_dsa_kernels.ops.attention_target import attention_target
from npu_dsa_kernels.ops.indexer_kl_loss import indexer_kl_loss
from npu_dsa_kernels.ops.lightning_indexer import lightning_indexer
from npu_dsa_kernels.ops.sparse_attention import attention_and_target, sparse_attention
from npu_dsa_kernels.query_split import QuerySplit

# B batch, S queries, L queries of this rank (all S without `query_split`), T keys, K selected keys,
# H heads, D head dim


class DSAOutput(NamedTuple):
    """What `dsa_attention` returns."""

    out: Tensor
    """[B, S, H, v_dim] attention output."""
    lse: Tensor
    """[B, S, H] log-sum-exp of the attention's logits."""
    indices: Tensor
    """int32 [B, S, K] selected keys, -1 in empty slots."""
    kl: Tensor | None
    """[B, L] indexer loss per token (or their sum), or None if it was switched off."""


def dsa_attention(
    q: Tensor,
    kv: Tensor,
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    *,
    topk: int,
    scale: float,
    v_dim: int,
    bounds: Tensor | None = None,
    reduce_target: Callable[[Tensor], Tensor] | None = None,
    query_split: QuerySplit | None = None,
    compute_kl: bool = True,
    kl_mask: Tensor | None = None,
    kl_backend: str | None = None,
    kl_reduction: str = "none",
    backend: str | None = None,
    validate: bool = False,
) -> DSAOutput:
    """Select keys, attend to them, and compare the indexer with what the attention did.

    `out` and `lse` train only `q` and `kv`; `kl` trains only `q_index`, `k_index` and `weights`.

    Args:
        q: [B, S, H, D]; kv: [B, T, D]: see `sparse_attention`.
        q_index: [B, L, Hi, Di]; k_index: [B, T, Di]; weights: [B, L, Hi]: see `lightning_indexer`.
        topk, bounds: see `lightning_indexer`; `bounds` of all S queries.
        scale, v_dim: see `sparse_attention`.
        reduce_target: called on the head-summed target [B, S, K] between attention and loss, and
            returns the one to use. Tensor parallel ranks, with some of the heads each, all-reduce
            here; every rank then has the loss over all heads.
        query_split: tensor parallel ranks, with some of the heads each, share out the indexer's
            queries: `q_index` and `weights` have this rank's rows (`QuerySplit.take`), and `kl` is
            theirs. None: every rank has all of them.
        compute_kl: False skips target and loss; no indexer tensor is then kept for the backward.
        kl_mask: bool [B, S], the queries whose loss counts; others, e.g. padding, have 0.
        kl_backend: the backend of target and loss; `backend` if None. "npu" computes both in one
            operator, over all heads and only as a sum; "torch" runs on the same device without
            these conditions.
        kl_reduction: "none" for the loss per token, "sum" for its sum over B and S, a scalar.
        backend: see `backends`.
        validate: check values too (synchronises with the device).

    Raises:
        ValueError: as the single operators; `q` and `q_index` of different B or S, unknown
            `kl_reduction`, or one that `kl_backend` does not have, `reduce_target` on "npu" or with
            `query_split`, S that `query_split` does not share out.
    """
    checks.tensor("q", q, "B S H D")
    checks.tensor("kv", kv, "B T D")
    checks.tensor("q_index", q_index, "B S H D")
    checks.tensor("k_index", k_index, "B T D")
    B, S = q.shape[:2]
    if query_split is None:
        L, what = S, f"[B, S] = {(B, S)}, as q has"
    else:
        L = query_split.share(S)
        what = f"[B, L] = {(B, L)}, this rank's share of the S={S} queries"
    if q_index.shape[:2] != (B, L):
        raise checks.bad("q_index", f"shape {tuple(q_index.shape)}", f"expected {what}")
    if k_index.shape[:2] != kv.shape[:2]:
        want = f"expected [B, T] = {tuple(kv.shape[:2])}, as kv has"
        raise checks.bad("k_index", f"shape {tuple(k_index.shape)}", want)

    checks.bounds(bounds, B, S, kv.shape[1], validate=validate)
    if kl_mask is not None:
        checks.tensor("kl_mask", kl_mask, "B S")
        checks.dtype("kl_mask", kl_mask, (torch.bool,))
        checks.shape("kl_mask", kl_mask, B=B, S=S)
        checks.same_device("q", q, kl_mask=kl_mask)
    if query_split is not None and reduce_target is not None:
        want = "expected None with query_split, which adds up the target itself"
        raise checks.bad("reduce_target", "a function", want)
    checks.choice("kl_reduction", kl_reduction, ("none", "sum"))
    name = resolve(backend, q.device)
    kl_name = name if kl_backend is None else resolve(kl_backend, q.device)
    fused_kl = compute_kl and kl_name == "npu"
    if fused_kl and kl_reduction != "sum":
        want = (
            "expected 'sum' on backend 'npu', whose operator sums over the tokens; "
            "kl_backend='torch' computes the loss per token on the same device"
        )
        raise checks.bad("kl_reduction", repr(kl_reduction), want)
    if fused_kl and reduce_target is not None:
        want = (
            "expected None on backend 'npu', whose operator keeps the target to itself: pass "
            "query_split, which gives each rank all heads of its share of the tokens, or "
            "kl_backend='torch'"
        )
        raise checks.bad("reduce_target", "a function", want)

    rows = _Rows(query_split, B, S)
    row_bounds = rows.bounds(bounds, q.device)
    row_indices, scores = lightning_indexer(
        q_index, k_index, weights, topk=topk, bounds=row_bounds, backend=name, validate=validate
    )
    indices = rows.gather(row_indices)
    kl = None
    if compute_kl and not fused_kl and name == kl_name:
        # One backend does it all: the attention leaves the target, the indexer its scores.
        out, lse, target = attention_and_target(
            q, kv, indices, scale=scale, v_dim=v_dim, backend=name
        )
    else:
        out, lse = sparse_attention(q, kv, indices, scale=scale, v_dim=v_dim, backend=name)
        target, scores = None, None
    if not compute_kl:
        return DSAOutput(out, lse, indices, None)

    hidden = None if kl_mask is None else ~rows.take(kl_mask)
    if fused_kl:
        if hidden is not None:
            row_bounds = rows.hide(row_bounds, hidden)
            row_indices = row_indices.masked_fill(hidden.unsqueeze(-1), -1)
        row_q, row_lse = rows.of_all_heads(q), rows.of_all_heads(lse)
        kl = fused_kl_loss(
            *(row_q, kv, q_index, k_index, weights, row_indices, row_lse, row_bounds, scale, "npu")
        )
        return DSAOutput(out, lse, indices, kl)
    if target is None:
        target = attention_target(q, kv, indices, lse, scale=scale, backend=kl_name)
    target = rows.sum(target)
    if reduce_target is not None:
        target = reduce_target(target)
        if not isinstance(target, Tensor):
            got = f"a function that returned {type(target).__name__}"
            raise checks.bad("reduce_target", got, "expected it to return the reduced target")
    if hidden is not None:
        row_indices = row_indices.masked_fill(hidden.unsqueeze(-1), -1)
    kl = indexer_kl_loss(
        q_index, k_index, weights, row_indices, target, scores=scores, backend=kl_name
    )
    return DSAOutput(out, lse, indices, kl.sum() if kl_reduction == "sum" else kl)


class _Rows:
    """The queries whose index is this rank's work: all, or those of a `QuerySplit`."""

    def __init__(self, split: QuerySplit | None, B: int, S: int) -> None:
        self.split, self.B, self.S = split, B, S

    def take(self, x_BS: Tensor) -> Tensor:
        return x_BS if self.split is None else self.split.take(x_BS)

    def gather(self, x_BL: Tensor) -> Tensor:
        return x_BL if self.split is None else self.split.gather(x_BL)

    def sum(self, x_BS: Tensor) -> Tensor:
        return x_BS if self.split is None else self.split.sum_rows(x_BS)

    def of_all_heads(self, x_BSh: Tensor) -> Tensor:
        return x_BSh if self.split is None else self.split.rows_of_all_heads(x_BSh)

    def bounds(self, bounds_BS2: Tensor | None, device: torch.device) -> Tensor | None:
        if self.split is None or bounds_BS2 is not None:
            return None if bounds_BS2 is None else self.take(bounds_BS2)
        rows_L = self.split.rows(self.S, device=device).to(torch.int32)
        return torch.stack([torch.zeros_like(rows_L), rows_L + 1], -1).expand(self.B, -1, -1)

    def hide(self, bounds_BL2: Tensor | None, hidden_BL: Tensor) -> Tensor:
        if bounds_BL2 is None:
            hi_L = torch.arange(1, self.S + 1, dtype=torch.int32, device=hidden_BL.device)
            bounds_BL2 = torch.stack([torch.zeros_like(hi_L), hi_L], -1).expand(self.B, -1, -1)
        return bounds_BL2.masked_fill(hidden_BL.unsqueeze(-1), 0)

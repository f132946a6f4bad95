"""DeepSeek Sparse Attention of one layer: indexer, top-k, attention, indexer loss."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from npu_dsa_kernels import checks
from npu_dsa_kernels.backends import resolve
from npu_dsa_kernels.ops._fused_kl import fused_kl_loss
from npu_dsa_kernels.ops.attention_target import attention_target
from npu_dsa_kernels.ops.indexer_kl_loss import indexer_kl_loss
from npu_dsa_kernels.ops.lightning_indexer import lightning_indexer
from npu_dsa_kernels.ops.sparse_attention import attention_and_target, sparse_attention


class DSAOutput(NamedTuple):
    """What `dsa_attention` returns."""

    out: Tensor
    """[B, S, H, v_dim] attention output."""
    lse: Tensor
    """[B, S, H] log-sum-exp of the attention's logits."""
    indices: Tensor
    """int32 [B, S, K] selected keys, -1 in empty slots."""
    kl: Tensor | None
    """[B, S] indexer loss per token (or their sum), or None if it was switched off."""


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
    compute_kl: bool = True,
    kl_backend: str | None = None,
    kl_reduction: str = "none",
    backend: str | None = None,
    validate: bool = False,
) -> DSAOutput:
    """Select keys, attend to them, and compare the indexer with what the attention did.

    `out` and `lse` train only `q` and `kv`; `kl` trains only `q_index`, `k_index` and `weights`.

    Args:
        q: [B, S, H, D]; kv: [B, T, D]: see `sparse_attention`.
        q_index: [B, S, Hi, Di]; k_index: [B, T, Di]; weights: [B, S, Hi]: see `lightning_indexer`.
        topk, bounds: see `lightning_indexer`.
        scale, v_dim: see `sparse_attention`.
        reduce_target: called on the head-summed target [B, S, K] between attention and loss, and
            returns the one to use. Tensor parallel ranks, with some of the heads each, all-reduce
            here; every rank then has the loss over all heads.
        compute_kl: False skips target and loss; no indexer tensor is then kept for the backward.
        kl_backend: the backend of target and loss; `backend` if None. "npu" computes both in one
            operator, over all heads and only as a sum; "torch" runs on the same device without
            these conditions.
        kl_reduction: "none" for the loss per token, "sum" for its sum over B and S, a scalar.
        backend: see `backends`.
        validate: check values too (synchronises with the device).

    Raises:
        ValueError: as the single operators; `q` and `q_index` of different B or S, unknown
            `kl_reduction`, or one that `kl_backend` does not have, `reduce_target` on "npu".
    """
    checks.tensor("q", q, "B S H D")
    checks.tensor("kv", kv, "B T D")
    checks.tensor("q_index", q_index, "B S H D")
    checks.tensor("k_index", k_index, "B T D")
    if q_index.shape[:2] != q.shape[:2]:
        want = f"expected [B, S] = {tuple(q.shape[:2])}, as q has"
        raise checks.bad("q_index", f"shape {tuple(q_index.shape)}", want)
    if k_index.shape[:2] != kv.shape[:2]:
        want = f"expected [B, T] = {tuple(kv.shape[:2])}, as kv has"
        raise checks.bad("k_index", f"shape {tuple(k_index.shape)}", want)

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
            "expected None on backend 'npu', whose operator keeps the target to itself: give each "
            "rank all heads of its share of the tokens (an all-to-all of q before this call and of "
            "out after it), or pass kl_backend='torch'"
        )
        raise checks.bad("reduce_target", "a function", want)

    indices, scores = lightning_indexer(
        q_index, k_index, weights, topk=topk, bounds=bounds, backend=name, validate=validate
    )
    kl = None
    if compute_kl and not fused_kl and name == kl_name:
        # One backend does it all: the attention leaves the target, the indexer its scores.
        out, lse, target = attention_and_target(
            q, kv, indices, scale=scale, v_dim=v_dim, backend=name
        )
    else:
        out, lse = sparse_attention(q, kv, indices, scale=scale, v_dim=v_dim, backend=name)
        target, scores = None, None
    if fused_kl:
        kl = fused_kl_loss(q, kv, q_index, k_index, weights, indices, lse, bounds, scale, "npu")
    elif compute_kl:
        if target is None:
            target = attention_target(q, kv, indices, lse, scale=scale, backend=kl_name)
        if reduce_target is not None:
            target = reduce_target(target)
            if not isinstance(target, Tensor):
                got = f"a function that returned {type(target).__name__}"
                raise checks.bad("reduce_target", got, "expected it to return the reduced target")
        kl = indexer_kl_loss(
            q_index, k_index, weights, indices, target, scores=scores, backend=kl_name
        )
        if kl_reduction == "sum":
            kl = kl.sum()
    return DSAOutput(out, lse, indices, kl)

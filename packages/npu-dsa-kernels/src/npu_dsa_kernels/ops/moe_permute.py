"""Tokens sorted by expert."""

from typing import NamedTuple

import torch
from torch import Tensor

from npu_dsa_kernels import checks
from npu_dsa_kernels.backends import kernels, reference, resolve
from npu_dsa_kernels.backends.precision import no_autocast
from npu_dsa_kernels.ops._autograd import no_forward_mode, once_differentiable

# N tokens, D features, k experts of a token, M rows of the permuted tokens, E experts


class MoEPermutation(NamedTuple):
    """What `moe_permute` returns."""

    tokens: Tensor
    """[M, D] a copy of its token for every slot, sorted by expert; zero beyond the last one."""
    probs: Tensor | None
    """[M] the probability of each row, or None if none were given."""
    rows: Tensor
    """int32 [N, k] the row of each slot, -1 where it has none: what `moe_unpermute` takes."""
    counts: Tensor
    """int64 [E] rows of each expert: what `grouped_matmul` takes."""


def moe_permute(
    tokens: Tensor,
    experts: Tensor,
    *,
    num_experts: int,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    backend: str | None = None,
    validate: bool = False,
) -> MoEPermutation:
    """Copy each token to the rows of its experts, experts in order; differentiable.

    The order is that of a stable sort of the slots ``n * k + j`` by expert. A slot of expert -1
    (or any other number outside of [0, E)) is dropped: experts of another rank. The backward
    gathers and sums; it never scatters, so the same inputs give the same bits on every device.

    Args:
        tokens: [N, D], float64, float32, bfloat16 or float16. Differentiable.
        experts: int32 or int64 [N, k], the experts of each token.
        num_experts: E, experts on this rank.
        probs: floating [N, k], permuted along. Differentiable.
        num_out_tokens: M; ``N * k`` if None. Slots that sort beyond row M are dropped.
        backend: see `backends`.
        validate: check the values of `experts` too (synchronises with the device).

    Returns:
        A `MoEPermutation`. The shapes do not depend on the values of `experts`.

    Raises:
        ValueError: wrong shape, dtype or device, E or M out of range, more than 2^31 - 1 slots,
            experts outside of [-1, E) (with `validate`), unknown backend.
        RuntimeError: at a double backward through any backend but "reference".
    """
    checks.tensor("tokens", tokens, "N D")
    checks.floating("tokens", tokens)
    checks.whole_number("num_experts", num_experts, 1, checks.INT32_MAX)
    checks.slots("experts", experts, num_experts, distinct=False, validate=validate)
    N, k = tokens.shape[0], experts.shape[1]
    checks.shape("experts", experts, N=N, k=k)
    if probs is not None:
        checks.tensor("probs", probs, "N k")
        checks.floating("probs", probs)
        checks.shape("probs", probs, N=N, k=k)
    checks.same_device("tokens", tokens, experts=experts, probs=probs)
    M = N * k
    if num_out_tokens is not None:
        checks.whole_number("num_out_tokens", num_out_tokens, 0, checks.INT32_MAX)
        M = num_out_tokens
    name = resolve(backend, tokens.device)
    if name == "reference":
        with no_autocast(tokens):
            out = reference.moe_permute(tokens, experts, probs, num_experts, M)
    else:
        no_forward_mode("moe_permute", tokens, probs)
        out = _moe_permute(tokens, experts, probs, num_experts, M, name)
    permuted, permuted_probs, rows, counts = out
    return MoEPermutation(permuted, None if probs is None else permuted_probs, rows, counts)


@torch.library.custom_op("npu_dsa::moe_permute", mutates_args=())
def _moe_permute(
    tokens: Tensor,
    experts: Tensor,
    probs: Tensor | None,
    num_experts: int,
    num_out_tokens: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Permuted tokens, probabilities ([0] where there are none), rows and counts."""
    with no_autocast(tokens):
        return kernels(backend).moe_permute(tokens, experts, probs, num_experts, num_out_tokens)


@_moe_permute.register_fake
def _(
    tokens: Tensor,
    experts: Tensor,
    probs: Tensor | None,
    num_experts: int,
    num_out_tokens: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        tokens.new_empty(num_out_tokens, tokens.shape[1]),
        tokens.new_empty(0) if probs is None else probs.new_empty(num_out_tokens),
        experts.new_empty(experts.shape, dtype=torch.int32),
        experts.new_empty(num_experts, dtype=torch.int64),
    )


@torch.library.custom_op("npu_dsa::moe_permute_backward", mutates_args=())
def _moe_permute_backward(
    d_tokens: Tensor, d_probs: Tensor | None, rows: Tensor, backend: str
) -> tuple[Tensor, Tensor]:
    """Gradients of tokens [N, D] and probs [N, k] ([0] where there are none)."""
    with no_autocast(d_tokens):
        return kernels(backend).moe_permute_backward(d_tokens, d_probs, rows)


@_moe_permute_backward.register_fake
def _(
    d_tokens: Tensor, d_probs: Tensor | None, rows: Tensor, backend: str
) -> tuple[Tensor, Tensor]:
    d_in = d_tokens.new_empty(rows.shape[0], d_tokens.shape[1])
    return d_in, d_tokens.new_empty(0) if d_probs is None else d_probs.new_empty(rows.shape)


def _setup_context(ctx, inputs, output) -> None:
    _, _, probs, _, _, ctx.backend = inputs
    ctx.has_probs = probs is not None
    ctx.save_for_backward(output[2])


def _backward(ctx, d_tokens: Tensor, d_probs: Tensor, d_rows: None, d_counts: None):
    (rows,) = ctx.saved_tensors
    d_in, d_probs_in = _moe_permute_backward(
        d_tokens, d_probs if ctx.has_probs else None, rows, ctx.backend
    )
    return d_in, None, d_probs_in if ctx.has_probs else None, None, None, None


_moe_permute.register_autograd(_backward, setup_context=_setup_context)
once_differentiable(_moe_permute_backward, "moe_permute")

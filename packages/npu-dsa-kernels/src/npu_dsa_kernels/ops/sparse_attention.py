"""Attention of each query over its own set of keys, one key/value head for all query heads."""

import torch
from torch import Tensor

from npu_dsa_kernels import checks
from npu_dsa_kernels.backends import kernels, reference, resolve
from npu_dsa_kernels.backends.precision import compute_dtype, no_autocast
from npu_dsa_kernels.ops._autograd import no_forward_mode, once_differentiable

# B batch, S queries, T keys, H heads, D key dim, V value dim, K selected keys


def sparse_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    scale: float,
    v_dim: int,
    backend: str | None = None,
    validate: bool = False,
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the selected keys; differentiable in `q` and `kv`.

    With T the selected keys of query t: ``P[t, h, :] = softmax over s in T of (scale * q[t, h] .
    kv[s])`` and ``out[t, h] = P[t, h] @ kv[T, :v_dim]``. This is the matrix-absorbed form of
    multi-head latent attention (DeepSeek-V2, section 2.1; DeepSeek-V3.2, section 2.1): keys are
    ``[latent || rope]``, values their first `v_dim` columns.

    An index of -1 marks an empty slot, and so does any other index outside of [0, T): neither reads
    memory. A row of empty slots gives ``out = 0``, ``lse = -inf`` and zero gradients. A key twice
    in a row is undefined.

    Args:
        q: [B, S, H, D], float64, float32, bfloat16 or float16.
        kv: [B, T, D], of the same dtype.
        indices: int32 [B, S, K].
        scale: factor of the logits.
        v_dim: columns of `kv` that are the value, 1 <= v_dim <= D.
        backend: see `backends`.
        validate: check the values of `indices` too (synchronises with the device).

    Returns:
        out: [B, S, H, v_dim] in the dtype of `q`; sums are taken in float32 at least.
        lse: [B, S, H], log-sum-exp of the scaled logits, float32 (float64 for float64 inputs).
            Differentiable too, but not on backend "npu".

    Raises:
        ValueError: wrong rank, shape, dtype or device, scale not finite, v_dim outside of [1, D],
            indices outside of [-1, T) or repeated (with `validate`), unknown backend.
        RuntimeError: at a double backward through any backend but "reference", and where a gradient
            of `lse` arrives on backend "npu".
    """
    _check(q, kv, indices, scale, v_dim=v_dim, validate=validate)
    name = resolve(backend, q.device)
    if name == "reference":
        with no_autocast(q):
            return reference.sparse_attention(q, kv, indices, scale, v_dim)
    no_forward_mode("sparse_attention", q, kv)
    return _sparse_attention(q, kv, indices, float(scale), v_dim, name)


def attention_and_target(
    q: Tensor, kv: Tensor, indices: Tensor, *, scale: float, v_dim: int, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """`sparse_attention` and `attention_target` in one call: out, lse and target.

    The attention has the probabilities at hand whose sum over the heads is the target; by itself
    the target takes another product of queries and keys.
    """
    _check(q, kv, indices, scale, v_dim=v_dim, validate=False)
    if backend == "reference":
        with no_autocast(q):
            out, lse = reference.sparse_attention(q, kv, indices, scale, v_dim)
            return out, lse, reference.attention_target(q, kv, indices, lse, scale).detach()
    no_forward_mode("dsa_attention", q, kv)
    out, lse, target = _sparse_attention_with_target(q, kv, indices, float(scale), v_dim, backend)
    return out, lse, target.detach()


def _check(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, *, v_dim: int = 1, validate: bool
) -> None:
    """The checks shared with `attention_target`."""
    checks.tensor("q", q, "B S H D")
    checks.floating("q", q)
    checks.not_empty("q", q, H=2, D=3)
    B, S, _, D = q.shape
    checks.tensor("kv", kv, "B T D")
    checks.dtype("kv", kv, (q.dtype,), ", the dtype of q")
    checks.shape("kv", kv, B=B, T=kv.shape[1], D=D)
    checks.key_count("kv", kv.shape[1])
    checks.indices(indices, B, S, kv.shape[1], validate=validate)
    checks.same_device("q", q, kv=kv, indices=indices)
    checks.scale(scale)
    if isinstance(v_dim, bool) or not isinstance(v_dim, (int, torch.SymInt)) or v_dim < 1:
        raise checks.bad("v_dim", repr(v_dim), f"expected an int in [1, D={D}]")
    if v_dim > D:
        raise checks.bad("v_dim", v_dim, f"expected an int in [1, D={D}]")


@torch.library.custom_op("npu_dsa::sparse_attention", mutates_args=())
def _sparse_attention(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, v_dim: int, backend: str
) -> tuple[Tensor, Tensor]:
    with no_autocast(q):
        return kernels(backend).sparse_attention(q, kv, indices, scale, v_dim)


@_sparse_attention.register_fake
def _(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, v_dim: int, backend: str
) -> tuple[Tensor, Tensor]:
    B, S, H, _ = q.shape
    return q.new_empty(B, S, H, v_dim), q.new_empty(B, S, H, dtype=compute_dtype(q.dtype))


@torch.library.custom_op("npu_dsa::sparse_attention_with_target", mutates_args=())
def _sparse_attention_with_target(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, v_dim: int, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    with no_autocast(q):
        return kernels(backend).sparse_attention_with_target(q, kv, indices, scale, v_dim)


@_sparse_attention_with_target.register_fake
def _(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, v_dim: int, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    B, S, H, _ = q.shape
    wide = compute_dtype(q.dtype)
    return (
        q.new_empty(B, S, H, v_dim),
        q.new_empty(B, S, H, dtype=wide),
        q.new_empty(indices.shape, dtype=wide),
    )


@torch.library.custom_op("npu_dsa::sparse_attention_backward", mutates_args=())
def _sparse_attention_backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    with no_autocast(q):
        return kernels(backend).sparse_attention_backward(
            d_out, d_lse, q, kv, indices, out, lse, scale
        )


@_sparse_attention_backward.register_fake
def _(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), kv.new_empty(kv.shape)


def _setup_context(ctx, inputs, output) -> None:
    q, kv, indices, ctx.scale, _, ctx.backend = inputs
    ctx.save_for_backward(q, kv, indices, *output[:2])
    ctx.set_materialize_grads(False)


def _backward(ctx, d_out: Tensor | None, d_lse: Tensor | None, d_target: Tensor | None = None):
    # The target is detached before anyone sees it: d_target is None.
    q, kv, indices, out, lse = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(out)
    if d_lse is None and ctx.backend != "npu":  # whose kernel has no gradient of lse
        d_lse = torch.zeros_like(lse)
    dq, dkv = _sparse_attention_backward(
        d_out, d_lse, q, kv, indices, out, lse, ctx.scale, ctx.backend
    )
    return dq, dkv, None, None, None, None


_sparse_attention.register_autograd(_backward, setup_context=_setup_context)
_sparse_attention_with_target.register_autograd(_backward, setup_context=_setup_context)
once_differentiable(_sparse_attention_backward, "sparse_attention")

"""Attention of each query over all its visible keys, every head with keys and values of its own."""

import torch
from torch import Tensor

from npu_dsa_kernels import checks
from npu_dsa_kernels.backends import kernels, reference, resolve
from npu_dsa_kernels.backends.precision import compute_dtype, no_autocast
from npu_dsa_kernels.ops._autograd import no_forward_mode, once_differentiable

# B batch, S queries, T keys, H heads, D key dim, V value dim


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    bounds: Tensor | None = None,
    backend: str | None = None,
    validate: bool = False,
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the visible keys; differentiable in `q`, `k` and `v`.

    With V the visible keys of query t: ``P[t, h, :] = softmax over s in V of (scale * q[t, h] .
    k[s, h])`` and ``out[t, h] = P[t, h] @ v[V, h]`` (Vaswani et al. 2017, eq. 1). This is
    multi-head latent attention before absorption, with keys ``[nope || rope]`` of each head
    (DeepSeek-V2, section 2.1), which DeepSeek-V3.2 runs in its dense warm-up stage (section 2.1.1).

    A row without visible keys gives ``out = 0``, ``lse = -inf`` and zero gradients, whatever it
    holds; so do keys that no query sees. Memory is linear in S and T.

    Args:
        q: [B, S, H, D], float64, float32, bfloat16 or float16.
        k: [B, T, H, D], of the same dtype.
        v: [B, T, H, V], of the same dtype.
        scale: factor of the logits.
        bounds: int32 [B, S, 2], visible keys ``[lo, hi)`` of each query (see `causal_bounds`).
            None: causal, with T == S. The range is taken as far as it lies in [0, T).
        backend: see `backends`.
        validate: check the values of `bounds` too (synchronises with the device).

    Returns:
        out: [B, S, H, V] in the dtype of `q`; sums are taken in float32 at least.
        lse: [B, S, H], log-sum-exp of the scaled logits, float32 (float64 for float64 inputs).
            Differentiable too, but not on backend "npu".

    Raises:
        ValueError: wrong rank, shape, dtype or device, scale not finite, bounds outside of [0, T]
            or reversed (with `validate`), unknown backend.
        RuntimeError: at a double backward through any backend but "reference", and where a gradient
            of `lse` arrives on backend "npu".
    """
    checks.tensor("q", q, "B S H D")
    checks.floating("q", q)
    checks.not_empty("q", q, H=2, D=3)
    B, S, H, D = q.shape
    checks.tensor("k", k, "B T H D")
    T = k.shape[1]
    checks.tensor("v", v, "B T H V")
    for name, x, last in (("k", k, {"D": D}), ("v", v, {"V": v.shape[3]})):
        checks.dtype(name, x, (q.dtype,), ", the dtype of q")
        checks.shape(name, x, B=B, T=T, H=H, **last)
    checks.not_empty("v", v, V=3)
    checks.key_count("k", T)
    checks.scale(scale)
    checks.bounds(bounds, B, S, T, validate=validate)
    checks.same_device("q", q, k=k, v=v, bounds=bounds)
    name = resolve(backend, q.device)
    if name == "reference":
        with no_autocast(q):
            return reference.dense_attention(q, k, v, bounds, scale)
    no_forward_mode("dense_attention", q, k, v)
    return _dense_attention(q, k, v, bounds, float(scale), name)


@torch.library.custom_op("npu_dsa::dense_attention", mutates_args=())
def _dense_attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    with no_autocast(q):
        return kernels(backend).dense_attention(q, k, v, bounds, scale)


@_dense_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    B, S, H, _ = q.shape
    return q.new_empty(B, S, H, v.shape[3]), q.new_empty(B, S, H, dtype=compute_dtype(q.dtype))


@torch.library.custom_op("npu_dsa::dense_attention_backward", mutates_args=())
def _dense_attention_backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    with no_autocast(q):
        return kernels(backend).dense_attention_backward(
            d_out, d_lse, q, k, v, bounds, out, lse, scale
        )


@_dense_attention_backward.register_fake
def _(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.scale, ctx.backend = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx, d_out: Tensor | None, d_lse: Tensor | None):
    q, k, v, bounds, out, lse = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(out)
    dq, dk, dv = _dense_attention_backward(
        d_out, d_lse, q, k, v, bounds, out, lse, ctx.scale, ctx.backend
    )
    return dq, dk, dv, None, None, None


_dense_attention.register_autograd(_backward, setup_context=_setup_context)
once_differentiable(_dense_attention_backward, "dense_attention")

"""What the indexer learns to predict: the attention's mass on each selected key."""

import torch
from torch import Tensor

from npu_dsa_kernels import checks
from npu_dsa_kernels.backends import kernels, reference, resolve
from npu_dsa_kernels.backends.precision import compute_dtype, no_autocast
from npu_dsa_kernels.ops.sparse_attention import _check

# B batch, S queries, T keys, H heads, D key dim, K selected keys


def attention_target(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lse: Tensor,
    *,
    scale: float,
    backend: str | None = None,
    validate: bool = False,
) -> Tensor:
    """Attention probabilities of the selected keys, summed over the heads given; no gradient.

    ``target[t, j] = sum_h exp(scale * q[t, h] . kv[s] - lse[t, h])`` with ``s = indices[t, j]``, 0
    in empty slots (DeepSeek-V3.2, section 2.1.1: the main attention scores summed over all heads).
    It is not normalised, so that ranks holding different heads may add theirs; `indexer_kl_loss`
    normalises.

    Args:
        q, kv, indices, scale, backend, validate: as in `sparse_attention`.
        lse: [B, S, H] of the same call, in its dtype.

    Returns:
        [B, S, K], float32 (float64 for float64 inputs).

    Raises:
        ValueError: as in `sparse_attention`, and for an `lse` of another shape, dtype or device.
    """
    _check(q, kv, indices, scale, validate=validate)
    B, S, H, _ = q.shape
    checks.tensor("lse", lse, "B S H")
    checks.dtype("lse", lse, (compute_dtype(q.dtype),), ", as sparse_attention returns it")
    checks.shape("lse", lse, B=B, S=S, H=H)
    checks.same_device("q", q, lse=lse)
    name = resolve(backend, q.device)
    q, kv, lse = q.detach(), kv.detach(), lse.detach()
    if name == "reference":
        with no_autocast(q):
            return reference.attention_target(q, kv, indices, lse, scale)
    return _attention_target(q, kv, indices, lse, float(scale), name)


@torch.library.custom_op("npu_dsa::attention_target", mutates_args=())
def _attention_target(
    q: Tensor, kv: Tensor, indices: Tensor, lse: Tensor, scale: float, backend: str
) -> Tensor:
    with no_autocast(q):
        return kernels(backend).attention_target(q, kv, indices, lse, scale)


@_attention_target.register_fake
def _(q: Tensor, kv: Tensor, indices: Tensor, lse: Tensor, scale: float, backend: str) -> Tensor:
    return q.new_empty(indices.shape, dtype=compute_dtype(q.dtype))

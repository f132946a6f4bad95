"""The "npu" backend: torch_npu's fused operators, called as ``torch.ops.npu.*``.

Importing this module imports no torch_npu; `status` does, once, where it can be expected to work.
"""

from npu_dsa_kernels.backends.npu.attention import dense_attention, dense_attention_backward
from npu_dsa_kernels.backends.npu.availability import status
from npu_dsa_kernels.backends.npu.base import *  # noqa: F403
from npu_dsa_kernels.backends.npu.dense import fused_dense_kl_loss
from npu_dsa_kernels.backends.npu.dsa import (
    attention_target,
    fused_kl_loss,
    indexer_kl_loss,
    indexer_kl_loss_backward,
    lightning_indexer,
    sparse_attention,
    sparse_attention_backward,
)

__all__ = [
    "attention_target",
    "dense_attention",
    "dense_attention_backward",
    "fused_dense_kl_loss",
    "fused_kl_loss",
    "indexer_kl_loss",
    "indexer_kl_loss_backward",
    "lightning_indexer",
    "sparse_attention",
    "sparse_attention_backward",
    "status",
]

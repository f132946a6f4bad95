"""DeepSeek Sparse Attention for training: forward and backward, on any device torch runs on."""

from npu_dsa_kernels.__about__ import __version__
from npu_dsa_kernels.backends import backends
from npu_dsa_kernels.bounds import causal_bounds
from npu_dsa_kernels.layer import DSAOutput, dsa_attention
from npu_dsa_kernels.ops.attention_target import attention_target
from npu_dsa_kernels.ops.hadamard import hadamard
from npu_dsa_kernels.ops.indexer_kl_loss import indexer_kl_loss
from npu_dsa_kernels.ops.lightning_indexer import lightning_indexer
from npu_dsa_kernels.ops.sparse_attention import sparse_attention

__all__ = [
    "DSAOutput",
    "__version__",
    "attention_target",
    "backends",
    "causal_bounds",
    "dsa_attention",
    "hadamard",
    "indexer_kl_loss",
    "lightning_indexer",
    "sparse_attention",
]

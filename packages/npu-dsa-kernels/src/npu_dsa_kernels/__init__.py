"""DeepSeek Sparse Attention and its model's base operators, forward and backward, on any device."""

from npu_dsa_kernels.__about__ import __version__
from npu_dsa_kernels.backends import backends
from npu_dsa_kernels.bounds import causal_bounds
from npu_dsa_kernels.layer import DSAOutput, dsa_attention
from npu_dsa_kernels.ops.attention_target import attention_target
from npu_dsa_kernels.ops.dense_attention import dense_attention
from npu_dsa_kernels.ops.dense_indexer_kl_loss import dense_indexer_kl_loss
from npu_dsa_kernels.ops.grouped_matmul import grouped_matmul
from npu_dsa_kernels.ops.hadamard import hadamard
from npu_dsa_kernels.ops.indexer_kl_loss import indexer_kl_loss
from npu_dsa_kernels.ops.lightning_indexer import lightning_indexer
from npu_dsa_kernels.ops.moe_permute import MoEPermutation, moe_permute
from npu_dsa_kernels.ops.moe_unpermute import moe_unpermute
from npu_dsa_kernels.ops.rms_norm import rms_norm
from npu_dsa_kernels.ops.rotary_mul import rotary_mul
from npu_dsa_kernels.ops.sparse_attention import sparse_attention
from npu_dsa_kernels.ops.swiglu import swiglu
from npu_dsa_kernels.query_split import QuerySplit

__all__ = [
    "DSAOutput",
    "MoEPermutation",
    "QuerySplit",
    "__version__",
    "attention_target",
    "backends",
    "causal_bounds",
    "dense_attention",
    "dense_indexer_kl_loss",
    "dsa_attention",
    "grouped_matmul",
    "hadamard",
    "indexer_kl_loss",
    "lightning_indexer",
    "moe_permute",
    "moe_unpermute",
    "rms_norm",
    "rotary_mul",
    "sparse_attention",
    "swiglu",
]

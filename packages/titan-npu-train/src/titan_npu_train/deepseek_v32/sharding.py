"""Parallel layouts of the parts DeepSeek-V3.2 adds to DeepSeek-V3."""

from typing import TYPE_CHECKING

import spmd_types as spmd
from torchtitan.models.common.decoder_sharding import (
    dense_activation_placement,
    dense_param_placement,
    dense_sequence_parallel_placement,
)
from torchtitan.protocols.sharding import ShardingConfig

if TYPE_CHECKING:
    from titan_npu_train.deepseek_v32.attention import Attention

__all__ = [
    "HEADS",
    "HEAD_WEIGHT",
    "HEAD_WEIGHT_GRADIENT",
    "QUERY_ROWS",
    "WHOLE",
    "WHOLE_PENDING",
    "set_dsa_sharding_config",
]

# Layouts of [batch, sequence, channels] at the border of the local computation. Over data- and
# context-parallel ranks all are sharded; what differs is the tensor-parallel axis.
WHOLE = dense_activation_placement(tp=spmd.R)
"""Every tensor-parallel rank has all channels of all tokens."""
WHOLE_PENDING = dense_activation_placement(tp=spmd.P)
"""Gradient of WHOLE where each rank used it for its own heads or queries: to be summed."""
HEADS = dense_activation_placement(tp=spmd.S(2))
"""Each rank has the channels of its heads."""
QUERY_ROWS = dense_sequence_parallel_placement()
"""Each rank has some of the tokens; which ones is the business of QuerySplit."""
HEAD_WEIGHT = dense_param_placement(tp=spmd.S(0))
"""A weight whose rows belong to heads."""
HEAD_WEIGHT_GRADIENT = type(HEAD_WEIGHT)(
    {axis: spmd.P if kind is spmd.R else kind for axis, kind in HEAD_WEIGHT.axis_types.items()}
)
"""Its gradient, from this rank's tokens."""


def set_dsa_sharding_config(attention: "Attention.Config") -> None:
    """Complete one attention config, after torchtitan's DeepSeek-V3 plan has been applied to it.

    The indexer's parameters are whole on every rank: it has no head split. Its queries are split
    instead, and so each rank's gradient of them is a part of the sum.
    """
    replicated = ShardingConfig(
        state_shardings={name: dense_param_placement(tp=spmd.R) for name in ("weight", "bias")}
    )
    index = attention.indexer
    for part in (index.wq_b, index.wk, index.k_norm, index.weights_proj):
        part.sharding_config = replicated
    # Rotation and attention are local: no layouts of their own, and plain tensors as caches.
    attention.rope.sharding_config = None
    attention.inner_attention.sharding_config = None

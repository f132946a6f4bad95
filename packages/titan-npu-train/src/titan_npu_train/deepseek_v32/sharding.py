"""Parallel layouts of the parts DeepSeek-V3.2 adds to DeepSeek-V3."""

import spmd_types as spmd
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.protocols.sharding import ShardingConfig

from titan_npu_train.deepseek_v32.attention import Attention

__all__ = ["set_dsa_sharding_config"]


def set_dsa_sharding_config(attention: Attention.Config) -> None:
    """Complete one attention config, after torchtitan's DeepSeek-V3 plan has been applied to it.

    The indexer's parameters are whole on every rank: it has no head split.
    """
    replicated = ShardingConfig(
        state_shardings={
            name: dense_param_placement(tp=spmd.R) for name in ("weight", "bias", "cache")
        }
    )
    index = attention.indexer
    for part in (index.wq_b, index.wk, index.k_norm, index.weights_proj, index.rope):
        part.sharding_config = replicated
    # torchtitan's plan names the arguments of its own inner attention.
    attention.inner_attention.sharding_config = None

"""The parallel plan of the mixture of experts: routed tokens are never gathered over TP.

torchtitan's own plan has this under expert and sequence parallelism; here every case has it.
"""

import spmd_types as spmd
from torchtitan.models.common.decoder_sharding import (
    dense_activation_placement,
    dense_sequence_parallel_placement,
)
from torchtitan.models.common.moe_sharding import (
    expert_param_placement_dense,
    set_moe_sharding_config,
)
from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig

from titan_npu_train.deepseek_v32.moe import MoE, SequenceShard

__all__ = ["set_moe_sharding"]

EXPERT_WEIGHTS = ("w1_EFD", "w2_EDF", "w3_EFD")


def set_moe_sharding(moe_config: MoE.Config, *, enable_sp: bool, enable_ep: bool) -> None:
    """Lay out one MoE layer; replaces what torchtitan's plan set on it."""
    set_moe_sharding_config(
        moe_config,
        enable_ep=True,
        enable_sp=enable_sp,
        expert_param_layout=dict.fromkeys(EXPERT_WEIGHTS, spmd.R),
    )
    routed, shared = moe_config.routed_experts, moe_config.shared_experts
    if not enable_ep:
        whole = expert_param_placement_dense(tp_placement=spmd.R)
        routed.inner_experts.sharding_config = ShardingConfig(
            state_shardings=dict.fromkeys(EXPERT_WEIGHTS, whole)
        )
    if not enable_sp:
        whole = dense_activation_placement(tp=spmd.R)
        shard = dense_sequence_parallel_placement()
        moe_config.sharding_config.in_dst_shardings["x_BLD"] = whole
        moe_config.sequence_shard = SequenceShard.Config(
            sharding_config=ShardingConfig(
                in_src_shardings={"x_BLD": whole},
                in_dst_shardings={"x_BLD": whole},
                out_src_shardings=shard,
                local_map=LocalMapConfig(
                    in_grad_placements=(dense_activation_placement(tp=spmd.P),)
                ),
            )
        )
        moe_config.router.gate.sharding_config.in_src_shardings["input"] = shard
        routed.sharding_config.in_src_shardings["x_BLD"] = shard
        if shared is not None:
            shared.sharding_config.in_src_shardings["x"] = whole

"""The parallel plan of the mixture of experts: tensor parallelism never gathers routed tokens."""

import spmd_types as spmd
from torchtitan.config import ParallelismConfig
from torchtitan.models.common.decoder_sharding import (
    dense_activation_placement,
    dense_sequence_parallel_placement,
)
from torchtitan.models.common.moe_sharding import (
    expert_param_placement_dense,
    set_moe_sharding_config,
)
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig, SpmdLayout

from titan_npu_train.deepseek_v32.moe import MoE, SequenceShard

__all__ = ["check_moe_parallelism", "set_moe_sharding"]

_EXPERT_WEIGHTS = ("w1_EFD", "w2_EDF", "w3_EFD")


def set_moe_sharding(moe_config: MoE.Config, *, enable_sp: bool, enable_ep: bool) -> None:
    """Lay out one MoE layer, over whatever layout its config has.

    Router and routed experts work on the L / TP tokens of a rank's own part of the sequence. TP
    communicates for the shared expert alone:

    - with sequence parallelism an all-gather of its input and a reduce-scatter of its output, the
      other way round in backward; the output is added to the routed experts' shard by shard;
    - without it, where the layer's input and output are whole on every TP rank, one all-reduce of
      the sum of all experts' outputs, and one of the input's gradient.

    Without expert parallelism each rank computes with whole expert weights. Weights that several
    ranks hold whole (these, and the router's gate) get a gradient from each rank's tokens; FSDP
    sums it over TP once. Token counts are of each rank's own tokens: :mod:`.load_balance` sums
    them.

    torchtitan's plan does the same under expert and sequence parallelism. Without the former it
    splits the experts' hidden dimension, so that every TP rank routes all tokens and the routed
    output is another reduce-scatter; without the latter it gathers the gradient of the routed
    tokens twice.

    Args:
        moe_config: the layer; its layouts are replaced.
        enable_sp: ``parallelism.enable_sequence_parallel``: the layer's input and output are
            sharded along the sequence over TP.
        enable_ep: experts are spread over ranks (``parallelism.expert_parallel_degree`` > 1).
    """
    # Its layout of tokens with expert parallelism is the one wanted without, too.
    set_moe_sharding_config(
        moe_config,
        enable_ep=True,
        enable_sp=enable_sp,
        expert_param_layout=dict.fromkeys(_EXPERT_WEIGHTS, spmd.R),
    )
    if not enable_ep:
        whole_weight = expert_param_placement_dense(tp_placement=spmd.R)
        moe_config.routed_experts.inner_experts.sharding_config = ShardingConfig(
            state_shardings=dict.fromkeys(_EXPERT_WEIGHTS, whole_weight)
        )
    moe_config.sequence_shard = None
    if not enable_sp:
        _shard_inside(moe_config)


def _shard_inside(moe_config: MoE.Config) -> None:
    """Split the sequence once inside the layer, of an input that every TP rank holds whole."""
    whole = dense_activation_placement(tp=spmd.R)
    part = dense_sequence_parallel_placement()
    moe_config.sequence_shard = SequenceShard.Config(
        sharding_config=ShardingConfig(
            in_src_shardings={"x_BLD": whole},
            in_dst_shardings={"x_BLD": whole},
            out_src_shardings=part,
            local_map=LocalMapConfig(in_grad_placements=(dense_activation_placement(tp=spmd.P),)),
        )
    )
    # The gradient of the whole input is summed over TP here, for all experts at once.
    _inputs(moe_config, "in_dst_shardings")["x_BLD"] = whole
    _inputs(moe_config.router.gate, "in_src_shardings")["input"] = part
    _inputs(moe_config.routed_experts, "in_src_shardings")["x_BLD"] = part
    if moe_config.shared_experts is not None:
        _inputs(moe_config.shared_experts, "in_src_shardings")["x"] = whole


def _inputs(config: Module.Config, which: str) -> dict[str, SpmdLayout]:
    """Layouts by argument, of a module that torchtitan's plan has given some."""
    layouts = getattr(config.sharding_config, which)
    assert layouts is not None
    return layouts


def check_moe_parallelism(
    parallelism: ParallelismConfig,
    *,
    num_experts: int,
    seq_len: int | None = None,
    rows: int | None = None,
) -> None:
    """Refuse degrees that a model with routed experts cannot run with, before anything is built.

    Args:
        parallelism: the degrees.
        num_experts: routed experts a layer.
        seq_len: ``training.seq_len``; None where it is not known (no check of it then).
        rows: sequences in one forward pass of a rank; None where it is not known.

    Raises:
        ValueError: naming the option, what it got and what would work.
    """
    tp, cp = parallelism.tensor_parallel_degree, parallelism.context_parallel_degree
    ep, dp = parallelism.expert_parallel_degree, parallelism.data_parallel_shard_degree
    if num_experts % ep:
        raise ValueError(
            f"parallelism.expert_parallel_degree is {ep}, which does not divide the model's "
            f"{num_experts} experts; use one of {_divisors(num_experts)}"
        )
    # -1: as many as there are ranks left, which only the launched job knows.
    if dp > 0 and (ranks := dp * cp * tp) % ep:
        raise ValueError(
            f"parallelism.expert_parallel_degree is {ep}, but experts are spread over the "
            f"{ranks} ranks of data_parallel_shard_degree {dp} x context_parallel_degree {cp} x "
            f"tensor_parallel_degree {tp}; use one of {_divisors(ranks)}"
        )
    if seq_len is not None and tp > 1 and seq_len % (cp * tp):
        larger = -(-seq_len // (cp * tp)) * cp * tp
        raise ValueError(
            f"training.seq_len is {seq_len}, but each of {cp * tp} ranks (parallelism."
            f"context_parallel_degree {cp} x tensor_parallel_degree {tp}) routes an equal part of "
            f"the tokens to experts; use a multiple of {cp * tp} such as {larger}, or smaller "
            "degrees"
        )
    if parallelism.spmd_backend == "full_dtensor" and cp > 1 and tp > 1 and (rows or 1) > 1:
        # torch 2.14 folds batch and sequence in a linear layer, and cannot unfold a sequence that
        # two mesh axes shard: "Cannot unflatten tensor with _StridedShard placement".
        raise ValueError(
            f"parallelism.spmd_backend full_dtensor with context_parallel_degree {cp} and "
            f"tensor_parallel_degree {tp} takes one sequence at a time, got {rows}: set "
            "training.local_batch_size (under a pipeline parallelism."
            "pipeline_parallel_microbatch_size) to 1, or use spmd_backend spmd_types"
        )


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)

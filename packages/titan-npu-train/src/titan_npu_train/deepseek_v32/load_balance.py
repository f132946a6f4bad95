"""Auxiliary-loss-free load balancing of the experts, in main and MTP layers.

Source: Wang et al., Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts,
arXiv:2408.15664, with each step's changes centred, as torchtitan does.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.distributed import ParallelDims

from titan_npu_train.deepseek_v32.moe import MoE

__all__ = ["register_moe_load_balancing", "tokens_per_expert"]


def register_moe_load_balancing(
    optimizers: OptimizersContainer, model_parts: list[nn.Module], parallel_dims: ParallelDims
) -> None:
    """Update every expert bias before each optimizer step.

    torchtitan's own hook knows other counts than :class:`.moe.MoE` keeps: doubled by activation
    checkpointing, the same on all TP ranks without expert parallelism, and none of MTP layers.
    """
    layers = [
        module
        for part in model_parts
        for module in part.modules()
        if isinstance(module, MoE) and module.load_balance_coeff is not None
    ]
    if layers:
        optimizers.register_step_pre_hook(lambda *_: _update_expert_biases(layers, parallel_dims))


@torch.no_grad()
def tokens_per_expert(layers: Sequence[MoE], parallel_dims: ParallelDims) -> torch.Tensor:
    """Tokens each expert got since the last optimizer step, of all ranks: int64 [layers, E].

    A collective call: every rank of a pipeline stage makes it, with the same layers.
    """
    counts_NE = torch.stack([_local(moe.tokens_per_expert_E) for moe in layers]).long()
    for axis in ("tp", "loss"):  # the ranks of both counted tokens of their own
        if (mesh := parallel_dims.get_optional_mesh(axis)) is not None:
            dist.all_reduce(counts_NE, group=mesh.get_group())
    return counts_NE


@torch.no_grad()
def _update_expert_biases(layers: Sequence[MoE], parallel_dims: ParallelDims) -> None:
    # Letters: N MoE layers, E experts. In integers the sign does not depend on rounding.
    counts_NE = tokens_per_expert(layers, parallel_dims)
    mean_times_E_N1 = counts_NE.sum(-1, keepdim=True)
    sign_NE = (mean_times_E_N1 - counts_NE * counts_NE.size(-1)).sign().float()
    for moe, sign_E in zip(layers, sign_NE, strict=True):
        assert moe.load_balance_coeff is not None and moe.expert_bias_E is not None
        delta_E = moe.load_balance_coeff * sign_E
        _local(moe.expert_bias_E).add_(delta_E - delta_E.mean())
        _local(moe.tokens_per_expert_E).zero_()


def _local(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.to_local() if isinstance(buffer, DTensor) else buffer

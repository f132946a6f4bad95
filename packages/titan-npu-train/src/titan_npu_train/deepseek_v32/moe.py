"""The mixture of experts: torchtitan's, with an exact count of the tokens each expert got.

Shape letters: B batch, L sequence, D model dim, K experts a token, E experts.
"""

from dataclasses import dataclass

import spmd_types as spmd
import torch
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.moe import MoE as TitanMoE
from torchtitan.protocols.module import Module

__all__ = ["MoE", "SequenceShard"]


class SequenceShard(Module):
    """This TP rank's part of the sequence, of an activation that every TP rank holds whole.

    The gradient is a term of a sum over TP: zero outside the part. (A redistribution would do for
    torchtitan's spmd_types backend; DTensor's gathers the gradient.)
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config):
        super().__init__()
        del config
        self.rank, self.size = 0, 1

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        super().parallelize(parallel_dims)
        if (mesh := parallel_dims.get_optional_mesh("tp")) is not None:
            self.rank, self.size = mesh.get_local_rank(), mesh.size()

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        """x_BLD [B, L, D]; returns [B, L / TP, D].

        Raises:
            ValueError: L is not a multiple of TP.
        """
        if x_BLD.size(1) % self.size:
            raise ValueError(
                f"a sequence of {x_BLD.size(1)} tokens cannot be split evenly over "
                f"{self.size} tensor-parallel ranks"
            )
        # By their own rules a slice of what is equal on all ranks would still be equal.
        with spmd.no_typecheck():
            return x_BLD.chunk(self.size, 1)[self.rank].contiguous()


class MoE(TitanMoE):
    """Routed and shared experts; counts tokens for load balancing when gradients pass through.

    ``tokens_per_expert_E`` sums, over this rank's tokens, the forwards that were trained on since
    it was last cleared (float32, exact below 2^24). A forward is counted by its backward: once
    however often activation checkpointing computes it, and not at all if no backward follows, as
    in evaluation or where a pipeline only asks for shapes. A frozen router is not balanced.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TitanMoE.Config):
        """``sequence_shard``: takes the routed tokens out of an input not sharded over TP."""

        sequence_shard: SequenceShard.Config | None = None

    def __init__(self, config: Config):
        super().__init__(config)
        shard = config.sequence_shard
        self.sequence_shard = None if shard is None else shard.build()

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        """x_BLD and the result are [B, L, D]; what a rank holds of them, the plan says."""
        routed_BLD = x_BLD if self.sequence_shard is None else self.sequence_shard(x_BLD)
        scores_BLK, experts_BLK, all_scores_BLE = self.router(routed_BLD, self.expert_bias_E)
        chosen_BLE = torch.zeros_like(all_scores_BLE, dtype=torch.bool)
        counts_E = chosen_BLE.scatter_(-1, experts_BLK, True).sum(dim=(0, 1))
        out_BLD = self.routed_experts(routed_BLD, scores_BLK, experts_BLK, counts_E)
        if self.shared_experts is not None:
            out_BLD = out_BLD + self.shared_experts(x_BLD)
        if self.training and out_BLD.requires_grad and self.router.gate.weight.requires_grad:
            # Of a recomputed forward only the values are used: no gradient reaches its hook.
            with spmd.no_typecheck():
                out_BLD.register_hook(lambda _: self._count(counts_E))
        return out_BLD

    def _count(self, counts_E: torch.Tensor) -> None:
        # Expert dispatch may have retyped the counts for its own mesh.
        with torch.no_grad(), spmd.no_typecheck():
            self.tokens_per_expert_E.add_(counts_E)

"""Auxiliary-loss-free load balancing of the experts, in main and MTP layers."""

from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, register_moe_load_balancing_hook
from torchtitan.distributed import ParallelDims

__all__ = ["register_moe_load_balancing"]


class _MTPLayers(nn.Module):
    """Presents MTP layers the way torchtitan's hook looks for layers."""

    def __init__(self, mtp_layers: nn.ModuleList):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(mtp_layers)})


def register_moe_load_balancing(
    optimizers: OptimizersContainer, model_parts: list[nn.Module], parallel_dims: ParallelDims
) -> None:
    """Update every expert bias before each optimizer step.

    torchtitan's own hook looks at ``layers`` only, so an MTP layer's experts would never be
    balanced.
    """
    found = [getattr(part, "mtp_layers", None) for part in model_parts]
    mtp = [_MTPLayers(layers) for layers in found if isinstance(layers, nn.ModuleList)]
    register_moe_load_balancing_hook(optimizers, [*model_parts, *mtp], parallel_dims)

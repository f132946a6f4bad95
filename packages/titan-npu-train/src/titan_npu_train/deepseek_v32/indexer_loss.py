"""How the indexer's KL loss enters the backward pass, and how it is counted.

Shape letters: B batch, S sequence.

The loss of a layer is ``sum_t weight[t] * KL[t]`` with ``weight = valid / global_valid_tokens``:
the training loss's own normalisation, so the indexer's gradient is the same for any split of a
global batch. It never enters the loss value; it is attached to the attention's output, whose
backward hands it a gradient of one. That needs no channel from the layers to the loss, and holds
under activation checkpointing and pipeline stages.
"""

from typing import NamedTuple

import torch

from npu_dsa_kernels import causal_bounds

__all__ = ["DSAMasks", "IndexerLossMeter", "attach_indexer_loss"]


class DSAMasks(NamedTuple):
    """What every layer's sparse attention needs to know about a microbatch.

    Travels through torchtitan's ``attention_masks`` argument.

    Attributes:
        bounds_BS2: int32, the keys ``[lo, hi)`` each query may see.
        kl_weight_BS: fp32, each token's weight in the indexer loss; None trains no indexer.
    """

    bounds_BS2: torch.Tensor
    kl_weight_BS: torch.Tensor | None = None

    @classmethod
    def from_positions(
        cls, positions_BS: torch.Tensor, kl_weight_BS: torch.Tensor | None = None
    ) -> "DSAMasks":
        """Masks of rows whose ``positions`` restart at every packed document."""
        return cls(causal_bounds(positions_BS), kl_weight_BS)


class IndexerLossMeter:
    """Sums one layer's indexer loss over the microbatches of a step.

    It is fed from the backward pass, which runs once for each forward that counts, so activation
    checkpointing cannot count a microbatch twice.
    """

    def __init__(self) -> None:
        self._total: torch.Tensor | None = None

    def add(self, value: torch.Tensor) -> None:
        self._total = value.clone() if self._total is None else self._total + value

    def take(self) -> torch.Tensor | None:
        """The sum since the last call (fp32 scalar), or None when nothing was added."""
        total, self._total = self._total, None
        return total


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, loss, meter):
        ctx.meter, ctx.value = meter, loss.detach()
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad_out):
        ctx.meter.add(ctx.value)
        return grad_out, torch.ones_like(ctx.value), None


def attach_indexer_loss(
    out: torch.Tensor, loss: torch.Tensor, meter: IndexerLossMeter
) -> torch.Tensor:
    """Return ``out`` unchanged; its backward also back-propagates ``loss`` (scalar) once."""
    return _AttachLoss.apply(out, loss, meter)

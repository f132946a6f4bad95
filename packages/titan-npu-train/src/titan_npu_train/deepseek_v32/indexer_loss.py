"""How the indexer's KL loss enters the backward pass, and how it is counted.

Shape letters: B batch, S sequence.

The loss of a layer is ``scale * sum of KL[t] over the tokens that count`` with ``scale =
coefficient / global_valid_tokens``: the training loss's own normalisation, so the indexer's
gradient is the same for any split of a global batch. It never enters the loss value; it is attached
to the attention's output, whose backward hands it a gradient of one. That needs no channel from the
layers to the loss, and holds under activation checkpointing and pipeline stages.
"""

import itertools
from typing import NamedTuple

import torch

from npu_dsa_kernels import causal_bounds

__all__ = ["DSAMasks", "StepSum", "attach_indexer_loss"]

_microbatches = itertools.count()


class DSAMasks(NamedTuple):
    """What every layer's sparse attention needs to know about this rank's part of a microbatch.

    Travels through torchtitan's ``attention_masks`` argument. Always plain local tensors.

    Attributes:
        positions_BS: each token's position within its document.
        bounds_BS2: int32, the keys ``[lo, hi)`` each query may see, in the whole sequence.
        kl_mask_BS: bool, the tokens that count in the indexer loss; None trains no indexer.
        kl_scale: fp32 scalar, the factor of their sum.
        microbatch: a number no other microbatch has.
        measures_recall: whether the dense warm-up stage also measures recall.
    """

    positions_BS: torch.Tensor
    bounds_BS2: torch.Tensor
    kl_mask_BS: torch.Tensor | None = None
    kl_scale: torch.Tensor | None = None
    microbatch: int = -1
    measures_recall: bool = False

    @classmethod
    def from_positions(
        cls,
        positions_BS: torch.Tensor,
        *,
        index_S: torch.Tensor | None = None,
        kl_mask_BS: torch.Tensor | None = None,
        kl_scale: torch.Tensor | float = 1.0,
    ) -> "DSAMasks":
        """Masks of rows whose ``positions`` restart at every packed document.

        Args:
            positions_BS: integers.
            index_S: where in the whole sequence the tokens are; None: they are the whole sequence.
            kl_mask_BS: see the class.
            kl_scale: see the class.
        """
        bounds_BS2 = causal_bounds(positions_BS, index=index_S)
        if kl_mask_BS is None:
            return cls(positions_BS, bounds_BS2)
        scale = torch.as_tensor(kl_scale, dtype=torch.float32, device=positions_BS.device)
        return cls(positions_BS, bounds_BS2, kl_mask_BS, scale, next(_microbatches))

    @property
    def trains_indexer(self) -> bool:
        return self.kl_mask_BS is not None

    def restricted_to(self, counts_BS: torch.Tensor) -> "DSAMasks":
        """The same, with only the tokens of ``counts_BS`` in the indexer loss."""
        if self.kl_mask_BS is None:
            return self
        return self._replace(kl_mask_BS=self.kl_mask_BS & counts_BS.bool())


class StepSum:
    """Sums a figure of one layer, e.g. its indexer loss, over the microbatches of a step.

    A microbatch may run several times: recomputed under activation checkpointing, in two passes of
    a backward that a pipeline splits, or once more where a pipeline first finds out the shapes
    between its stages. Its last value is the one that counts.
    """

    def __init__(self) -> None:
        self._values: dict[int, torch.Tensor] = {}

    def record(self, microbatch: int, value: torch.Tensor) -> None:
        self._values[microbatch] = value

    def take(self) -> torch.Tensor | None:
        """The sum since the last call, of a value's shape; None when nothing was recorded."""
        values, self._values = self._values, {}
        return torch.stack(list(values.values())).sum(0) if values else None


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, loss):
        ctx.dtype = loss.dtype
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad_out):
        return grad_out, grad_out.new_ones((), dtype=ctx.dtype)


def attach_indexer_loss(out: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """Return ``out`` unchanged; its backward also back-propagates ``loss`` (scalar) once."""
    return _AttachLoss.apply(out, loss)

"""The dense warm-up stage: only the indexers learn, from an attention over every visible key.

Source: DeepSeek-V3.2, section 2.1.1. A model that was trained with dense attention gets an indexer
in every layer. Before sparse attention relies on them, they learn to predict where the frozen
model's attention looks: KL over every visible key (:func:`npu_dsa_kernels.dense_indexer_kl_loss`).

What is frozen needs no backward pass. A block computes on a detached input, so nothing of the
backbone is kept for one, and hands the gradient of its output on to its input as it is
(:func:`carry_gradient`). That gradient only brings each layer's indexer loss its turn, in the order
that pipeline stages, activation checkpointing and FSDP expect. Its values mean nothing, and nothing
reads them.

Shape letters: B batch, S sequence, D model dim.
"""

import re
from collections.abc import Iterable

import torch
from torch import nn
from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.models.deepseek_v3 import DeepSeekV3Model

from titan_npu_train.deepseek_v32.local_region import untyped

__all__ = ["carry_gradient", "freeze_backbone", "groups_of_indexers"]


def freeze_backbone(model: nn.Module) -> None:
    """Leave only the parameters of indexers trainable."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." in name)


def groups_of_indexers(
    groups: Iterable[ParamGroupConfig], model: DeepSeekV3Model.Config
) -> list[ParamGroupConfig]:
    """The optimizer's parameter groups that have a parameter left once the backbone is frozen.

    torchtitan refuses a group without parameters, as one for the backbone alone would be.
    """
    with torch.device("meta"):
        parameters = dict(model.layers[0].attention.indexer.build().named_parameters())
    left = [
        f"{kind}.{layer}.attention.indexer.{name}"
        for kind, layers in (("layers", model.layers), ("mtp_layers", model.mtp_layers))
        for layer in range(len(layers))
        for name in parameters
    ]
    kept = []
    for group in groups:
        matched = {name for name in left if re.search(group.pattern, name)}
        if matched:
            kept.append(group)
        left = [name for name in left if name not in matched]
    return kept


class _CarryGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, x, loss):
        ctx.dtype = loss.dtype
        if out.shape != x.shape:
            ctx.save_for_backward(x)
        ctx.mark_dirty(out)  # the tensor itself: FSDP warns of blocks that return views
        return out

    @staticmethod
    def backward(ctx, grad_out):
        # An MTP layer gathers the sequence that tensor parallelism has divided: any gradient of
        # its input's shape will do.
        for x in ctx.saved_tensors:
            grad_out = torch.zeros_like(x)
        return None, grad_out, torch.ones((), dtype=ctx.dtype, device=grad_out.device)


def carry_gradient(
    out_BSD: torch.Tensor, x_BSD: torch.Tensor, loss: torch.Tensor | None
) -> torch.Tensor:
    """Return ``out_BSD``, unchanged; its backward back-propagates ``loss`` (scalar) once.

    ``out_BSD`` must have no gradient of its own; that of the result goes to ``x_BSD``. Without a
    loss (evaluation) nothing is carried.
    """
    if loss is None:
        return out_BSD
    with untyped():
        return _CarryGradient.apply(out_BSD, x_BSD, loss)

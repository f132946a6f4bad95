"""torchtitan's DeepSeek-V3 blocks, which in the dense warm-up stage train their indexer alone."""

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.models.deepseek_v3 import MTPTransformerBlock
from torchtitan.models.deepseek_v3.model import DeepSeekV3TransformerBlock

from titan_npu_train.deepseek_v32.warmup import carry_gradient

__all__ = ["MTPBlock", "TransformerBlock"]


class TransformerBlock(DeepSeekV3TransformerBlock):
    """Attention and feed-forward of a main layer."""

    @dataclass(kw_only=True, slots=True)
    class Config(DeepSeekV3TransformerBlock.Config):
        pass

    def forward(
        self,
        x: torch.Tensor,
        attention_masks: Any,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not self.attention.dense:
            return super().forward(x, attention_masks, positions)
        out = super().forward(x.detach(), attention_masks, positions)
        return carry_gradient(out, x, self.attention.take_loss())


class MTPBlock(MTPTransformerBlock):
    """A multi-token-prediction layer, whose attention has an indexer of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(MTPTransformerBlock.Config):
        pass

    def forward(
        self,
        mtp_input_embed: torch.Tensor,
        prev_embed: torch.Tensor,
        mtp_input_valid_mask: torch.Tensor,
        attention_masks: Any,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rest = (mtp_input_valid_mask, attention_masks, positions)
        if not self.attention.dense:
            return super().forward(mtp_input_embed, prev_embed, *rest)
        out = super().forward(mtp_input_embed.detach(), prev_embed.detach(), *rest)
        return carry_gradient(out, prev_embed, self.attention.take_loss())

"""Multi-token prediction whose shifted tokens and labels are made before the sequence is split.

Depth d predicts the token d further on. Under context parallelism that token may be another rank's,
so the batch is shifted while it is whole; torchtitan shifts inside of the model and the loss.

Shape letters: B batch, S sequence, M MTP depths.
"""

from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.models.deepseek_v3.mtp import MTPLoss as TitanMTPLoss
from torchtitan.models.deepseek_v3.mtp import roll_mtp_sequence

__all__ = ["MTPLoss", "shifted_labels", "shifted_tokens"]


def shifted_tokens(
    tokens_BS: torch.Tensor, positions_BS: torch.Tensor | None, depths: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens each depth reads, [B, S, M], and which of them exist (bool).

    A document's last positions have no token to look ahead to: they read token 0 and do not count.
    """
    shifted = [
        roll_mtp_sequence(
            tokens_BS, shift=d, positions=positions_BS, fill_value=0, return_valid_mask=True
        )
        for d in range(1, depths + 1)
    ]
    tokens, exist = zip(*shifted, strict=True)
    return torch.stack(tokens, -1), torch.stack(exist, -1)


def shifted_labels(
    labels_BS: torch.Tensor, positions_BS: torch.Tensor | None, depths: int
) -> torch.Tensor:
    """The labels of the main prediction and of each depth: [B, S, 1 + M]."""
    shifted = [
        roll_mtp_sequence(labels_BS, shift=d, positions=positions_BS, fill_value=IGNORE_INDEX)
        for d in range(1, depths + 1)
    ]
    return torch.stack([labels_BS, *shifted], -1)  # pyrefly: ignore[bad-argument-type]


class MTPLoss(TitanMTPLoss):
    """Cross-entropy of the main prediction plus the mean one of the depths, scaled.

    Like torchtitan's, with the labels of all depths given: [B, S, 1 + M], see
    :func:`shifted_labels`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TitanMTPLoss.Config):
        pass

    def __call__(
        self,
        pred: list[torch.Tensor],
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        losses = [
            self.fn(logits, labels[..., depth], global_vocab_size=self.global_vocab_size)
            for depth, logits in enumerate(pred)
        ]
        with spmd.no_typecheck():
            loss = losses[0] + self.mtp_scale * torch.stack(losses[1:]).mean()
            if global_valid_tokens is not None:
                loss = loss / global_valid_tokens
        return loss, {}

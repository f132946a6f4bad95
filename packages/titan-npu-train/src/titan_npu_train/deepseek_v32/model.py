"""DeepSeek-V3.2: torchtitan's DeepSeek-V3 with an indexer and sparse attention in every layer."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import nn
from torchtitan.models.deepseek_v3 import DeepSeekV3Model, MTPTransformerBlock
from torchtitan.tools.logging import logger

from titan_npu_train.deepseek_v32.attention import Attention, attention_modules
from titan_npu_train.deepseek_v32.flops import training_flops
from titan_npu_train.deepseek_v32.indexer_loss import DSAMasks
from titan_npu_train.deepseek_v32.options import DSAOptions
from titan_npu_train.deepseek_v32.sharding import set_dsa_sharding_config

__all__ = ["DeepSeekV32Model", "MTPBlock"]


class MTPBlock(MTPTransformerBlock):
    """torchtitan's MTP layer, whose indexer learns from the positions that have an input.

    A document's last positions have no token to look ahead to: they are filled, and neither loss
    may count them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MTPTransformerBlock.Config):
        pass

    def forward(
        self,
        mtp_input_embed: torch.Tensor,
        prev_embed: torch.Tensor,
        mtp_input_valid_mask: torch.Tensor,
        attention_masks: DSAMasks | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attention_masks is not None and attention_masks.kl_weight_BS is not None:
            weight_BS = attention_masks.kl_weight_BS * mtp_input_valid_mask
            attention_masks = attention_masks._replace(kl_weight_BS=weight_BS)
        return super().forward(
            mtp_input_embed,
            prev_embed,
            mtp_input_valid_mask,
            attention_masks,  # pyrefly: ignore[bad-argument-type]
            positions,
        )


class DeepSeekV32Model(DeepSeekV3Model):
    """Decoder with DeepSeek Sparse Attention and optional multi-token-prediction layers."""

    @dataclass(kw_only=True, slots=True)
    class Config(DeepSeekV3Model.Config):
        def update_from_config(self, *, config, **kwargs) -> None:
            _check_parallelism(config.parallelism)
            DeepSeekV3Model.Config.update_from_config(self, config=config, **kwargs)
            options = getattr(config, "dsa", None) or DSAOptions()
            for layer in [*self.layers, *self.mtp_layers]:
                attention = layer.attention
                attention.apply_options(options)
                set_dsa_sharding_config(attention)
                attention.indexer.rope = dataclasses.replace(
                    attention.indexer.rope, max_seq_len=attention.rope.max_seq_len
                )

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Total parameters, and training FLOPs a token (see :mod:`.flops`)."""
            sizes = {name: p.numel() for name, p in model.named_parameters()}
            total = sum(sizes.values())
            indexer = sum(n for name, n in sizes.items() if ".indexer." in name)
            routed = sum(n for name, n in sizes.items() if ".routed_experts." in name)
            moe = next((layer.moe for layer in self.layers if layer.moe is not None), None)
            idle = 0 if moe is None else routed - routed * moe.router.top_k // moe.num_experts
            flops = training_flops(self, seq_len)
            logger.info(
                f"Parameters: {total:,} in all, {total - idle:,} active a token, "
                f"{indexer:,} in the indexers"
            )
            logger.info(
                f"Training FLOPs a token at sequence length {seq_len}: {flops.total:.3e} "
                f"(linear {flops.linear:.3e}, attention {flops.attention:.3e}, "
                f"indexer {flops.indexer_linear + flops.indexer_scores:.3e})"
            )
            return total, round(flops.total)

    def get_attention_masks(self, positions: torch.Tensor) -> DSAMasks:
        """The mask every layer shares: causal within each packed document."""
        return DSAMasks.from_positions(positions)

    def take_indexer_losses(self) -> dict[int, torch.Tensor]:
        """Indexer loss by layer since the last call, MTP layers numbered after the main ones.

        Layers of other pipeline stages, and layers that trained no indexer, are absent.
        """
        losses = {}
        for name, attention in attention_modules(self):
            if (value := attention.indexer_loss_meter.take()) is not None:
                losses[self.layer_index(name)] = value
        return losses

    def layer_index(self, name: str) -> int:
        """Number of the layer a dotted module name belongs to."""
        kind, index = name.split(".")[:2]
        return int(index) + (len(self.config.layers) if kind == "mtp_layers" else 0)

    @property
    def attention_modules(self) -> list[tuple[str, Attention]]:
        return attention_modules(self)


def _check_parallelism(parallelism) -> None:
    """Refuse what would run and be wrong."""
    for degree, what in (
        ("tensor_parallel_degree", "tensor"),
        ("context_parallel_degree", "context"),
    ):
        if (value := getattr(parallelism, degree)) > 1:
            raise ValueError(
                f"parallelism.{degree} is {value}: sparse attention does not support {what} "
                "parallelism in this version, and the 671B configurations wait for it. Where the "
                "model fits, set it to 1 and use data_parallel_shard_degree, "
                "data_parallel_replicate_degree or expert_parallel_degree"
            )

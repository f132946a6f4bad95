"""Multi-head latent attention over the keys the lightning indexer selects.

Shape letters: B batch, S sequence, D model dim, H heads, R query latent, L key/value latent,
N no-position head dim, P rotary head dim, V value head dim, A = L + P, K selected keys,
I index heads, C index head dim.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torchtitan.models.deepseek_v3.model import Attention as TitanMLA
from torchtitan.protocols.module import Module

from npu_dsa_kernels import dsa_attention, indexer_kl_loss, lightning_indexer
from titan_npu_train.deepseek_v32.indexer import Indexer
from titan_npu_train.deepseek_v32.indexer_loss import (
    DSAMasks,
    IndexerLossMeter,
    attach_indexer_loss,
)
from titan_npu_train.deepseek_v32.options import DSAOptions

__all__ = ["DSA", "Attention", "EagerDSA", "attention_modules", "inner_attention_config"]


class DSA(Module):
    """Matrix-absorbed sparse attention: queries meet the shared latent directly (MQA).

    One call of :func:`npu_dsa_kernels.dsa_attention`; memory grows linearly with S.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        v_dim: int
        """The leading channels of a key that are its value: the latent's width."""
        backend: str | None = None
        """Backend of npu_dsa_kernels; None takes the best for the device."""

    def __init__(self, config: Config):
        super().__init__()
        self.v_dim, self.backend = config.v_dim, config.backend

    def forward(
        self,
        q_BSHA: torch.Tensor,
        kv_BSA: torch.Tensor,
        q_index_BSIC: torch.Tensor,
        k_index_BSC: torch.Tensor,
        weights_BSI: torch.Tensor,
        *,
        topk: int,
        scale: float,
        masks: DSAMasks,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns ``out_BSHL`` and per-token ``kl_BS`` (None without ``masks.kl_weight_BS``)."""
        result = dsa_attention(
            q_BSHA,
            kv_BSA,
            q_index_BSIC,
            k_index_BSC,
            weights_BSI,
            topk=topk,
            scale=scale,
            v_dim=self.v_dim,
            bounds=masks.bounds_BS2,
            compute_kl=masks.kl_weight_BS is not None,
            backend=self.backend,
        )
        return result.out, result.kl


class EagerDSA(Module):
    """Per-head keys and values with S x S scores and a top-k mask: the published baseline.

    Same result as :class:`DSA`, from small operators and quadratic memory.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        backend: str | None = "reference"

    def __init__(self, config: Config):
        super().__init__()
        self.backend = config.backend

    def forward(
        self,
        q_BSHX: torch.Tensor,
        k_BSHX: torch.Tensor,
        v_BSHV: torch.Tensor,
        q_index_BSIC: torch.Tensor,
        k_index_BSC: torch.Tensor,
        weights_BSI: torch.Tensor,
        *,
        topk: int,
        scale: float,
        masks: DSAMasks,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns ``out_BSHV`` and per-token ``kl_BS`` (None without ``masks.kl_weight_BS``)."""
        indices_BSK, _ = lightning_indexer(
            q_index_BSIC,
            k_index_BSC,
            weights_BSI,
            topk=topk,
            bounds=masks.bounds_BS2,
            backend=self.backend,
        )
        B, S = indices_BSK.shape[:2]
        empty_BSK = indices_BSK < 0
        # Empty slots are written to a column of their own, which is cut off again.
        columns_BSK = indices_BSK.long().masked_fill(empty_BSK, S)
        seen_BSS = columns_BSK.new_zeros(B, S, S + 1, dtype=torch.bool)
        seen_BSS = seen_BSS.scatter_(-1, columns_BSK, True)[..., :S]
        scores_BHSS = torch.einsum("bshx,bthx->bhst", q_BSHX, k_BSHX).float() * scale
        p_BHSS = scores_BHSS.masked_fill(~seen_BSS.unsqueeze(1), float("-inf")).softmax(-1)
        p_BHSS = p_BHSS.masked_fill(~seen_BSS.unsqueeze(1), 0.0)  # rows without any key
        out_BSHV = torch.einsum("bhst,bthv->bshv", p_BHSS.to(v_BSHV.dtype), v_BSHV)
        if masks.kl_weight_BS is None:
            return out_BSHV, None
        with torch.no_grad():
            target_BSK = p_BHSS.sum(1).gather(-1, columns_BSK.clamp(max=S - 1))
            target_BSK = target_BSK.masked_fill(empty_BSK, 0.0)
        kl_BS = indexer_kl_loss(
            q_index_BSIC, k_index_BSC, weights_BSI, indices_BSK, target_BSK, backend=self.backend
        )
        return out_BSHV, kl_BS


def inner_attention_config(
    form: str, *, kv_lora_rank: int, backend: str | None = None
) -> DSA.Config | EagerDSA.Config:
    """Config of the inner attention that computes ``form``; None takes its default backend."""
    if form == "absorbed":
        return DSA.Config(v_dim=kv_lora_rank, backend=backend)
    return EagerDSA.Config() if backend is None else EagerDSA.Config(backend=backend)


class Attention(TitanMLA):
    """torchtitan's DeepSeek-V3 attention with an indexer and sparse attention.

    ``form`` selects between the two formulations of the same function: ``"absorbed"`` (the key
    up-projection moves into the query and the value up-projection behind the attention) and
    ``"unabsorbed"`` (per-head keys and values; the published baseline).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TitanMLA.Config):
        indexer: Indexer.Config
        form: Literal["absorbed", "unabsorbed"] = "absorbed"

        def __post_init__(self) -> None:
            if self.q_lora_rank <= 0:
                raise ValueError(
                    "DeepSeek-V3.2's indexer reads the query latent: q_lora_rank must be positive, "
                    f"got {self.q_lora_rank}"
                )
            if self.form not in ("absorbed", "unabsorbed"):
                raise ValueError(
                    f"attention form must be 'absorbed' or 'unabsorbed', got {self.form!r}"
                )

        def apply_options(self, options: DSAOptions) -> None:
            """Change what ``options`` name, in place."""
            if options.topk is not None:
                self.indexer.topk = options.topk
            if options.form is not None and options.form != self.form:
                self.form = options.form
                self.inner_attention = inner_attention_config(
                    options.form, kv_lora_rank=self.kv_lora_rank, backend=options.backend
                )
            elif options.backend is not None:
                assert isinstance(self.inner_attention, DSA.Config | EagerDSA.Config)
                self.inner_attention.backend = options.backend

    def __init__(self, config: Config):
        super().__init__(config)
        self.form = config.form
        self.indexer = config.indexer.build()
        self.indexer_loss_meter = IndexerLossMeter()

    def forward(
        self,
        x: torch.Tensor,
        attention_masks: DSAMasks | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention over ``x`` [B, S, D]; same shape out.

        Without ``attention_masks``, the mask follows from ``positions`` (causal within each
        document) and the indexer is not trained.
        """
        if attention_masks is None:
            if positions is None:
                positions = torch.arange(x.size(1), device=x.device).expand(x.shape[:2])
            attention_masks = DSAMasks.from_positions(positions)
        trains_indexer = torch.is_grad_enabled() and attention_masks.kl_weight_BS is not None
        query, key_value, index = self.prolog(x, positions, trains_indexer)
        out_BSHX, kl_BS = self.inner_attention(
            *query,
            *key_value,
            *index,
            topk=self.indexer.topk,
            scale=self.softmax_scale,
            masks=attention_masks,
        )
        out = self.epilog(out_BSHX)
        if trains_indexer:
            loss = (kl_BS * attention_masks.kl_weight_BS).sum()
            out = attach_indexer_loss(out, loss, self.indexer_loss_meter)
        return out

    def prolog(self, x: torch.Tensor, positions: torch.Tensor | None, trains_indexer: bool):
        """Everything before the attention: its query, its keys and values, and the index."""
        q_latent_BSR = self.q_norm(self.wq_a(x))
        q_BSHX = self.wq_b(q_latent_BSR).unflatten(-1, (-1, self.qk_head_dim))
        q_nope_BSHN, q_rope_BSHP = q_BSHX.split(
            [self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1
        )
        latent_BSL, k_rope_BSP = self.wkv_a(x).split(
            [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1
        )
        latent_BSL = self.kv_norm(latent_BSL)
        q_rope_BSHP, k_rope_BS1P = self.rope(q_rope_BSHP, k_rope_BSP.unsqueeze(2), positions)

        with torch.set_grad_enabled(trains_indexer):
            index = self.indexer(x.detach(), q_latent_BSR.detach(), positions)

        if self.form == "absorbed":
            w_uk_HNL, _ = self._up_projections()
            q_latent_BSHL = torch.einsum("bshn,hnl->bshl", q_nope_BSHN, w_uk_HNL)
            q_BSHA = torch.cat([q_latent_BSHL, q_rope_BSHP], dim=-1)
            kv_BSA = torch.cat([latent_BSL, k_rope_BS1P.squeeze(2)], dim=-1)
            return (q_BSHA,), (kv_BSA,), index

        kv_BSHX = self.wkv_b(latent_BSL).unflatten(
            -1, (-1, self.qk_nope_head_dim + self.v_head_dim)
        )
        k_nope_BSHN, v_BSHV = kv_BSHX.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        k_rope_BSHP = k_rope_BS1P.expand(-1, -1, k_nope_BSHN.size(2), -1)
        q_BSHX = torch.cat([q_nope_BSHN, q_rope_BSHP], dim=-1)
        k_BSHX = torch.cat([k_nope_BSHN, k_rope_BSHP], dim=-1)
        return (q_BSHX,), (k_BSHX, v_BSHV), index

    def epilog(self, out: torch.Tensor) -> torch.Tensor:
        """Everything after the attention, from its per-head output to [B, S, D]."""
        if self.form == "absorbed":
            _, w_uv_HVL = self._up_projections()
            out = torch.einsum("bshl,hvl->bshv", out, w_uv_HVL)
        return self.wo(out.flatten(2))

    def _up_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value up-projections of each head, from the one weight that holds both."""
        w_HXL = self.wkv_b.weight.unflatten(0, (-1, self.qk_nope_head_dim + self.v_head_dim))
        return w_HXL.split([self.qk_nope_head_dim, self.v_head_dim], dim=1)


def attention_modules(model: nn.Module) -> list[tuple[str, Attention]]:
    """The model's attention modules with their names, main layers first."""
    return [(name, m) for name, m in model.named_modules() if isinstance(m, Attention)]

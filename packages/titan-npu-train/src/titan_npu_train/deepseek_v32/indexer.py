"""The lightning indexer's projections (DeepSeek-V3.2, section 2.1).

Shape letters: B batch, S sequence, D model dim, R query latent, I index heads, C index head dim.
"""

from dataclasses import dataclass

import torch
from torchtitan.models.common import Linear
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.protocols.module import Module

from npu_dsa_kernels import hadamard
from titan_npu_train.deepseek_v32.modules import Float32LayerNorm, Float32Linear

__all__ = ["Indexer"]


class Indexer(Module):
    """Projects a token to index queries, one index key and per-head weights.

    The rotary embedding covers the first ``rope.dim`` channels and pairs channel ``i`` with
    ``i + rope.dim / 2`` (half-split), unlike the main attention's adjacent pairs. Both queries and
    keys then go through an orthonormal Hadamard transform, which leaves scores unchanged in exact
    arithmetic and spreads outliers over channels before low-precision scoring.

    ``weights_proj`` and ``k_norm`` are computed in fp32 and kept in fp32 by FSDP (see
    :func:`full_precision_modules`).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        n_heads: int
        head_dim: int
        topk: int
        wq_b: Linear.Config
        wk: Linear.Config
        k_norm: Float32LayerNorm.Config
        weights_proj: Float32Linear.Config
        rope: CosSinRoPE.Config

        def __post_init__(self) -> None:
            if self.topk < 1:
                raise ValueError(f"indexer topk must be at least 1, got {self.topk}")
            if self.head_dim & (self.head_dim - 1):
                raise ValueError(
                    f"indexer head_dim must be a power of two (Hadamard), got {self.head_dim}"
                )
            if self.rope.dim > self.head_dim:
                raise ValueError(
                    f"indexer rope dim ({self.rope.dim}) is larger than head_dim ({self.head_dim})"
                )

    def __init__(self, config: Config):
        super().__init__()
        self.n_heads, self.head_dim, self.topk = config.n_heads, config.head_dim, config.topk
        self.rope_dim = config.rope.dim
        self.weights_scale = (config.n_heads * config.head_dim) ** -0.5
        self.wq_b = config.wq_b.build()
        self.wk = config.wk.build()
        self.k_norm = config.k_norm.build()
        self.weights_proj = config.weights_proj.build()
        self.rope = config.rope.build()

    def forward(
        self, x_BSD: torch.Tensor, q_latent_BSR: torch.Tensor, positions_BS: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns ``q_index_BSIC``, ``k_index_BSC`` (activation dtype) and ``weights_BSI`` (fp32).

        The caller detaches ``x_BSD`` and ``q_latent_BSR``: the indexer gives the backbone no
        gradient.
        """
        q_BSIC = self.wq_b(q_latent_BSR).unflatten(-1, (self.n_heads, self.head_dim))
        k_BS1C = self.k_norm(self.wk(x_BSD)).unsqueeze(2)
        split = [self.rope_dim, self.head_dim - self.rope_dim]
        q_rope, q_pass = q_BSIC.split(split, dim=-1)
        k_rope, k_pass = k_BS1C.split(split, dim=-1)
        q_rope, k_rope = self.rope(q_rope, k_rope, positions_BS)
        q_BSIC = hadamard(torch.cat([q_rope, q_pass], dim=-1))
        k_BSC = hadamard(torch.cat([k_rope, k_pass], dim=-1)).squeeze(2)
        weights_BSI = self.weights_proj(x_BSD) * self.weights_scale
        return q_BSIC, k_BSC, weights_BSI

    def full_precision_modules(self) -> list[Module]:
        """The modules FSDP must not cast: they learn from small, fp32 score gradients."""
        return [self.k_norm, self.weights_proj]

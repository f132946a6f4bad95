"""The lightning indexer's projections (DeepSeek-V3.2, section 2.1).

Shape letters: B batch, S sequence, Q queries (those of S that are this tensor-parallel rank's), D
model dim, R query latent, I index heads, C index head dim.
"""

from dataclasses import dataclass

import torch
from torchtitan.distributed import ParallelDims
from torchtitan.models.common import Linear
from torchtitan.models.common.rope import CosSinRoPE, RoPE
from torchtitan.protocols.module import Module

from npu_dsa_kernels import QuerySplit, hadamard
from titan_npu_train.deepseek_v32.local_region import LocalRegion
from titan_npu_train.deepseek_v32.modules import Float32LayerNorm, Float32Linear
from titan_npu_train.deepseek_v32.sharding import QUERY_ROWS, WHOLE, WHOLE_PENDING

__all__ = ["Indexer", "rotate"]


class Indexer(Module):
    """Projects a token to index queries, one index key and per-head weights.

    The rotary embedding covers the first ``rope.dim`` channels and pairs channel ``i`` with
    ``i + rope.dim / 2`` (half-split), unlike the main attention's adjacent pairs. Both queries and
    keys then go through an orthonormal Hadamard transform, which leaves scores unchanged in exact
    arithmetic and spreads outliers over channels before low-precision scoring.

    Under tensor parallelism each rank projects the queries of its :class:`QuerySplit` and the keys
    of all tokens; parameters are whole, and their gradients partial sums.

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

    _region: LocalRegion | None = None
    _query_split: QuerySplit | None = None

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

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        super().parallelize(parallel_dims)
        self._region = LocalRegion(parallel_dims)
        if parallel_dims.tp_enabled:
            self._query_split = QuerySplit(parallel_dims.get_mesh("tp").get_group())

    def forward(
        self, x_BSD: torch.Tensor, q_latent_BSR: torch.Tensor, positions_BS: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns ``q_index_BQIC``, ``k_index_BSC`` (activation dtype) and ``weights_BQI`` (fp32).

        The caller detaches ``x_BSD`` and ``q_latent_BSR``: the indexer gives the backbone no
        gradient. ``positions_BS`` is a local tensor, and so are the results.
        """
        q_BQX = self._of_queries(self.wq_b(self._queries(q_latent_BSR)))
        k_BSC = self._of_keys(self.k_norm(self.wk(x_BSD)))
        weights_BQI = self._of_queries(self.weights_proj(self._queries(x_BSD)))
        positions_BQ = positions_BS
        if self._query_split is not None:
            positions_BQ = self._query_split.take(positions_BS)
        q_BQIC = self._rotate(q_BQX.unflatten(-1, (self.n_heads, self.head_dim)), positions_BQ)
        k_BS1C = self._rotate(k_BSC.unsqueeze(2), positions_BS)
        return hadamard(q_BQIC), hadamard(k_BS1C).squeeze(2), weights_BQI * self.weights_scale

    def _rotate(self, x_BSIC: torch.Tensor, positions_BS: torch.Tensor) -> torch.Tensor:
        rope, rest = x_BSIC.split([self.rope_dim, self.head_dim - self.rope_dim], dim=-1)
        return torch.cat([rotate(self.rope, rope, positions_BS), rest], dim=-1)

    def _queries(self, x_BSX: torch.Tensor) -> torch.Tensor:
        if self._query_split is None:
            return x_BSX
        assert self._region is not None
        rows_BQX = self._query_split.take(self._region.enter(x_BSX, WHOLE))
        return self._region.leave(rows_BQX, QUERY_ROWS)

    def _of_queries(self, x_BQX: torch.Tensor) -> torch.Tensor:
        if self._region is None:
            return x_BQX
        return self._region.enter(x_BQX, WHOLE if self._query_split is None else QUERY_ROWS)

    def _of_keys(self, x_BSX: torch.Tensor) -> torch.Tensor:
        return x_BSX if self._region is None else self._region.enter(x_BSX, WHOLE, WHOLE_PENDING)

    def full_precision_modules(self) -> list[Module]:
        """The modules FSDP must not cast: they learn from small, fp32 score gradients."""
        return [self.k_norm, self.weights_proj]


def rotate(rope: RoPE, x_BSHP: torch.Tensor, positions_BS: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of one tensor; torchtitan's own call wants two with the same positions."""
    return rope(x_BSHP, x_BSHP[:, :, :1], positions_BS)[0]

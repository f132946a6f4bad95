"""Multi-head latent attention over the keys the lightning indexer selects.

Shape letters: B batch, S sequence (this rank's part of it), T keys (of the whole sequence), Q
queries whose index is this tensor-parallel rank's work, D model dim, H heads (this rank's), R query
latent, L key/value latent, N no-position head dim, P rotary head dim, X = N + P, V value head dim,
A = L + P, K selected keys, I index heads, C index head dim.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torchtitan.distributed import ParallelDims
from torchtitan.models.deepseek_v3.model import Attention as TitanMLA
from torchtitan.protocols.module import Module

from npu_dsa_kernels import (
    QuerySplit,
    dense_attention,
    dense_indexer_kl_loss,
    dsa_attention,
    indexer_kl_loss,
    lightning_indexer,
)
from npu_dsa_kernels.backends import resolve
from titan_custom_cp import DSAContextParallelContext, current_context
from titan_npu_train.deepseek_v32.indexer import Indexer
from titan_npu_train.deepseek_v32.indexer_loss import (
    DSAMasks,
    StepSum,
    attach_indexer_loss,
)
from titan_npu_train.deepseek_v32.local_region import LocalRegion, retyped, untyped
from titan_npu_train.deepseek_v32.options import DENSE_WARMUP, DSAOptions
from titan_npu_train.deepseek_v32.sharding import (
    HEAD_WEIGHT,
    HEAD_WEIGHT_GRADIENT,
    HEADS,
    WHOLE,
    WHOLE_PENDING,
)
from titan_npu_train.recall import found_keys, sampled_queries

__all__ = [
    "DSA",
    "Attention",
    "DenseAttention",
    "EagerDSA",
    "attention_modules",
    "inner_attention_config",
]


class InnerAttention(Module):
    """What an attention does with local tensors: the keys of the whole sequence are there."""

    query_split: QuerySplit | None = None
    """How tensor-parallel ranks share the indexer's queries; None: this rank has all heads."""

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        super().parallelize(parallel_dims)
        if parallel_dims.tp_enabled:
            self.query_split = QuerySplit(parallel_dims.get_mesh("tp").get_group())


class DSA(InnerAttention):
    """Matrix-absorbed sparse attention: queries meet the shared latent directly (MQA).

    One call of :func:`npu_dsa_kernels.dsa_attention`; memory grows linearly with S.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        v_dim: int
        """The leading channels of a key that are its value: the latent's width."""
        backend: str | None = None
        """Backend of npu_dsa_kernels; None takes the best for the device."""
        kl_backend: str | None = None
        """Backend of the indexer's loss; None takes that of the attention."""

    def __init__(self, config: Config):
        super().__init__()
        self.v_dim, self.backend, self.kl_backend = (
            config.v_dim,
            config.backend,
            config.kl_backend,
        )

    def forward(
        self,
        q_BSHA: torch.Tensor,
        kv_BTA: torch.Tensor,
        q_index_BQIC: torch.Tensor,
        k_index_BTC: torch.Tensor,
        weights_BQI: torch.Tensor,
        *,
        topk: int,
        scale: float,
        masks: DSAMasks,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns ``out_BSHL`` and the sum of the KL (None without ``masks.kl_mask_BS``)."""
        if resolve(self.backend, q_BSHA.device) == "npu":
            # torch_npu's operators take one dtype.
            weights_BQI = weights_BQI.to(q_index_BQIC.dtype)
        result = dsa_attention(
            q_BSHA,
            kv_BTA,
            q_index_BQIC,
            k_index_BTC,
            weights_BQI,
            topk=topk,
            scale=scale,
            v_dim=self.v_dim,
            bounds=masks.bounds_BS2,
            query_split=self.query_split,
            compute_kl=masks.trains_indexer,
            kl_mask=masks.kl_mask_BS,
            kl_backend=self.kl_backend,
            kl_reduction="sum",
            backend=self.backend,
        )
        return result.out, result.kl


class EagerDSA(InnerAttention):
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
        k_BTHX: torch.Tensor,
        v_BTHV: torch.Tensor,
        q_index_BQIC: torch.Tensor,
        k_index_BTC: torch.Tensor,
        weights_BQI: torch.Tensor,
        *,
        topk: int,
        scale: float,
        masks: DSAMasks,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns ``out_BSHV`` and the sum of the KL (None without ``masks.kl_mask_BS``)."""
        split, T = self.query_split, k_index_BTC.size(1)
        bounds_BQ2 = masks.bounds_BS2 if split is None else split.take(masks.bounds_BS2)
        row_indices_BQK, _ = lightning_indexer(
            q_index_BQIC,
            k_index_BTC,
            weights_BQI,
            topk=topk,
            bounds=bounds_BQ2,
            backend=self.backend,
        )
        indices_BSK = row_indices_BQK if split is None else split.gather(row_indices_BQK)
        empty_BSK = indices_BSK < 0
        # Empty slots are written to a column of their own, which is cut off again.
        columns_BSK = indices_BSK.long().masked_fill(empty_BSK, T)
        seen_BST = columns_BSK.new_zeros(*indices_BSK.shape[:2], T + 1, dtype=torch.bool)
        seen_BST = seen_BST.scatter_(-1, columns_BSK, True)[..., :T]
        scores_BHST = torch.einsum("bshx,bthx->bhst", q_BSHX, k_BTHX).float() * scale
        p_BHST = scores_BHST.masked_fill(~seen_BST.unsqueeze(1), float("-inf")).softmax(-1)
        p_BHST = p_BHST.masked_fill(~seen_BST.unsqueeze(1), 0.0)  # rows without any key
        out_BSHV = torch.einsum("bhst,bthv->bshv", p_BHST.to(v_BTHV.dtype), v_BTHV)
        if masks.kl_mask_BS is None:
            return out_BSHV, None
        counts_BQ = masks.kl_mask_BS
        with torch.no_grad():
            target_BQK = p_BHST.sum(1).gather(-1, columns_BSK.clamp(max=T - 1))
            target_BQK = target_BQK.masked_fill(empty_BSK, 0.0)
            if split is not None:
                target_BQK, counts_BQ = split.sum_rows(target_BQK), split.take(counts_BQ)
        kl_BQ = indexer_kl_loss(
            q_index_BQIC,
            k_index_BTC,
            weights_BQI,
            row_indices_BQK.masked_fill(~counts_BQ.unsqueeze(-1), -1),
            target_BQK,
            backend=self.backend,
        )
        return out_BSHV, kl_BQ.sum()


class DenseAttention(InnerAttention):
    """Per-head keys and values, every visible key: attention of the dense warm-up stage.

    The indexer's loss compares it with the same attention, over every visible key too. On logged
    steps ``found_keys`` sums :func:`titan_npu_train.recall.found_keys` over a sample of queries.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        backend: str | None = None
        """Backend of npu_dsa_kernels; None takes the best for the device."""
        kl_backend: str | None = None
        """Backend of the indexer's loss; None takes that of the attention."""

    def __init__(self, config: Config):
        super().__init__()
        self.backend = config.backend
        self.kl_backend = config.kl_backend or config.backend
        self.found_keys = StepSum()

    def forward(
        self,
        q_BSHX: torch.Tensor,
        k_BTHX: torch.Tensor,
        v_BTHV: torch.Tensor,
        q_index_BQIC: torch.Tensor,
        k_index_BTC: torch.Tensor,
        weights_BQI: torch.Tensor,
        *,
        topk: int,
        scale: float,
        masks: DSAMasks,
        absorbed: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns ``out_BSHV`` and the sum of the KL (None without ``masks.kl_mask_BS``).

        ``absorbed`` is the same attention over the latent, ``q_BSHA`` and ``kv_BTA``. Where heads
        are split over ranks the loss, which needs all heads of a query, takes that one: queries
        are exchanged, and keys are on every rank already.
        """
        kl = None
        if masks.kl_mask_BS is not None:
            # Before the attention: what recomputes a checkpointed block can end with the loss.
            bounds_BQ2, counts_BQ = masks.bounds_BS2, masks.kl_mask_BS
            q, keys = q_BSHX, k_BTHX
            if (split := self.query_split) is not None:
                assert absorbed is not None
                q, keys = split.rows_of_all_heads(absorbed[0]), absorbed[1]
                bounds_BQ2, counts_BQ = split.take(bounds_BQ2), split.take(counts_BQ)
            if resolve(self.kl_backend, q.device) == "npu":
                # torch_npu's operators take one dtype.
                weights_BQI = weights_BQI.to(q_index_BQIC.dtype)
            kl = dense_indexer_kl_loss(
                q_index_BQIC,
                k_index_BTC,
                weights_BQI,
                q,
                keys,
                scale=scale,
                # Queries that do not count see nothing.
                bounds=bounds_BQ2.masked_fill(~counts_BQ.unsqueeze(-1), 0),
                reduction="sum",
                backend=self.kl_backend,
            )
            if masks.measures_recall:
                rows = sampled_queries(bounds_BQ2, keys.size(1))
                found = found_keys(
                    *(q[:, rows], keys, q_index_BQIC[:, rows], k_index_BTC, weights_BQI[:, rows]),
                    bounds_BQ2=bounds_BQ2[:, rows],
                    counts_BQ=counts_BQ[:, rows],
                    topk=topk,
                    scale=scale,
                )
                self.found_keys.record(masks.microbatch, found)
        out_BSHV, _ = dense_attention(
            q_BSHX, k_BTHX, v_BTHV, scale=scale, bounds=masks.bounds_BS2, backend=self.backend
        )
        return out_BSHV, kl


def inner_attention_config(
    form: str, *, kv_lora_rank: int, backend: str | None = None, kl_backend: str | None = None
) -> DSA.Config | EagerDSA.Config:
    """Config of the inner attention that computes ``form``; None takes its default backend."""
    if form == "absorbed":
        return DSA.Config(v_dim=kv_lora_rank, backend=backend, kl_backend=kl_backend)
    return EagerDSA.Config() if backend is None else EagerDSA.Config(backend=backend)


class Attention(TitanMLA):
    """torchtitan's DeepSeek-V3 attention with an indexer and sparse attention.

    ``form`` selects between the two formulations of the same function: ``"absorbed"`` (the key
    up-projection moves into the query and the value up-projection behind the attention) and
    ``"unabsorbed"`` (per-head keys and values; the published baseline).

    Parallel: heads are split over tensor-parallel ranks, the indexer's queries too (see
    :class:`npu_dsa_kernels.QuerySplit`). Context-parallel ranks have their part of the sequence and
    gather all keys through the open :class:`titan_custom_cp.DSAContextParallelContext`: one
    all-gather of latent, rope and index keys together, one reduce-scatter back.
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
            if options.stage == DENSE_WARMUP:
                inner = self.inner_attention
                own = inner.backend if isinstance(inner, DSA.Config) else None
                self.form = "unabsorbed"
                self.inner_attention = DenseAttention.Config(
                    backend=options.backend or own, kl_backend=options.kl_backend
                )
                return
            if options.form is not None and options.form != self.form:
                self.form = options.form
                self.inner_attention = inner_attention_config(
                    options.form, kv_lora_rank=self.kv_lora_rank, backend=options.backend
                )
            inner = self.inner_attention
            if options.backend is not None:
                assert isinstance(inner, DSA.Config | EagerDSA.Config)
                inner.backend = options.backend
            if options.kl_backend is not None:
                if not isinstance(inner, DSA.Config):
                    raise ValueError(
                        f"dsa.kl_backend is {options.kl_backend!r}, but form {self.form!r} has "
                        "one backend for all: leave it out"
                    )
                inner.kl_backend = options.kl_backend

    _region: LocalRegion | None = None
    _context_parallel: bool = False

    def __init__(self, config: Config):
        super().__init__(config)
        self.form = config.form
        self.indexer = config.indexer.build()
        self.indexer_loss_meter = StepSum()
        self.dense = isinstance(config.inner_attention, DenseAttention.Config)
        """Whether it attends to every visible key: the dense warm-up stage, of frozen weights."""
        self._loss: torch.Tensor | None = None

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        super().parallelize(parallel_dims)
        self._region = LocalRegion(parallel_dims)
        self._context_parallel = parallel_dims.cp_enabled

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
        trains_indexer = torch.is_grad_enabled() and attention_masks.trains_indexer
        with untyped():
            out = self._local(x, attention_masks, trains_indexer)
        return self.wo(retyped(out, HEADS))

    def _local(self, x: torch.Tensor, masks: DSAMasks, trains_indexer: bool) -> torch.Tensor:
        """The heads' output [B, S, H * V], ready for the output projection."""
        q_BSHX, kv_BSA, index = self.prolog(x, masks.positions_BS, trains_indexer)
        q_index_BQIC, k_index_BSC, weights_BQI = index
        if self._context_parallel:
            kv_BSA, k_index_BSC = _open_context().gather_keys(kv_BSA, k_index_BSC)
        key_value = (kv_BSA,) if self.form == "absorbed" else self._expand(kv_BSA)
        absorbed = {}
        if self.dense and trains_indexer and self.inner_attention.query_split is not None:
            q_nope_BSHN, q_rope_BSHP = q_BSHX.split(
                [self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1
            )
            q_BSHA = torch.cat([self._absorb(q_nope_BSHN), q_rope_BSHP], dim=-1)
            absorbed["absorbed"] = (q_BSHA, kv_BSA)
        out_BSHX, kl = self.inner_attention(
            q_BSHX,
            *key_value,
            q_index_BQIC,
            k_index_BSC,
            weights_BQI,
            topk=self.indexer.topk,
            scale=self.softmax_scale,
            masks=masks,
            **absorbed,
        )
        out_BSY = self.epilog(out_BSHX)
        if trains_indexer:
            loss = kl * masks.kl_scale
            self.indexer_loss_meter.record(masks.microbatch, loss.detach())
            if self.dense:
                self._loss = loss
            else:
                out_BSY = attach_indexer_loss(out_BSY, loss)
        return self._leave(out_BSY, HEADS)

    def take_loss(self) -> torch.Tensor | None:
        """In the dense warm-up stage, the last forward's indexer loss, for the block to attach."""
        loss, self._loss = self._loss, None
        return loss

    def prolog(self, x: torch.Tensor, positions_BS: torch.Tensor, trains_indexer: bool):
        """Everything before the attention: its query, its keys and the index, all local."""
        q_latent_BSR = self.q_norm(self.wq_a(x))
        q_BSY = self._enter(self.wq_b(q_latent_BSR), HEADS)
        latent_BSL, k_rope_BSP = self.wkv_a(x).split(
            [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1
        )
        latent_BSL = self._enter(self.kv_norm(latent_BSL), WHOLE, WHOLE_PENDING)
        k_rope_BSP = self._enter(k_rope_BSP, WHOLE, WHOLE_PENDING)
        with torch.set_grad_enabled(trains_indexer):
            index = self.indexer(x.detach(), q_latent_BSR.detach(), positions_BS)

        q_BSHX = q_BSY.unflatten(-1, (-1, self.qk_head_dim))
        q_nope_BSHN, q_rope_BSHP = q_BSHX.split(
            [self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1
        )
        q_rope_BSHP, k_rope_BS1P = self.rope(q_rope_BSHP, k_rope_BSP.unsqueeze(2), positions_BS)
        if self.form == "absorbed":
            q_nope_BSHN = self._absorb(q_nope_BSHN)
        q_BSHX = torch.cat([q_nope_BSHN, q_rope_BSHP], dim=-1)
        kv_BSA = torch.cat([latent_BSL, k_rope_BS1P.squeeze(2)], dim=-1)
        return q_BSHX, kv_BSA, index

    def _absorb(self, q_nope_BSHN: torch.Tensor) -> torch.Tensor:
        """Queries that meet the latent as these meet the keys of each head: [B, S, H, L]."""
        w_uk_HNL, _ = self._up_projections()
        return torch.einsum("bshn,hnl->bshl", q_nope_BSHN, w_uk_HNL)

    def _expand(self, kv_BTA: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of each head."""
        latent_BTL, k_rope_BTP = kv_BTA.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        w_uk_HNL, w_uv_HVL = self._up_projections()
        k_nope_BTHN = torch.einsum("btl,hnl->bthn", latent_BTL, w_uk_HNL)
        k_rope_BTHP = k_rope_BTP.unsqueeze(2).expand(-1, -1, k_nope_BTHN.size(2), -1)
        k_BTHX = torch.cat([k_nope_BTHN, k_rope_BTHP], dim=-1)
        return k_BTHX, torch.einsum("btl,hvl->bthv", latent_BTL, w_uv_HVL)

    def epilog(self, out: torch.Tensor) -> torch.Tensor:
        """Everything local after the attention, from its per-head output to [B, S, H * V]."""
        if self.form == "absorbed":
            _, w_uv_HVL = self._up_projections()
            out = torch.einsum("bshl,hvl->bshv", out, w_uv_HVL)
        return out.flatten(2)

    def _up_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value up-projections of each head, from the one weight that holds both."""
        w_YL = self._enter(self.wkv_b.weight, HEAD_WEIGHT, HEAD_WEIGHT_GRADIENT)
        w_HYL = w_YL.unflatten(0, (-1, self.qk_nope_head_dim + self.v_head_dim))
        w_uk_HNL, w_uv_HVL = w_HYL.split([self.qk_nope_head_dim, self.v_head_dim], dim=1)
        return w_uk_HNL, w_uv_HVL

    def _enter(self, x, layout, gradient=None) -> torch.Tensor:
        return x if self._region is None else self._region.enter(x, layout, gradient)

    def _leave(self, x: torch.Tensor, layout) -> torch.Tensor:
        return x if self._region is None else self._region.leave(x, layout)


def _open_context() -> DSAContextParallelContext:
    context = current_context()
    if isinstance(context, DSAContextParallelContext):
        return context
    found = "none is open" if context is None else f"the open one is a {type(context).__name__}"
    raise RuntimeError(
        "sparse attention under context parallelism runs inside of a "
        f"titan_custom_cp.DSAContextParallelContext, but {found}; titan_npu_train's Trainer opens "
        "one around each step"
    )


def attention_modules(model: nn.Module) -> list[tuple[str, Attention]]:
    """The model's attention modules with their names, main layers first."""
    return [(name, m) for name, m in model.named_modules() if isinstance(m, Attention)]

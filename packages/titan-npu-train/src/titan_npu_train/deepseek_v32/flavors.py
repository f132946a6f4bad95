"""The sizes DeepSeek-V3.2 comes in, and how a size becomes a model config."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import nn
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import make_ffn_config
from torchtitan.models.common.moe import RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.param_init import depth_scaled_std
from torchtitan.models.common.rope import CosSinRoPE

from titan_npu_train.deepseek_v32.attention import Attention, inner_attention_config
from titan_npu_train.deepseek_v32.blocks import MTPBlock, TransformerBlock
from titan_npu_train.deepseek_v32.indexer import Indexer
from titan_npu_train.deepseek_v32.model import DeepSeekV32Model
from titan_npu_train.deepseek_v32.modules import Float32LayerNorm, Float32Linear, GroupedExperts
from titan_npu_train.deepseek_v32.moe import MoE
from titan_npu_train.expert_dispatch import ExpertDispatcher

__all__ = ["FLAVORS", "Flavor", "model_config"]

NORM_EPS = 1e-6
Form = Literal["absorbed", "unabsorbed"]


@dataclass(frozen=True, kw_only=True)
class Flavor:
    """Dimensions of a DeepSeek-V3.2; the defaults are the 671B model's.

    ``max_seq_len`` bounds the sequence length; YaRN's frequencies do not depend on it.
    """

    vocab_size: int = 129280
    dim: int = 7168
    n_layers: int = 61
    n_dense_layers: int = 3
    n_mtp_layers: int = 1
    n_heads: int = 128
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    dense_hidden_dim: int = 18432
    moe_hidden_dim: int = 2048
    num_experts: int = 256
    num_shared_experts: int = 1
    experts_per_token: int = 8
    num_expert_groups: int | None = 8
    num_limited_groups: int | None = 4
    route_scale: float = 2.5
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 2048
    max_seq_len: int = 163840


_BLOCKS = Flavor(
    n_layers=4,
    n_dense_layers=1,
    n_mtp_layers=0,
    num_experts=8,
    experts_per_token=8,
    num_expert_groups=None,
    num_limited_groups=None,
)
_SMALL_BLOCKS = replace(
    _BLOCKS,
    vocab_size=2048,
    dim=512,
    n_heads=8,
    q_lora_rank=192,
    kv_lora_rank=128,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    dense_hidden_dim=1344,
    moe_hidden_dim=160,
    experts_per_token=2,
    index_n_heads=4,
    index_head_dim=32,
    index_topk=512,
)

FLAVORS: dict[str, Flavor] = {
    "debugmodel": Flavor(
        vocab_size=2048,
        dim=192,
        n_layers=4,
        n_dense_layers=1,
        n_mtp_layers=0,
        n_heads=4,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        dense_hidden_dim=512,
        moe_hidden_dim=128,
        num_experts=8,
        experts_per_token=2,
        num_expert_groups=4,
        num_limited_groups=2,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=32,
    ),
    "4layers": _BLOCKS,
    "8layers": replace(_BLOCKS, n_layers=8),
    "4layers_small": _SMALL_BLOCKS,
    "8layers_small": replace(_SMALL_BLOCKS, n_layers=8),
    "671B": Flavor(),
}


def model_config(
    flavor: Flavor,
    *,
    form: Form = "absorbed",
    dsa_backend: str | None = None,
) -> DeepSeekV32Model.Config:
    """A complete model config of the given dimensions.

    Args:
        flavor: the dimensions; see :data:`FLAVORS`.
        form: how attention is computed (see :class:`.attention.Attention`).
        dsa_backend: backend of npu_dsa_kernels; None takes the best for the device.
    """
    layers = [
        TransformerBlock.Config(**_block(flavor, i, form, dsa_backend))
        for i in range(flavor.n_layers)
    ]
    mtp_layers = [
        MTPBlock.Config(
            **_block(flavor, flavor.n_layers + i, form, dsa_backend),
            enorm=_norm(flavor.dim),
            hnorm=_norm(flavor.dim),
            eh_proj=_linear(2 * flavor.dim, flavor.dim),
            mtp_norm=_norm(flavor.dim),
        )
        for i in range(flavor.n_mtp_layers)
    ]
    head_std = flavor.dim**-0.5
    return DeepSeekV32Model.Config(
        dim=flavor.dim,
        vocab_size=flavor.vocab_size,
        tok_embeddings=Embedding.Config(
            num_embeddings=flavor.vocab_size,
            embedding_dim=flavor.dim,
            # torchtitan's 1.0 lets the embedding drown what the first layers add to it.
            param_init={"weight": partial(nn.init.normal_, std=0.1)},
        ),
        norm=_norm(flavor.dim),
        lm_head=Linear.Config(
            in_features=flavor.dim,
            out_features=flavor.vocab_size,
            param_init={
                "weight": partial(
                    nn.init.trunc_normal_, std=head_std, a=-3 * head_std, b=3 * head_std
                )
            },
        ),
        layers=layers,
        mtp_layers=mtp_layers,
    )


def _init(std: float = 0.02) -> dict[str, Callable]:
    return {"weight": partial(nn.init.trunc_normal_, std=std), "bias": nn.init.zeros_}


def _linear(in_features: int, out_features: int, std: float = 0.02) -> Linear.Config:
    return Linear.Config(in_features=in_features, out_features=out_features, param_init=_init(std))


def _fp32_linear(in_features: int, out_features: int, std: float = 0.02) -> Float32Linear.Config:
    return Float32Linear.Config(
        in_features=in_features, out_features=out_features, param_init=_init(std)
    )


def _norm(dim: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=dim, eps=NORM_EPS, param_init={"weight": nn.init.ones_})


def _rope(flavor: Flavor) -> dict[str, Any]:
    # YaRN is on at every sequence length; its attention factor is part of the softmax scale.
    return {
        "dim": flavor.qk_rope_head_dim,
        "max_seq_len": flavor.max_seq_len,
        "theta": 10000.0,
        "scaling": "yarn",
        "rope_factor": 40.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_seq_len": 4096,
    }


def _block(flavor: Flavor, layer_id: int, form: Form, dsa_backend: str | None) -> dict:
    dense = layer_id < flavor.n_dense_layers
    return {
        "attention": _attention(flavor, layer_id, form, dsa_backend),
        "attention_norm": _norm(flavor.dim),
        "ffn_norm": _norm(flavor.dim),
        "feed_forward": _feed_forward(flavor, layer_id, flavor.dense_hidden_dim) if dense else None,
        "moe": None if dense else _moe(flavor, layer_id),
    }


def _feed_forward(flavor: Flavor, layer_id: int, hidden_dim: int):
    return make_ffn_config(
        dim=flavor.dim,
        hidden_dim=hidden_dim,
        w1_param_init=_init(),
        w2w3_param_init=_init(depth_scaled_std(0.02, layer_id)),
    )


def _moe(flavor: Flavor, layer_id: int):
    deep = depth_scaled_std(0.02, layer_id)
    return MoE.Config(
        num_experts=flavor.num_experts,
        router=TokenChoiceTopKRouter.Config(
            num_experts=flavor.num_experts,
            gate=_fp32_linear(flavor.dim, flavor.num_experts, deep),
            top_k=flavor.experts_per_token,
            score_func="sigmoid",
            route_norm=True,
            route_scale=flavor.route_scale,
            num_expert_groups=flavor.num_expert_groups,
            num_limited_groups=flavor.num_limited_groups,
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(
                dim=flavor.dim,
                hidden_dim=flavor.moe_hidden_dim,
                num_experts=flavor.num_experts,
                param_init={
                    "w1_EFD": partial(nn.init.trunc_normal_, std=0.02),
                    "w2_EDF": partial(nn.init.trunc_normal_, std=deep),
                    "w3_EFD": partial(nn.init.trunc_normal_, std=deep),
                },
            ),
            token_dispatcher=ExpertDispatcher.Config(
                num_experts=flavor.num_experts, top_k=flavor.experts_per_token
            ),
        ),
        shared_experts=_feed_forward(
            flavor, layer_id, flavor.moe_hidden_dim * flavor.num_shared_experts
        ),
    )


def _attention(
    flavor: Flavor, layer_id: int, form: Form, dsa_backend: str | None
) -> Attention.Config:
    f = flavor
    qk_head_dim = f.qk_nope_head_dim + f.qk_rope_head_dim
    return Attention.Config(
        form=form,
        dim=f.dim,
        n_heads=f.n_heads,
        q_lora_rank=f.q_lora_rank,
        kv_lora_rank=f.kv_lora_rank,
        qk_nope_head_dim=f.qk_nope_head_dim,
        qk_rope_head_dim=f.qk_rope_head_dim,
        v_head_dim=f.v_head_dim,
        mscale=1.0,
        wq_a=_linear(f.dim, f.q_lora_rank),
        wq_b=_linear(f.q_lora_rank, f.n_heads * qk_head_dim),
        q_norm=_norm(f.q_lora_rank),
        wkv_a=_linear(f.dim, f.kv_lora_rank + f.qk_rope_head_dim),
        kv_norm=_norm(f.kv_lora_rank),
        wkv_b=_linear(f.kv_lora_rank, f.n_heads * (f.qk_nope_head_dim + f.v_head_dim)),
        wo=_linear(f.n_heads * f.v_head_dim, f.dim, depth_scaled_std(0.02, layer_id)),
        rope=ComplexRoPE.Config(**_rope(f)),
        inner_attention=inner_attention_config(
            form, kv_lora_rank=f.kv_lora_rank, backend=dsa_backend
        ),
        indexer=Indexer.Config(
            n_heads=f.index_n_heads,
            head_dim=f.index_head_dim,
            topk=f.index_topk,
            wq_b=_linear(f.q_lora_rank, f.index_n_heads * f.index_head_dim),
            wk=_linear(f.dim, f.index_head_dim),
            k_norm=Float32LayerNorm.Config(
                normalized_shape=f.index_head_dim,
                eps=NORM_EPS,
                param_init={"weight": nn.init.ones_, "bias": nn.init.zeros_},
            ),
            weights_proj=_fp32_linear(f.dim, f.index_n_heads),
            rope=CosSinRoPE.Config(**_rope(f)),
        ),
    )

"""Analytic model FLOPs of a training token: what the mathematics needs, recomputation excluded.

Conventions: a multiply-add is two FLOPs; only matrix products count; a backward pass through one
costs twice its forward. A row is taken as one document, so a query at position t sees t + 1 keys
and attends to min(t + 1, top-k) of them. Attention therefore grows with S * top-k, and only the
indexer's scores with S * S.
"""

from dataclasses import dataclass

from torchtitan.models.deepseek_v3 import DeepSeekV3Model

from titan_npu_train.deepseek_v32.attention import Attention
from titan_npu_train.deepseek_v32.options import DENSE_WARMUP, SPARSE

__all__ = ["TrainingFlops", "mean_selected_keys", "mean_visible_keys", "training_flops"]


@dataclass(frozen=True)
class TrainingFlops:
    """FLOPs of one token, forward and backward.

    Attributes:
        linear: every projection, expert and the vocabulary projection, but not the indexer's.
        indexer_linear: the indexer's projections. Their inputs are detached, so their backward
            computes weight gradients only: 4 FLOPs a parameter, not 6.
        attention: scores and weighted values over the selected keys.
        indexer_scores: scores over every visible key; backward over the selected keys.

    In the dense warm-up stage the backbone runs forward only, attention and both directions of the
    indexer's scores cover every visible key, and the loss has its target from the attention.
    """

    linear: float
    indexer_linear: float
    attention: float
    indexer_scores: float

    @property
    def total(self) -> float:
        return self.linear + self.indexer_linear + self.attention + self.indexer_scores


def mean_visible_keys(seq_len: int) -> float:
    """Keys a query sees on average in a causal row of ``seq_len`` tokens."""
    return (seq_len + 1) / 2


def mean_selected_keys(seq_len: int, topk: int) -> float:
    """Keys a query attends to on average: ``mean_t min(t + 1, topk)``."""
    k = min(topk, seq_len)
    return (k * (k + 1) / 2 + (seq_len - k) * k) / seq_len


def training_flops(config: DeepSeekV3Model.Config, seq_len: int) -> TrainingFlops:
    """FLOPs of one token of ``config`` trained at ``seq_len``, the MTP layers included."""
    warms_up = getattr(config, "stage", SPARSE) == DENSE_WARMUP
    passes = 1 if warms_up else 3
    linear = _size(config.lm_head) * (1 + len(config.mtp_layers))
    indexer_linear = attention = scores = 0.0
    linear += sum(_size(layer.eh_proj) for layer in config.mtp_layers)
    for layer in [*config.layers, *config.mtp_layers]:
        attn = layer.attention
        assert isinstance(attn, Attention.Config)
        linear += sum(_size(w) for w in (attn.wq_a, attn.wq_b, attn.wkv_a, attn.wkv_b, attn.wo))
        linear += _feed_forward_size(layer)
        index = attn.indexer
        indexer_linear += sum(_size(w) for w in (index.wq_b, index.wk, index.weights_proj))

        visible = mean_visible_keys(seq_len)
        selected = visible if warms_up else mean_selected_keys(seq_len, index.topk)
        if attn.form == "absorbed":
            widths = (attn.kv_lora_rank + attn.qk_rope_head_dim) + attn.kv_lora_rank
        else:
            widths = attn.qk_nope_head_dim + attn.qk_rope_head_dim + attn.v_head_dim
        attention += passes * 2 * selected * attn.n_heads * widths
        width = 2 * index.n_heads * index.head_dim
        scores += width * (visible + 2 * selected)
    return TrainingFlops(passes * 2 * linear, 4 * indexer_linear, attention, scores)


def _size(linear) -> int:
    return linear.in_features * linear.out_features


def _feed_forward_size(layer) -> float:
    if layer.moe is None:
        ffn = layer.feed_forward
        return _size(ffn.w1) + _size(ffn.w2) + _size(ffn.w3)
    moe = layer.moe
    experts = moe.routed_experts.inner_experts
    size = _size(moe.router.gate) + moe.router.top_k * 3 * experts.dim * experts.hidden_dim
    if (shared := moe.shared_experts) is not None:
        size += _size(shared.w1) + _size(shared.w2) + _size(shared.w3)
    return size

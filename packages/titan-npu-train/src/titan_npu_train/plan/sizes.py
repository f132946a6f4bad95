"""Parameters of a DeepSeek-V3.2's parts, counted from its configuration, norms left out."""

from typing import Any

from titan_npu_train.plan.split import Split

__all__ = ["attention_size", "before_fsdp", "expert_size", "feed_forward_size", "linear_size"]


def linear_size(linear: Any) -> int:
    return linear.in_features * linear.out_features


def feed_forward_size(ffn: Any) -> int:
    """Of a dense feed-forward, or a shared expert."""
    return linear_size(ffn.w1) + linear_size(ffn.w2) + linear_size(ffn.w3)


def expert_size(moe: Any) -> int:
    """Of one routed expert."""
    experts = moe.routed_experts.inner_experts
    return 3 * experts.dim * experts.hidden_dim


def attention_size(attention: Any, tensor: int) -> float:
    """Of a tensor-parallel rank, before FSDP.

    Tensor parallelism splits the products with a dimension of heads; the indexer is not one of
    them.
    """
    a, index = attention, attention.indexer
    split = sum(linear_size(weight) for weight in (a.wq_b, a.wkv_b, a.wo))
    whole = sum(linear_size(w) for w in (a.wq_a, a.wkv_a, index.wq_b, index.wk, index.weights_proj))
    return whole + split / tensor


def before_fsdp(model: Any, split: Split) -> tuple[float, float]:
    """Parameters of a rank before FSDP shares them out: all but experts, and experts."""
    layers = [*model.layers, *model.mtp_layers]
    dense = sum(attention_size(layer.attention, split.tensor) for layer in layers)
    dense += 2 * model.vocab_size * model.dim / split.tensor
    experts = 0.0
    for layer in layers:
        if layer.moe is None:
            dense += feed_forward_size(layer.feed_forward) / split.tensor
            continue
        if layer.moe.shared_experts is not None:
            dense += feed_forward_size(layer.moe.shared_experts) / split.tensor
        dense += linear_size(layer.moe.router.gate)
        experts += layer.moe.num_experts * expert_size(layer.moe) / split.expert
    return dense / split.pipeline, experts / split.pipeline

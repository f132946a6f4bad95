"""The memory table that was published with the 64-card run, by its own counting.

It counts parameters, not what a program allocates: no norms, one of the two vocabulary matrices,
the MTP layer in every pipeline, no gathered parameters, no workspace. Its worst case for the
experts has every token of the expert-parallel group at every expert of one rank. It is here to
compare with; :func:`.memory.estimate` is the plan.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from titan_npu_train.plan.sizes import (
    attention_size,
    expert_size,
    feed_forward_size,
    linear_size,
)

__all__ = ["HCCL_BYTES", "PublishedRow", "published_row", "published_rows"]

HCCL_BYTES = round(2.8 * 2**30)
"""What the published table gives communication, whatever the split."""

MOST_STAGES = 8
_FP32, _BF16 = 4, 2


@dataclass(frozen=True)
class PublishedRow:
    """One split. ``parameters`` is a number, everything else bytes, of one device."""

    pipeline: int
    tensor: int
    context: int
    data: int
    expert: int
    parameters: float
    parameter_bytes: float
    gradient_bytes: float
    activation_bytes: float
    moe_imbalance_bytes: float
    hccl_bytes: float = HCCL_BYTES

    @property
    def total_bytes(self) -> float:
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.activation_bytes
            + self.moe_imbalance_bytes
            + self.hccl_bytes
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"total_bytes": self.total_bytes}


def published_row(
    model: Any, *, pipeline: int, tensor: int, context: int, data: int, expert: int, tokens: int
) -> PublishedRow:
    """One row of the published table.

    Args:
        model: a DeepSeek-V3.2 model configuration.
        pipeline, tensor, context, data, expert: parallel degrees.
        tokens: of a data-parallel rank (4096 in the published table).
    """
    layers = [*model.layers, *model.mtp_layers]
    moes = [layer.moe for layer in layers if layer.moe is not None]
    dense_ranks = data * context
    count = sum(attention_size(layer.attention, tensor) for layer in layers) / dense_ranks
    dense = [layer.feed_forward for layer in layers if layer.feed_forward is not None]
    count += sum(feed_forward_size(ffn) for ffn in dense) / (tensor * dense_ranks)
    count += model.dim * model.vocab_size / (tensor * dense_ranks)
    gates = [layer.moe.router.gate for layer in model.layers if layer.moe is not None]
    count += sum(linear_size(gate) for gate in gates) / dense_ranks
    for moe in moes:
        count += feed_forward_size(moe.shared_experts) / (tensor * dense_ranks)
        count += moe.num_experts * expert_size(moe) / expert
    count /= pipeline
    imbalance = 0.0
    if moes:
        experts = moes[0].routed_experts.inner_experts
        widths = 3 * experts.dim + 3 * experts.hidden_dim
        here = moes[0].num_experts / expert
        imbalance = expert / tensor * tokens * here * widths * _BF16
    return PublishedRow(
        pipeline=pipeline,
        tensor=tensor,
        context=context,
        data=data,
        expert=expert,
        parameters=count,
        parameter_bytes=count * _FP32,
        gradient_bytes=count * _FP32,
        activation_bytes=len(layers) * tokens / tensor * model.dim * _BF16,
        moe_imbalance_bytes=imbalance,
    )


def published_rows(model: Any, world: int, *, tokens: int) -> Iterator[PublishedRow]:
    """Every split of ``world`` devices into PP x TP x DP with all of a stage's devices in EP."""
    experts = next((layer.moe.num_experts for layer in model.layers if layer.moe), 1)
    heads = model.layers[0].attention.n_heads
    for pipeline in _powers_of_two(min(world, len(model.layers), MOST_STAGES)):
        for tensor in _powers_of_two(min(world // pipeline, heads, 16)):
            stage = world // pipeline
            # As published, every device of a stage has experts of its own.
            if stage * pipeline != world or stage % tensor or experts % stage:
                continue
            yield published_row(
                model,
                pipeline=pipeline,
                tensor=tensor,
                context=1,
                data=stage // tensor,
                expert=stage,
                tokens=tokens,
            )


def _powers_of_two(limit: int) -> list[int]:
    return [1 << i for i in range(limit.bit_length()) if 1 << i <= limit]

"""What a step costs in time, by a model simple enough to be checked by hand.

It ranks splits of one job; it is no forecast. Work is divided evenly, matrix products reach a fixed
share of the peak, and a collective takes its bytes over one link plus a fixed latency:

- tensor parallelism: a layer gathers its input and scatters its output, for attention and for its
  feed-forward (the shared expert's, in an MoE layer), and shares the indexers' choices and targets;
- context parallelism: a layer gathers the latent keys and the indexers' keys, and scatters their
  gradients;
- expert parallelism: a layer sends each token to its experts and fetches what they made of it;
- FSDP gathers a layer's weights, and scatters its gradients: only what does not fit beside the
  computation counts;
- a pipeline hands over hidden states, and is not full at its ends: a bubble of ``(PP - 1) /
  (microbatches x stages of a rank)`` of the time its work takes;
- full checkpointing runs every layer's forward again, with its communication; selective keeps what
  products and exchanges made, and gathers again;
- swapping moves the optimizer's states to the device and back, once a step, beside nothing.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from titan_npu_train.deepseek_v32.flops import training_flops
from titan_npu_train.failures import UserError
from titan_npu_train.plan.sizes import before_fsdp
from titan_npu_train.plan.split import Split, stages_of

__all__ = ["ATLAS_A3", "Cost", "Machine", "cost"]

_BF16, _FP32, _INT32 = 2, 4, 4


@dataclass(frozen=True)
class Machine:
    """A device and its links.

    Attributes:
        flops: peak dense bf16 FLOP/s of a device.
        utilisation: share of it that a model's matrix products reach.
        link: bytes/s out of a device to any other.
        host_link: bytes/s between a device and its host's memory, each way.
        latency: seconds a collective takes besides its bytes.
    """

    flops: float = 376e12
    utilisation: float = 0.4
    link: float = 196e9
    host_link: float = 40e9
    latency: float = 20e-6

    def with_settings(self, settings: list[str]) -> "Machine":
        """Changed by ``name=value`` words.

        Raises:
            UserError: no such name, or not a positive number.
        """
        known = [f.name for f in dataclasses.fields(self)]
        changed = {}
        for setting in settings:
            name, _, value = setting.partition("=")
            try:
                number = float(value)
            except ValueError:
                number = -1.0
            if name not in known or not 0 < number < float("inf"):
                raise UserError(
                    f"--machine {setting}: it is NAME=VALUE with a positive number, and NAME one "
                    f"of {', '.join(known)}. Example: --machine link=50e9"
                )
            changed[name] = number
        return dataclasses.replace(self, **changed)


ATLAS_A3 = Machine()
"""A die of an Atlas A3, half an Ascend 910C.

Peak and link (392 GB/s one way for a card's two dies): CloudMatrix384, arXiv:2506.12708. Its four
host processors of 160 GB/s serve 16 dies: 40 GB/s. Utilisation and latency are assumptions.
"""


@dataclass(frozen=True)
class Cost:
    """Seconds of one optimizer step on every device, one after the other.

    ``fsdp`` is all of FSDP's communication, ``exposed_fsdp`` what computation does not hide.
    """

    compute: float
    tensor: float
    context: float
    expert: float
    pipeline: float
    fsdp: float
    exposed_fsdp: float
    bubble: float
    swap: float
    tokens: int
    devices: int

    @property
    def communication(self) -> float:
        """Seconds in which devices communicate and do not compute."""
        return self.tensor + self.context + self.expert + self.pipeline + self.exposed_fsdp

    @property
    def total(self) -> float:
        return self.compute + self.communication + self.bubble + self.swap

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.tokens / self.total / self.devices

    def to_dict(self) -> dict[str, float]:
        return dataclasses.asdict(self) | {
            "communication": self.communication,
            "total": self.total,
            "tokens_per_second_per_device": self.tokens_per_second_per_device,
        }


def cost(config: Any, split: Split, machine: Machine = ATLAS_A3) -> Cost:
    """Seconds of one step of ``config``, split as ``split``.

    Args:
        config: of a DeepSeek-V3.2; its own degrees do not matter, its schedule does.
        split: how it is divided.
        machine: what it runs on.
    """
    model = config.model_spec.model
    layers = [*model.layers, *model.mtp_layers]
    seq_len = config.training.seq_len
    tokens = split.data * split.rows * split.microbatches * seq_len
    flops = training_flops(model, seq_len)
    again = 4 / 3 if split.checkpointing == "full" else 1.0
    compute = flops.total * again * tokens / split.world / (machine.flops * machine.utilisation)

    # Times that a layer's forward and backward communication happens in a microbatch.
    forwards = 2 if split.checkpointing == "full" else 1
    gathers = 1 if split.checkpointing == "none" else 2  # forward all-gathers
    rank_layers = len(layers) / split.pipeline
    moe_layers = sum(layer.moe is not None for layer in layers) / split.pipeline
    passes = split.microbatches * rank_layers
    part = split.rows * seq_len // split.context  # tokens of a tensor-parallel group

    def ring(bytes_: float, ranks: int, times: float) -> float:
        """``times`` all-gathers or reduce-scatters of ``bytes_`` in all, or all-to-alls of it."""
        if ranks == 1:
            return 0.0
        return times * (bytes_ * (ranks - 1) / ranks / machine.link + machine.latency)

    attention = layers[0].attention
    hidden = part * model.dim * _BF16
    choices = part * min(attention.indexer.topk, seq_len) * _INT32
    # Forward: 2 gathers and 2 scatters; backward: the same, the other way round.
    tensor = ring(hidden, split.tensor, passes * (2 * gathers + 2 * forwards + 4))
    tensor += ring(choices, split.tensor, passes * 2 * forwards)

    keys = attention.kv_lora_rank + attention.qk_rope_head_dim + attention.indexer.head_dim
    context = ring(split.rows * seq_len * keys * _BF16, split.context, passes * (gathers + 1))

    expert = 0.0
    moe = next((layer.moe for layer in layers if layer.moe is not None), None)
    if moe is not None:
        sent = part / split.tensor * moe.router.top_k * model.dim * _BF16
        times = split.microbatches * moe_layers * 2 * (forwards + 1)
        expert = ring(sent, split.expert, times)

    pipeline = 0.0
    stages = 1
    if split.pipeline > 1:
        stages = stages_of(config, split.pipeline) // split.pipeline
        moved = hidden / split.tensor
        times = 2 * stages * split.microbatches
        pipeline = times * (moved / machine.link + machine.latency)

    # Weights come in bf16 for forward and again for backward, gradients leave in fp32.
    dense, experts = before_fsdp(model, split)
    rounds = split.microbatches
    gathers = 2
    if split.pipeline > 1 and config.fsdp.pipeline_reduction == "last":
        rounds = gathers = 1
    fsdp = 0.0
    for size, ranks in ((dense, split.data * split.context), (experts, split.expert_shards)):
        if ranks > 1:
            moved = rounds * (gathers * _BF16 + _FP32) * size * (ranks - 1) / ranks
            fsdp += moved / machine.link
            fsdp += rounds * (gathers + 1) * rank_layers * machine.latency
    exposed = max(0.0, fsdp - compute)
    work = compute + tensor + context + expert + pipeline + exposed
    bubble = work * (split.pipeline - 1) / (split.microbatches * stages)
    swap = 0.0
    if split.swap:
        held = dense / (split.data * split.context) + experts / split.expert_shards
        swap = held * 2 * _FP32 * 2 / machine.host_link  # two moments, there and back
    return Cost(
        compute=compute,
        tensor=tensor,
        context=context,
        expert=expert,
        pipeline=pipeline,
        fsdp=fsdp,
        exposed_fsdp=exposed,
        bubble=bubble,
        swap=swap,
        tokens=tokens,
        devices=split.world,
    )

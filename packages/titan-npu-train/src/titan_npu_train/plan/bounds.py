"""Memory that a split needs at the very least, without building anything.

A search asks this first. It is a true bound: norms, gathered weights, workspace and most of what
layers keep are left out.
"""

from typing import Any

from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import TORCH_DTYPE_MAP

from titan_npu_train.deepseek_v32.options import SPARSE
from titan_npu_train.plan.sizes import before_fsdp
from titan_npu_train.plan.split import Split

__all__ = ["least_memory"]


def least_memory(config: Any, split: Split) -> dict[str, float]:
    """Bytes of a device, by part; the rank of a pipeline that has least is not told apart.

    - parameters and gradients, and AdamW's moments unless swapped, of an even share; in the dense
      warm-up stage, in which next to nothing is trained, parameters alone;
    - activations: absorbed queries and attention outputs of every head, unless recomputed;
    - MoE imbalance: rows into and out of a rank's experts, if all tokens come to them.
    """
    model = config.model_spec.model
    dense, experts = before_fsdp(model, split)
    held = dense / (split.data * split.context) + experts / split.expert_shards
    layers = [*model.layers, *model.mtp_layers]
    # A pipeline's shares are uneven by an embedding, a head and a layer.
    even = 1.0 if split.pipeline == 1 else max(0.0, 1 - 2 * split.pipeline / len(layers))
    stored = held * even * TORCH_DTYPE_MAP[config.training.dtype].itemsize
    least = {"parameters": stored}
    if model.stage == SPARSE:
        least["gradients"] = stored
        if not split.swap and _has_moments(config.optimizer):
            least["optimizer"] = 2 * stored
    tokens = split.rows * config.training.seq_len / split.context
    attention = layers[0].attention
    if model.stage == SPARSE and attention.form == "absorbed":
        latent, rope = attention.kv_lora_rank, attention.qk_rope_head_dim
        kept = {"none": latent + rope + latent, "selective": latent, "full": 0}[split.checkpointing]
        here = even * len(layers) / split.pipeline
        least["activations"] = (
            here * tokens * attention.n_heads / split.tensor * kept * _compute_bytes(config)
        )
    moe = next((layer.moe for layer in layers if layer.moe is not None), None)
    if moe is not None and split.expert > 1:
        local = tokens / split.tensor
        balanced = local * moe.router.top_k
        crowded = local * split.expert * min(moe.router.top_k, moe.num_experts // split.expert)
        rows = max(0.0, crowded - balanced)
        least["moe_imbalance"] = 2 * rows * model.dim * _compute_bytes(config)
    if split.microbatches == 1:
        # The first gradients come when what layers kept for them goes.
        gone = min(("gradients", "activations"), key=lambda part: least.get(part, 0.0))
        least.pop(gone, None)
    return least


def _has_moments(optimizer: OptimizersContainer.Config) -> bool:
    """Whether every parameter has two moments of its own dtype."""
    names = {group.optimizer_name for group in optimizer.param_groups}
    return names <= {"Adam", "AdamW"} and optimizer.implementation != "fused_opt_states_bf16"


def _compute_bytes(config: Any) -> int:
    return TORCH_DTYPE_MAP[config.training.mixed_precision_param].itemsize

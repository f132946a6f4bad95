"""A tiny DeepSeek-V3.2 that keeps every mechanism of the real one."""

import torch

from titan_npu_train.deepseek_v32 import Flavor, model_config
from titan_npu_train.deepseek_v32.indexer_loss import DSAMasks
from titan_npu_train.deepseek_v32.model import DeepSeekV32Model

TINY = Flavor(
    vocab_size=128,
    dim=32,
    n_layers=3,
    n_dense_layers=1,
    n_mtp_layers=0,
    n_heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    dense_hidden_dim=48,
    moe_hidden_dim=16,
    num_experts=8,
    experts_per_token=2,
    num_expert_groups=4,
    num_limited_groups=2,
    index_n_heads=16,  # with few heads many keys score exactly 0, and ties hide differences
    index_head_dim=16,
    index_topk=16,
    max_seq_len=256,
)


def build(config: DeepSeekV32Model.Config, seed: int = 0) -> DeepSeekV32Model:
    """The model on CPU in fp32 with random weights that make every part of it matter.

    Every layer changes the residual stream by about its own size (with the training
    initialisation, errors in attention would vanish behind it), and the stream starts small, so
    that the epsilon of a norm shows.
    """
    model = config.build()
    torch.manual_seed(seed)
    with torch.no_grad():
        model.init_states()
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "tok_embeddings" in name:
                parameter.copy_(0.05 * noise)
            elif "norm" in name:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(noise * parameter.size(-1) ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias_E"):
                buffer.copy_(0.05 * torch.randn_like(buffer))
    return model


def tiny_model(seed: int = 0, **kwargs) -> DeepSeekV32Model:
    return build(model_config(TINY, **kwargs), seed)


def packed_positions(*rows: tuple[int, ...]) -> torch.Tensor:
    """Positions of rows that hold documents of the given lengths."""
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])


def forward(
    model: DeepSeekV32Model,
    tokens: torch.Tensor,
    labels: torch.Tensor,
    positions: torch.Tensor,
    *,
    valid_tokens: int | None = None,
    coefficient: float = 1.0,
) -> torch.Tensor:
    """The LM loss, with the indexer loss attached, as the trainer does it."""
    valid = labels != -100
    count = valid_tokens or int(valid.sum())
    masks = DSAMasks.from_positions(
        positions, kl_mask_BS=valid if coefficient else None, kl_scale=coefficient / count
    )
    logits = model(tokens, positions, masks)
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100
    )
    return loss / count


def backward(model: DeepSeekV32Model, *batch: torch.Tensor, **kwargs) -> None:
    """Forward and backward; arguments as for :func:`forward`."""
    forward(model, *batch, **kwargs).backward()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Gradients by parameter name, cleared from the model."""
    found = {}
    for name, parameter in model.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "")
        found[name] = parameter.grad
        parameter.grad = None
    return found


def worst_difference(
    got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Largest difference relative to the expected gradient's norm, indexers apart."""
    assert got.keys() == expected.keys()
    worst = {"indexer": 0.0, "backbone": 0.0}
    for name, wanted in expected.items():
        assert wanted is not None, f"{name} has no gradient"
        assert got[name] is not None, f"{name} has no gradient"
        norm = wanted.double().norm()
        assert norm > 0, f"{name} has a zero gradient"
        difference = ((got[name].double() - wanted.double()).norm() / norm).item()
        kind = "indexer" if ".indexer." in name else "backbone"
        worst[kind] = max(worst[kind], difference)
    return worst

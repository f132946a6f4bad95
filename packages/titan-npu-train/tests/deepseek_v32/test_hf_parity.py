"""Logits against transformers' DeepseekV32ForCausalLM, through the state-dict adapter, both ways.

top-k is S / 4, so a wrong indexer selects other keys and the logits show it.
"""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

from tiny import TINY, build, tiny_model
from titan_npu_train.deepseek_v32 import DeepSeekV32StateDictAdapter, model_config
from titan_npu_train.deepseek_v32.indexer import Indexer
from titan_npu_train.deepseek_v32.model import DeepSeekV32Model

SEQ_LEN = 64
LIMIT = 5e-6


def hf_config() -> DeepseekV32Config:
    return DeepseekV32Config(
        vocab_size=TINY.vocab_size,
        hidden_size=TINY.dim,
        intermediate_size=TINY.dense_hidden_dim,
        moe_intermediate_size=TINY.moe_hidden_dim,
        num_hidden_layers=TINY.n_layers,
        num_attention_heads=TINY.n_heads,
        num_key_value_heads=TINY.n_heads,
        n_shared_experts=TINY.num_shared_experts,
        n_routed_experts=TINY.num_experts,
        routed_scaling_factor=TINY.route_scale,
        kv_lora_rank=TINY.kv_lora_rank,
        q_lora_rank=TINY.q_lora_rank,
        qk_rope_head_dim=TINY.qk_rope_head_dim,
        v_head_dim=TINY.v_head_dim,
        qk_nope_head_dim=TINY.qk_nope_head_dim,
        head_dim=TINY.qk_rope_head_dim,
        n_group=TINY.num_expert_groups,
        topk_group=TINY.num_limited_groups,
        num_experts_per_tok=TINY.experts_per_token,
        first_k_dense_replace=TINY.n_dense_layers,
        index_topk=TINY.index_topk,
        index_head_dim=TINY.index_head_dim,
        index_n_heads=TINY.index_n_heads,
        rms_norm_eps=1e-6,
        max_position_embeddings=163840,
        attn_implementation="eager",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, TINY.vocab_size, (2, SEQ_LEN), generator=torch.manual_seed(7))


@torch.no_grad()
def relative_error(
    ours: DeepSeekV32Model, theirs: DeepseekV32ForCausalLM, tokens: torch.Tensor
) -> float:
    expected = theirs.eval()(tokens, use_cache=False).logits
    return ((ours.eval()(tokens) - expected).norm() / expected.norm()).item()


def hf_from_ours(model: DeepSeekV32Model, folder) -> DeepseekV32ForCausalLM:
    """Through files, as a user would: transformers fuses the experts on loading."""
    adapter = DeepSeekV32StateDictAdapter(model.config, None)
    weights = {k: v.contiguous().clone() for k, v in adapter.to_hf(model.state_dict()).items()}
    hf_config().save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    loaded, info = DeepseekV32ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return loaded


@pytest.fixture
def pair(tmp_path) -> tuple[DeepSeekV32Model, DeepseekV32ForCausalLM]:
    ours = tiny_model()
    return ours, hf_from_ours(ours, tmp_path)


def test_our_weights_in_transformers(pair, tokens):
    assert relative_error(*pair, tokens) < LIMIT


def test_transformers_weights_in_ours(tmp_path, tokens):
    torch.manual_seed(3)
    theirs = DeepseekV32ForCausalLM(hf_config()).float()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path)
    ours = build(model_config(TINY))
    adapter = DeepSeekV32StateDictAdapter(ours.config, None)
    state = adapter.from_hf(load_file(tmp_path / "model.safetensors"))
    assert set(state) == set(ours.state_dict())
    ours.load_state_dict(state, strict=True)
    assert relative_error(ours, theirs, tokens) < LIMIT


def test_unabsorbed_form_agrees_too(pair, tokens):
    ours = build(model_config(TINY, form="unabsorbed"))
    ours.load_state_dict(pair[0].state_dict())
    assert relative_error(ours, pair[1], tokens) < LIMIT


# The test above must notice what others have got wrong.


def interleave_indexer_rope(model: DeepSeekV32Model) -> None:
    """Pair adjacent channels, as the main attention does: the known wrong way."""
    for module in model.modules():
        if isinstance(module, Indexer):
            half = module.rope_dim // 2
            adjacent = torch.arange(2 * half).view(2, half).T.flatten()
            rotate = module.rope.forward

            def wrong(q, k, positions, rotate=rotate, adjacent=adjacent):
                q, k = rotate(q[..., adjacent.argsort()], k[..., adjacent.argsort()], positions)
                return q[..., adjacent], k[..., adjacent]

            module.rope.forward = wrong


def set_norm_eps(model: DeepSeekV32Model, suffix: str, eps: float) -> None:
    changed = [m for name, m in model.named_modules() if name.endswith(suffix)]
    assert changed
    for module in changed:
        module.eps = eps


def scale_softmax(model: DeepSeekV32Model) -> None:
    """Leave YaRN's attention factor out."""
    for _, attention in model.attention_modules:
        attention.softmax_scale = attention.qk_head_dim**-0.5


@pytest.mark.parametrize(
    "fault",
    [
        interleave_indexer_rope,
        partial(set_norm_eps, suffix="attention_norm", eps=1e-5),
        partial(set_norm_eps, suffix="q_norm", eps=1e-5),
        partial(set_norm_eps, suffix="kv_norm", eps=1e-5),
        scale_softmax,
    ],
    ids=["indexer-rope-interleaved", "attention-eps", "q-eps", "kv-eps", "no-mscale"],
)
def test_a_fault_is_seen(pair, tokens, fault):
    fault(pair[0])
    assert relative_error(*pair, tokens) > LIMIT

"""The debugmodel, wider or with more words."""

from dataclasses import replace
from typing import Any

from titan_npu_train.deepseek_v32 import config_registry, flavors, model_config
from titan_npu_train.trainer import Trainer

__all__ = ["vocabulary", "wide"]

WORDS = 65536


def _debugmodel(name: str, **dimensions: Any) -> Trainer.Config:
    config = config_registry.deepseek_v32_debugmodel()
    flavor = replace(flavors.FLAVORS["debugmodel"], **dimensions)
    assert config.model_spec is not None
    config.model_spec = replace(config.model_spec, flavor=name, model=model_config(flavor))
    return config


def wide() -> Trainer.Config:
    """179 M parameters and few tokens: weights, gradients and AdamW's moments."""
    config = _debugmodel(
        "wide", dim=1024, dense_hidden_dim=4096, moe_hidden_dim=1024, num_experts=16
    )
    config.training = replace(config.training, local_batch_size=1, seq_len=256)
    return config


def vocabulary() -> Trainer.Config:
    """65,536 words, and the loss of all tokens at once: logits."""
    config = _debugmodel("vocabulary", vocab_size=WORDS)
    config.loss = replace(config.loss.loss_fn, global_vocab_size=WORDS)  # not chunked
    return config

"""Names in the Hugging Face layout, MTP layer and missing indexers included."""

from dataclasses import replace

import torch

from tiny import TINY, build
from titan_npu_train.deepseek_v32 import DeepSeekV32StateDictAdapter, model_config

INDEXER = {"wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"}


def mtp_model():
    model = build(model_config(replace(TINY, n_mtp_layers=1)))
    return model, DeepSeekV32StateDictAdapter(model.config, None)


def test_there_and_back_with_an_mtp_layer():
    model, adapter = mtp_model()
    state = model.state_dict()
    back = adapter.from_hf(adapter.to_hf(state))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_published_names():
    """The MTP layer is layer n_layers of the checkpoint, with an indexer of its own."""
    model, adapter = mtp_model()
    names = set(adapter.to_hf(model.state_dict()))
    for layer in range(TINY.n_layers + 1):
        prefix = f"model.layers.{layer}.self_attn.indexer."
        assert {n.removeprefix(prefix) for n in names if n.startswith(prefix)} == INDEXER
    mtp = f"model.layers.{TINY.n_layers}."
    assert {mtp + n for n in ("enorm.weight", "hnorm.weight", "eh_proj.weight")} <= names
    assert mtp + "shared_head.norm.weight" in names
    assert mtp + "mlp.gate.e_score_correction_bias" in names
    assert mtp + "mlp.experts.7.down_proj.weight" in names


def test_a_checkpoint_without_indexers_may_initialise_them():
    model, adapter = mtp_model()
    names = set(adapter.to_hf(model.state_dict()))
    indexers = {n for n in names if ".indexer." in n}
    assert adapter.initialised_if_absent(indexers) == indexers
    # Anything else that is missing is an error, also a part of an indexer.
    other = {"model.norm.weight", "model.layers.1.self_attn.indexer.wk.weight"}
    assert adapter.initialised_if_absent(other) == set()

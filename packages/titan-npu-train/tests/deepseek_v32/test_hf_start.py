"""Training may start from Hugging Face weights, also from those of a model without indexers."""

import json
import logging
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from tiny import TINY, build, tiny_model
from titan_npu_train.checkpoint import CheckpointError
from titan_npu_train.checkpoint.hugging_face import load_hugging_face
from titan_npu_train.deepseek_v32 import DeepSeekV32StateDictAdapter, model_config


def export(model, folder, *, without=lambda name: False) -> None:
    adapter = DeepSeekV32StateDictAdapter(model.config, None)
    weights = {k: v.contiguous().clone() for k, v in adapter.to_hf(model.state_dict()).items()}
    kept = {k: v for k, v in weights.items() if not without(k)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def load(model, folder) -> None:
    adapter = DeepSeekV32StateDictAdapter(model.config, None)
    state = load_hugging_face(
        str(folder), model.state_dict(), adapter, quantized=False, process_group=None
    )
    model.load_state_dict(state, strict=False)


def test_all_weights(tmp_path):
    source, model = tiny_model(seed=1), tiny_model(seed=2)
    export(source, tmp_path)
    load(model, tmp_path)
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_a_checkpoint_without_indexers(tmp_path, caplog):
    source, model = tiny_model(seed=1), tiny_model(seed=2)
    fresh = {name: value.clone() for name, value in model.state_dict().items()}
    export(source, tmp_path, without=lambda name: ".indexer." in name)
    with caplog.at_level(logging.WARNING):
        load(model, tmp_path)
    for name, value in model.state_dict().items():
        expected = fresh if ".indexer." in name else source.state_dict()
        assert torch.equal(value, expected[name]), name
    assert f"lacks {5 * TINY.n_layers} parameters" in caplog.text
    assert "random initialisation" in caplog.text


@pytest.mark.parametrize(
    "lost", ["model.norm.weight", "model.layers.1.self_attn.indexer.wk.weight"]
)
def test_anything_else_missing_is_an_error(tmp_path, lost):
    model = tiny_model()
    export(model, tmp_path, without=lambda name: name == lost)
    with pytest.raises(CheckpointError, match=lost):
        load(model, tmp_path)


def test_another_shape_is_an_error_before_anything_is_loaded(tmp_path):
    export(build(model_config(replace(TINY, vocab_size=130))), tmp_path)
    model = tiny_model(seed=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        CheckpointError, match=r"lm_head.weight: checkpoint \[130, 32\], this run \[128, 32\]"
    ):
        load(model, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_fp8_weights_are_not_read_without_their_scales(tmp_path):
    model = tiny_model()
    adapter = DeepSeekV32StateDictAdapter(model.config, None)
    weights = {k: v.contiguous().clone() for k, v in adapter.to_hf(model.state_dict()).items()}
    name = "model.layers.0.self_attn.o_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    weights[name + "_scale_inv"] = torch.ones(1, 1)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"--checkpoint\.initial_load_in_hf_quantized"):
        load(model, tmp_path)


def test_fp8_weights_are_read_with_their_scales(tmp_path):
    """Blocks of 128 x 128 with one scale each, as published."""
    wide = replace(TINY, dim=256, n_layers=1)
    source, model = build(model_config(wide), seed=1), build(model_config(wide), seed=2)
    adapter = DeepSeekV32StateDictAdapter(model.config, None)
    weights = {k: v.contiguous().clone() for k, v in adapter.to_hf(source.state_dict()).items()}
    name = "model.layers.0.self_attn.q_a_proj.weight"  # 24 x 256: two blocks
    scales = torch.tensor([[0.25, 4.0]])
    spread = scales.repeat_interleave(128, dim=1)
    stored = (weights[name] / spread).to(torch.float8_e4m3fn)
    expected = stored.float() * spread
    weights[name], weights[name + "_scale_inv"] = stored, scales
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    state = load_hugging_face(
        str(tmp_path), model.state_dict(), adapter, quantized=True, process_group=None
    )
    torch.testing.assert_close(state["layers.0.attention.wq_a.weight"], expected)
    untouched = "layers.0.attention.wo.weight"
    assert torch.equal(state[untouched], source.state_dict()[untouched])


def test_a_folder_without_weights_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"no \.safetensors files"):
        load(tiny_model(), tmp_path)

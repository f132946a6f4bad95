"""A sharded run begins from Hugging Face weights, with indexers or without."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_split_equality import DEBUGMODEL, EP2, launch, options, rows, workspace

from titan_npu_train.deepseek_v32 import FLAVORS, DeepSeekV32StateDictAdapter, model_config

__all__ = ["workspace"]  # the fixture

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def exported(workspace) -> dict[str, torch.Tensor]:
    """The weights a run of two processes exported, in the Hugging Face layout."""
    launch(
        2,
        [
            *("train", str(workspace / "export.pt")),
            *options(workspace, DEBUGMODEL),
            *("--checkpoint.enable", "--checkpoint.last_save_in_hf"),
            *("--checkpoint.last_save_model_only", "--checkpoint.initial_load_path"),
            str(workspace / f"seed-{DEBUGMODEL}" / "checkpoint" / "step-0"),
            *("--dump_folder", str(workspace / "export")),
            *rows(2),
            *EP2,
        ],
    )
    weights = {}
    for file in (workspace / "export" / "checkpoint" / "step-2").glob("*.safetensors"):
        weights |= load_file(file)
    return weights


def start(workspace, folder) -> dict[str, torch.Tensor]:
    launch(
        2,
        [
            *("load", str(folder / "loaded.pt")),
            *options(workspace, DEBUGMODEL),
            *("--checkpoint.enable", "--checkpoint.initial_load_in_hf"),
            *("--checkpoint.initial_load_path", str(folder)),
            *("--dump_folder", str(folder / "run")),
            *rows(2),
            *EP2,
        ],
    )
    loaded = torch.load(folder / "loaded.pt")
    return {name.replace("_checkpoint_wrapped_module.", ""): w for name, w in loaded.items()}


@pytest.mark.parametrize("indexers", [True, False], ids=["v3.2", "v3-without-indexers"])
def test_start(workspace, exported, tmp_path, indexers):
    kept = {name: w for name, w in exported.items() if indexers or ".indexer." not in name}
    assert len(kept) < len(exported) or indexers
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = start(workspace, tmp_path)
    adapter = DeepSeekV32StateDictAdapter(model_config(FLAVORS["debugmodel"]), None)
    expected = adapter.from_hf(exported)
    assert expected.keys() == loaded.keys()
    for name, weight in expected.items():
        same = torch.equal(loaded[name], weight)
        assert same == (indexers or ".indexer." not in name), name

"""A sharded run begins from Hugging Face weights, with indexers or without."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from split_jobs import DEBUGMODEL, STEPS, launch, make_workspace, options, rows, train_job

from titan_npu_train.deepseek_v32 import FLAVORS, DeepSeekV32StateDictAdapter, model_config

pytestmark = pytest.mark.distributed

EP2 = ["--parallelism.expert_parallel_degree", "2"]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return make_workspace(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def exported(workspace) -> dict[str, torch.Tensor]:
    """The weights a run of two processes exported, in the Hugging Face layout."""
    extra = [*rows(2), *EP2, "--checkpoint.last_save_in_hf", "--checkpoint.last_save_model_only"]
    job = train_job(workspace, "export", DEBUGMODEL, [*extra, "--checkpoint.no-load_only"])
    launch(workspace, 2, [job])
    weights = {}
    for file in (workspace / "export" / "checkpoint" / f"step-{STEPS}").glob("*.safetensors"):
        weights |= load_file(file)
    return weights


def start(workspace, folder) -> dict[str, torch.Tensor]:
    job = {
        "mode": "load",
        "out": str(folder / "loaded.pt"),
        "options": [
            *options(workspace, DEBUGMODEL),
            *("--checkpoint.enable", "--checkpoint.initial_load_in_hf"),
            *("--checkpoint.initial_load_path", str(folder)),
            *("--dump_folder", str(folder / "run")),
            *rows(2),
            *EP2,
        ],
    }
    launch(workspace, 2, [job])
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

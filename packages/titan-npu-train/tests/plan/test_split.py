"""Splits, and the configurations that make them."""

import dataclasses

import pytest

from titan_npu_train import preflight
from titan_npu_train.deepseek_v32 import config_registry
from titan_npu_train.failures import UserError
from titan_npu_train.plan.split import global_rows, split_of, stages_of

PRESETS = {
    "deepseek_v32_671b_4k_128die": "TP4 FSDP32 EP64",
    "deepseek_v32_671b_32k_128die": "TP4 CP8 FSDP4 EP64",
    "deepseek_v32_671b_32k_128die_pp2": "PP2 TP4 CP16 FSDP1 EP64",
}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_s_split_and_back(preset):
    config = getattr(config_registry, preset)()
    split = split_of(config, 128)
    assert split.name() == PRESETS[preset]
    assert split.world == 128
    assert not list(split.problems(config))
    assert split_of(split.apply(config), 128) == split
    assert global_rows(split.apply(config), 128) == global_rows(config, 128)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("swap", [False, True])
def test_its_options_make_the_same_split(preset, swap):
    split = split_of(getattr(config_registry, preset)(), 128)
    other = dataclasses.replace(split, tensor=2, data=2 * split.data, swap=swap)
    options = [*other.options()]
    config = preflight.load_config(preflight.DEFAULT_MODULE, preset, options)
    microbatches = global_rows(config, 128) // other.data // other.rows
    assert split_of(config, 128) == dataclasses.replace(other, microbatches=microbatches)


def test_applying_changes_nothing_of_the_original():
    config = config_registry.deepseek_v32_671b_4k_128die()
    split = dataclasses.replace(split_of(config, 128), tensor=8, data=16, checkpointing="none")
    split.apply(config)
    assert split_of(config, 128).name() == PRESETS["deepseek_v32_671b_4k_128die"]
    assert config.activation_checkpoint is not None


def test_stages():
    config = config_registry.deepseek_v32_671b_32k_128die_pp2()
    assert stages_of(config) == 4
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    assert stages_of(config) == 2
    config.parallelism.pipeline_parallel_schedule = "Interleaved1F1B"
    config.parallelism.pipeline_parallel_layers_per_stage = 8
    # torchtitan counts the embedding and the output as a layer each.
    assert stages_of(config) == 8


def test_why_a_split_cannot_run():
    config = config_registry.deepseek_v32_671b_4k_128die()
    split = split_of(config, 128)
    pipelined = dataclasses.replace(split, pipeline=2, data=16, microbatches=2)
    reasons = list(pipelined.problems(config))
    assert any("multi-token-prediction" in r for r in reasons)
    few = dataclasses.replace(pipelined, pipeline=4, data=8, microbatches=2)
    assert "2 microbatch(es) for 4 pipeline stages" in next(iter(few.problems(config)))
    experts = dataclasses.replace(split, expert=48)
    assert "expert_parallel_degree 48" in next(iter(experts.problems(config)))


def test_a_world_that_does_not_fit():
    with pytest.raises(UserError, match="need 128"):
        split_of(config_registry.deepseek_v32_671b_4k_128die(), 64)

"""An estimate, part by part; its peak is that of the whole model with the real FSDP2."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torchtitan.distributed import spmd_types

from planned import configured, options
from titan_npu_train.optimizer import SwapOptions
from titan_npu_train.plan import memory
from titan_npu_train.plan.layout import layout
from titan_npu_train.plan.memory import PARTS, estimate
from whole_step import whole_step

SPLITS = {
    "one": ("debugmodel", 1, []),
    "ep": ("debugmodel", 2, options(expert=2)),
    "full": ("debugmodel", 2, ["activation_checkpoint:full"]),
    "selective": ("debugmodel", 2, ["activation_checkpoint:selective"]),
    "never": (
        "debugmodel",
        2,
        ["--parallelism.fsdp_reshard_after_forward", "never", "activation_checkpoint:full"],
    ),
    "tp ep": ("debugmodel", 4, [*options(tensor=2, expert=4), "activation_checkpoint:full"]),
    "cp ep": ("debugmodel", 4, options(context=2, expert=4)),
    "mixed precision": (
        "debugmodel",
        8,
        [
            *("--training.mixed_precision_param", "bfloat16"),
            *("--training.local_batch_size", "1", "activation_checkpoint:full"),
        ],
    ),
    "accumulated": ("debugmodel", 2, ["--training.global_batch_size", "16"]),
    "hsdp": ("debugmodel", 4, ["--parallelism.data_parallel_replicate_degree", "2"]),
    "two ahead": (
        "debugmodel",
        2,
        ["--fsdp.prefetch_forward", "2", "--fsdp.prefetch_backward", "2"],
    ),
    "mtp": ("debugmodel_mtp", 2, []),
    "warmup": ("debugmodel_warmup", 2, []),
    "wide": ("4layers", 8, options(expert=8)),
}
NOT_IN_A_STEP = ("parameters", "optimizer", "runtime", "communication", "moe_imbalance")


@pytest.fixture
def balanced(monkeypatch):
    """Without the worst case of the experts, which no real step is made of."""
    simulated = memory.layer_memory

    def balanced_layers(config):
        needs = simulated(config)
        return replace(needs, crowded={k: needs.blocks[k] for k in needs.crowded})

    monkeypatch.setattr(memory, "layer_memory", balanced_layers)


@pytest.mark.parametrize("name", SPLITS)
def test_the_replay_is_the_whole_step(name, balanced):
    preset, world, words = SPLITS[name]
    config = configured(preset, *words)
    (rank,) = estimate(config, world).ranks
    step = whole_step(config, world)
    planned = rank.total - sum(rank.parts[part] for part in NOT_IN_A_STEP)
    assert rank.parts["parameters"] == step.parameters
    assert planned == pytest.approx(step.peak, rel=0.03)


def test_a_quick_estimate_is_the_exact_one():
    config = configured("671b_32k_128die_pp2")
    exact, quick = (estimate(config, 128, device="npu", exact=e) for e in (True, False))
    assert exact == quick
    planned = layout(config, 128)
    for rank in exact.ranks:
        assert rank.parts["parameters"] == max(
            planned.parameter_bytes(r) for r in planned.ranks(rank.pipeline_rank)[::16]
        )
        assert set(rank.parts) == set(PARTS)
        assert rank.total == sum(rank.parts.values())


def optimizer(config, world=2) -> int:
    return estimate(config, world, device="npu").largest.parts["optimizer"]


def test_optimizer_states_are_those_of_the_optimizer():
    config = configured("debugmodel")
    numel = sum(p.local_bytes(0) for p in layout(config, 2).parameters(0)) // 4
    count = len(list(layout(config, 2).parameters(0)))
    assert optimizer(config) == numel * 8 + count * 4
    group = config.optimizer.param_groups[0]
    group.optimizer_name = "Adam"
    group.optimizer_kwargs = {"lr": 1e-3, "amsgrad": True}
    assert optimizer(config) == numel * 12 + count * 4
    group.optimizer_kwargs = {"lr": 1e-3}
    config.optimizer.implementation = "fused_opt_states_bf16"
    assert optimizer(config) == numel * 4 + count * 4


def test_frozen_parameters_have_neither_gradients_nor_states():
    config = configured("debugmodel_warmup")
    trained = [p for p in layout(config, 2).parameters(0) if p.trained]
    assert trained and all(".indexer." in p.name for p in trained)
    assert optimizer(config) == sum(2 * p.local_bytes(0) + 4 for p in trained)


def test_foreach_needs_temporaries_of_all_parameters_in_its_step():
    config = configured(
        "debugmodel", "--training.local_batch_size", "1", "--training.seq_len", "64"
    )
    fused = estimate(config, 1, device="npu").largest
    config.optimizer.implementation = "foreach"
    foreach = estimate(config, 1, device="npu").largest
    assert foreach.moment == "the optimizer's step"
    assert foreach.parts["optimizer"] > fused.parts["optimizer"] + 0.9 * fused.parts["parameters"]


def test_swapped_states_leave_the_device_between_steps():
    config = configured("671b_4k_128die")
    config.optimizer.swap = SwapOptions()
    plain = estimate(config, 128, device="npu", exact=False).largest
    assert plain.parts["optimizer"] > 40 * 2**30
    config.optimizer.swap = SwapOptions(storage="host")
    swapped = estimate(config, 128, device="npu", exact=False).largest
    assert swapped.parts["optimizer"] < 10_000  # a step count a parameter
    assert plain.total - swapped.total > 40 * 2**30


@pytest.mark.parametrize("slices", [2, 5])
def test_two_slices_are_what_a_step_has_on_the_device(slices):
    """Of the real optimizer, which on a CPU copies to and fro as on any device.

    The plan has a block's parameters in another order, so that of many slices one or two may be cut
    elsewhere.
    """
    config = configured("debugmodel")
    config.optimizer.swap = SwapOptions(storage="host", slices=slices)
    model = config.model_spec.model.build()
    planned = layout(config, 1)
    optimizers = config.optimizer.build(model_parts=[model])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers.step()
    (swapped,) = optimizers
    parameters = list(planned.parameters(0))
    needs = memory._OptimizerNeeds(config.optimizer, parameters, 0, "npu")
    aligned = 2 * 512 * len(parameters)
    assert needs.between_steps == 4 * len(parameters)  # counts of steps
    assert needs.in_step == pytest.approx(swapped.stats().device_peak_bytes, abs=aligned)
    optimizers.close()


def test_host_memory_is_memory_on_cpu():
    config = configured("debugmodel")
    plain = estimate(config, 2).largest
    config.optimizer.swap = replace(config.optimizer.swap, storage="host")
    assert estimate(config, 2).largest.parts["optimizer"] == plain.parts["optimizer"]


def test_a_pipeline_that_reduces_each_microbatch_keeps_less():
    config = configured("671b_32k_128die_pp2")
    each = estimate(config, 128, device="npu", exact=False)
    config.fsdp.pipeline_reduction = "last"
    last = estimate(config, 128, device="npu", exact=False)
    for a, b in zip(each.ranks, last.ranks, strict=True):
        dense = 2.9e9 * (2 + 4)  # whole in bf16, and their gradients in fp32
        held = b.parts["gathered"] + b.parts["gradients"]
        assert held - a.parts["gathered"] - a.parts["gradients"] > dense


def test_earlier_stages_keep_more_microbatches():
    words = [
        *options(pipeline=2),
        *("--training.local_batch_size", "8"),
        *("--parallelism.pipeline_parallel_microbatch_size", "2"),
    ]
    first, last = estimate(configured("debugmodel", *words), 2).ranks
    assert (first.pipeline_rank, last.pipeline_rank) == (0, 1)
    one = estimate(configured("debugmodel", "--training.local_batch_size", "2"), 1).largest
    # Two microbatches of half of the layers are under way on the first, one on the last.
    assert first.parts["activations"] == pytest.approx(one.parts["activations"], rel=0.1)
    assert last.parts["activations"] == pytest.approx(one.parts["activations"] / 2, rel=0.1)
    assert last.parts["logits"] and not first.parts["logits"]


def test_notes_say_what_is_assumed():
    notes = " ".join(estimate(configured("671b_4k_128die"), 128, device="npu", exact=False).notes)
    for word in ("HCCL_BUFFSIZE", "assumed", "262,144", "without data"):
        assert word in notes


@pytest.mark.parametrize("backend", ["spmd_types", "partial_dtensor"])
def test_a_model_works_in_the_same_process_after_it(backend):
    """As when titan-npu plans a run, starts it and then evaluates what it trained."""
    config = configured(
        "debugmodel", *options(expert=2, tensor=2), "--parallelism.spmd_backend", backend
    )
    estimate(config, 2)
    assert spmd_types.spmd_sparse_mesh() is None
    model = configured("debugmodel").model_spec.model.build()
    model.init_states()
    tokens = torch.arange(64).unsqueeze(0)
    logits = model(tokens, tokens, model.get_attention_masks(tokens))
    assert logits.isfinite().all()


def test_nothing_is_left_behind_or_changed():
    config = configured("debugmodel", *options(expert=2))
    before = copy.deepcopy(config)
    first = estimate(config, 2)
    second = estimate(config, 2)
    same = {k: v for k, v in first.largest.parts.items() if k != "runtime"}
    assert same == {k: v for k, v in second.largest.parts.items() if k != "runtime"}
    assert repr(config.to_dict()) == repr(before.to_dict())
    assert not dist.is_initialized()
    assert torch.get_default_device() == torch.device("cpu")


def test_inside_of_training_it_is_refused():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(RuntimeError, match="outside of training"):
            estimate(configured("debugmodel"), 2)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="device must be"):
        estimate(configured("debugmodel"), 2, device="tpu")

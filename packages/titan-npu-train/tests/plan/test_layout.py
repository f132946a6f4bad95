"""A plan's layout is what the model's parallelization makes of it, rank by rank."""

import copy

import pytest
import torch
import torch.distributed as dist
from torchtitan.distributed import utils as dist_utils

from planned import configured, held, options
from titan_npu_train.plan.layout import layout

SPLITS = {
    "one": (1, []),
    "fsdp": (3, []),
    "tp ep": (4, options(tensor=2, expert=4)),
    "cp ep": (8, options(context=2, tensor=2, expert=4)),
    "hsdp": (4, ["--parallelism.data_parallel_replicate_degree", "2", *options(expert=2)]),
    "more ranks than experts": (16, []),
    "pipeline": (4, options(pipeline=2, expert=2)),
    "interleaved": (
        2,
        [*options(pipeline=2), "--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"],
    ),
    "dtensor": (4, [*options(tensor=2), "--parallelism.spmd_backend", "full_dtensor"]),
}


@pytest.mark.parametrize("name", SPLITS)
def test_every_rank_holds_what_is_planned(name):
    world, words = SPLITS[name]
    config = configured("debugmodel", *words)
    planned = layout(config, world)
    for rank in range(world) if world <= 4 else (1, world - 2, world - 1):
        parts = {
            p.name: (p.local_shape(rank), p.storage_bytes(rank)) for p in planned.parameters(rank)
        }
        assert parts == held(config, world, rank)


@pytest.mark.parametrize("name", SPLITS)
def test_one_layer_of_each_kind_stands_for_all(name):
    world, words = SPLITS[name]
    config = configured("debugmodel", *words)
    exact, quick = layout(config, world), layout(config, world, exact=False)
    assert quick.stages_of == exact.stages_of
    assert quick.actions == exact.actions
    assert quick.microbatches == exact.microbatches
    for rank in range(world):
        assert set(quick.parameters(rank)) == set(exact.parameters(rank))
        assert [b.name for b in quick.blocks(rank)] == [b.name for b in exact.blocks(rank)]


def test_padding_of_uneven_shards_is_stored():
    config = configured("debugmodel")  # 192 and 96 rows over 7 ranks
    planned = layout(config, 7)
    assert planned.parameter_bytes(6) == planned.parameter_bytes(0)
    local = [sum(p.local_bytes(rank) for p in planned.parameters(rank)) for rank in (0, 6)]
    assert local[1] < local[0] == planned.parameter_bytes(0)


def test_671b_on_ranks_that_are_not_there():
    config = configured("671b_32k_128die_pp2")
    planned = layout(config, 128)
    for rank in (5, 127):
        parts = {p.name: p.local_shape(rank) for p in planned.parameters(rank)}
        assert parts == {name: shape for name, (shape, _) in held(config, 128, rank).items()}
    quick = layout(config, 128, exact=False)
    for rank in (0, 64):
        assert quick.parameter_bytes(rank) == planned.parameter_bytes(rank)


def test_nothing_is_left_behind_or_changed():
    config = configured("debugmodel", *options(tensor=2, expert=2))
    before, backend = copy.deepcopy(config), dist_utils.get_spmd_backend()
    layout(config, 2)
    assert repr(config.to_dict()) == repr(before.to_dict())
    assert not dist.is_initialized()
    assert dist_utils.get_spmd_backend() == backend
    assert torch.get_default_device() == torch.device("cpu")


def test_bad_splits_are_refused_in_words():
    with pytest.raises(ValueError, match="Invalid parallel dims"):
        layout(configured("debugmodel", *options(tensor=2), *shards(2)), 2)
    with pytest.raises(ValueError, match="attention heads"):
        layout(configured("debugmodel", *options(tensor=8)), 8)
    assert not dist.is_initialized()


def shards(degree: int) -> list[str]:
    return ["--parallelism.data_parallel_shard_degree", str(degree)]

"""What a layer keeps and needs is what a formula, or the whole model, says."""

import gc

import torch

from planned import configured, options
from titan_npu_train.plan.layout import as_trained
from titan_npu_train.plan.simulate import Storages, layer_memory


def needs(name: str, *words: str):
    return layer_memory(as_trained(configured(name, *words)))


def test_full_checkpointing_keeps_the_input_of_each_layer():
    found = needs("671b_32k_128die_pp2")
    sequence = 32768 // 16 // 4  # of a context- and tensor-parallel rank
    for kind in ("dense", "moe"):
        assert abs(found.blocks[kind].saved - sequence * 7168 * 2) < 1e5
    assert found.output == sequence * 7168 * 2


def test_checkpointing_trades_what_is_kept_for_what_is_computed_again():
    none, selective, full = (
        needs("debugmodel", *words).blocks["moe"]
        for words in ([], ["activation_checkpoint:selective"], ["activation_checkpoint:full"])
    )
    assert none.saved > 2 * selective.saved > 4 * full.saved
    assert full.backward > full.saved + 0.5 * none.saved


def test_a_crowded_rank_gets_every_token_that_can_come():
    found = needs("671b_4k_128die")
    assert found.rows == 1024 * 8
    # 64 ranks with 4 experts each: a token chooses at most 4 of them.
    assert found.crowded_rows == 1024 * 64 * 4
    extra = found.crowded["moe"].backward - found.blocks["moe"].backward
    # At least a row in and out of the experts, and what is between them.
    assert extra > (found.crowded_rows - found.rows) * (2 * 7168 + 3 * 2048) * 2


def test_without_expert_parallelism_nothing_is_crowded():
    found = needs("debugmodel")
    assert found.crowded_rows == found.rows == 4 * 512 * 2


def test_layers_stages_and_data_parallel_ranks_do_not_matter():
    first = needs("4layers_small")
    assert needs("8layers_small") is first
    assert needs("4layers_small", "--parallelism.data_parallel_shard_degree", "4") is first
    assert needs("4layers_small", *options(pipeline=2)) is first
    assert needs("4layers_small", "--training.seq_len", "2048") is not first
    assert needs("4layers_small", *options(tensor=2)) is not first


def test_storages_are_counted_from_first_to_last_reference():
    weight = torch.zeros(1000)
    with Storages() as count:
        a = weight + 1
        view = a[:10]
        weight.view(10, 100)
        del a
        assert sum(size for _, size in count.events) == 4000
        del view
        gc.collect()
        assert [size for _, size in count.events] == [4000, -4000]
        b = torch.zeros(500)
        b.untyped_storage().resize_(8000)
        b.set_(b.untyped_storage(), 0, (2000,))
        assert sum(size for _, size in count.events) == 8000

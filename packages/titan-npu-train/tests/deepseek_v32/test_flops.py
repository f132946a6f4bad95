"""The analytic FLOP and parameter counts against counts by hand."""

from dataclasses import replace

import pytest

from tiny import TINY
from titan_npu_train.deepseek_v32 import FLAVORS, model_config
from titan_npu_train.deepseek_v32.flops import (
    mean_selected_keys,
    mean_visible_keys,
    training_flops,
)


@pytest.mark.parametrize("topk", [1, 3, 7, 8, 20])
def test_mean_keys_by_counting(topk):
    seq_len = 8
    visible = [t + 1 for t in range(seq_len)]
    assert mean_visible_keys(seq_len) == sum(visible) / seq_len
    assert mean_selected_keys(seq_len, topk) == sum(min(v, topk) for v in visible) / seq_len


def test_a_layer_by_hand():
    """One dense layer, every number written out."""
    flavor = replace(TINY, n_layers=1, index_topk=2)
    flops = training_flops(model_config(flavor), seq_len=4)
    ffn = 3 * 32 * 48
    attention = 32 * 24 + 24 * 4 * 16 + 32 * (16 + 8) + 16 * 4 * (8 + 8) + 4 * 8 * 32
    head = 32 * 128
    assert flops.linear == 6 * (ffn + attention + head)
    indexer = 24 * 16 * 16 + 32 * 16 + 32 * 16
    assert flops.indexer_linear == 4 * indexer  # no gradient of their inputs
    # 1 + 2 + 2 + 2 selected and 1 + 2 + 3 + 4 visible keys over four tokens.
    selected, visible = 7 / 4, 10 / 4
    assert flops.attention == 3 * 2 * selected * 4 * ((16 + 8) + 16)
    assert flops.indexer_scores == 2 * 16 * 16 * visible + 2 * 2 * 16 * 16 * selected
    assert flops.total == sum(
        (flops.linear, flops.indexer_linear, flops.attention, flops.indexer_scores)
    )


def test_moe_counts_active_experts_only():
    one = training_flops(model_config(replace(TINY, n_layers=2, experts_per_token=1)), 64)
    two = training_flops(model_config(replace(TINY, n_layers=2, experts_per_token=2)), 64)
    assert two.linear - one.linear == 6 * 3 * 32 * 16
    more = training_flops(model_config(replace(TINY, n_layers=2, num_experts=16)), 64)
    assert more.linear - two.linear == 6 * 8 * 32  # the router only


def test_attention_grows_with_topk_not_with_the_sequence():
    config = model_config(FLAVORS["671B"])
    short, long = training_flops(config, 32768), training_flops(config, 65536)
    assert long.attention / short.attention < 1.04
    assert 1.8 < long.indexer_scores / short.indexer_scores < 2.0


def test_an_mtp_layer_adds_a_layer_a_projection_and_a_head():
    base = training_flops(model_config(TINY), 64)
    mtp = training_flops(model_config(replace(TINY, n_mtp_layers=1)), 64)
    longer = training_flops(model_config(replace(TINY, n_layers=4)), 64)
    assert mtp.linear - longer.linear == 6 * (2 * 32 * 32 + 32 * 128)
    assert mtp.indexer_linear == longer.indexer_linear
    assert base.attention < mtp.attention == longer.attention


def test_the_671b_model_has_the_published_size():
    """671B parameters without MTP, 37B active; the indexers add under one percent."""
    import torch

    config = model_config(replace(FLAVORS["671B"], n_mtp_layers=0, max_seq_len=4096))
    with torch.device("meta"):
        model = config.build()
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    total = sum(sizes.values())
    indexer = sum(n for name, n in sizes.items() if ".indexer." in name)
    assert total - indexer == 671_026_404_352
    assert indexer == 61 * (1536 * 64 * 128 + 7168 * 128 + 2 * 128 + 7168 * 64)
    assert indexer / total < 0.01
    active = training_flops(config, 4096).linear / 6 + sizes["tok_embeddings.weight"]
    assert 37e9 < active < 38e9

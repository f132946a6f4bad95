"""Gradients of the whole model: what may and what may not change them."""

import copy
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from tiny import (
    TINY,
    backward,
    build,
    forward,
    gradients,
    packed_positions,
    tiny_model,
    worst_difference,
)
from titan_npu_train.deepseek_v32 import FLAVORS, attention, model_config
from titan_npu_train.deepseek_v32.indexer_loss import DSAMasks
from titan_npu_train.deepseek_v32.parallelize import apply_activation_checkpointing

SEQ_LEN = 64  # top-k is 16


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels (some ignored) and positions of four rows with packed documents."""
    torch.manual_seed(11)
    tokens = torch.randint(0, TINY.vocab_size, (4, SEQ_LEN))
    labels = torch.randint(0, TINY.vocab_size, (4, SEQ_LEN))
    labels[0, 5:20] = -100
    labels[3, -9:] = -100
    positions = packed_positions((64,), (40, 24), (1, 62, 1), (30, 34))
    return tokens, labels, positions


@pytest.fixture
def expected(batch) -> dict[str, torch.Tensor]:
    model = tiny_model()
    backward(model, *batch)
    return gradients(model)


def losses(model) -> torch.Tensor:
    taken = model.take_indexer_losses()
    return torch.stack([taken[layer] for layer in sorted(taken)])


def test_every_parameter_learns(expected):
    worst_difference(expected, expected)


def test_forms_agree(batch, expected):
    model = build(model_config(TINY, form="unabsorbed"))
    backward(model, *batch)
    worst = worst_difference(gradients(model), expected)
    assert worst["indexer"] < 1e-5
    assert worst["backbone"] < 1e-5


@pytest.mark.parametrize("policy", [FullAC, SelectiveAC])
def test_activation_checkpointing_changes_nothing(batch, expected, policy):
    plain, model = tiny_model(), tiny_model()
    policy.Config().build(dump_folder="").apply(model)
    backward(plain, *batch)
    backward(model, *batch)
    worst = worst_difference(gradients(model), expected)
    assert worst == {"indexer": 0.0, "backbone": 0.0}
    # Counted once, although the forward runs twice.
    assert torch.equal(losses(model), losses(plain))


def test_two_forwards_before_two_backwards_under_checkpointing(batch):
    """As in a pipeline: nothing of one microbatch may leak into the other's recomputation."""
    halves = list(zip(*(t.chunk(2) for t in batch), strict=True))
    plain, model = tiny_model(), tiny_model()
    FullAC.Config().build(dump_folder="").apply(model)
    for half in halves:
        backward(plain, *half, valid_tokens=100)
    for loss in [forward(model, *half, valid_tokens=100) for half in halves]:
        loss.backward()
    worst = worst_difference(gradients(model), gradients(plain))
    assert max(worst.values()) < 1e-6


@pytest.mark.parametrize("microbatches", [2, 4])
def test_gradient_accumulation_changes_nothing(batch, expected, microbatches):
    whole, model = tiny_model(), tiny_model()
    valid = int((batch[1] != -100).sum())
    backward(whole, *batch)
    for part in zip(*(t.chunk(microbatches) for t in batch), strict=True):
        backward(model, *part, valid_tokens=valid)
    worst = worst_difference(gradients(model), expected)
    assert worst["indexer"] < 1e-5
    assert worst["backbone"] < 1e-5
    torch.testing.assert_close(losses(model), losses(whole), rtol=1e-5, atol=0)


def test_packed_documents_equal_documents_apart(batch):
    """Two documents in a row against each in a row of its own, short of it by padding."""
    tokens, labels = batch[0][:1], batch[1][:1]
    packed, apart = tiny_model(), tiny_model()
    backward(packed, tokens, labels, packed_positions((40, 24)))
    valid = int((labels != -100).sum())
    for lo, hi in ((0, 40), (40, 64)):
        backward(
            apart,
            tokens[:, lo:hi],
            labels[:, lo:hi],
            packed_positions((hi - lo,)),
            valid_tokens=valid,
        )
    worst = worst_difference(gradients(packed), gradients(apart))
    assert worst["indexer"] < 1e-5
    assert worst["backbone"] < 1e-5
    torch.testing.assert_close(losses(packed), losses(apart), rtol=1e-5, atol=0)


@pytest.mark.parametrize("seq_len", [TINY.index_topk - 1, TINY.index_topk, TINY.index_topk + 1, 64])
def test_no_token_sees_the_future_or_another_document(seq_len):
    """Losses of tokens before a change, and of the other document, do not notice it."""
    torch.manual_seed(5)
    model = tiny_model().eval()
    split = seq_len // 3
    positions = packed_positions((split, seq_len - split))
    tokens = torch.randint(0, TINY.vocab_size, (1, seq_len))
    changed = tokens.clone()
    place = split + (seq_len - split) // 2
    changed[0, place] = (changed[0, place] + 1) % TINY.vocab_size
    with torch.no_grad():
        before, after = model(tokens, positions), model(changed, positions)
    # Not bit for bit: a matrix product may round differently when an expert gets another row.
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    close(before[:, :place], after[:, :place])
    assert (before[:, place:] - after[:, place:]).abs().max() > 1e-2
    first = tokens.clone()
    first[0, split - 1] = (first[0, split - 1] + 1) % TINY.vocab_size
    with torch.no_grad():
        close(model(first, positions)[:, split:], before[:, split:])


def test_training_at_and_around_topk():
    for seq_len in (TINY.index_topk - 1, TINY.index_topk, TINY.index_topk + 1):
        model = tiny_model()
        tokens = torch.randint(0, TINY.vocab_size, (1, seq_len))
        backward(model, tokens, tokens, packed_positions((seq_len,)))
        assert all(g is not None and g.isfinite().all() for g in gradients(model).values())


def test_the_indexer_loss_gives_the_backbone_nothing(batch):
    model, without = tiny_model(), tiny_model()
    backward(model, *batch)
    backward(without, *batch, coefficient=0)
    got, expected = gradients(model), gradients(without)
    for name in expected:
        if ".indexer." in name:
            assert expected[name] is None
            assert got[name].norm() > 0
        else:
            assert torch.equal(got[name], expected[name]), name
    assert not without.take_indexer_losses()


def test_the_coefficient_scales_the_indexer_gradient_only(batch):
    model, half = tiny_model(), tiny_model()
    backward(model, *batch)
    backward(half, *batch, coefficient=0.5)
    expected, got = gradients(model), gradients(half)
    for name in expected:
        factor = 0.5 if ".indexer." in name else 1.0
        torch.testing.assert_close(got[name], factor * expected[name], rtol=1e-6, atol=0)


def test_ignored_tokens_train_no_indexer(batch):
    """Changing what only ignored tokens contribute changes no indexer gradient."""
    tokens, labels, positions = (t[3:] for t in batch)  # its last 9 labels are ignored
    model, other = tiny_model(), tiny_model()
    changed = tokens.clone()
    changed[0, -9:] = (changed[0, -9:] + 1) % TINY.vocab_size
    backward(model, tokens, labels, positions)
    backward(other, changed, labels, positions)
    worst = worst_difference(
        {k: v for k, v in gradients(other).items() if ".indexer." in k},
        {k: v for k, v in gradients(model).items() if ".indexer." in k},
    )
    assert worst["indexer"] < 1e-6


def test_coefficient_zero_saves_nothing_of_the_indexer(batch):
    """No tensor shaped like an index query or a per-selected-key score is kept."""
    model = tiny_model()
    index_width = TINY.index_n_heads * TINY.index_head_dim

    def saved_sizes(coefficient):
        sizes = []

        def pack(tensor):
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            backward(model, *batch, coefficient=coefficient)
        return sizes

    queries = batch[0].numel() * index_width
    assert queries in saved_sizes(1.0)
    assert queries not in saved_sizes(0.0)


def test_same_keys_with_and_without_gradient(batch, monkeypatch):
    chosen = []
    original = attention.dsa_attention

    def record(*args, **kwargs):
        result = original(*args, **kwargs)
        chosen.append(result.indices)
        return result

    monkeypatch.setattr(attention, "dsa_attention", record)
    model = tiny_model()
    backward(model, *batch)
    with torch.no_grad():
        model(batch[0], batch[2])
    assert len(chosen) == 2 * TINY.n_layers
    for trained, evaluated in zip(chosen[: TINY.n_layers], chosen[TINY.n_layers :], strict=True):
        assert torch.equal(trained, evaluated)


def test_mtp_layer_has_an_indexer_of_its_own(batch):
    model = build(model_config(replace(TINY, n_mtp_layers=1)))
    tokens, labels, positions = batch
    valid = labels != -100
    masks = DSAMasks.from_positions(positions, kl_mask_BS=valid, kl_scale=1 / valid.sum())
    main, mtp = model(tokens, positions, masks)
    (main.square().mean() + mtp.square().mean()).backward()
    found = gradients(model)
    worst_difference(found, found)  # every parameter has one
    taken = model.take_indexer_losses()
    assert sorted(taken) == [0, 1, 2, 3]
    assert all(value > 0 for value in taken.values())


def test_the_mtp_indexer_learns_from_real_inputs_only():
    """A document's last position has no next token: its content trains no MTP indexer."""
    config = model_config(replace(TINY, n_mtp_layers=1))
    positions = packed_positions((40, 24))
    tokens = torch.randint(0, TINY.vocab_size, (1, SEQ_LEN), generator=torch.manual_seed(2))
    losses = []
    for last in (False, True):
        model = build(config)
        counts = torch.ones(1, SEQ_LEN, dtype=torch.bool)
        counts[0, [39, 63]] = last
        main, mtp = model(tokens, positions, DSAMasks.from_positions(positions, kl_mask_BS=counts))
        (main.sum() + mtp.sum()).backward()
        losses.append(model.take_indexer_losses())
    assert torch.equal(losses[0][TINY.n_layers], losses[1][TINY.n_layers])
    assert not torch.equal(losses[0][0], losses[1][0])


@pytest.mark.parametrize("policy", [FullAC, SelectiveAC])
def test_checkpointing_covers_mtp_layers(policy):
    config = model_config(replace(TINY, n_mtp_layers=1))
    tokens = torch.randint(0, TINY.vocab_size, (1, SEQ_LEN), generator=torch.manual_seed(2))
    positions = packed_positions((40, 24))
    counts = torch.ones(1, SEQ_LEN, dtype=torch.bool)
    masks = DSAMasks.from_positions(positions, kl_mask_BS=counts, kl_scale=1 / SEQ_LEN)
    found = []
    for checkpointed in (False, True):
        model = build(config)
        if checkpointed:
            apply_activation_checkpointing(model, policy(policy.Config()))
            assert all(isinstance(m, CheckpointWrapper) for m in model.mtp_layers)
            assert all(isinstance(m, CheckpointWrapper) for m in model.layers.values())
        main, mtp = model(tokens, positions, masks)
        (main.square().mean() + mtp.square().mean()).backward()
        found.append(gradients(model))
    assert worst_difference(found[1], found[0]) == {"indexer": 0.0, "backbone": 0.0}


@pytest.mark.parametrize("name", FLAVORS)
def test_every_norm_has_the_published_epsilon(name):
    flavor = replace(FLAVORS[name], n_mtp_layers=1, max_seq_len=64)
    with torch.device("meta"):
        model = model_config(flavor).build()
    norms = {n: m for n, m in model.named_modules() if isinstance(m, nn.RMSNorm | nn.LayerNorm)}
    # attention, ffn, q, kv and index key of each layer; three more of the MTP layer; the last.
    assert len(norms) == 5 * (flavor.n_layers + 1) + 3 + 1
    assert {n: m.eps for n, m in norms.items() if m.eps != 1e-6} == {}


def test_deep_copies_do_not_share_a_meter(batch):
    """Pipeline stages are deep copies of the model."""
    model = tiny_model()
    other = copy.deepcopy(model)
    backward(model, *batch)
    assert model.take_indexer_losses()
    assert not other.take_indexer_losses()


def test_torch_still_counts_profiler_marks_as_recomputed_operators():
    """When this fails, PROFILER_OPS and what adds them to torch's set can go."""
    code = """
import torch
from torch.utils.checkpoint import SAC_IGNORED_OPS
print(torch.ops.profiler._record_function_enter_new.default in SAC_IGNORED_OPS)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

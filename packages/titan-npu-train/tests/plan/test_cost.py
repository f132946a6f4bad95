"""The cost model, against figures worked out by hand."""

import dataclasses

import pytest

from titan_npu_train.deepseek_v32 import config_registry
from titan_npu_train.deepseek_v32.flops import training_flops
from titan_npu_train.failures import UserError
from titan_npu_train.plan.cost import ATLAS_A3, Machine, cost
from titan_npu_train.plan.split import Split

ONE = Split(
    pipeline=1, tensor=1, context=1, data=1, expert=1, rows=1, microbatches=1,
    checkpointing="none", swap=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def published():
    """The published job at 4K: 16 rows of 4096 tokens for each data-parallel rank."""
    config = config_registry.deepseek_v32_671b_32k_128die_pp2()
    config.training.seq_len = 4096
    return config


def split(**changes) -> Split:
    return dataclasses.replace(ONE, **changes)


def test_one_device_only_computes(published):
    found = cost(published, ONE)
    flops = training_flops(published.model_spec.model, 4096).total
    assert found.compute == pytest.approx(flops * 4096 / (376e12 * 0.4))
    assert found.total == found.compute
    assert found.tokens_per_second_per_device == pytest.approx(4096 / found.compute)


def test_full_checkpointing_runs_forward_again(published):
    plain, again = cost(published, ONE), cost(published, split(checkpointing="full"))
    assert again.compute == pytest.approx(plain.compute * 4 / 3)


def test_collectives_of_one_layer_by_hand(published):
    """61 layers, 58 of them MoE, of width 7168; no latency."""
    machine = Machine(link=1e9, latency=1e-30)
    tokens, width = 4096, 7168
    found = cost(published, split(tensor=4, expert=4), machine)
    hidden, choices = tokens * width * 2, tokens * 2048 * 4
    assert found.tensor == pytest.approx(61 * (8 * hidden + 2 * choices) * 3 / 4 / 1e9)
    assert found.expert == pytest.approx(58 * 4 * tokens / 4 * 8 * width * 2 * 3 / 4 / 1e9)
    found = cost(published, split(context=8), machine)
    assert found.context == pytest.approx(61 * 2 * tokens * (576 + 128) * 2 * 7 / 8 / 1e9)


def test_recomputing_a_layer_communicates_again(published):
    degrees = {"tensor": 4, "context": 2, "expert": 8, "data": 1}
    none, selective, full = (
        cost(published, split(**degrees, checkpointing=policy))
        for policy in ("none", "selective", "full")
    )
    # What it scatters and exchanges, selective checkpointing keeps.
    assert none.expert == selective.expert == full.expert * 2 / 3
    assert none.context < selective.context == full.context
    assert none.tensor < selective.tensor < full.tensor


def test_bubble_of_a_pipeline(published):
    """PP 2 with two stages a rank and 16 microbatches: a 32nd of the work."""
    found = cost(published, split(pipeline=2, microbatches=16))
    assert found.bubble == pytest.approx((found.compute + found.communication) / 32)


def test_swapping_moves_two_moments_there_and_back(published):
    machine = Machine(host_link=1e9)
    plain = cost(published, split(data=128, expert=128), machine)
    swapped = cost(published, split(data=128, expert=128, swap=True), machine)
    assert plain.swap == 0
    # The whole model's 671e9 parameters over 128 devices, 16 bytes each.
    assert swapped.swap == pytest.approx(671e9 / 128 * 16 / 1e9, rel=0.01)
    assert swapped.total - plain.total == pytest.approx(swapped.swap)


def test_fsdp_hides_behind_computation(published):
    fast = cost(published, split(data=128, expert=8))
    slow = cost(published, split(data=128, expert=8), Machine(link=1e9))
    assert fast.fsdp > 0 == fast.exposed_fsdp
    assert slow.exposed_fsdp == pytest.approx(slow.fsdp - slow.compute)


def test_pp2_tp4_is_preferred_to_tp8_for_its_communication(published):
    shared = {"data": 16, "microbatches": 16, "checkpointing": "full", "swap": True}
    pp2 = cost(published, split(pipeline=2, tensor=4, expert=64, **shared))
    tp8 = cost(published, split(tensor=8, expert=128, **shared))
    assert pp2.tokens == tp8.tokens and pp2.compute == tp8.compute
    print(f"\ncommunication: PP2 TP4 EP64 {pp2.communication:.2f} s, TP8 EP128 "
          f"{tp8.communication:.2f} s a step")  # fmt: skip
    assert pp2.communication < 0.7 * tp8.communication
    assert pp2.total < tp8.total  # its bubble included


def test_machine_settings():
    assert ATLAS_A3.with_settings(["link=5e9", "latency=1e-6"]) == Machine(link=5e9, latency=1e-6)
    for wrong in ("link", "link=fast", "link=-1", "speed=3", "link=inf"):
        with pytest.raises(UserError, match=f"--machine {wrong}.*link=50e9"):
            ATLAS_A3.with_settings([wrong])

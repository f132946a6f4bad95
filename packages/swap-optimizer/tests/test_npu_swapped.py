"""storage="npu_swapped" with its kernel written out on the CPU."""

import copy
import sys

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from swap_optimizer import SwapOptimizer, npu_swapped
from swapped_memory import Forbidden, SwappedMemory, apply_adam_w
from training import Training, same_bits

SWAPPED = {"slices": 4, "storage": "npu_swapped"}


@pytest.fixture
def memory(monkeypatch):
    memory = SwappedMemory(apply_adam_w)
    monkeypatch.setattr(npu_swapped, "DEVICE", "cpu")
    monkeypatch.setitem(sys.modules, "torch_npu", memory)
    with memory:
        yield memory


def wrap(optimizer):
    return SwapOptimizer(optimizer, **SWAPPED)


@pytest.mark.parametrize("make", [lambda g: AdamW(g, lr=1e-3), lambda g: Adam(g[:1], lr=1e-3)])
def test_like_the_plain_optimizer(memory, make):
    """But for rounding: the kernel's order of operations is another one."""
    plain, swap = Training(make), Training(make, wrap)
    for i in range(20):
        a, b = plain.step(i), swap.step(i)
        assert torch.allclose(a, b, rtol=1e-4, atol=0)
    one, other = plain.states()["optimizer"], swap.states()["optimizer"]
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for i, state in one["state"].items():
        assert list(state) == list(other["state"][i])
        assert same_bits(state["step"], other["state"][i]["step"])
        for key in ("exp_avg", "exp_avg_sq"):
            got = other["state"][i][key]
            assert (got - state[key]).norm() <= 1e-3 * state[key].norm()
    moments = sum(p.numel() for p in plain.model.parameters() if p in plain.optimizer.state)
    assert swap.optimizer.stats().state_bytes == 8 * moments


def test_checkpoints_are_exact(memory):
    """States are read and written by the kernel itself, without a rounding."""

    def make(groups):
        return AdamW(groups, lr=1e-2)

    whole = Training(make, wrap).run(range(20))
    first = Training(make, wrap).run(range(10))
    saved = copy.deepcopy(first.states())
    again = first.states()["optimizer"]["state"]
    for i, state in saved["optimizer"]["state"].items():
        assert all(same_bits(value, again[i][key]) for key, value in state.items())
    plain = Training(make).load(saved)
    assert all(
        same_bits(value, saved["optimizer"]["state"][i][key])
        for i, state in plain.optimizer.state_dict()["state"].items()
        for key, value in state.items()
    )
    for optimizer in (whole, Training(make, wrap).run(range(2)).load(saved).run(range(10, 20))):
        for p, q in zip(whole.model.parameters(), optimizer.model.parameters(), strict=True):
            assert same_bits(p, q)


def test_any_value_is_copied(memory):
    p = nn.Parameter(torch.zeros(8))
    swap = SwapOptimizer(AdamW([p]), **SWAPPED | {"slices": 1})
    p.grad = torch.ones(8)
    swap.step()
    states = swap.state_dict()
    hard = torch.tensor([1e-38, -1e-38, 3.4e38, -3.4e38, 1 + 2**-23, 1 / 3, 0.0, 1.0])
    states["state"][0]["exp_avg"] = hard
    states["state"][0]["exp_avg_sq"] = hard.abs()
    swap.load_state_dict(states)
    assert torch.equal(swap.state[p]["exp_avg"], hard)
    assert torch.equal(swap.state[p]["exp_avg_sq"], hard.abs())


def test_the_limits_are_checked_here(memory):
    x = memory.empty_with_swapped_memory([3]).zero_()
    with pytest.raises(Forbidden, match="aten::add"):
        x + 1


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            SGD,
            TypeError,
            "updates by npu_apply_adam_w, which is AdamW; got SGD. Use storage='host'",
        ),
        (lambda p: AdamW(p, amsgrad=True), ValueError, "group 0 of AdamW has amsgrad=True"),
        (lambda p: AdamW(p, maximize=True), ValueError, "has maximize=True"),
        (lambda p: Adam(p, weight_decay=0.1), ValueError, "weight_decay=0.1 as an L2 penalty"),
        (lambda p: AdamW([p[0].bfloat16()]), ValueError, "of torch.bfloat16; expected contiguous"),
    ],
)
def test_what_the_kernel_cannot_do(memory, make, error, message):
    params = [nn.Parameter(torch.ones(3))]
    if "bfloat16" in message:
        params = [nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]
        make = AdamW
    with pytest.raises(error, match=message):
        SwapOptimizer(make(params), **SWAPPED | {"slices": 1})


def test_a_scaler_unscales_itself(memory):
    optimizer = AdamW([nn.Parameter(torch.ones(3))], fused=True)
    assert optimizer._step_supports_amp_scaling
    assert not SwapOptimizer(optimizer, **SWAPPED | {"slices": 1})._step_supports_amp_scaling

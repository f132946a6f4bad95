"""How parameters are divided, and that it never shows in the results."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import AdamW

from swap_optimizer import SwapOptimizer, peak_bytes
from swap_optimizer.layout import partition
from training import same_bits

WEIGHTS = st.lists(st.integers(0, 50), min_size=1, max_size=9)


@given(WEIGHTS, st.data())
def test_parts_are_as_even_as_they_can_be(weights, data):
    """Every part has something, in order; no other division has a lighter heaviest part."""
    parts = data.draw(st.integers(1, len(weights)))
    ends = partition(weights, parts)
    assert len(ends) == parts and ends[-1] == len(weights)
    assert all(a < b for a, b in pairwise([0, *ends]))
    heaviest = max(sum(weights[a:b]) for a, b in pairwise([0, *ends]))

    def best(start, left):
        if left == 1:
            return sum(weights[start:])
        return min(
            max(sum(weights[start:i]), best(i, left - 1))
            for i in range(start + 1, len(weights) - left + 2)
        )

    assert heaviest == best(0, parts)


@pytest.mark.parametrize("parts", [1, 16, 100])
def test_many_layers(parts):
    """Of a model of equal layers the slices differ by a layer at most."""
    ends = partition([10] * 100, parts)
    sizes = {b - a for a, b in pairwise([0, *ends])}
    assert max(sizes) == -(-100 // parts)


@given(WEIGHTS, st.data())
def test_scaled_weights_are_divided_alike(weights, data):
    """A parameter and its states, which are some times as large."""
    parts = data.draw(st.integers(1, len(weights)))
    assert partition(weights, parts) == partition([3 * w for w in weights], parts)


@pytest.mark.parametrize("where", [0, 20, 48])
def test_one_large_parameter_does_not_fill_the_others(where):
    """With one of 31 % in 16 slices, the others are even shares of the rest."""
    weights = [14] * 48
    weights.insert(where, 302)
    sizes = [sum(weights[a:b]) for a, b in pairwise([0, *partition(weights, 16)])]
    assert max(sizes) == 302
    assert sorted(sizes)[-2] <= 14 * 5 and min(sizes) >= 14 * 2


def test_the_largest_parameters_one_by_one():
    assert partition([1, 100, 50, 1, 1, 1, 1], 4) == [1, 2, 3, 7]
    assert partition([0, 0, 0], 2)[-1] == 3


@pytest.mark.parametrize("storage", ["host", "disk"])
@pytest.mark.parametrize("sizes", [[640] * 12, [5000, *[300] * 20], [*[300] * 9, 5000, 700, 800]])
@pytest.mark.parametrize("slices", [1, 2, 5, 8])
def test_peak_bytes_is_what_a_step_takes(sizes, slices, storage):
    params = [nn.Parameter(torch.ones(n)) for n in sizes]
    swap = SwapOptimizer(AdamW(params), slices=slices, storage=storage)
    foreseen = peak_bytes([8 * n for n in sizes], slices)
    aligned = 512 * 2 * len(sizes)
    for least in (foreseen / 2, foreseen):  # states that are made, and states that are loaded
        for p in params:
            p.grad = torch.ones_like(p)
        swap.step()
        assert least <= swap.stats().device_peak_bytes < foreseen + aligned
    swap.close()


def test_peak_bytes_of_even_parameters_is_an_eighth():
    assert peak_bytes([100] * 64, 16) == 6400 // 8
    assert peak_bytes([10, 30], 1) == 40
    with pytest.raises(ValueError, match="slices must be an integer from 1 to 2, the number of s"):
        peak_bytes([10, 30], 3)


SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=7)
STORAGES = ("host", "disk")


@given(
    st.data(), SHAPES, st.sampled_from(STORAGES), st.sampled_from([torch.float32, torch.bfloat16])
)
@settings(max_examples=40, deadline=None)
def test_any_shapes_groups_slices_and_gradients(data, shapes, storage, dtype):
    slices = data.draw(st.integers(1, len(shapes)))
    border = data.draw(st.integers(0, len(shapes) - 1))
    which = st.lists(st.booleans(), min_size=len(shapes), max_size=len(shapes))
    steps = data.draw(st.lists(which, min_size=1, max_size=4))
    reload_after = data.draw(st.integers(0, len(steps)))

    def train(wrap):
        params = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
        groups = [{"params": params[border:]}]
        if border:
            groups.append({"params": params[:border], "lr": 0.5, "amsgrad": True})
        optimizer = wrap(AdamW(groups, lr=0.1))
        for i, ready in enumerate(steps):
            for j, (p, has) in enumerate(zip(params, ready, strict=True)):
                p.grad = torch.sin(p.detach() * (j + 2) + i) if has else None
            optimizer.step()
            if i == reload_after:
                optimizer.load_state_dict(optimizer.state_dict())
        return params, optimizer

    params, plain = train(lambda optimizer: optimizer)
    others, swap = train(lambda optimizer: SwapOptimizer(optimizer, slices=slices, storage=storage))
    assert all(map(same_bits, params, others))
    one, other = plain.state_dict()["state"], swap.state_dict()["state"]
    assert one.keys() == other.keys()
    assert all(same_bits(one[i][k], other[i][k]) for i in one for k in one[i])
    swap.close()

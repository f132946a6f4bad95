"""The swapped optimizer against the plain one, bit by bit, on one process."""

import io

import pytest
import torch

from training import OPTIMIZERS, OTHERS, Training, assert_same_bits, swapped

STORAGES = ["host", "disk"]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", [*OPTIMIZERS, *OTHERS])
def test_twenty_steps(name, dtype, storage):
    make = (OPTIMIZERS | OTHERS)[name]
    plain, swap = Training(make, dtype=dtype), Training(make, swapped(storage), dtype=dtype)
    for i in range(20):
        assert torch.equal(plain.step(i), swap.step(i)), i
    assert_same_bits(plain, swap)
    swap.optimizer.close()


def through_a_file(states):
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


SWAP = {"plain": lambda optimizer: optimizer} | {s: swapped(s) for s in STORAGES}


@pytest.mark.parametrize("after", SWAP)
@pytest.mark.parametrize("before", SWAP)
@pytest.mark.parametrize("name", ["AdamW fused", "Adam amsgrad", "Adafactor", "SGD momentum"])
def test_resume_at_step_ten(name, before, after):
    whole = Training(OPTIMIZERS[name]).run(range(20))
    first = Training(OPTIMIZERS[name], SWAP[before]).run(range(10))
    saved = through_a_file(first.states())
    resumed = Training(OPTIMIZERS[name], SWAP[after]).run(range(3)).load(saved)
    assert_same_bits(first, resumed)
    assert_same_bits(whole, resumed.run(range(10, 20)))

"""What a resumed run takes over, beyond what the other tests see."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from titan_npu_train.checkpoint.rng import RngState
from toy_training import STEPS, Toy

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_resumed_at_any_step(tmp_path: Path, mode: str) -> None:
    options = {"interval": 1, "keep_latest_k": 0, "async_mode": mode}
    losses = Toy(tmp_path, options).train()
    for step in range(1, STEPS):
        again = Toy(tmp_path, {**options, "load_only": True}).train(load_step=step)
        assert again == {s: loss for s, loss in losses.items() if s > step}


@pytest.mark.distributed
def test_written_by_a_background_process(tmp_path: Path) -> None:
    """The mode with pinned memory, which without an accelerator is shared memory instead."""
    options = {"interval": 2, "async_mode": "async_with_pinned_mem"}
    losses = Toy(tmp_path / "whole", options).train()
    assert losses == Toy(tmp_path / "sync", {"interval": 2}).train()
    first = Toy(tmp_path / "run", options).train(steps=3)
    then = Toy(tmp_path / "run", options).train()
    assert first | then == losses
    assert min(then) == 3


def test_generators_are_restored(tmp_path: Path) -> None:
    state = RngState([torch.nn.Identity()])
    saved = state.state_dict()

    def draw() -> tuple:
        return torch.rand(3).tolist(), random.random(), np.random.random()

    expected = draw()
    draw()
    state.load_state_dict(saved)
    assert draw() == expected


def test_generators_are_restored_again_at_the_first_forward() -> None:
    model = torch.nn.Dropout(0.5)
    state = RngState([torch.nn.Identity(), model])
    saved = state.state_dict()
    x = torch.ones(64)
    expected = model(x), model(x)
    state.load_state_dict(saved)
    torch.rand(1)  # as a data loader starting to iterate does
    assert torch.equal(model(x), expected[0])
    assert torch.equal(model(x), expected[1]), "only the first forward resets"


def test_generators_of_fewer_ranks(tmp_path: Path, caplog) -> None:
    Toy(tmp_path).train(steps=2)
    toy = Toy(tmp_path)
    toy.checkpointer.states["rng"]._rank = 5
    assert toy.checkpointer.load()
    assert "no random generator state for this rank" in caplog.text


def test_optimizer_state_that_did_not_exist_yet(tmp_path: Path) -> None:
    """A parameter whose first gradient comes after the checkpoint; torch starts its Adam there."""

    class LateStart(Toy):
        def build_model(self) -> torch.nn.Module:
            model = super().build_model()
            model.late = torch.nn.Parameter(torch.ones(16))
            model.register_forward_hook(
                lambda _, __, out: out * model.late if self.step > 3 else out
            )
            return model

    losses = LateStart(tmp_path / "whole", {"interval": 100}).train()
    LateStart(tmp_path / "run").train(steps=2)
    resumed = LateStart(tmp_path / "run", {"interval": 100}).train()
    assert resumed == {step: loss for step, loss in losses.items() if step > 2}

"""Swapped optimizers in torchtitan's container: the same steps, the same checkpoints."""

import copy

import pytest
import torch
from torch import nn
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
    default_adamw,
)

from swap_optimizer import SwapOptimizer
from titan_npu_train import preflight
from titan_npu_train.deepseek_v32 import config_registry
from titan_npu_train.failures import UserError
from titan_npu_train.optimizer import SwapOptions, SwappedOptimizers, swappable

PRESETS = [name for name in config_registry.__all__ if "671b" in name]


def parts() -> list[nn.Module]:
    """Two pipeline stages of one model: names of the second go on where the first's end."""
    torch.manual_seed(0)
    stages = []
    for names in (("0", "1"), ("2",)):
        stage = nn.Module()
        stage.layers = nn.ModuleDict({name: nn.Linear(8, 8) for name in names})
        stages.append(stage)
    return stages


def config(**changes) -> OptimizersContainer.Config:
    """Two groups: biases are not decayed."""
    groups = [
        ParamGroupConfig(
            pattern=pattern,
            optimizer_name="AdamW",
            optimizer_kwargs={"lr": 1e-2, "weight_decay": decay},
        )
        for pattern, decay in ((r"bias$", 0.0), (r".*", 0.1))
    ]
    return OptimizersContainer.Config(param_groups=groups, **changes)


class Job:
    """Optimizers, their schedule and a hook, as the trainer has them."""

    def __init__(self, swap: SwapOptions, **changes) -> None:
        self.parts = parts()
        self.optimizers = swappable(config(**changes), swap).build(model_parts=self.parts)
        schedule = LRSchedulersContainer.Config(warmup_steps=3)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=8)
        self.hooks = 0
        self.optimizers.register_step_pre_hook(self._hook)
        self.step = 0

    def _hook(self, *_) -> None:
        self.hooks += 1

    def train(self, until: int) -> None:
        while self.step < until:
            generator = torch.Generator().manual_seed(self.step)
            for part in self.parts:
                for i, parameter in enumerate(part.parameters()):
                    # One parameter has no gradient in some of the steps.
                    if i or self.step % 3:
                        parameter.grad = torch.randn(parameter.shape, generator=generator)
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
            self.step += 1

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for part in self.parts for p in part.parameters()]

    def saved(self) -> dict:
        return copy.deepcopy(
            {
                "step": self.step,
                "weights": [part.state_dict() for part in self.parts],
                "optimizer": self.optimizers.state_dict(),
                "schedule": self.schedulers.state_dict(),
            }
        )

    def resume(self, saved: dict) -> None:
        self.step = saved["step"]
        for part, weights in zip(self.parts, saved["weights"], strict=True):
            part.load_state_dict(weights)
        self.optimizers.load_state_dict(saved["optimizer"])
        self.schedulers.load_state_dict(saved["schedule"])

    def close(self) -> None:
        self.optimizers.close()


@pytest.fixture
def job(tmp_path):
    made = []

    def build(storage, **changes) -> Job:
        path = str(tmp_path / f"{len(made)}") if storage == "disk" else None
        made.append(Job(SwapOptions(storage=storage, slices=3, path=path), **changes))
        return made[-1]

    yield build
    for one in made:
        one.close()


@pytest.mark.parametrize("storage", ["disk", "host"])
@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_the_same_steps_bit_for_bit(job, storage, implementation):
    plain = job(None, implementation=implementation)
    swapped = job(storage, implementation=implementation)
    assert len(swapped.optimizers) == 2
    assert all(isinstance(o, SwapOptimizer) for o in swapped.optimizers)
    assert not any(isinstance(o, SwapOptimizer) for o in plain.optimizers)
    for one in (plain, swapped):
        one.train(8)
    assert plain.hooks == swapped.hooks == 8  # once a step, not once a slice
    for a, b in zip(plain.weights(), swapped.weights(), strict=True):
        assert torch.equal(a, b)
    ours, theirs = swapped.optimizers.state_dict(), plain.optimizers.state_dict()
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(value)), key
    rates = [list(one.schedulers.get_metrics().values()) for one in (plain, swapped)]
    assert rates[0] == rates[1]


@pytest.mark.parametrize("first", ["disk", None])
@pytest.mark.parametrize("second", ["disk", None])
def test_either_resumes_from_either(job, first, second):
    straight = job(None)
    straight.train(8)
    before = job(first)
    before.train(4)
    after = job(second)
    after.resume(before.saved())
    after.train(8)
    for a, b in zip(straight.weights(), after.weights(), strict=True):
        assert torch.equal(a, b)


def test_a_part_with_fewer_parameters_than_slices(tmp_path):
    swap = SwapOptions(storage="disk", slices=16, path=str(tmp_path))
    container = swappable(config(), swap).build(model_parts=parts())
    assert [o.stats().slices for o in container] == [4, 2]
    container.close()
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_what_cannot_be(tmp_path):
    with pytest.raises(ValueError, match=r"optimizer\.swap\.slices must be 1 or more, got 0"):
        SwapOptions(storage="disk", slices=0)
    with pytest.raises(ValueError, match=r"optimizer\.swap\.path is '/x'.*it is host"):
        SwapOptions(storage="host", path="/x")
    swap = SwapOptions(storage="host")
    with pytest.raises(ValueError, match=r"fused_opt_states_bf16.*use fused"):
        swappable(config(implementation="fused_opt_states_bf16"), swap)
    with pytest.raises((ValueError, TypeError), match="npu_swapped"):
        swappable(config(), SwapOptions(storage="npu_swapped")).build(model_parts=parts())
    folder = tmp_path / "file"
    folder.write_text("in the way")
    in_the_way = swappable(config(), SwapOptions(storage="disk", path=str(folder)))
    with pytest.raises(OSError, match="file"):
        in_the_way.build(model_parts=parts())


def test_options_of_the_command_line():
    options = ["--optimizer.swap.storage", "disk", "--optimizer.swap.slices", "4"]
    read = preflight.load_config(preflight.DEFAULT_MODULE, "deepseek_v32_debugmodel", options)
    assert read.optimizer.swap == SwapOptions(storage="disk", slices=4)
    assert isinstance(read.optimizer, SwappedOptimizers.Config)
    options[-1] = "0"
    with pytest.raises(UserError, match="slices must be 1 or more"):
        preflight.load_config(preflight.DEFAULT_MODULE, "deepseek_v32_debugmodel", options)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_671b_presets_swap(preset):
    swap = getattr(config_registry, preset)().optimizer.swap
    assert (swap.storage, swap.slices) == ("host", 16)


def test_the_configuration_is_otherwise_the_same():
    stock = default_adamw(lr=3e-4)
    ours = swappable(stock)
    assert (ours.param_groups, ours.implementation) == (stock.param_groups, stock.implementation)
    assert ours.swap.storage is None

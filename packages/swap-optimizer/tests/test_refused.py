"""What cannot be swapped is refused at construction, by name, and nothing is changed."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW, SparseAdam

from swap_optimizer import StepError, SwapOptimizer
from training import OPTIMIZERS, OTHERS, Training


def params(n=4, size=3):
    return [nn.Parameter(torch.full((size,), float(i))) for i in range(n)]


@pytest.mark.parametrize("slices", [0, -1, 5, 1.5, True, None, "2"])
def test_slices(slices):
    message = f"slices must be an integer from 1 to 4, the number of parameters, got {slices!r}"
    with pytest.raises(ValueError, match=message):
        SwapOptimizer(AdamW(params(4)), slices=slices)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"storage": "gpu"}, "storage must be one of host, disk, npu_swapped, got 'gpu'"),
        ({"path": "/x"}, "path is for storage='disk', got '/x' with 'host'"),
        ({"storage": "npu_swapped"}, "is for parameters on an NPU, these are on cpu; use 'host'"),
    ],
)
def test_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        SwapOptimizer(AdamW(params()), slices=1, **options)


def test_what_is_no_optimizer():
    with pytest.raises(TypeError, match=r"must be a torch.optim.Optimizer .* got list"):
        SwapOptimizer(params(), slices=1)
    swap = SwapOptimizer(AdamW(params()), slices=1)
    with pytest.raises(TypeError, match="not swapped already, got SwapOptimizer"):
        SwapOptimizer(swap, slices=1)


def test_a_second_one_around_the_same_optimizer():
    optimizer = AdamW(params())
    swap = SwapOptimizer(optimizer, slices=1)
    for _ in range(2):
        with pytest.raises(TypeError, match="this AdamW is or was in a SwapOptimizer; make"):
            SwapOptimizer(optimizer, slices=2)
        assert optimizer.state is swap.state
        swap.close()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_parameters_that_are_there_twice():
    a, b, c, d = params()
    message = "parameter 2 is the same tensor as parameter 0; expected each parameter once"
    with pytest.raises(ValueError, match=message):
        SwapOptimizer(AdamW([a, b, a]), slices=1)
    tied = AdamW([a, b])
    tied.param_groups.append({**tied.param_groups[0], "params": [a]})
    with pytest.raises(ValueError, match=message):
        SwapOptimizer(tied, slices=1)
    swap = SwapOptimizer(AdamW([a, b]), slices=1)
    with pytest.raises(ValueError, match="parameter 4 is the same tensor as parameter 2"):
        swap.add_param_group({"params": [c, d, c]})
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        swap.add_param_group({"params": [a]})
    assert len(swap.param_groups) == 1


def test_parameters_on_two_devices():
    two = [*params(1), nn.Parameter(torch.empty(3, device="meta"))]
    with pytest.raises(ValueError, match="the parameters are on cpu, meta; expected one device"):
        SwapOptimizer(AdamW(two), slices=1)


class Subclass(torch.Tensor):
    pass


def test_tensor_subclasses():
    strange = torch.ones(3).as_subclass(Subclass).requires_grad_()
    with pytest.raises(TypeError, match="parameter 1 is a Subclass; expected a plain"):
        SwapOptimizer(AdamW([*params(1), strange]), slices=1)


# --- optimizers that couple parameters ------------------------------------------------------------


class WholeNorm(SGD):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            p.sub_(p.grad / norm, alpha=0.1)


class CountsInGroup(SGD):
    """As schedule-free optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step()


class CountsInAttribute(SGD):
    calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=1 / self.calls)


class SharedState(SGD):
    def step(self, closure=None):
        self.state["everyone"]["n"] = 1
        super().step()


class FirstGroup(SGD):
    """All groups by the first one's learning rate."""

    @torch.no_grad()
    def step(self, closure=None):
        lr = self.param_groups[0]["lr"]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=lr)


class ListState(SGD):
    """A history, as tensors in a list."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["history"] = [p.grad.clone()]
        super().step()


class Clips(SGD):
    """Divides by the norm of all gradients where that is above a threshold."""

    threshold = 10.0

    @torch.no_grad()
    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = float(torch.stack([p.grad.norm() for p in every]).norm())
        for p in every:
            p.sub_(p.grad * min(1.0, self.threshold / norm), alpha=0.1)


class ClipsTiny(Clips):
    threshold = 1e-3


class Lookahead(SGD):
    """Every tenth step goes half the way; counted in an attribute."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.steps_done = 0

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.steps_done += 1
        for p in [p for group in self.param_groups for p in group["params"]]:
            slow = self.state[p].setdefault("slow", p.detach().clone())
            if self.steps_done % 10 == 0:
                p.copy_(slow.lerp_(p, 0.5))


class KeepsReferences(SGD):
    """The moments are also in a dict of its own, where it looks for them."""

    @torch.no_grad()
    def step(self, closure=None):
        mine = vars(self).setdefault("mine", {})
        for p in [p for group in self.param_groups for p in group["params"]]:
            if p not in mine:
                self.state[p]["m"] = mine[p] = torch.zeros_like(p)
            p.sub_(mine[p].mul_(0.9).add_(p.grad), alpha=0.1)


class OneMoment(SGD):
    """One tensor is the state of every parameter of a shape."""

    @torch.no_grad()
    def step(self, closure=None):
        every = vars(self).setdefault("every", {})
        for p in [p for group in self.param_groups for p in group["params"]]:
            m = self.state[p].setdefault("m", every.setdefault(p.shape, torch.zeros_like(p)))
            p.sub_(m.mul_(0.9).add_(p.grad), alpha=0.1)


class ZeroForNone(SGD):
    """A gradient that is missing is taken for zero."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in [p for group in self.param_groups for p in group["params"]]:
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            m = self.state[p].setdefault("m", torch.zeros_like(p))
            p.mul_(0.99).sub_(m.mul_(0.9).add_(grad), alpha=0.1)


class OnlyInItsState(SGD):
    """What is computed from the number of parameters shows in the states alone."""

    @torch.no_grad()
    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"]]
        for p in every:
            self.state[p]["share"] = torch.full_like(p, 1 / len(every))


class NeedsClosure(SGD):
    def step(self, closure):
        closure()
        super().step()


GROUPS = [{"params": params(2)}, {"params": params(2), "lr": 0.5}]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LBFGS(params()), "LBFGS updates all parameters as one vector"),
        (lambda: SparseAdam(params()), "SparseAdam is for sparse gradients"),
        (lambda: WholeNorm(params()), "WholeNorm gives other results for a parameter by itself"),
        (lambda: CountsInGroup(params()), r"CountsInGroup changes its param group in a step \('k'"),
        (lambda: CountsInAttribute(params()), "CountsInAttribute gives other results"),
        (lambda: SharedState(params()), "states that belong to no parameter .'everyone'"),
        (lambda: FirstGroup(copy.deepcopy(GROUPS)), "FirstGroup gives other results"),
        (lambda: ListState(params()), "keeps tensors inside a list .state 'history'"),
        (lambda: Clips(params()), "Clips gives other results for a parameter by itself"),
        (lambda: ClipsTiny(params()), "ClipsTiny gives other results for a parameter by itself"),
        (lambda: Lookahead(params()), "Lookahead gives other .*attribute 'steps_done' differs"),
        (lambda: KeepsReferences(params()), r"KeepsReferences gives other results"),
        (lambda: OneMoment(params()), r"OneMoment gives other results"),
        (lambda: ZeroForNone(params()), "ZeroForNone does something for a parameter without"),
        (lambda: OnlyInItsState(params()), r"OnlyInItsState gives other .*state 'share' differs"),
        (lambda: NeedsClosure(params()), "missing 1 required positional argument: 'closure'"),
    ],
)
def test_coupled_optimizers(make, message, tmp_path):
    optimizer = make()
    before = copy.deepcopy(optimizer.state_dict())
    attributes = dict(vars(optimizer))
    with pytest.raises(TypeError, match=message):
        SwapOptimizer(optimizer, slices=2, storage="disk", path=tmp_path)
    assert optimizer.state_dict() == before and vars(optimizer) == attributes
    assert not list(tmp_path.iterdir())


class NeedsGradients(SGD):
    """Ends with an error where one is missing: not a reason to refuse it."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in [p for group in self.param_groups for p in group["params"]]:
            self.state[p].setdefault("best", torch.full_like(p, float("nan")))
            p.sub_(p.grad, alpha=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_the_trial_lets_through(dtype):
    """States that are not numbers, steps that overflow, and steps that need every gradient."""
    for make in (NeedsGradients, Adam):
        SwapOptimizer(make([nn.Parameter(p.detach().to(dtype)) for p in params()]), slices=2)


class ChangesLater(SGD):
    """A warm-up by itself, that begins after the trial's last step."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["n"] = state.get("n", 0) + 1
                if state["n"] > 5:
                    group["lr"] = group["lr"] * 0.9
                p.sub_(p.grad, alpha=group["lr"])


def test_a_group_that_is_changed_later():
    swap = SwapOptimizer(ChangesLater(params(), lr=0.1), slices=2)
    for i in range(6):
        for p in swap.param_groups[0]["params"]:
            p.grad = torch.ones(3)
        if i < 5:
            swap.step()
    message = r"changed its param group in a step \('lr'\).*in part: 0 of 2 slices were updated"
    with pytest.raises(StepError, match=message) as error:
        swap.step()
    assert error.value.happened is None
    assert swap.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("name", [*OPTIMIZERS, *OTHERS])
def test_the_trial_touches_nothing(name):
    """Not the parameters, not the random generator, not the optimizer."""
    make = (OPTIMIZERS | OTHERS)[name]
    training = Training(make)
    before = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
    random = torch.get_rng_state()
    swap = SwapOptimizer(training.optimizer, slices=2)
    assert torch.equal(torch.get_rng_state(), random)
    after = (training.model.state_dict(), swap.state_dict())
    assert str(before[1]) == str(after[1])
    assert all(torch.equal(before[0][k], after[0][k]) for k in before[0])
    assert not any(isinstance(v, nn.Parameter) for v in vars(training.optimizer).values())


def test_differentiable():
    with pytest.raises(ValueError, match="param group 0 has differentiable=True"):
        SwapOptimizer(Adam(params(), differentiable=True), slices=1)


def test_a_replaced_step():
    optimizer = AdamW(params())
    optimizer.step = lambda: None
    with pytest.raises(TypeError, match="the step of this AdamW was replaced on the instance"):
        SwapOptimizer(optimizer, slices=1)


def test_sparse_gradients():
    embedding = nn.Embedding(10, 4, sparse=True)
    swap = SwapOptimizer(SGD([*params(2), embedding.weight]), slices=3)
    embedding(torch.tensor([1, 2])).sum().backward()
    for p in swap.param_groups[0]["params"][:2]:
        p.grad = torch.ones(3)
    message = r"parameter 2 in param group 0 is sparse .torch.sparse_coo.*The step was not done"
    with pytest.raises(StepError, match=message) as error:
        swap.step()
    assert error.value.happened is False
    assert all((p == i).all() for i, p in enumerate(swap.param_groups[0]["params"][:2]))


def test_copies_and_pickles():
    swap = SwapOptimizer(AdamW(params()), slices=1)
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled.*Use state_dict"):
            attempt(swap)


def test_parameters_that_were_replaced():
    swap = SwapOptimizer(AdamW(params()), slices=2)
    swap.param_groups[0]["params"][0] = nn.Parameter(torch.ones(3))
    with pytest.raises(StepError, match=r"other parameters than before.*The step was not done"):
        swap.step()

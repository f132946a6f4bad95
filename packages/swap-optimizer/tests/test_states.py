"""States, hooks, closures, groups: where the swapped optimizer stands in for the plain one."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from swap_optimizer import StepError, SwapOptimizer
from swap_optimizer.swapfile import PAGE, SwapFile
from training import OPTIMIZERS, Training, assert_same_bits, same_bits, swapped

STORAGES = ["host", "disk"]


def params(n=6, size=64):
    return [nn.Parameter(torch.full((size,), float(i))) for i in range(n)]


def give_grads(optimizer, i=0):
    for group in optimizer.param_groups:
        for j, p in enumerate(group["params"]):
            p.grad = torch.sin(torch.arange(p.numel(), dtype=torch.float32) + i + j).view_as(p)


def same_states(one, other):
    one, other = one["state"], other["state"]
    assert one.keys() == other.keys()
    for i, state in one.items():
        assert list(state) == list(other[i])
        assert all(same_bits(value, other[i][key]) for key, value in state.items())


@pytest.fixture(params=STORAGES)
def storage(request):
    return request.param


def test_eight_bytes_a_parameter(storage):
    """And no more: not when it is made, not after saving and loading."""
    swap = SwapOptimizer(AdamW(params(8, 1024), fused=True), slices=4, storage=storage)
    for _ in range(2):
        for i in range(2):
            give_grads(swap, i)
            swap.step()
        stats = swap.stats()
        assert stats.state_bytes == 8 * 8 * 1024
        if storage == "host":
            assert stats.storage_bytes == 8 * 8 * 1024
        else:
            # A header, and for each slice the rest of a page.
            assert 0 <= stats.storage_bytes - 8 * 8 * 1024 <= 5 * 2**16
        assert stats.kept_bytes == 8 * 4  # `step`
        assert stats.device_peak_bytes == 2 * 8 * 8 * 1024 // 4
        assert stats.held_bytes == 0 and stats.slices == 4
        swap.load_state_dict(swap.state_dict())


def test_times(storage):
    swap = SwapOptimizer(AdamW(params()), slices=3, storage=storage)
    assert swap.stats().step_seconds == 0
    for i in range(2):
        give_grads(swap, i)
        swap.step()
    stats = swap.stats()
    parts = stats.load_seconds, stats.update_seconds, stats.offload_seconds
    assert all(0 < part < stats.step_seconds for part in parts)
    assert 0 <= stats.waited_seconds < stats.step_seconds


def test_slices_that_have_nothing_to_do_are_left_alone(storage):
    swap = SwapOptimizer(AdamW(params()), slices=3, storage=storage)
    give_grads(swap)
    swap.step()
    swap.zero_grad()
    swap.step()
    assert swap.stats().device_peak_bytes == 0


def test_state_is_a_mapping(storage):
    optimizer = AdamW(params())
    a, b, *_ = optimizer.param_groups[0]["params"]
    swap = SwapOptimizer(optimizer, slices=2, storage=storage)
    assert not swap.state and len(swap.state) == 0 and a not in swap.state
    assert dict(swap.state[a]) == {}
    a.grad = torch.ones_like(a)
    swap.step()
    assert swap.state and list(swap.state) == [a] and a in swap.state and b not in swap.state
    assert list(swap.state[a]) == ["step", "exp_avg", "exp_avg_sq"]
    assert optimizer.state is swap.state
    with pytest.raises(KeyError):
        swap.state["a"]
    with pytest.raises(TypeError, match="does not support item assignment"):
        swap.state[a]["exp_avg"] = torch.zeros(1)
    with pytest.raises(TypeError, match="set by load_state_dict"):
        swap.state[a] = {}


def test_writing_into_a_state_is_writing_into_the_storage(storage):
    """Torch's distributed checkpoint loads like that."""
    plain, swap = (Training(OPTIMIZERS["AdamW"], wrap) for wrap in (lambda o: o, swapped(storage)))
    for training in (plain, swap):
        training.run(range(3))
        for state in training.optimizer.state_dict()["state"].values():
            state["exp_avg"].mul_(0.5)
            state["step"].add_(1)
        training.run(range(3, 5))
    assert_same_bits(plain, swap)


def test_what_is_saved_of_a_state_is_it_alone(storage):
    swap = SwapOptimizer(AdamW(params()), slices=1, storage=storage)
    give_grads(swap)
    swap.step()
    file = io.BytesIO()
    torch.save(swap.state_dict()["state"][0]["exp_avg"], file)
    assert file.tell() < 2000 < swap.stats().storage_bytes


def test_states_outlive_the_optimizer(storage):
    swap = SwapOptimizer(AdamW(params()), slices=2, storage=storage)
    give_grads(swap)
    swap.step()
    states = swap.state_dict()
    wanted = copy.deepcopy(states)
    swap.close()
    same_states(states, wanted)
    more = {"params": params(1)}
    for attempt in (
        swap.state_dict,
        lambda: swap.load_state_dict(states),
        lambda: swap.add_param_group(more),
    ):
        with pytest.raises(RuntimeError, match="is closed"):
            attempt()
    with pytest.raises(StepError, match=r"is closed\. The step was not done"):
        swap.step()
    swap.close()


def test_states_are_taken_over(storage):
    """Wrapped in the middle of a training; nothing of them is left behind."""
    plain, swap = Training(OPTIMIZERS["Adam amsgrad"]), Training(OPTIMIZERS["Adam amsgrad"])
    plain.run(range(5)), swap.run(range(5))
    swap.optimizer = SwapOptimizer(swap.optimizer, slices=4, storage=storage)
    swap.scheduler.optimizer = swap.optimizer
    assert_same_bits(plain, swap)
    assert_same_bits(plain.run(range(5, 9)), swap.run(range(5, 9)))


def test_loaded_states_are_cast_like_torch_does(storage):
    """bf16 parameters: moments become bf16, `step` stays."""
    saved = Training(OPTIMIZERS["AdamW"]).run(range(4)).states()["optimizer"]
    plain = Training(OPTIMIZERS["AdamW"], dtype=torch.bfloat16)
    swap = Training(OPTIMIZERS["AdamW"], swapped(storage), dtype=torch.bfloat16)
    for training in (plain, swap):
        training.optimizer.load_state_dict(saved)
    assert_same_bits(plain, swap)
    state = swap.optimizer.state_dict()["state"][0]
    assert (state["exp_avg"].dtype, state["step"].dtype) == (torch.bfloat16, torch.float32)
    assert state["step"] == 4 and state["step"] is not saved["state"][0]["step"]


def test_loading_replaces_all_states(storage):
    swap = Training(OPTIMIZERS["Adam amsgrad"], swapped(storage)).run(range(3))
    with_less = Training(OPTIMIZERS["AdamW"]).run(range(1)).states()["optimizer"]  # no amsgrad
    swap.optimizer.load_state_dict(with_less)
    again = swap.optimizer.state_dict()
    assert again["state"].keys() == with_less["state"].keys()
    assert all(list(s) == ["step", "exp_avg", "exp_avg_sq"] for s in again["state"].values())
    empty = Training(OPTIMIZERS["AdamW"]).states()["optimizer"]
    swap.optimizer.load_state_dict(empty)
    assert not swap.optimizer.state
    with pytest.raises(ValueError, match="parameter group"):
        swap.optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})


PERMUTED = {
    "all": [5, 4, 3, 2, 1, 0],
    "in a slice": [1, 0, 2, 3, 5, 4],
    "forwards": [5, 0, 1, 2, 3, 4],
}


@pytest.mark.parametrize("order", PERMUTED.values(), ids=PERMUTED)
@pytest.mark.parametrize("keys", [{}, {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}])
def test_loading_its_own_states_in_other_places(storage, order, keys):
    """They are views of what is overwritten."""
    plain, swap = AdamW(params()), SwapOptimizer(AdamW(params()), slices=3, storage=storage)
    for optimizer in (plain, swap):
        give_grads(optimizer)
        optimizer.step()
        states = optimizer.state_dict()
        moved = {i: states["state"][j] for i, j in enumerate(order)}
        moved = {i: {k: s[keys.get(k, k)] for k in s} for i, s in moved.items()}
        optimizer.load_state_dict({**states, "state": moved})
    same_states(plain.state_dict(), swap.state_dict())


def test_loading_its_own_states_copies_none(storage, monkeypatch):
    """In their own places they are the storage already."""
    swap = SwapOptimizer(AdamW(params()), slices=3, storage=storage)
    give_grads(swap)
    swap.step()
    states, wanted = swap.state_dict(), copy.deepcopy(swap.state_dict())
    kept = []
    apart = SwapOptimizer._apart
    monkeypatch.setattr(SwapOptimizer, "_apart", lambda *a: kept.append(apart(*a)) or kept[-1])
    swap.load_state_dict(states)
    (loaded,) = kept
    assert all(loaded[i][k] is states["state"][i][k] for i in loaded for k in loaded[i])
    same_states(swap.state_dict(), wanted)


def test_views_outlive_another_layout(storage):
    """Loading states of other sizes makes room for them; what shows the old ones keeps it."""
    swap = SwapOptimizer(AdamW(params(size=20000)), slices=3, storage=storage)
    larger = AdamW(params(size=20000), amsgrad=True)
    for optimizer in (swap, larger):
        give_grads(optimizer)
        optimizer.step()
    views, wanted = swap.state_dict(), copy.deepcopy(swap.state_dict())
    small = {**wanted, "state": {}}
    for states in (larger.state_dict(), small, larger.state_dict()):
        swap.load_state_dict(states)
        give_grads(swap, 3)
        swap.step()
    same_states(views, wanted)


def test_room_is_used_again():
    """Not by regions that are shown; and neighbours are one region again."""
    file = SwapFile(None)
    a, b, c = (file.allocate(PAGE) for _ in range(3))
    whole, first, last = file.nbytes, a.offset, c.offset
    view = file.show(b)
    view.fill_(7)
    for region in (a, b, c):
        file.free(region)
    d, e = file.allocate(PAGE), file.allocate(PAGE)
    assert {d.offset, e.offset} == {first, last} and file.nbytes == whole
    for region in (d, e):
        file.write(region, torch.zeros(PAGE, dtype=torch.uint8))
    assert (view == 7).all()
    del view
    for region in (d, e):
        file.free(region)
    assert file.allocate(3 * PAGE).offset == first and file.nbytes == whole
    file.close()


def test_no_step_after_loading_that_failed(storage):
    swap = SwapOptimizer(AdamW(params()), slices=3, storage=storage)
    give_grads(swap)
    swap.step()
    good = copy.deepcopy(swap.state_dict())
    bad = copy.deepcopy(good)
    bad["state"][3] = 5
    with pytest.raises(TypeError, match="has no len") as failed:
        swap.load_state_dict(bad)
    assert "the states of 1 of 3 slices were loaded" in failed.value.__notes__[0]
    message = r"loading states failed before .* load them again\. The step was not done"
    with pytest.raises(StepError, match=message) as error:
        swap.step()
    assert error.value.happened is False
    swap.load_state_dict(good)
    same_states(swap.state_dict(), good)
    swap.step()


def test_load_hooks_may_change_what_is_loaded(storage):
    """The outer one's before the wrapped one's, as both are given."""
    optimizer = AdamW(params())
    swap = SwapOptimizer(optimizer, slices=3, storage=storage)
    give_grads(swap)
    swap.step()
    states = swap.state_dict()

    def add(n):
        def hook(_, found):
            state = {i: s | {"step": 2 * s["step"] + n} for i, s in found["state"].items()}
            return {**found, "state": state}

        return hook

    swap.register_load_state_dict_pre_hook(add(1))
    optimizer.register_load_state_dict_pre_hook(add(0.5))
    swap.load_state_dict(states)
    assert {float(s["step"]) for s in swap.state_dict()["state"].values()} == {2 * 3 + 0.5}
    assert {float(s["step"]) for s in states["state"].values()} == {1.0}


def test_hooks_run_once_a_step(storage):
    calls = []
    optimizer = SGD(params(), momentum=0.9)
    swap = SwapOptimizer(optimizer, slices=3, storage=storage)
    for owner, name in ((optimizer, "inner"), (swap, "outer")):
        owner.register_step_pre_hook(lambda o, a, k, name=name: calls.append(f"{name} before"))
        owner.register_step_post_hook(lambda o, a, k, name=name: calls.append(f"{name} after"))
        owner.register_state_dict_pre_hook(lambda o, name=name: calls.append(f"{name} save"))
        owner.register_load_state_dict_post_hook(lambda o, name=name: calls.append(f"{name} load"))
    everywhere = register_optimizer_step_post_hook(lambda o, a, k: calls.append("everywhere"))
    try:
        give_grads(swap)
        swap.step()
        swap.load_state_dict(swap.state_dict())
    finally:
        everywhere.remove()
    assert calls == [
        "outer before", "inner before", "inner after", "outer after", "everywhere",
        "outer save", "inner save", "inner load", "outer load",
    ]  # fmt: skip


def test_hooks_of_the_wrapped_one_may_change_the_closure(storage):
    optimizer = SGD(params())
    swap = SwapOptimizer(optimizer, slices=2, storage=storage)
    optimizer.register_step_pre_hook(lambda o, args, kwargs: ((o, lambda: 2.0), kwargs))
    give_grads(swap)
    assert swap.step(lambda: 1.0) == 2.0


def test_closure_is_called_once(storage):
    plain, swap = SGD(params(), lr=0.1), SGD(params(), lr=0.1)
    swap = SwapOptimizer(swap, slices=3, storage=storage)
    losses = []
    for optimizer in (plain, swap):

        def closure(optimizer=optimizer):
            losses.append(sum(p.square().sum() for p in optimizer.param_groups[0]["params"]))
            optimizer.zero_grad()
            losses[-1].backward()
            return losses[-1]

        assert optimizer.step(closure) is losses[-1]
    assert len(losses) == 2 and torch.equal(*losses)
    for p, q in zip(plain.param_groups[0]["params"], swap.param_groups[0]["params"], strict=True):
        assert torch.equal(p, q)


def test_scheduler_of_the_wrapped_one(storage):
    """Made before it was swapped: it works, and does not warn that no step was made."""
    optimizer = SGD(params(), lr=1.0)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    swap = SwapOptimizer(optimizer, slices=2, storage=storage)
    give_grads(swap)
    swap.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    assert swap.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("fused", [False, True])
def test_gradient_scaler(storage, fused):
    """A fused optimizer unscales, and skips a step with infinities, by itself."""
    results = []
    for wrap in (lambda o: o, lambda o: SwapOptimizer(o, slices=3, storage=storage)):
        optimizer = wrap(AdamW(params(), fused=fused))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for i in range(4):
            optimizer.zero_grad()
            loss = sum((p * (i + 1)).square().sum() for p in optimizer.param_groups[0]["params"])
            scaler.scale(loss).backward()
            if i == 2:
                optimizer.param_groups[0]["params"][1].grad[0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
        assert not any(hasattr(optimizer, name) for name in ("grad_scale", "found_inf"))
        results.append((optimizer.param_groups[0]["params"], optimizer.state_dict()))
    (ps, plain), (qs, swap) = results
    assert all(map(same_bits, ps, qs))
    same_states(plain, swap)


def test_add_param_group(storage):
    plain, swap = AdamW(params(), lr=0.1), AdamW(params(), lr=0.1)
    swap = SwapOptimizer(swap, slices=3, storage=storage)
    for optimizer in (plain, swap):
        give_grads(optimizer)
        optimizer.step()
        optimizer.add_param_group({"params": params(5, 100), "lr": 0.01})
        for i in range(2):
            give_grads(optimizer, i)
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        give_grads(optimizer, 3)
        optimizer.step()
    assert swap.stats().slices > 3
    for group, other in zip(plain.param_groups, swap.param_groups, strict=True):
        assert all(map(same_bits, group["params"], other["params"]))
    same_states(plain.state_dict(), swap.state_dict())


def test_a_group_that_is_refused_is_not_added(storage):
    swap = SwapOptimizer(AdamW(params()), slices=3, storage=storage)
    bad = {"params": [nn.Parameter(torch.empty(2, device="meta"))]}
    with pytest.raises(ValueError, match="parameters are on cpu, meta"):
        swap.add_param_group(bad)
    with pytest.raises(ValueError, match="param group 1 has differentiable=True"):
        swap.add_param_group({"params": params(1), "differentiable": True})
    give_grads(swap)
    swap.step()
    assert len(swap.param_groups) == 1


class Replaces(SGD):
    """A new tensor for its state each time, and one more from the third step on."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["n"] = state.get("n", 0) + 1
                state["mean"] = 0.9 * state["mean"] + p.grad if "mean" in state else p.grad.clone()
                state["mask"] = state["mean"] > 0
                if state["n"] == 3:
                    state["late"] = torch.zeros_like(p, dtype=torch.float64).t()
                if "late" in state:
                    state["late"] += p.grad.t()
                p.sub_(state["mean"], alpha=group["lr"])


def test_states_that_are_replaced_or_come_late(storage):
    """Also of other types, and not contiguous."""
    plain, swap = Training(Replaces), Training(Replaces, swapped(storage))
    for i in range(8):
        assert torch.equal(plain.step(i), swap.step(i))
    assert_same_bits(plain, swap)


def test_parameters_that_are_not_contiguous(storage):
    def make():
        x = torch.arange(24.0).view(4, 6)
        return [nn.Parameter(x.clone().t()), nn.Parameter(x.clone()), nn.Parameter(x[:, ::2])]

    plain, swap = AdamW(make()), SwapOptimizer(AdamW(make()), slices=2, storage=storage)
    for optimizer in (plain, swap):
        for i in range(3):
            give_grads(optimizer, i)
            optimizer.step()
    same_states(plain.state_dict(), swap.state_dict())
    a, b = plain.state_dict()["state"], swap.state_dict()["state"]
    assert all(a[i]["exp_avg"].stride() == b[i]["exp_avg"].stride() for i in a)


def test_parameters_of_no_elements(storage):
    def make():
        return [nn.Parameter(torch.ones(shape)) for shape in ((3,), (0, 4), (), (5,))]

    plain, swap = AdamW(make()), SwapOptimizer(AdamW(make()), slices=4, storage=storage)
    for optimizer in (plain, swap):
        for i in range(3):
            give_grads(optimizer, i)
            optimizer.step()
    same_states(plain.state_dict(), swap.state_dict())


def test_several_in_one_process(tmp_path):
    """As pipeline parallelism has them, one for each part of the model; one path is enough."""
    swaps = [SwapOptimizer(AdamW(params()), slices=2, storage="disk", path=tmp_path) for _ in "abc"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        f"swap-optimizer-rank0-{i}.bin" for i in range(3)
    ]
    plain = AdamW(params())
    for optimizer in (plain, *swaps):
        give_grads(optimizer)
        optimizer.step()
    for swap in swaps:
        assert all(map(same_bits, plain.param_groups[0]["params"], swap.param_groups[0]["params"]))
        swap.close()
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_wrapped_optimizer_says_what_happened(storage):
    optimizer = SGD(params(), momentum=0.9)
    swap = SwapOptimizer(optimizer, slices=3, storage=storage)
    give_grads(swap)
    swap.step()
    third = swap.param_groups[0]["params"][3]
    third.grad = torch.ones(64)
    third.grad.data = torch.ones(5)  # the wrapped optimizer's business
    with pytest.raises(RuntimeError) as error:
        swap.step()
    (note,) = error.value.__notes__
    assert "the step was done in part: 1 of 3 slices were updated and stored, one more may" in note
    assert optimizer.state is swap.state and len(optimizer.param_groups[0]["params"]) == 6
    give_grads(swap)
    swap.step()


class FailsAfterwards(SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        if self.param_groups[0]["fails"]:
            raise OSError("of the optimizer's own")


def test_an_error_in_the_first_slice_is_not_a_step_that_was_not_done(storage):
    optimizer = FailsAfterwards(params())
    optimizer.param_groups[0]["fails"] = False
    swap = SwapOptimizer(optimizer, slices=3, storage=storage)
    give_grads(swap)
    before = params()[0]
    swap.param_groups[0]["fails"] = True
    message = "own: the step was done in part: 0 of 3 slices .* one more may be changed in part"
    with pytest.raises(StepError, match=message) as error:
        swap.step()
    assert error.value.happened is None
    assert not torch.equal(swap.param_groups[0]["params"][0], before)

"""The wrapped optimizer, made to see a slice of its parameters at a time."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from swap_optimizer.layout import State


def params_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def groups_of(optimizer: Optimizer) -> list[int]:
    """The param group of each parameter, by position."""
    return [i for i, group in enumerate(optimizer.param_groups) for _ in group["params"]]


def narrow(
    groups: Sequence[dict[str, Any]], params: Sequence[Any], of: Sequence[int]
) -> list[dict[str, Any]]:
    """Copies of those groups that `params` are of, with nothing but these.

    Args:
        groups: param groups of an optimizer or of its state_dict.
        params: parameters, or their numbers in the state_dict.
        of: the group of each, by position.
    """
    narrowed = []
    for i in dict.fromkeys(of):
        mine = [p for p, g in zip(params, of, strict=True) if g == i]
        part = {**groups[i], "params": mine}
        if "param_names" in part:
            ids = {id(p) for p in mine}
            names = zip(groups[i]["params"], part["param_names"], strict=True)
            part["param_names"] = [name for p, name in names if id(p) in ids]
        narrowed.append(part)
    return narrowed


@contextlib.contextmanager
def acting_on(optimizer: Optimizer, groups: list[dict[str, Any]], state: State) -> Generator[None]:
    """The optimizer has these groups, this state and no hooks; afterwards its own again.

    Its other attributes are left alone: what an optimizer counts in them it goes on counting.
    """
    own = {"param_groups": optimizer.param_groups, "state": optimizer.state}
    hooks = {n: v for n, v in vars(optimizer).items() if is_hooks(n)}
    try:
        optimizer.param_groups = groups
        optimizer.state = defaultdict(dict, state)
        for name, value in hooks.items():
            setattr(optimizer, name, type(value)())
        yield
    finally:
        for name, value in {**own, **hooks}.items():
            setattr(optimizer, name, value)


def is_hooks(name: str) -> bool:
    return name.startswith("_optimizer_") and name.endswith("_hooks")


def bare_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The optimizer's step without what torch wraps around it: hooks, also global ones."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "__code__", None) is _HOOKED else step


# All functions that torch wraps share this code, whatever else is decorated like them.
_HOOKED = Optimizer.profile_hook_step(lambda self: None).__code__

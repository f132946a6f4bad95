"""Which optimizers can be swapped, found out before anything is: by kind, and by a trial.

The trial makes the optimizer's own step on copies of it with tiny parameters, once on all of them
together and once on each by itself. An optimizer whose parameters do not depend on each other gives
the same bits.
"""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer, SparseAdam

from swap_optimizer.layout import ALIGNMENT, is_swapped, local
from swap_optimizer.wrapped import acting_on, bare_step, is_hooks, narrow

# Of the gradients, step by step: what happens only above or below some size shows in one of them.
SCALES = (1.0, 1e4, 1e-4)
# Parameters of more groups than that show nothing new.
MOST_GROUPS = 8

Kind = tuple[int, torch.dtype]
# Shapes of toy and state, and the state's dtype.
Made = tuple[torch.Size, torch.Size, torch.dtype]


class GroupChanged(RuntimeError):
    """A step that put another value into its param group, later than the trial could see."""


def refuse_rebound(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> None:
    """The same entries, and in them the same values, in a slice's groups as before its step.

    Raises:
        GroupChanged: naming the first one that is not.
    """
    for old, new in zip(before, after, strict=True):
        for key in old | new:
            a, b = old.get(key), new.get(key)
            if key != "params" and a is not b and not _same(a, b):
                raise GroupChanged(
                    f"the wrapped optimizer changed its param group in a step ({key!r}), so its "
                    "parameters are not independent of each other and it cannot be swapped"
                )


def refuse_groups(groups: Sequence[dict[str, Any]]) -> None:
    for i, group in enumerate(groups):
        if group.get("differentiable"):
            raise ValueError(
                f"param group {i} has differentiable=True: gradients through the step need all "
                "states at once"
            )


def probe(optimizer: Optimizer) -> int:
    """Refuse an optimizer that cannot be swapped.

    Returns:
        The bytes that its swapped states will take, foreseen from the trial.

    Raises:
        TypeError: an optimizer whose parameters depend on each other, or whose states cannot be
            moved.
        ValueError: a group with differentiable=True.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        raise TypeError(
            "optimizer: LBFGS updates all parameters as one vector; only optimizers that update "
            "each parameter by itself can be swapped"
        )
    if isinstance(optimizer, SparseAdam):
        raise TypeError("optimizer: SparseAdam is for sparse gradients, which cannot be swapped")
    replaced = vars(optimizer).get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        raise TypeError(
            f"optimizer: the step of this {name} was replaced on the instance ({replaced!r}); "
            "swap it before that"
        )
    refuse_groups(optimizer.param_groups)
    try:
        together, apart = _Twin(optimizer), _Twin(optimizer)
        for i, scale in enumerate(SCALES):
            together.step(i, scale)
            apart.step(i, scale, by_itself=True)
        made = together.made()
        if what := together.differs(apart):
            raise TypeError(
                f"optimizer: {name} gives other results for a parameter by itself than for all "
                f"together ({what}); only optimizers that update each parameter by itself can be "
                "swapped"
            )
        _try_without_gradients(together, apart, name)
    except (TypeError, ValueError):
        raise
    except Exception as error:
        raise TypeError(
            f"optimizer: whether {name} updates each parameter by itself could not be tried: its "
            f"step on small tensors failed ({error})"
        ) from error
    return sum(_foresee(p, made) for group in optimizer.param_groups for p in group["params"])


class _Coupled(TypeError):
    """Said by the trial, not by the optimizer in it."""


def _try_without_gradients(together: "_Twin", apart: "_Twin", name: str) -> None:
    """One more step, in which every second toy has no gradient: those are left out apart."""
    try:
        together.step(len(SCALES), missing=True)
    except _Coupled:
        raise
    except Exception:  # it cannot do such a step at all, swapped or not
        return
    apart.step(len(SCALES), missing=True, by_itself=True)
    if what := together.differs(apart):
        raise TypeError(
            f"optimizer: {name} does something for a parameter without a gradient ({what}); in a "
            "swapped step those are left out"
        )


class _Twin:
    """A copy of an optimizer with two small parameters for each kind that it has."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.toys: list[Tensor] = []
        self.of: list[int] = []
        memo: dict[int, Any] = {}
        for i, group in enumerate(optimizer.param_groups):
            toys: dict[Kind, Tensor] = {}
            for p in group["params"]:
                kind = p.dim(), p.dtype
                if kind not in toys and i < MOST_GROUPS:
                    pair = [_toy(p, len(self.toys) + j) for j in range(2)]
                    toys[kind] = pair[0]
                    self.toys += pair
                    self.of += [i, i]
                # Whatever refers to a parameter refers to a toy in the copy.
                memo[id(p)] = toys.get(kind)
        twin = object.__new__(type(optimizer))
        for name, value in vars(optimizer).items():
            if is_hooks(name):
                vars(twin)[name] = OrderedDict()
            elif name not in ("state", "param_groups", "step"):
                vars(twin)[name] = _copied(value, memo)
        twin.state = defaultdict(dict)
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        twin.param_groups = [
            {**_copied(group, memo), "params": self._of_group(i)} for i, group in enumerate(groups)
        ]
        for group in twin.param_groups:
            if "param_names" in group:
                group["param_names"] = [str(j) for j in range(len(group["params"]))]
        self.optimizer = twin

    def _of_group(self, i: int) -> list[Tensor]:
        return [toy for toy, group in zip(self.toys, self.of, strict=True) if group == i]

    def step(
        self, i: int, scale: float = 1.0, missing: bool = False, by_itself: bool = False
    ) -> None:
        """Step number `i`.

        Args:
            scale: of the gradients.
            missing: every second toy has no gradient.
            by_itself: for each toy that has a gradient a step of its own, as if each were a slice.

        Raises:
            _Coupled: the step changes what all parameters share.
        """
        twin = self.optimizer
        for j, toy in enumerate(self.toys):
            given = not (missing and j % 2)
            toy.grad = _values(toy, 10 * i + j + 5, scale) if given else None
        numbers = range(len(self.toys))
        parts = [[j] for j in numbers if self.toys[j].grad is not None]
        for part in parts if by_itself else [list(numbers)]:
            toys = [self.toys[j] for j in part]
            groups = narrow(twin.param_groups, toys, [self.of[j] for j in part])
            before = [_copied(_shared(group), {}) for group in groups]
            state = {toy: twin.state[toy] for toy in toys if toy in twin.state}
            with acting_on(twin, groups, state):
                bare_step(twin)(twin)
                state = dict(twin.state)
            self._check(groups, before, state, toys)
            twin.state.update({p: _moved(s) for p, s in state.items()} if by_itself else state)

    def _check(
        self,
        groups: list[dict[str, Any]],
        before: list[dict[str, Any]],
        state: dict[Any, Any],
        toys: list[Tensor],
    ) -> None:
        name = type(self.optimizer).__name__
        for group, old in zip(groups, before, strict=True):
            for key in _shared(group).keys() | old.keys():
                if not _same(group.get(key), old.get(key)):
                    raise _Coupled(
                        f"optimizer: {name} changes its param group in a step ({key!r}), so its "
                        "parameters are not independent of each other"
                    )
        if strangers := [key for key in state if not any(key is toy for toy in toys)]:
            raise _Coupled(
                f"optimizer: {name} has states that belong to no parameter ({strangers[0]!r})"
            )

    def made(self) -> dict[Kind, list[Made]]:
        """The states that parameters of each kind got."""
        return {
            (toy.dim(), toy.dtype): [
                (toy.shape, value.shape, value.dtype)
                for key, value in self.optimizer.state.get(toy, {}).items()
                if is_swapped(key, value)
            ]
            for toy in reversed(self.toys)
        }

    def differs(self, other: "_Twin") -> str | None:
        """What is not the same in two twins: parameters, states, or attributes that are numbers."""
        for a, b in zip(self.toys, other.toys, strict=True):
            if not _same(a, b):
                return "parameters differ"
            mine, its = (t.optimizer.state.get(p, {}) for t, p in ((self, a), (other, b)))
            if not _same(mine, its):
                keys = [k for k in mine | its if not _same(mine.get(k), its.get(k))]
                return f"state {keys[0]!r} differs"
        one, another = vars(self.optimizer), vars(other.optimizer)
        for name in one | another:
            values = one.get(name), another.get(name)
            if any(isinstance(v, (int, float, Tensor)) for v in values) and not _same(*values):
                return f"attribute {name!r} differs"
        return None


def _shared(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def _toy(p: Tensor, seed: int) -> Tensor:
    x = local(p)
    device = "cpu" if x.is_meta else x.device
    # Dimensions that differ show which of them a state follows (Adafactor's rows and columns).
    shape = [min(size, 2 + i) for i, size in enumerate(x.shape)]
    toy = torch.empty(shape, dtype=x.dtype, device=device)
    toy.copy_(_values(toy, seed))
    return torch.nn.Parameter(toy, requires_grad=x.dtype.is_floating_point or x.dtype.is_complex)


def _values(like: Tensor, seed: int, scale: float = 1.0) -> Tensor:
    """Numbers in (-scale, scale), the same for the same seed; no random generator is touched."""
    n = torch.arange(like.numel(), dtype=torch.float64)
    x = scale * torch.sin(1.0 + 1.7 * n + 0.9 * seed)
    return x.reshape(like.shape).to(like.device, like.dtype)


def _moved(state: dict[str, Any]) -> dict[str, Any]:
    """A state as it comes back from the storage: swapped tensors are others than before."""
    return {k: v.clone() if is_swapped(k, v) else v for k, v in state.items()}


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, dict(memo))
    except Exception:  # a process group, a stream: the trial shares it
        return value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if isinstance(a, torch._subclasses.FakeTensor):
            return a.shape == b.shape  # there are no numbers
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        both_nan = a.dtype.is_floating_point and a.isnan() & b.isnan()
        return torch.equal(a, b) or bool(((a == b) | both_nan).all())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a is b or a == b)


def _foresee(p: Tensor, made: dict[Kind, list[Made]]) -> int:
    shape, total = local(p).shape, 0
    for toy, state, dtype in made.get((p.dim(), p.dtype), ()):
        if len(toy) == len(state):
            sizes = [d if s == t else s for d, s, t in zip(shape, state, toy, strict=True)]
        else:
            sizes = list(state)
        nbytes = torch.Size(sizes).numel() * dtype.itemsize
        total += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return total

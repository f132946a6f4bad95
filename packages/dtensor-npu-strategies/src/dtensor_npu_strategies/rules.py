"""The language of the strategies: what an operator computes of shards, along one mesh dimension."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.distributed.tensor import Partial, Placement, Replicate, Shard


class Rule(NamedTuple):
    """Placements along one mesh dimension with which an operator runs on what each rank has.

    Along other mesh dimensions another rule may hold. `Shard` stands for strided shards, too, and
    `Partial` for its sum or average, as the inputs have them.
    """

    inputs: Mapping[str, Placement]
    """By argument; those that are missing are replicated. All tensors of a list are alike."""
    outputs: tuple[Placement | None, ...]


class Arguments:
    """The arguments of a call by name, defaults filled in; tensors are known by `.shape` alone."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        return self._values[name]

    def ndim(self, name: str) -> int:
        """Dimensions of a tensor, or of the tensors of a list; -1 where they differ or are none."""
        value = self._values.get(name)
        tensors = value if isinstance(value, (list, tuple)) else [value]
        sizes = {len(x.shape) if hasattr(x, "shape") else -1 for x in tensors}
        return sizes.pop() if len(sizes) == 1 else -1

    def has(self, name: str) -> bool:
        """Whether there is a tensor, or a list of them."""
        value = self._values.get(name)
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        return hasattr(value, "shape")


Rules = Callable[[Arguments], Iterable[Rule]]
LocalValues = Callable[[Arguments, Callable[[str, int], int]], dict[str, int]]


@dataclass(frozen=True)
class Operator:
    """The strategies of one operator."""

    name: str
    """``namespace::name`` or ``namespace::name.overload``."""
    group: str
    rules: Rules
    pinned: Mapping[str, int | None] = field(default_factory=dict)
    """Arguments that are neither cut nor gathered along this dimension without being asked for,
    since shards of it are not what another order of ranks would give; None: along any."""
    why_pinned: str = ""
    local_values: LocalValues | None = None
    """Arguments that have another value on each rank, such as a number of rows, by name. Given are
    the call's arguments and a function from an argument's name and a number of rows to this rank's
    share of such rows."""


OPERATORS: dict[str, Operator] = {}


def operator(*names: str, group: str, **options: Any) -> Callable[[Rules], Rules]:
    """Enter a function from arguments to rules as the strategies of operators."""

    def enter(rules: Rules) -> Rules:
        for name in names:
            assert name not in OPERATORS
            OPERATORS[name] = Operator(name, group, rules, **options)
        return rules

    return enter


def sharded(a: Arguments, pattern: str, over: str) -> Iterator[Rule]:
    """Rules of an operator whose dimensions have names.

    ``sharded(a, "q:BSHD kv:BTD -> BSHV BSH", over="BSH")`` has one rule for each of B, S and H:
    tensors that have the dimension are sharded along it; inputs without it are replicated, and
    outputs without it are sums over the ranks. A dimension ``_`` is never sharded, and ``.`` is an
    output of no dimensions. An output ``=BSK`` does not depend on dimensions that it lacks, and is
    replicated. Arguments that are None are passed over. There are no rules if a tensor has another
    number of dimensions.
    """
    left, right = pattern.split("->")
    inputs = {}
    for item in left.split():
        name, dims = item.split(":")
        if not a.has(name):
            continue
        if a.ndim(name) != len(dims):
            return
        inputs[name] = dims
    for label in over:
        yield Rule(
            {name: _place(dims, label, Replicate()) for name, dims in inputs.items()},
            tuple(
                _place(dims.lstrip("="), label, Replicate() if "=" in dims else Partial())
                for dims in right.split()
            ),
        )


def linear(inputs: Iterable[str], *outputs: bool) -> Rule:
    """A sum over ranks of `inputs`, all others replicated: which outputs are such sums, too."""
    return Rule(
        dict.fromkeys(inputs, Partial()),
        tuple(Partial() if is_sum else Replicate() for is_sum in outputs),
    )


def _place(dims: str, label: str, otherwise: Placement) -> Placement:
    return Shard(dims.index(label)) if label in dims else otherwise


def leading(ndim: int, *, without: Iterable[int] = ()) -> tuple[str, str]:
    """Names for `ndim` dimensions (those `without` are ``_``), and the names to shard over."""
    skipped = {dim % ndim for dim in without}
    dims = "".join("_" if d in skipped else chr(ord("a") + d) for d in range(ndim))
    return dims, dims.replace("_", "")


def short(placement: Placement | None) -> str:
    """R, S(0) or P, as placements are mostly written."""
    if placement is None:
        return "-"
    if isinstance(placement, Partial):
        return "P" if placement.reduce_op == "sum" else f"P({placement.reduce_op})"
    return "R" if placement.is_replicate() else f"S({getattr(placement, 'dim', '?')})"

"""What a function over DTensors really moved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor, Placement
from torch.utils._debug_mode import DebugMode
from torch.utils._pytree import tree_leaves

from dtensor_npu_strategies.rules import short

NONE = "none (local slice)"


@dataclass(frozen=True)
class Redistribution:
    """A tensor whose placements changed, or a collective by itself."""

    operator: str
    """The operator that wanted other placements; ``redistribute`` where the program asked for
    them, and the collective's own name where it is none of DTensor's."""
    argument: str
    """The operator's argument."""
    from_: tuple[Placement, ...]
    to: tuple[Placement, ...]
    collective: str
    """The collectives, in order; ``none (local slice)`` where each rank had what it needs."""
    bytes: int
    """What this rank sends by the usual algorithms that send least: (n - 1) / n of the whole
    tensor for an all-gather, reduce-scatter or all-to-all of n ranks, twice that for an
    all-reduce."""
    phase: str = field(default="forward")
    """"forward" or "backward"."""


class Redistributions(list[Redistribution]):
    """A list that prints as a table."""

    def __str__(self) -> str:
        names = [f.name.rstrip("_") for f in fields(Redistribution)]
        rows = [
            [_text(getattr(item, f.name)) for f in fields(Redistribution)] for item in self
        ] or [["nothing was redistributed"]]
        widths = [
            max(len(row[i]) for row in ([names, *rows] if len(rows[0]) > 1 else [names]))
            for i in range(len(names))
        ]
        lines = [
            "  ".join(
                cell.rjust(width) if name == "bytes" else cell.ljust(width)
                for name, cell, width in zip(names, row, widths, strict=False)
            ).rstrip()
            for row in [names, *rows]
        ]
        return "\n".join(lines)

    __repr__ = __str__


def redistributions(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Redistributions:
    """Call ``function(*args, **kwargs)`` and list what was redistributed while it ran.

    Listed is what happened on this rank, whoever asked for it: the program, or DTensor because an
    operator has no strategy for the placements it got. Backward counts if `function` runs it.
    Collectives that are not DTensor's are listed, too. Collectives of other ranks are waited for
    as always: all ranks of the mesh must call this.

    Returns:
        A list in the order of time, empty where nothing moved. Printed, it is a table.
    """
    with _Recorder() as recorder:
        function(*args, **kwargs)
    return recorder.found


class _Recorder(DebugMode):
    """The mode that DTensor tells about redistributions."""

    def __init__(self) -> None:
        super().__init__(record_output=False)
        self.found = Redistributions()
        self._operator: str | None = None
        self._arguments: list[str] = []
        self._open: list[tuple[str, int]] | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            self._operator, self._arguments = func.name(), _names(func, args)
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if (moved := _collective(func, args, kwargs or {}, result)) is not None:
            if self._open is not None:
                self._open.append(moved)
            elif moved[1]:
                self._enter(moved[0], "", (), (), [moved])
        return result

    @contextlib.contextmanager
    def record_redistribute_calls(
        self,
        arg: Any,
        src_placement: Any,
        dst_placement: Any,
        transform_info_str: str | None = None,
        is_explicit: bool = False,
    ) -> Generator[None]:
        """Called by DTensor around an argument's redistribution, and once more inside of it."""
        if self._open is not None:
            yield
            return
        operator, argument = "redistribute", "input"
        if isinstance(arg, int) and self._operator is not None:
            operator = self._operator
            argument = self._arguments[arg] if arg < len(self._arguments) else str(arg)
        self._open = []
        try:
            yield
        finally:
            moved, self._open = self._open, None
            self._enter(operator, argument, _placements(src_placement),
                        _placements(dst_placement), moved)  # fmt: skip

    def record_output_placements(self, output_spec: Any) -> None:
        pass

    def _enter(
        self,
        operator: str,
        argument: str,
        from_: tuple[Placement, ...],
        to: tuple[Placement, ...],
        moved: list[tuple[str, int]],
    ) -> None:
        phase = "forward" if torch._C._current_autograd_node() is None else "backward"
        collective = " + ".join(name for name, _ in moved) or NONE
        total = sum(size for _, size in moved)
        self.found.append(Redistribution(operator, argument, from_, to, collective, total, phase))


def _placements(spec: Any) -> tuple[Placement, ...]:
    return tuple(getattr(spec, "placements", spec))


def _names(op: Any, args: tuple[Any, ...]) -> list[str]:
    """Names of the arguments as DTensor numbers them: where there are lists of tensors, lists are
    flattened."""
    names = [argument.name for argument in op._schema.arguments]
    lists = [x for x in args if isinstance(x, (list, tuple))]
    if not any(isinstance(x, torch.Tensor) for items in lists for x in items):
        return names
    flat: list[str] = []
    for name, x in zip(names, args, strict=False):
        many = isinstance(x, (list, tuple))
        flat += [f"{name}[{i}]" for i in range(len(x))] if many else [name]
    return flat


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(short(p) for p in value) or "-"
    return f"{value:,}" if isinstance(value, int) else value or "-"


# --- collectives ---------------------------------------------------------------------------------

# Ways of the same collective into torch, and how many times (n - 1) / n of the tensor a rank sends.
_KINDS = {
    "all_gather": (1, ("all_gather", "allgather")),
    "reduce_scatter": (1, ("reduce_scatter",)),
    "all_reduce": (2, ("all_reduce", "allreduce")),
    "all_to_all": (1, ("all_to_all", "alltoall")),
    "broadcast": (1, ("broadcast",)),
    "scatter": (1, ("scatter",)),
    "gather": (1, ("gather",)),
    "reduce": (1, ("reduce",)),
}


def _collective(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[str, int] | None:
    """A collective's name and bytes, or None for all other operators."""
    namespace, _, name = func.name().partition("::")
    if namespace not in ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"):
        return None
    kind = next((k for k, (_, words) in _KINDS.items() if any(w in name for w in words)), None)
    if kind is None:
        return None
    flat = tree_leaves([args, kwargs])
    group = _group(flat)
    n = dist.get_world_size(group) if group is not None else 1
    sizes = [
        sum(x.numel() * x.element_size() for x in tree_leaves(tree) if isinstance(x, torch.Tensor))
        for tree in (flat, result)
    ]  # fmt: skip
    return kind, _KINDS[kind][0] * max(sizes) * (n - 1) // n


def _group(flat: list[Any]) -> Any:
    """The process group among a collective's arguments: itself, or its name, which comes last."""
    for value in reversed(flat):
        if isinstance(value, str):
            try:
                return _resolve_process_group(cast(Any, value))
            except (RuntimeError, ValueError, TypeError):
                continue
        if isinstance(value, dist.ProcessGroup):
            return value
        if isinstance(value, torch.ScriptObject):
            with contextlib.suppress(Exception):
                return dist.ProcessGroup.unbox(value)
    return None

"""Strategies into DTensor and out again, by torch's private tables: nothing else here uses them.

`torch.distributed.tensor.experimental.register_sharding` is public, and not enough: what it enters
cannot be taken out, it gives up an input's shards where a dimension is smaller than the ranks, it
takes every operator with a list of tensors to return one tensor, and it trusts that tensors given
by keyword, which DTensor never redistributes, are as the strategy wants them. The tables behind it
are the same ones in torch 2.13 and 2.14; tests fail when the public way becomes enough.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeGuard

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._collective_utils import redistribute_cost
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import (
    OpSchema,
    OpSpec,
    OpStrategy,
    RuntimeSchemaInfo,
    TupleStrategy,
)
from torch.distributed.tensor._ops.utils import is_tensor_shardable
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from dtensor_npu_strategies import attention, matmul, moe, norm_rope  # noqa: F401 - they enter
from dtensor_npu_strategies.rules import OPERATORS, Arguments, Operator, Rule, short

_NOTHING = object()
# Where torch looks, in the dispatcher (the last) and its sharding propagator. Ours are in the first
# two and sometimes the third; what others have in the rest would be found before them.
_TABLES = (
    "op_strategy_funcs",
    "op_to_schema_info",
    "op_to_scalar_shape_adjuster",
    "op_single_dim_strategy_funcs",
    "op_to_schema_info_for_single_dim_strategy",
    "_custom_op_handlers",
)
_active: list[Registration] = []


class Registration:
    """Strategies that are in force, until `remove` is called or its ``with`` block ends."""

    operators: tuple[str, ...]
    """Names of the operators that have them."""
    absent: tuple[str, ...]
    """Those of the asked-for groups that are not there: the package that brings them was not
    imported before."""

    def __init__(self, operators: tuple[str, ...], absent: tuple[str, ...]) -> None:
        self.operators, self.absent = operators, absent
        self._mine: dict[tuple[str, OpOverload], Any] = {}
        self._before: dict[tuple[str, OpOverload], Any] = {}
        for table in _TABLES:
            _table(table)  # all or nothing
        for name in operators:
            op = _overload(name)
            if op is not None:
                self._enter(op, OPERATORS[name])
        _active.append(self)
        _clear_caches()

    def _enter(self, op: OpOverload, operator: Operator) -> None:
        mine: dict[str, Any] = dict.fromkeys(_TABLES, _NOTHING)
        mine["op_strategy_funcs"] = _Strategy(operator)
        mine["op_to_schema_info"] = _schema_info(op)
        if operator.local_values is not None:
            mine["op_to_scalar_shape_adjuster"] = _LocalValues(operator)
        for table, value in mine.items():
            self._before[table, op] = _table(table).get(op, _NOTHING)
            self._mine[table, op] = value
            _set(table, op, value)

    def remove(self) -> None:
        """Put back what was there before; a second call does nothing.

        What others have registered for an operator since stays, and so do other registrations of
        ours, in whatever order they are removed.
        """
        if self not in _active:
            return
        above = _active[_active.index(self) + 1 :]
        for (table, op), mine in self._mine.items():
            before = self._before[table, op]
            later = next((r for r in above if (table, op) in r._mine), None)
            if later is not None and later._before[table, op] is mine:
                later._before[table, op] = before
            elif later is None and _table(table).get(op, _NOTHING) is mine:
                _set(table, op, before)
        _active.remove(self)
        _clear_caches()

    def __enter__(self) -> Registration:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()


def register(ops: str | Iterable[str] | None = None) -> Registration:
    """Give DTensor the sharding strategies of this package, until the result is removed.

    They take the place of the strategies that torch or torch_npu have for these operators. Import
    what brings the operators (torch_npu, npu_dsa_kernels) first: those that are not there yet are
    left out, and listed in `Registration.absent`.

    Args:
        ops: groups ("matmul", "moe", "dsa", "norm_rope") or names of operators, with their
            namespace ("npu_dsa::rms_norm") or without where it is clear; None for all.

    Raises:
        ValueError: an unknown name, or an operator asked for by name that is not there.
    """
    names = [ops] if isinstance(ops, str) else ops
    groups: dict[str, list[str]] = {}
    for operator in OPERATORS.values():
        groups.setdefault(operator.group, []).append(operator.name)
    wanted: dict[str, None] = {}
    for name in groups if names is None else names:
        if name in groups:
            wanted.update(dict.fromkeys(groups[name]))
            continue
        found = [full for full in OPERATORS if name in (full, _bare(full))]
        if len(found) != 1:
            raise ValueError(_unknown(name, found, groups))
        if _overload(found[0]) is None:
            package = "torch_npu" if found[0].startswith("npu::") else "npu_dsa_kernels"
            raise ValueError(
                f"ops: the operator {found[0]} is not there; import {package}, which brings it, "
                "before register()"
            )
        wanted[found[0]] = None
    there = tuple(name for name in wanted if _overload(name) is not None)
    return Registration(there, tuple(name for name in wanted if name not in there))


def _bare(full: str) -> str:
    return full.partition("::")[2]


def _unknown(name: object, found: list[str], groups: Mapping[str, list[str]]) -> str:
    if found:
        return f"ops: {name!r} is the name of {len(found)} operators; say which: {', '.join(found)}"
    there = "; ".join(f"{group} ({', '.join(names)})" for group, names in groups.items())
    return f"ops: got {name!r}; expected groups, or operators of one: {there}"


def _overload(name: str) -> OpOverload | None:
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except AttributeError:
        return None


# --- DTensor's tables ----------------------------------------------------------------------------


def _table(name: str) -> dict[OpOverload, Any]:
    dispatcher = DTensor._op_dispatcher
    owner = dispatcher if name == "_custom_op_handlers" else dispatcher.sharding_propagator
    table = getattr(owner, name, None)
    if not isinstance(table, dict):
        raise RuntimeError(
            f"torch {torch.__version__} keeps DTensor's strategies elsewhere (no {name}): this "
            "version of dtensor-npu-strategies is for torch 2.13 and 2.14"
        )
    return table


def _set(table: str, op: OpOverload, value: Any) -> None:
    if value is _NOTHING:
        _table(table).pop(op, None)
    else:
        _table(table)[op] = value


def _clear_caches() -> None:
    # As torch.distributed.tensor.debug has it, whose import needs numpy.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta_cached.cache_clear()


def _schema_info(op: OpOverload) -> RuntimeSchemaInfo:
    """Any argument may change the answer, so all are part of the caches' keys."""
    arguments = op._schema.arguments
    keywords = [x.name for x in arguments]
    lists = any(str(x.type) in ("List[Tensor]", "Optional[List[Tensor]]") for x in arguments)
    return RuntimeSchemaInfo(static_argnum=0, static_kwargkey=keywords, needs_pytree=lists)


# --- from rules along one mesh dimension to placements on the mesh -------------------------------


class _Strategy:
    """What DTensor asks for the placements of a call."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator

    def __call__(self, schema: OpSchema) -> OpStrategy:
        call = _Call(schema, self.operator)
        rules = [Rule({}, (Replicate(),) * call.outputs), *self.operator.rules(call.arguments)]
        if call.is_list:
            rules = rules[1:]  # only they know how many there are
        options = [call.rows(rules, dim) for dim in range(call.mesh.ndim)]
        # Along mesh dimensions where the inputs fit some rule nothing moves; the others are open.
        fitting = [[row for row in rows if row.inputs == call.given(d)][:1] or rows
                   for d, rows in enumerate(options)]  # fmt: skip
        found = call.candidates(fitting) or call.candidates(options)
        if not found:
            raise ValueError(call.refusal(rules))
        return OpStrategy(found)


class _Row(tuple):
    """A rule written out: the placements of all input tensors, in order, and of the outputs."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement | None, ...]

    def __new__(cls, inputs, outputs):
        row = super().__new__(cls, (inputs, outputs))
        row.inputs, row.outputs = inputs, outputs
        return row


class _Call:
    """One call, taken apart."""

    def __init__(self, schema: OpSchema, operator: Operator) -> None:
        self.schema, self.operator = schema, operator
        self.op = schema.op
        values: dict[str, Any] = {}
        self.names: list[str] = []  # of the argument that each tensor is in
        self.specs: list[DTensorSpec] = []

        def enter(name: str, value: Any) -> Any:
            if isinstance(value, OpStrategy):
                spec = value.strategies[0].output_spec
                self.names.append(name)
                self.specs.append(spec)
                return spec
            if isinstance(value, TupleStrategy):
                return [enter(name, child) for child in value.children]
            if isinstance(value, (list, tuple)):
                return [enter(name, item) for item in value]
            return value

        arguments = self.op._schema.arguments
        for argument, value in zip(arguments, schema.args_schema, strict=False):
            values[argument.name] = enter(argument.name, value)
        self.positional = len(self.specs)
        for name, value in schema.kwargs_schema.items():
            values[name] = enter(name, value)
        for argument in arguments:
            values.setdefault(argument.name, argument.default_value)
        self.arguments = Arguments(values)
        self.mesh = self.specs[0].mesh
        returns = self.op._schema.returns
        self.is_list = len(returns) == 1 and isinstance(returns[0].type, torch.ListType)
        self.outputs = sum("Tensor" in str(r.type) for r in returns)
        self.not_tensors = len(returns) - self.outputs
        for name, spec in zip(self.names, self.specs, strict=True):
            if spec.mesh != self.mesh:
                raise ValueError(
                    f"{self.op}: {name} is on {spec.mesh}, {self.names[0]} on {self.mesh}; "
                    "expected all of one mesh"
                )

    def given(self, dim: int) -> tuple[Placement, ...]:
        return tuple(spec.placements[dim] for spec in self.specs)

    def rows(self, rules: Sequence[Rule], dim: int) -> list[_Row]:
        """The rules with the kinds of shards and sums that the inputs have along a mesh dim."""
        shards: dict[Any, None] = {}
        sums: dict[str, None] = {}
        for placement in self.given(dim):
            if isinstance(placement, _StridedShard):
                shards[placement.split_factor] = None
            elif isinstance(placement, Shard):
                shards[None] = None
            elif isinstance(placement, Partial) and placement.reduce_op in ("sum", "avg"):
                sums[placement.reduce_op] = None
        rows: list[_Row] = []
        for rule in rules:
            inputs = [rule.inputs.get(name, Replicate()) for name in self.names]
            kinds = shards or {None: None} if any(map(_is_shard, inputs)) else {None: None}
            reductions = sums or {"sum": None} if any(map(_is_sum, inputs)) else {"sum": None}
            for factor, reduction in itertools.product(kinds, reductions):
                rows.append(
                    _Row(
                        tuple(_as(p, factor, reduction) for p in inputs),
                        tuple(_as(p, factor, reduction) for p in rule.outputs),
                    )
                )
        return rows

    def candidates(self, options: Sequence[Sequence[_Row]]) -> list[OpSpec]:
        found = (self._candidate(rows) for rows in itertools.product(*options))
        return [candidate for candidate in found if candidate is not None]

    def _candidate(self, rows: tuple[_Row, ...]) -> OpSpec | None:
        inputs: list[DTensorSpec] = []
        for i, placements in enumerate(zip(*(row.inputs for row in rows), strict=True)):
            spec = self.specs[i]
            if placements == spec.placements:
                inputs.append(spec)
                continue
            # Tensors by keyword, and those written to, stay as they are.
            if i >= self.positional or (i == 0 and self.schema.is_inplace_op()):
                return None
            if self._unpins(i, placements) or _mixed(placements):
                return None
            # What is there once is not made a sum that is there in one place.
            if any(
                _is_sum(then) and then != now
                for now, then in zip(spec.placements, placements, strict=True)
            ):
                return None
            wanted = DTensorSpec(self.mesh, placements, tensor_meta=spec.tensor_meta)
            if not is_tensor_shardable(spec.shape, wanted):
                return None
            inputs.append(wanted)
        outputs: list[DTensorSpec | None] = []
        for placements in zip(*(row.outputs for row in rows), strict=True):
            if _mixed(placements):
                return None
            outputs.append(None if None in placements else DTensorSpec(self.mesh, placements))
        if self.schema.is_inplace_op() and _moves_self(rows):
            return None
        outputs += [None] * self.not_tensors
        single = len(outputs) == 1 and not self.is_list
        costs = [
            [redistribute_cost(now, then)] for now, then in zip(self.specs, inputs, strict=True)
        ]
        return OpSpec(outputs[0] if single else tuple(outputs), inputs, costs)

    def _unpins(self, i: int, placements: tuple[Placement, ...]) -> bool:
        name = self.names[i]
        if name not in self.operator.pinned:
            return False
        dim = self.operator.pinned[name]
        return any(
            now != then and (_cuts(now, dim) or _cuts(then, dim))
            for now, then in zip(self.specs[i].placements, placements, strict=True)
        )

    def refusal(self, rules: Sequence[Rule]) -> str:
        def shown(placements: Iterable[Placement | None]) -> str:
            return ", ".join(
                f"{name} {short(p)}" for name, p in zip(self.names, placements, strict=True)
            )

        got = ", ".join(
            f"{name} {' '.join(map(short, spec.placements))}"
            for name, spec in zip(self.names, self.specs, strict=True)
        )
        by_keyword = self.names[self.positional :]
        lines = [f"{self.op}: no strategy for {got} on a mesh of {tuple(self.mesh.shape)}."]
        if self.operator.why_pinned:
            lines.append(self.operator.why_pinned)
        if by_keyword:
            lines.append(f"DTensor redistributes no keyword arguments: {', '.join(by_keyword)}.")
        rows = dict.fromkeys(shown(row.inputs) for row in self.rows(rules, 0))
        lines.append("Along a mesh dimension, expected one of:")
        return "\n".join([*lines, *(f"  {row}" for row in rows)])


class _LocalValues:
    """Lets DTensor pass each rank its own numbers of rows."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator

    def __call__(self, inputs: list[DTensorSpec], schema: OpSchema) -> OpSchema:
        arguments = schema.op._schema.arguments
        values: dict[str, Any] = {x.name: x.default_value for x in arguments}
        values.update(zip((x.name for x in arguments), schema.args_schema, strict=False))
        values.update(schema.kwargs_schema)

        def share(name: str, rows: int) -> int:
            x = values[name]
            return compute_local_shape_and_global_offset(
                (rows, *x.shape[1:]), x.mesh, x.placements, skip_offset=True
            )[0][0]

        assert self.operator.local_values is not None
        call = Arguments(values)
        changed = self.operator.local_values(call, share)
        args = [
            changed.get(argument.name, value)
            for argument, value in zip(arguments, schema.args_schema, strict=False)
        ]
        return OpSchema(schema.op, tuple(args), schema.kwargs_schema)


def _is_shard(placement: Placement | None) -> TypeGuard[Shard | _StridedShard]:
    return isinstance(placement, (Shard, _StridedShard))


def _moves_self(rows: Iterable[_Row]) -> bool:
    """Whether what is written to would have to change its placement."""
    return any(row.inputs[0] != row.outputs[0] for row in rows)


def _cuts(placement: Placement, dim: int | None) -> bool:
    return _is_shard(placement) and dim in (None, placement.dim)


def _is_sum(placement: Placement | None) -> bool:
    return isinstance(placement, Partial)


def _as(placement: Placement | None, factor: int | None, reduction: str) -> Placement | None:
    if isinstance(placement, Shard) and factor is not None:
        return _StridedShard(placement.dim, split_factor=factor)
    if isinstance(placement, Partial):
        return Partial(reduction)
    return placement


def _mixed(placements: Iterable[Placement | None]) -> bool:
    """Whether sums and maxima, say, of ranks would have to be taken in some order."""
    kinds = {p.reduce_op for p in placements if isinstance(p, Partial)}
    return len(kinds) > 1 and kinds != {"sum", "avg"}

"""What FSDP2 does and when: gathers, computation, frees and reductions, in order.

FSDP2 shows where a block's computation begins and ends (module hooks), but not when parameters are
freed, and its public hooks on collectives refuse modules with two groups. So a trace shadows
methods of the group objects (``FSDPParamGroup``, private in torch) on these instances, while it is
open: nothing is patched for other models, and closing deletes the shadows. All knowledge of private
names is in :class:`_Tracer`; ``check_torch`` refuses a torch that lacks one of them.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp2_npu.shard import FullPrecisionPolicy

Phase = Literal["forward", "backward", "outside"]
Kind = Literal["all_gather", "compute", "free", "reduce_scatter"]
GroupKind = Literal["dense", "expert", "full_precision"]

_GROUP_METHODS = (
    "unshard",
    "pre_backward",
    "post_backward",
    "_to_sharded",
    "_to_sharded_post_forward",
)


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    Attributes:
        layer: name of the module, as in ``named_modules()``; "" is the root.
        phase: "forward", "backward", or "outside" of both: called by hand, as pipeline schedules
            call ``unshard()`` and ``reshard()``.
        kind: "all_gather" and "reduce_scatter" are the moment of issue, "free" that of resharding.
        group: which of the layer's groups; "expert" are the parameters on ``expert_mesh``.
        edge: "begin" or "end" of a "compute"; "" for the others. Recomputation in backward is part
            of backward's compute.
        bytes: size of the whole parameters gathered or freed; of the gradients reduced, padded to
            equal parts.
        ranks: ranks that take part in a collective. An all-gather of one rank copies, no more.
    """

    layer: str
    phase: Phase
    kind: Kind
    group: GroupKind
    edge: Literal["", "begin", "end"] = ""
    bytes: int = 0
    ranks: int = 0


@contextmanager
def trace_collectives(model: nn.Module) -> Generator[list[Event]]:
    """Record what FSDP2 does to a model's layers.

    Args:
        model: a model sharded with :func:`shard_model` or ``fully_shard``, or a pipeline stage.

    Yields:
        The list to which events are added as they happen, on this rank.

    Raises:
        ValueError: no module of the model is sharded, or it is being traced already.
        RuntimeError: a torch whose FSDP2 has other private names.
    """
    states = _states(model)
    events: list[Event] = []
    with ExitStack() as undo:
        for layer, state in states.items():
            _Tracer(layer, state, events, undo)
        yield events


def _states(model: nn.Module) -> dict[str, Any]:
    """FSDP states with parameters of their own, by the names of their modules."""
    names: dict[Any, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            names.setdefault(module._get_fsdp_state(), []).append(name)
    if not names:
        raise ValueError(
            f"no module of this {type(model).__name__} is sharded: call shard_model or fully_shard "
            "before trace_collectives"
        )
    states = {", ".join(n): state for state, n in names.items() if state._fsdp_param_groups}
    for state in states.values():
        for group in state._fsdp_param_groups:
            check_torch(group)
            if "unshard" in vars(group):
                raise ValueError("this model is being traced already")
    return states


def check_torch(group: Any) -> None:
    """Whether a parameter group has all that a trace relies on."""
    attributes = (*_GROUP_METHODS, "_training_state", "_all_gather_result", "is_unsharded")
    missing = [n for n in (*attributes, "_reduce_scatter_comm") if not hasattr(group, n)]
    if missing:
        raise RuntimeError(
            f"FSDP2 of torch {torch.__version__} has no FSDPParamGroup.{missing[0]}, which "
            "trace_collectives follows: use torch 2.13 or 2.14"
        )


class _Tracer:
    """Follows one FSDP state."""

    def __init__(self, layer: str, state: Any, events: list[Event], undo: ExitStack) -> None:
        self.layer = layer
        self.events = events
        self.kinds = {group: self._kind(state, group) for group in state._fsdp_param_groups}
        self.groups = groups = list(self.kinds)
        self.in_backward = False  # between the begin and the end of this layer's backward
        for group in groups:
            for method, wrapper in (
                ("unshard", self._unshard),
                ("post_backward", self._post_backward),
                ("_to_sharded", self._to_sharded),
                ("_to_sharded_post_forward", self._to_sharded),
            ):
                self._shadow(group, method, wrapper, undo)
            comm = group._reduce_scatter_comm
            group._reduce_scatter_comm = _ReduceScatter(self, group, comm)
            undo.callback(setattr, group, "_reduce_scatter_comm", comm)
        # FSDP2 enters backward group by group; computation begins after the last one.
        self._shadow(groups[-1], "pre_backward", self._pre_backward, undo)
        for module in state._modules:
            # After FSDP2's own hook before forward, and before the one after it.
            undo.callback(module.register_forward_pre_hook(self._before_forward).remove)
            undo.callback(module.register_forward_hook(self._after_forward, prepend=True).remove)

    @staticmethod
    def _kind(state: Any, group: Any) -> GroupKind:
        if isinstance(state._mp_policy, FullPrecisionPolicy):
            return "full_precision"
        return "expert" if getattr(group.mesh_info, "holds_experts", False) else "dense"

    @staticmethod
    def _shadow(group: Any, method: str, wrapper: Callable[..., Any], undo: ExitStack) -> None:
        original = getattr(group, method)

        def shadow(*args: Any, **kwargs: Any) -> Any:
            return wrapper(group, original, *args, **kwargs)

        setattr(group, method, shadow)
        undo.callback(delattr, group, method)

    def record(self, group: Any, kind: Kind, **more: Any) -> None:
        state = group._training_state.name
        if _backward_runs() or state in ("PRE_BACKWARD", "POST_BACKWARD"):
            phase: Phase = "backward"
        else:
            phase = "forward" if state == "FORWARD" or kind == "compute" else "outside"
        self.events.append(Event(self.layer, phase, kind, self.kinds[group], **more))

    def _before_forward(self, *_: Any) -> None:
        if not _backward_runs():
            self.record(self.groups[0], "compute", edge="begin")

    def _after_forward(self, *_: Any) -> None:
        if not _backward_runs():
            self.record(self.groups[0], "compute", edge="end")

    def _unshard(self, group: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        pending = group._all_gather_result
        result = original(*args, **kwargs)
        if group._all_gather_result is not pending:
            ranks = group._all_gather_process_group.size()
            self.record(group, "all_gather", bytes=_whole_bytes(group), ranks=ranks)
        return result

    def _to_sharded(self, group: Any, original: Callable[..., Any]) -> None:
        frees = group.is_unsharded
        original()
        if frees:
            self.record(group, "free", bytes=_whole_bytes(group))

    def _pre_backward(self, group: Any, original: Callable[..., Any], *args: Any) -> None:
        original(*args)
        if not self.in_backward:
            self.in_backward = True
            self.record(self.groups[0], "compute", edge="begin")

    def _post_backward(self, group: Any, original: Callable[..., Any], *args: Any) -> None:
        if self.in_backward:
            self.in_backward = False
            self.record(self.groups[0], "compute", edge="end")
        original(*args)


class _ReduceScatter:
    """A reduce-scatter that is recorded where it is issued."""

    def __init__(self, tracer: _Tracer, group: Any, comm: Any) -> None:
        self.tracer, self.group, self.comm = tracer, group, comm

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.comm.allocate(*args, **kwargs)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **kwargs: Any
    ) -> Any:
        size = {"bytes": input_tensor.nbytes, "ranks": group.size()}
        self.tracer.record(self.group, "reduce_scatter", **size)
        return self.comm(
            output_tensor=output_tensor, input_tensor=input_tensor, group=group, **kwargs
        )


def _backward_runs() -> bool:
    return torch._C._current_graph_task_id() != -1


def _whole_bytes(group: Any) -> int:
    """Bytes of a group's parameters on one rank when they are gathered, without padding."""
    return sum(
        p._orig_size.numel() * (p.param_dtype or p.orig_dtype).itemsize for p in group.fsdp_params
    )

"""Which collectives a piece of a model runs, by mesh axis."""

import traceback
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.distributed import ParallelDims


class Collectives(TorchDispatchMode):
    """Counts collectives by kind and mesh axis; FSDP's own are "fsdp", whatever their group."""

    KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")

    def __init__(self, dims: ParallelDims) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, str]] = Counter()
        self.tp_bytes = 0
        # TP and EP may be the same ranks: tell them by what only expert dispatch does.
        self._expert_ranks = None
        if (mesh := dims.get_optional_mesh("ep")) is not None:
            self._expert_ranks = tuple(dist.get_process_group_ranks(mesh.get_group()))
        self._axes = {
            tuple(dist.get_process_group_ranks(mesh.get_group())): axis
            for axis, mesh in dims.get_all_one_dimensional_meshes().items()
            if axis in ("tp", "cp", "batch")
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # first to local tensors and their collectives
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            kind = _kind(func._schema.name)
            if kind is not None:
                self._record(kind, args, kwargs or {}, result)
        return result

    def _record(self, kind: str, args: Any, kwargs: Any, result: Any) -> None:
        group = _group(args)
        ranks = dist.get_process_group_ranks(group)
        if any("_fully_shard" in frame.filename for frame in traceback.extract_stack(limit=40)):
            axis = "fsdp"
        elif kind == "all_to_all" and tuple(ranks) == self._expert_ranks:
            axis = "ep"
        else:
            axis = self._axes.get(tuple(ranks), str(ranks))
        self.seen[axis, kind] += 1
        if axis == "tp":
            n = len(ranks)
            flat = torch.utils._pytree.tree_leaves((args, result))
            full = max(t.numel() * t.element_size() for t in flat if torch.is_tensor(t))
            # What a ring sends from each rank.
            self.tp_bytes += full * (n - 1) // n * (2 if kind == "all_reduce" else 1)


def _kind(name: str) -> str | None:
    name = name.split("::")[1].replace("_", "")
    for kind in Collectives.KINDS:
        if kind.replace("_", "") in name:
            return kind
    return None


def _group(args: Any) -> dist.ProcessGroup:
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(arg)
            except (RuntimeError, TypeError):
                continue
        if isinstance(arg, str) and arg not in ("sum", "avg"):
            return dist.distributed_c10d._resolve_process_group(arg)
    raise AssertionError(f"no process group in {args}")

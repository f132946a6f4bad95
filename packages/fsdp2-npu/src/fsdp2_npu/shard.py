"""Wrap a model with FSDP2, block by block: groups, meshes, precision, reduction and prefetch."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from fsdp2_npu.microbatch import (
    MicrobatchReduction,
    check_microbatch_reduction,
    set_microbatch_reduction,
)
from fsdp2_npu.prefetch import Prefetch, set_prefetch
from fsdp2_npu.reduction import needs_sum_reduction

Model = TypeVar("Model", bound=nn.Module)
Experts = Callable[[nn.Module], nn.Module | None] | Mapping[nn.Module, nn.Module]


class FullPrecisionPolicy(MixedPrecisionPolicy):
    """The policy of ``full_precision`` modules, a type of its own so that traces can name them."""


def shard_model(
    model: Model,
    mesh: DeviceMesh,
    *,
    mesh_dims: DataParallelMeshDims | None = None,
    blocks: Iterable[nn.Module | Sequence[nn.Module]],
    experts: Experts | None = None,
    expert_mesh: DeviceMesh | None = None,
    expert_mesh_dims: DataParallelMeshDims | None = None,
    full_precision: Iterable[nn.Module] = (),
    prefetch: Prefetch = Prefetch(),  # noqa: B008 (frozen)
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    gradient_divide_factor: float | None = None,
    sum_reduction: bool | None = None,
    microbatch_reduction: MicrobatchReduction = "last",
) -> Model:
    """Shard a model's parameters, gradients and optimizer state over data-parallel ranks.

    Every block becomes one FSDP group (with an expert mesh two: dense and expert parameters, each
    over its own mesh), every ``full_precision`` module another, and what is left the root's.
    Parameters may be on the meta device; they become DTensors, in place. Apply activation
    checkpointing and compilation before this.

    On CPU, which has no streams, all-gathers are issued asynchronously, so that they run beside
    computation there too. FSDP2 waits for reduce-scatters where it issues them.

    Args:
        model: the model; it must be called as a whole (its root group is gathered by its forward).
        mesh: where dense parameters are sharded. Without ``mesh_dims`` a plain data-parallel mesh:
            1-d shards over all ranks; 2-d, with dimension names, replicates over the first
            dimension and shards over the second (HSDP). With ``mesh_dims`` the whole SPMD mesh on
            which parameters already are DTensors, replicated over the data-parallel dimensions.
        mesh_dims: names of the mesh's dimensions that shard and that replicate.
        blocks: the modules to gather and free one after the other, in execution order. An entry
            may be a sequence of modules that share one group, say a final norm and its head.
        experts: the routed experts of a block: a function of the block, or a mapping, that gives
            the submodule holding them, or None for a dense block. Their weights have the experts
            in the first dimension; that is what is sharded, unless there are more ranks than
            (local) experts, then the second one is, so that no rank holds padding alone.
        expert_mesh: where experts are sharded: under expert parallelism the ranks that hold the
            same experts. The dense mesh if None.
        expert_mesh_dims: for ``expert_mesh`` what ``mesh_dims`` is for ``mesh``.
        full_precision: modules whose parameters stay fp32 in computation and whose gradients are
            reduced in fp32, whatever ``mp_policy`` says. They are gathered once a step and kept
            between forward and backward: meant for small modules. One inside a compiled region
            breaks its graph, which torch.compile(fullgraph=True) refuses.
        prefetch: how many blocks ahead all-gathers are started.
        mp_policy: dtypes of computation and of gradient reduction, and the casting of inputs.
        offload_policy: e.g. CPUOffloadPolicy().
        reshard_after_forward: free a block's parameters after forward and gather them again for
            backward: True, or False to keep them. None frees all but the last block's, which
            backward needs at once. An integer keeps them sharded over so many ranks.
        gradient_divide_factor: what summed gradients are divided by; None is the number of ranks,
            i.e. the mean. 1.0 leaves the sum, for losses already divided by the global number of
            tokens.
        sum_reduction: reduce gradients with sums and an explicit division, never with AVG or
            PREMUL_SUM. None finds out from the meshes' backends.
        microbatch_reduction: what happens between the microbatches of a pipeline, or of gradient
            accumulation. "last" is torch's way: a pipeline keeps parameters and gradients whole
            until its last microbatch, and ``set_requires_gradient_sync(False)`` accumulates without
            communication. "each" frees parameters and reduces gradients in each backward, whatever
            a pipeline stage asks of the model (or you, by ``set_requires_gradient_sync``): less
            memory, more communication. Not for schedules that compute the gradients of weights
            later than those of inputs (zero bubble, DualPipeV), when parameters are gone already.

    Returns:
        The model, now an FSDPModule.

    Raises:
        ValueError: an argument that is not of its kind or does not fit the others.
    """
    blocks = _check_blocks(model, blocks)
    groups = [_Group(mesh, mesh_dims, "mesh", "mesh_dims")]
    if expert_mesh is not None:
        groups.append(_Group(expert_mesh, expert_mesh_dims, "expert_mesh", "expert_mesh_dims"))
    elif expert_mesh_dims is not None:
        raise ValueError("expert_mesh_dims is given without expert_mesh")
    if expert_mesh is not None and experts is None:
        raise ValueError("expert_mesh is given, but not experts: which submodules go there?")
    expert_modules = [_experts_of(block, experts) for block in blocks]
    full_precision = _check_full_precision(model, full_precision, blocks, expert_modules)
    _check_reshard(reshard_after_forward, mesh_dims)
    if gradient_divide_factor is not None and not gradient_divide_factor > 0:
        raise ValueError(
            f"gradient_divide_factor must be a positive number, got {gradient_divide_factor!r}"
        )
    check_microbatch_reduction(microbatch_reduction)

    common: dict[str, Any] = {"mesh": mesh, "dp_mesh_dims": mesh_dims}
    if offload_policy is not None:
        common["offload_policy"] = offload_policy

    fp32 = FullPrecisionPolicy(
        param_dtype=torch.float32,
        reduce_dtype=torch.float32,
        cast_forward_inputs=mp_policy.cast_forward_inputs,
    )
    for module in full_precision:
        # Kept after forward: as groups of their own they would cost two more latencies a block.
        fully_shard(module, mp_policy=fp32, reshard_after_forward=False, **common)

    place_experts = _expert_placement(groups[-1], own_mesh=expert_mesh is not None)
    for i, (block, block_experts) in enumerate(zip(blocks, expert_modules, strict=True)):
        reshard: bool | int = reshard_after_forward is not False
        if reshard_after_forward is None:
            reshard = i < len(blocks) - 1
        elif not isinstance(reshard_after_forward, bool):
            reshard = reshard_after_forward
        parameters = {p for module in block_experts for p in module.parameters()}
        fully_shard(
            block if len(block) > 1 else block[0],
            mp_policy=mp_policy,
            reshard_after_forward=reshard,
            shard_placement_fn=place_experts(parameters) if parameters else None,
            **common,
        )
    # The root is needed from the first operation of forward to the last of backward.
    fully_shard(model, mp_policy=mp_policy, reshard_after_forward=False, **common)

    if sum_reduction is None:
        sum_reduction = any(group.needs_sum_reduction() for group in groups)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(sum_reduction)
            if gradient_divide_factor is not None:
                module.set_gradient_divide_factor(float(gradient_divide_factor))

    inside = [
        [block[0], *(m for m in full_precision if any(_contains(part, m) for part in block))]
        for block in blocks
    ]
    # fully_shard made FSDPModules of them in place, which no annotation can say.
    root = cast(FSDPModule, model)
    set_prefetch(root, cast(list[list[FSDPModule]], inside), prefetch)
    if mesh.device_type == "cpu":
        # What streams do elsewhere. set_custom_all_gather, the public way, refuses modules with two
        # groups (dense and experts).
        root._set_unshard_async_op(True)
    set_microbatch_reduction(model, microbatch_reduction)
    return model


@dataclasses.dataclass(frozen=True)
class _Group:
    """A mesh with the names of the arguments that gave it."""

    mesh: DeviceMesh
    dims: DataParallelMeshDims | None
    mesh_argument: str
    dims_argument: str

    def __post_init__(self) -> None:
        mesh, dims = self.mesh, self.dims
        if not isinstance(mesh, DeviceMesh):
            raise ValueError(
                f"{self.mesh_argument} must be a DeviceMesh, got {type(mesh).__name__}"
            )
        names = mesh.mesh_dim_names
        if dims is None:
            if mesh.ndim not in (1, 2) or (mesh.ndim == 2 and names is None):
                raise ValueError(
                    f"{self.mesh_argument} without {self.dims_argument} must be 1-d, or 2-d with "
                    f"dimension names, got {mesh}; for a larger SPMD mesh name its data-parallel "
                    f"dimensions in {self.dims_argument}"
                )
            return
        if not isinstance(dims, DataParallelMeshDims):
            raise ValueError(
                f"{self.dims_argument} must be a DataParallelMeshDims, got {type(dims).__name__}"
            )
        missing = [name for name in self.reducing_dims() or () if name not in (names or ())]
        if missing:
            raise ValueError(
                f"{self.dims_argument} names {missing}, but the dimensions of "
                f"{self.mesh_argument} are {names}"
            )

    def reducing_dims(self) -> tuple[str, ...] | None:
        """Names of the dimensions that reduce gradients; None for all."""
        if self.dims is None:
            return None
        return (*self.dims.replicate_names, *self.dims.shard_names)

    def shard_size(self) -> int:
        if self.dims is None:
            return self.mesh.size(self.mesh.ndim - 1)
        size = 1
        for name in self.dims.shard_names:
            size *= self.mesh[name].size()
        return size

    def needs_sum_reduction(self) -> bool:
        return needs_sum_reduction(self.mesh, self.reducing_dims())


def _expert_placement(
    group: _Group, *, own_mesh: bool
) -> Callable[[set[nn.Parameter]], Callable[[nn.Parameter], Any]]:
    """Makes, from the expert parameters of a block, the function that places its parameters."""
    size = group.shard_size()
    info = None
    if own_mesh:
        # The documented return type of shard_placement_fn, importable from here only.
        from torch.distributed.fsdp._fully_shard._fsdp_common import (
            FSDPMeshInfo,
            ShardPlacementResult,
        )
        from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info

        # One object for all blocks: FSDP2 groups parameters by it.
        info = _get_mesh_info(group.mesh, group.dims)
        if not isinstance(info, FSDPMeshInfo):
            raise ValueError(
                f"{group.dims_argument} must name a dimension to shard experts over, got "
                f"{group.dims}; one of size 1 will do"
            )
        info.holds_experts = True  # for traces  # pyrefly: ignore[missing-attribute]

    def for_parameters(parameters: set[nn.Parameter]) -> Callable[[nn.Parameter], Any]:
        def place(parameter: nn.Parameter) -> Any:
            if parameter not in parameters:
                return None
            shard = _expert_shard(parameter, size)
            return shard if info is None else ShardPlacementResult(shard, info)

        return place

    return for_parameters


def _expert_shard(parameter: nn.Parameter, size: int) -> Shard:
    """Shard(0), the experts, unless some rank would get none of them and Shard(1) divides."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if local.ndim > 1 and local.shape[0] < size and local.shape[1] % size == 0:
        return Shard(1)
    return Shard(0)


def _check_blocks(
    model: nn.Module, blocks: Iterable[nn.Module | Sequence[nn.Module]]
) -> list[list[nn.Module]]:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    checked: list[list[nn.Module]] = []
    owners: dict[nn.Module, str] = {}
    inside = set(model.modules())
    for i, entry in enumerate(blocks):
        block = [entry] if isinstance(entry, nn.Module) else list(entry)
        if not block:
            raise ValueError(f"blocks[{i}] is empty")
        for module in block:
            if not isinstance(module, nn.Module):
                raise ValueError(
                    f"blocks[{i}] must be a module or a sequence of modules, got "
                    f"{type(module).__name__} ({module!r}); of a ModuleDict pass .values()"
                )
            if module is model or module not in inside:
                raise ValueError(f"blocks[{i}] ({_name(module)}) is not a submodule of model")
            if isinstance(module, FSDPModule):
                raise ValueError(f"blocks[{i}] ({_name(module)}) is sharded already")
            for part in module.modules():
                if part in owners:
                    raise ValueError(
                        f"blocks[{i}] and {owners[part]} both contain {_name(part)}; each "
                        "parameter belongs to one block"
                    )
            owners.update((part, f"blocks[{i}]") for part in module.modules())
        checked.append(block)
    return checked


def _experts_of(block: list[nn.Module], experts: Experts | None) -> list[nn.Module]:
    """The expert modules of a block's parts."""
    if experts is None:
        return []
    if not (callable(experts) or isinstance(experts, Mapping)):
        raise ValueError(
            f"experts must be a function of a block or a mapping, got {type(experts).__name__}"
        )
    found = []
    for part in block:
        module = experts.get(part) if isinstance(experts, Mapping) else experts(part)
        if module is None:
            continue
        if not isinstance(module, nn.Module) or not _contains(part, module):
            raise ValueError(
                f"experts gives {_name(module)} for {_name(part)}, which is not a submodule of it"
            )
        found.append(module)
    return found


def _check_full_precision(
    model: nn.Module,
    modules: Iterable[nn.Module],
    blocks: list[list[nn.Module]],
    expert_modules: list[list[nn.Module]],
) -> list[nn.Module]:
    checked = list(modules)
    inside = set(model.modules())
    parts = {part for block in blocks for part in block}
    experts = [module for block in expert_modules for module in block]
    for i, module in enumerate(checked):
        label = f"full_precision[{i}] ({_name(module)})"
        if not isinstance(module, nn.Module) or module not in inside or module is model:
            raise ValueError(f"{label} is not a submodule of model")
        if isinstance(module, FSDPModule):
            raise ValueError(f"{label} is sharded already")
        if not any(True for _ in module.parameters()):
            raise ValueError(f"{label} has no parameters")
        if any(part in parts for part in module.modules()):
            raise ValueError(f"{label} contains a block; it may only be a part of one")
        if any(_contains(e, module) or _contains(module, e) for e in experts):
            raise ValueError(f"{label} overlaps with experts, which are one group with one dtype")
        for other in checked[:i]:
            if _contains(other, module) or _contains(module, other):
                raise ValueError(f"{label} overlaps with {_name(other)}, also in full_precision")
    return checked


def _check_reshard(value: bool | int | None, mesh_dims: DataParallelMeshDims | None) -> None:
    if value is None or isinstance(value, bool):
        return
    if not isinstance(value, int) or value < 2:
        raise ValueError(
            "reshard_after_forward must be True, False, None or a number of ranks above 1, got "
            f"{value!r}"
        )
    if mesh_dims is not None:
        raise ValueError(
            "reshard_after_forward as a number of ranks is not supported with mesh_dims"
        )


def _contains(module: nn.Module, part: nn.Module) -> bool:
    return any(part is candidate for candidate in module.modules())


def _name(module: Any) -> str:
    return type(module).__name__

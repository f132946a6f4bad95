"""Which part of which parameter every rank of a run holds, from the model's own parallelization.

The model is built on the meta device and parallelized as in training, in a process group whose
other ranks do not exist. One rank a pipeline stage is enough: a sharded parameter says how it is
divided, and another rank's part follows from its place in the mesh. (Where tensor parallelism does
not divide a dimension, all of its ranks count as the first one, which has the largest part.)
"""

import contextlib
import copy
import itertools
import logging
import math
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import Placement
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config.override import apply_overrides
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.pipeline_parallel import (
    _generate_llm_fqn_per_model_part,
    _get_pipeline_metadata,
)
from torchtitan.distributed.spmd_types import set_spmd_meshes
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from titan_npu_train.deepseek_v32.model import SPLIT_BACKWARD_SCHEDULES, DeepSeekV32Model
from titan_npu_train.deepseek_v32.options import DENSE_WARMUP
from titan_npu_train.deepseek_v32.warmup import groups_of_indexers

__all__ = [
    "Action",
    "Block",
    "Group",
    "Layout",
    "Parameter",
    "Stage",
    "as_trained",
    "fake_world",
    "layout",
    "parallelized",
    "reduced",
]

_MODEL_AXES = ("tp", "ep")  # of a mesh; the others are FSDP's


@dataclass(frozen=True)
class Parameter:
    """One parameter of the model and how ranks share it.

    Attributes:
        name: canonical dotted name.
        shape: of the whole parameter.
        trained: whether it gets a gradient.
        placements: one for each dimension of its mesh.
        mesh_shape: ranks along each dimension of the mesh.
        strides: by how much the rank grows along each dimension of the mesh.
        names: of the mesh's dimensions.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    placements: tuple[Placement, ...] = ()
    mesh_shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of a rank's part."""
        return self._part(rank, self.placements)

    def local_bytes(self, rank: int) -> int:
        return math.prod(self.local_shape(rank)) * self.dtype.itemsize

    def gathered_shape(self, rank: int) -> tuple[int, ...]:
        """Shape after FSDP gathered it: the part that tensor or expert parallelism gave."""
        kept = [
            p if n in _MODEL_AXES else None
            for p, n in zip(self.placements, self.names, strict=True)
        ]
        return self._part(rank, kept)

    def padded_numel(self, rank: int) -> int:
        """Elements of a rank's part as FSDP2 stores it: as many as the largest part has."""
        shape = self.gathered_shape(rank)
        ranks, dim = self.shards
        if not shape or ranks == 1:
            return math.prod(shape)
        return math.prod(shape[:dim]) * -(-shape[dim] // ranks) * math.prod(shape[dim + 1 :])

    def storage_bytes(self, rank: int) -> int:
        return self.padded_numel(rank) * self.dtype.itemsize

    @property
    def shards(self) -> tuple[int, int]:
        """Ranks that FSDP shares this parameter's part over, and the dimension it cuts."""
        ranks, dim = 1, 0
        for placement, name, size in zip(self.placements, self.names, self.mesh_shape, strict=True):
            if name not in _MODEL_AXES and not placement.is_replicate():
                ranks, dim = ranks * size, placement.dim  # pyrefly: ignore[missing-attribute]
        return ranks, dim

    def _part(self, rank: int, placements: Iterable[Placement | None]) -> tuple[int, ...]:
        sharded = [
            (p, size, rank // stride % size)
            for p, size, stride in zip(placements, self.mesh_shape, self.strides, strict=True)
            if p is not None and not p.is_replicate()
        ]
        if not sharded:
            return self.shape
        kinds, sizes, coordinates = zip(*sharded, strict=True)
        shape, _ = _compute_local_shape_and_global_offset(
            self.shape, sizes, list(coordinates), kinds, skip_offset=True
        )
        return tuple(shape)


@dataclass(frozen=True)
class Group:
    """Parameters that FSDP gathers, and reduces the gradients of, together.

    Attributes:
        ranks: that share them.
        param_dtype, reduce_dtype: of computation and of gradient reduction.
        keeps: whether they stay whole between forward and backward.
    """

    parameters: tuple[Parameter, ...]
    ranks: int
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    keeps: bool


@dataclass(frozen=True)
class Block:
    """Part of the model that runs, and is gathered, as one.

    ``kind`` is "embedding", "dense", "moe", "mtp", "head", or "root" for parameters outside of all
    blocks. ``groups`` begins with the block's own; those of modules inside follow.
    """

    name: str
    kind: str
    groups: tuple[Group, ...]

    @property
    def parameters(self) -> Iterator[Parameter]:
        return (p for group in self.groups for p in group.parameters)


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: its blocks in the order in which they run."""

    index: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Action:
    """What a pipeline schedule has a rank do: ``kind`` is torch's own name of it."""

    kind: str
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Layout:
    """The whole job.

    Attributes:
        stages: by index.
        stages_of: indices of the stages of each pipeline rank.
        actions: of each pipeline rank, in order; empty without a pipeline.
        meshes: names and sizes of the communication groups of more than one rank.
        microbatches: that go through the model, or the pipeline, for one call of backward.
    """

    world: int
    stages: tuple[Stage, ...]
    stages_of: tuple[tuple[int, ...], ...]
    actions: tuple[tuple[Action, ...], ...]
    meshes: dict[str, int]
    microbatches: int

    @property
    def pipeline(self) -> int:
        return len(self.stages_of)

    def pipeline_rank(self, rank: int) -> int:
        return rank * self.pipeline // self.world

    def ranks(self, pipeline_rank: int) -> range:
        size = self.world // self.pipeline
        return range(pipeline_rank * size, (pipeline_rank + 1) * size)

    def blocks(self, rank: int) -> Iterator[Block]:
        for index in self.stages_of[self.pipeline_rank(rank)]:
            yield from self.stages[index].blocks

    def parameters(self, rank: int) -> Iterator[Parameter]:
        return (p for block in self.blocks(rank) for p in block.parameters)

    def parameter_bytes(self, rank: int) -> int:
        """As stored: with FSDP2's padding."""
        return sum(p.storage_bytes(rank) for p in self.parameters(rank))


def layout(config: Any, world: int, *, exact: bool = True) -> Layout:
    """The layout of ``config`` on ``world`` ranks.

    Args:
        config: a ``Trainer.Config`` of a DeepSeek-V3.2; it is not changed.
        world: number of ranks.
        exact: build and parallelize every layer; otherwise one of each kind, which stands for the
            others, and torchtitan's own division into stages.

    Raises:
        ValueError: not a DeepSeek-V3.2, or a configuration that could not be trained.
        RuntimeError: inside of a process group.
    """
    return (_exact if exact else _from_kinds)(as_trained(config), world)


def as_trained(config: Any) -> Any:
    """A copy of ``config`` with the changes that the trainer makes to it."""
    spec = config.model_spec
    if spec is None or not isinstance(spec.model, DeepSeekV32Model.Config):
        raise ValueError("memory is planned for DeepSeek-V3.2 models only")
    config = copy.deepcopy(config)
    parallelism = config.parallelism
    if (
        parallelism.pipeline_parallel_degree > 1
        and parallelism.pipeline_parallel_schedule in SPLIT_BACKWARD_SCHEDULES
        and isinstance(config.loss, ChunkedLossWrapper.Config)
    ):
        config.loss = config.loss.loss_fn
    if config.dsa.stage == DENSE_WARMUP:
        groups = groups_of_indexers(config.optimizer.param_groups, config.model_spec.model)
        config.optimizer = replace(config.optimizer, param_groups=groups)
    return config


@contextlib.contextmanager
def fake_world(config: Any, world: int, rank: int = 0) -> Generator[ParallelDims]:
    """A process group of ``world`` ranks of which only this one exists, and its meshes.

    Nothing of it is left behind. ``config`` is updated for it as in training.
    """
    if dist.is_initialized():
        raise RuntimeError("a plan is made outside of training: a process group is running here")
    backend, level = dist_utils.get_spmd_backend(), logger.level
    logger.setLevel(logging.ERROR)
    try:
        try:
            dims = ParallelDims.from_config(config.parallelism, world)
        except AssertionError as error:
            raise ValueError(str(error)) from None
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
        dims.build_mesh()
        config.model_spec.model.update_from_config(config=config)
        if config.override.imports:
            apply_overrides(config.override, config)
        yield dims
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist_utils.set_spmd_backend(backend)
        # Outside of training there are none; modules look here whether experts are parallel.
        set_spmd_meshes(dense_mesh=None, sparse_mesh=None)  # pyrefly: ignore[bad-argument-type]
        _clear_sharding_prop_cache()
        logger.setLevel(level)


def build(config: Any) -> Decoder:
    """The model on the meta device, in the dtype it is trained in."""
    with (
        torch.device("meta"),
        utils.set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]),
    ):
        return config.model_spec.model.build()


def parallelized(config: Any, dims: ParallelDims, model: nn.Module) -> tuple[Any, list[nn.Module]]:
    """What the trainer makes of a model: its pipeline schedule (None without), and its parts."""
    spec = config.model_spec
    settings = {
        "parallel_dims": dims,
        "training": config.training,
        "parallelism": config.parallelism,
        "compile_config": config.compile,
        "ac_config": config.activation_checkpoint,
        "dump_folder": "",
    }
    if not dims.pp_enabled:
        return None, [spec.parallelize_fn(model, **settings)]
    schedule, parts, _, _ = spec.pipelining_fn(
        model,
        **settings,
        device=torch.device(utils.device_type),
        model_config=spec.model,
        parallelize_fn=spec.parallelize_fn,
        loss_fn=lambda *_, **__: (None, {}),
    )
    return schedule, parts


def reduced(config: Any) -> dict[str, str]:
    """Keep one layer of each kind in ``config``; which of those kept stands for each layer."""
    model = config.model_spec.model
    standing: dict[str, str] = {}
    for name in ("layers", "mtp_layers"):
        kept: list[Any] = []
        kinds: dict[bool, int] = {}
        for i, layer in enumerate(getattr(model, name)):
            kind = layer.moe is not None
            if kind not in kinds:
                kinds[kind] = len(kept)
                kept.append(layer)
            standing[f"{name}.{i}"] = f"{name}.{kinds[kind]}"
        setattr(model, name, kept)
    return standing


def _exact(config: Any, world: int) -> Layout:
    pipeline = config.parallelism.pipeline_parallel_degree
    stages: dict[int, Stage] = {}
    stages_of, actions = [], []
    meshes, microbatches = {}, 1
    for pipeline_rank in range(pipeline):
        own = copy.deepcopy(config)
        with fake_world(own, world, pipeline_rank * (world // pipeline)) as dims:
            schedule, parts = parallelized(own, dims, build(own))
            if schedule is None:
                indices = (0,)
            else:
                indices = tuple(
                    stage.stage_index
                    for stage in (
                        schedule._stages
                        if isinstance(schedule, PipelineScheduleMulti)
                        else [schedule._stage]
                    )
                )
                microbatches = schedule._n_microbatches
                actions.append(_actions(schedule, pipeline_rank))
            stages_of.append(indices)
            for index, part in zip(indices, parts, strict=True):
                stages[index] = Stage(index, tuple(_blocks(part, own)))
            meshes = _meshes(dims)
            del parts, schedule
    return Layout(
        world,
        tuple(stages[i] for i in sorted(stages)),
        tuple(stages_of),
        tuple(actions),
        meshes,
        microbatches,
    )


def _from_kinds(config: Any, world: int) -> Layout:
    small = copy.deepcopy(config)
    with fake_world(config, world) as dims:  # for its checks, and the division into stages
        standing = reduced(small)
        small.model_spec.model.update_from_config(config=small)
        if small.override.imports:
            apply_overrides(small.override, small)
        part = small.model_spec.parallelize_fn(
            build(small),
            parallel_dims=dims,
            training=small.training,
            parallelism=small.parallelism,
            compile_config=small.compile,
            ac_config=None,
            dump_folder="",
        )
        blocks = {block.name: block for block in _blocks(part, small)}
        stage_names, stages_of, actions, microbatches = _pipeline(config, dims, standing)
        meshes = _meshes(dims)
    stages = tuple(
        Stage(index, tuple(_copies(names, blocks, standing)))
        for index, names in enumerate(stage_names)
    )
    return Layout(world, stages, stages_of, actions, meshes, microbatches)


def _copies(
    names: list[str], blocks: dict[str, Block], standing: dict[str, str]
) -> Iterator[Block]:
    """The blocks of a stage, from the ones that were built."""
    for name in names:
        if name not in standing:
            if name in blocks:  # the head is one block with two names
                yield blocks[name]
            continue
        built = standing[name]
        groups = tuple(
            replace(
                group,
                parameters=tuple(
                    replace(p, name=name + p.name.removeprefix(built)) for p in group.parameters
                ),
            )
            for group in blocks[built].groups
        )
        yield replace(blocks[built], name=name, groups=groups)


def _pipeline(config: Any, dims: ParallelDims, standing: dict[str, str]):
    """Names of each stage's modules, stages and actions of each rank, and microbatches."""
    spec, parallelism = config.model_spec, config.parallelism
    if not dims.pp_enabled:
        names = ["tok_embeddings", *(n for n in standing if n.startswith("layers."))]
        names += [n for n in standing if n.startswith("mtp_layers.")]
        return [[*names, "head"]], ((0,),), (), 1
    stages = parallelism.module_fqns_per_model_part
    if stages is None:
        stages = _generate_llm_fqn_per_model_part(
            *_get_pipeline_metadata(dims, parallelism, spec.model)
        )
    hollow = nn.Module()
    schedule, *_ = spec.pipelining_fn(
        hollow,
        parallel_dims=dims,
        training=config.training,
        parallelism=replace(parallelism, module_fqns_per_model_part=stages),
        compile_config=config.compile,
        ac_config=None,
        dump_folder="",
        device=torch.device(utils.device_type),
        model_config=spec.model,
        parallelize_fn=lambda part, **_: part,
        loss_fn=lambda *_, **__: (None, {}),
    )
    own = schedule._stages if isinstance(schedule, PipelineScheduleMulti) else [schedule._stage]
    ranks = own[0].stage_index_to_group_rank
    stages_of = tuple(
        tuple(i for i in range(len(stages)) if ranks[i] == rank) for rank in range(dims.pp)
    )
    actions = tuple(_actions(schedule, rank) for rank in range(dims.pp))
    names = [[n for n in stage if n != "norm"] for stage in stages]
    names = [["head" if n == "lm_head" else n for n in stage] for stage in names]
    return names, stages_of, actions, schedule._n_microbatches


def _actions(schedule: Any, rank: int) -> tuple[Action, ...]:
    """Computation and FSDP's part of a rank's schedule, overlapped pairs one after the other."""
    order = getattr(schedule, "pipeline_order_with_comms", None)
    single = order is None
    if order is None:
        order = schedule._get_pipeline_order()
    found = []
    for action in order[rank]:
        for a in (action.sub_actions or [action]) if action is not None else []:
            kind = a.computation_type.name
            if kind.startswith(("SEND", "RECV")):
                continue
            microbatch = -1 if a.microbatch_index is None else a.microbatch_index
            found.append(Action(kind, a.stage_index, microbatch))
    if single and not any(a.kind == "REDUCE_GRAD" for a in found):
        found.append(Action("REDUCE_GRAD", rank, -1))
    return tuple(found)


def _meshes(dims: ParallelDims) -> dict[str, int]:
    return {name: mesh.size() for name, mesh in dims.get_all_one_dimensional_meshes().items()}


def _blocks(part: nn.Module, config: Any) -> Iterator[Block]:
    """The FSDP blocks of a model or a stage, in the order in which they run."""
    names = {id(p): _canonical(name) for name, p in part.named_parameters()}
    groups: dict[str, list[Group]] = {}
    states = set()
    for module_name, module in part.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        # What FSDP gathers together is not public; its own tools read it here, too.
        state = module._get_fsdp_state()
        if id(state) in states:
            continue
        states.add(id(state))
        for group in state._fsdp_param_groups:
            parameters = tuple(_parameter(names[id(f.sharded_param)], f) for f in group.fsdp_params)
            if not parameters:
                continue
            policy = group.mp_policy
            block = _block_name(_canonical(module_name), parameters)
            inner = _canonical(module_name).count(".") > 1
            groups.setdefault(block, []).append(
                Group(
                    parameters,
                    parameters[0].shards[0],
                    policy.param_dtype or parameters[0].dtype,
                    policy.reduce_dtype or policy.param_dtype or parameters[0].dtype,
                    keeps=inner,
                )
            )
    moe = {
        f"{kind}.{name}": layer.moe_enabled
        for kind in ("layers", "mtp_layers")
        if getattr(part, kind, None) is not None
        for name, layer in getattr(part, kind).named_children()
    }
    order = ["root", "tok_embeddings", *moe, "head"]
    for name in sorted(groups, key=order.index):
        kind = {"root": "root", "tok_embeddings": "embedding", "head": "head"}.get(name)
        if kind is None:
            kind = "mtp" if name.startswith("mtp_") else "moe" if moe[name] else "dense"
        yield Block(name, kind, tuple(groups[name]))


def _block_name(module: str, parameters: tuple[Parameter, ...]) -> str:
    first = module.split(".")[0]
    if first in ("layers", "mtp_layers"):
        return ".".join(module.split(".")[:2])
    if first in ("norm", "lm_head"):
        return "head"
    return first or "root"


def _parameter(name: str, fsdp_parameter: Any) -> Parameter:
    parameter = fsdp_parameter.sharded_param
    shape, dtype, trained = tuple(parameter.shape), parameter.dtype, parameter.requires_grad
    if not isinstance(parameter, DTensor):
        return Parameter(name, shape, dtype, trained)
    mesh = parameter.device_mesh
    ranks = mesh.mesh
    strides = []
    for dim in range(mesh.ndim):
        line = ranks.movedim(dim, 0).flatten(1)[:, 0].tolist() if mesh.ndim > 1 else ranks.tolist()
        steps = {b - a for a, b in itertools.pairwise(line)} or {1}
        assert len(steps) == 1, f"ranks {line} along {mesh} are not evenly spaced"
        strides.append(steps.pop())
    return Parameter(
        name,
        shape,
        dtype,
        trained,
        tuple(parameter.placements),
        tuple(mesh.shape),
        tuple(strides),
        tuple(mesh.mesh_dim_names or ()),
    )


def _canonical(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")

"""One MoE layer on the ranks of a mesh, as the trainer would run it, next to one process.

Shape letters: B batch, L sequence, D model dim, E experts.
"""

import traceback
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointing,
    FullAC,
    SelectiveAC,
)
from torchtitan.models.common.decoder_sharding import (
    dense_activation_placement,
    dense_sequence_parallel_placement,
)
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.protocols.module import Module, ModuleDict
from torchtitan.protocols.sharding import resolve_placements

from collectives import Collectives
from titan_npu_train.deepseek_v32 import FLAVORS, model_config, parallelize
from titan_npu_train.deepseek_v32.load_balance import (
    register_moe_load_balancing,
    tokens_per_expert,
)
from titan_npu_train.deepseek_v32.moe import MoE
from titan_npu_train.deepseek_v32.moe_sharding import set_moe_sharding
from titan_npu_train.fsdp import FSDPOptions

B, L = 4, 16


@dataclass(frozen=True, kw_only=True)
class Case:
    """A mesh and how the layer runs on it; every degree is 1 unless given."""

    replicate: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    backend: str = "spmd_types"
    sp: bool = True
    stock: bool = False  # torchtitan's plan instead of ours
    shared: bool = True  # with the shared expert
    ac: str | None = None
    typecheck: bool = False
    microbatches: int = 1

    def world_size(self) -> int:
        return self.replicate * self.shard * self.cp * self.tp


class Block(Module):
    def __init__(self, moe: MoE.Config):
        super().__init__()
        self.moe_enabled = True
        self.moe = moe.build()

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        return self.moe(x_BLD)


class Model(Module):
    """As much of a model as parallelism and load balancing look at."""

    def __init__(self, moe: MoE.Config):
        super().__init__()
        self.tok_embeddings = self.norm = self.lm_head = self.mtp_layers = None
        self.layers = ModuleDict({"0": Block(moe)})

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        return self.layers["0"](x_BLD)


def moe_config(*, shared: bool = True) -> MoE.Config:
    config = model_config(FLAVORS["debugmodel"]).layers[1].moe
    assert isinstance(config, MoE.Config)
    config.load_balance_coeff = 0.25
    if not shared:
        config.shared_experts = None
    return config


def build(config: MoE.Config) -> Model:
    """The same weights on every rank, large enough that each part of the layer matters."""
    model = Model(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.init_states()
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * parameter.size(-1) ** -0.5)
        bias_E = model.layers["0"].moe.expert_bias_E
        bias_E.copy_(0.05 * torch.randn(bias_E.shape, generator=generator))
    return model


def checkpointing(kind: str) -> ActivationCheckpointing:
    if kind == "full":
        return FullAC.Config().build()
    return parallelize.DSASelectiveAC(SelectiveAC.Config())


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Input of the layer and gradient of its output, both [B, L, D] of the global batch."""
    generator = torch.Generator().manual_seed(1)
    dim = FLAVORS["debugmodel"].dim
    return torch.randn(B, L, dim, generator=generator), torch.randn(B, L, dim, generator=generator)


@dataclass
class Result:
    """What one process computes, or what ranks computed put together."""

    y: torch.Tensor
    x_grad: torch.Tensor
    grads: dict[str, torch.Tensor]
    tokens_E: torch.Tensor
    bias_E: torch.Tensor


class Hooks:
    """Stands in for the optimizers: keeps what is to run before a step."""

    def __init__(self) -> None:
        self.hooks: list[Any] = []

    def register_step_pre_hook(self, hook: Any) -> None:
        self.hooks.append(hook)

    def step(self) -> None:
        for hook in self.hooks:
            hook()


def one_process(*, shared: bool = True) -> Result:
    model = build(moe_config(shared=shared))
    x, y_grad = data()
    x.requires_grad_()
    y = model(x)
    y.backward(y_grad)
    moe = model.layers["0"].moe
    tokens_E = moe.tokens_per_expert_E.clone()
    hooks = Hooks()
    register_moe_load_balancing(hooks, [model], SimpleNamespace(get_optional_mesh=lambda _: None))
    hooks.step()
    return Result(
        y=y.detach(),
        x_grad=x.grad,
        grads={name: p.grad for name, p in model.named_parameters()},
        tokens_E=tokens_E,
        bias_E=moe.expert_bias_E.clone(),
    )


@dataclass
class Report:
    """Of one rank: errors relative to one process, and the collectives it took part in."""

    errors: dict[str, float] = field(default_factory=dict)
    forward: dict[tuple[str, str], int] = field(default_factory=dict)
    backward: dict[tuple[str, str], int] = field(default_factory=dict)
    tp_bytes: int = 0
    tokens_differ: float = 0.0
    bias_differs: float = 0.0
    error: str = ""


def on_ranks(rank: int, cases: list[Case]) -> list[Report]:
    wanted = {shared: one_process(shared=shared) for shared in (True, False)}
    reports = []
    for case in cases:
        try:
            reports.append(_run(case, wanted[case.shared]))
        except Exception:
            reports.append(Report(error=traceback.format_exc()))
    return reports


def _run(case: Case, wanted: Result) -> Report:
    # DTensor remembers layouts with the mesh they had; FSDP wants this case's own mesh object.
    _clear_sharding_prop_cache()
    dims = ParallelDims(
        dp_replicate=case.replicate,
        dp_shard=case.shard,
        cp=case.cp,
        tp=case.tp,
        pp=1,
        ep=case.ep,
        world_size=dist.get_world_size(),
        spmd_backend=case.backend,
    )
    dims.build_mesh()
    dist_utils.set_spmd_backend(case.backend)
    config = moe_config(shared=case.shared)
    if case.stock:
        layout = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}
        set_moe_sharding_config(
            config, enable_ep=case.ep > 1, enable_sp=case.sp, expert_param_layout=layout
        )
    else:
        set_moe_sharding(config, enable_sp=case.sp, enable_ep=case.ep > 1)
    model = build(config)
    model.parallelize(dims)
    if case.ac is not None:
        parallelize.apply_activation_checkpointing(model, checkpointing(case.ac))
    parallelize._apply_fsdp(
        model,
        dims,
        TrainingConfig(mixed_precision_param="float32"),
        ParallelismConfig(spmd_backend=case.backend),
        FSDPOptions(),
    )
    hooks = Hooks()
    register_moe_load_balancing(hooks, [model], dims)

    report = Report()
    context = dist_utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=case.typecheck)
    x, y_grad = data()
    ys, x_grads = [], []
    for x_part, y_grad_part in zip(
        x.chunk(case.microbatches), y_grad.chunk(case.microbatches), strict=True
    ):
        log = Collectives(dims)
        leaf, local_y_grad = _shard(x_part, case, dims), _shard(y_grad_part, case, dims)
        with context():
            leaf = _hand_over(leaf, case, dims)
            with log:
                y = model(leaf)
            report.forward = dict(log.seen)
            log.seen.clear()
            with log:
                _local(y).backward(local_y_grad)
                x_grads.append(_input_gradient(leaf))
            report.backward = dict(log.seen)
        ys.append((_local(y).detach(), x_part))
        report.tp_bytes += log.tp_bytes

    wanted_ys = wanted.y.chunk(case.microbatches)
    wanted_x_grads = wanted.x_grad.chunk(case.microbatches)
    for (got_y, _), got_grad, want_y, want_grad in zip(
        ys, x_grads, wanted_ys, wanted_x_grads, strict=True
    ):
        for name, got, want in (("y", got_y, want_y), ("x", got_grad, want_grad)):
            error = _error(got, _shard(want, case, dims))
            report.errors[name] = max(error, report.errors.get(name, 0.0))
    for name, parameter in model.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "")
        grad = parameter.grad
        assert isinstance(grad, DTensor), name
        report.errors[name] = _error(grad.full_tensor(), wanted.grads[name])

    moe = next(module for module in model.modules() if isinstance(module, MoE))
    (tokens_E,) = tokens_per_expert([moe], dims)
    report.tokens_differ = (tokens_E - wanted.tokens_E).abs().max().item()
    hooks.step()
    report.bias_differs = (_local(moe.expert_bias_E) - wanted.bias_E).abs().max().item()
    return report


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    if got.shape != want.shape:
        return float("inf")
    return ((got - want).double().norm() / want.double().norm()).item()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _input_gradient(leaf: torch.Tensor) -> torch.Tensor:
    """As the layer before takes it: DTensor hands it the sum over ranks still to be done."""
    grad = leaf.grad
    assert grad is not None
    if isinstance(leaf, DTensor):
        grad = grad.redistribute(placements=leaf.placements)
    return _local(grad)


def _shard(whole_BLD: torch.Tensor, case: Case, dims: ParallelDims) -> torch.Tensor:
    """This rank's part of an activation between layers."""
    part = whole_BLD
    axes = [("batch", 0), ("cp", 1), *([("tp", 1)] if case.sp else [])]
    for axis, dim in axes:
        if (mesh := dims.get_optional_mesh(axis)) is not None:
            part = part.chunk(mesh.size(), dim)[mesh.get_local_rank()]
    return part.contiguous()


def _hand_over(part_BLD: torch.Tensor, case: Case, dims: ParallelDims) -> torch.Tensor:
    """This rank's part as the layer before would hand it over, as a leaf."""
    layout = (
        dense_sequence_parallel_placement() if case.sp else dense_activation_placement(tp=spmd.I)
    )
    leaf = part_BLD
    if case.backend != "spmd_types" and (mesh := dims.resolve_mesh(layout.axes())) is not None:
        leaf = DTensor.from_local(part_BLD, mesh, resolve_placements(layout, mesh))
    leaf.requires_grad_()
    if case.typecheck:
        spmd.assert_type(leaf, layout.axis_types, layout.partition_spec)
    return leaf

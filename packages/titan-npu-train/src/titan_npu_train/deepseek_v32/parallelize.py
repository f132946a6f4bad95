"""Parallelism of a DeepSeek-V3.2 model, in the order that works.

Layouts first, then activation checkpointing, compilation and FSDP: each wraps what the one before
it made.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils.checkpoint import SAC_IGNORED_OPS
from torchtitan.config import (
    TORCH_DTYPE_MAP,
    CompileConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointing,
    ActivationCheckpointingConfig,
    SelectiveAC,
)
from torchtitan.distributed.full_dtensor import (
    resolve_fsdp_mesh,
    resolve_sparse_fsdp_mesh,
)

from fsdp2_npu import shard_model
from titan_npu_train.deepseek_v32.attention import attention_modules
from titan_npu_train.deepseek_v32.model import DeepSeekV32Model
from titan_npu_train.fsdp import FSDPOptions

__all__ = ["DSASelectiveAC", "parallelize_deepseek_v32"]


PROFILER_OPS = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)
"""Marks FSDP sets for the profiler. It may set more of them when a layer is recomputed than in its
forward (pipelines with several stages a rank), and torch 2.14 takes them for operators of the layer
that are missing: "invocation index 4 encountered during backward but not found in storage".
"""


class DSASelectiveAC(SelectiveAC):
    """torchtitan's selective policy that also keeps what the DSA operators computed.

    Each costs about as much as the layer's matrix products and keeps little: the chosen keys, the
    attention's output, and the head-summed target.
    """

    def get_save_ops(self) -> set:
        ops = torch.ops.npu_dsa
        return super().get_save_ops() | {
            ops.lightning_indexer.default,
            ops.sparse_attention.default,
            ops.sparse_attention_with_target.default,
            ops.attention_target.default,
            ops.dense_indexer_kl_loss.default,
            ops.fused_kl_loss.default,
            ops.fused_dense_kl_loss.default,
        }

    def apply(self, model: nn.Module) -> None:
        SAC_IGNORED_OPS.update(PROFILER_OPS)
        super().apply(model)


def parallelize_deepseek_v32(
    model: DeepSeekV32Model,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointingConfig | None,
    dump_folder: str,
) -> DeepSeekV32Model:
    """Apply the configured parallelism to a model, or a pipeline stage of it, in place."""
    model.parallelize(parallel_dims)

    if ac_config is not None:
        if type(ac_config) is SelectiveAC.Config:
            policy = DSASelectiveAC(ac_config, dump_folder=dump_folder)
        else:
            policy = ac_config.build(dump_folder=dump_folder)
        apply_activation_checkpointing(model, policy)

    if compile_config.enable and "model" in compile_config.components:
        compile_regions(model, backend=compile_config.backend)

    assert isinstance(model.config, DeepSeekV32Model.Config)
    _apply_fsdp(model, parallel_dims, training, parallelism, model.config.fsdp)
    return model


def apply_activation_checkpointing(
    model: DeepSeekV32Model, policy: ActivationCheckpointing
) -> None:
    """Checkpoint every block, those of MTP layers too (torchtitan's ``apply`` leaves them out)."""
    policy.apply(model)
    if model.mtp_layers is not None:
        layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(model.mtp_layers)})
        policy.apply(nn.ModuleDict({"layers": layers}))
        for i, layer in layers.items():
            model.mtp_layers.register_module(i, layer)


def compile_regions(model: DeepSeekV32Model, *, backend: str) -> None:
    """Compile what surrounds sparse attention and expert dispatch, but neither of the two.

    Both are single operators or bound by communication, with shapes that follow the data; the
    projections, norms, rotary embeddings, router and dense feed-forwards around them are chains of
    small operators.
    """
    for _, attention in attention_modules(model):
        # Not one graph: FSDP's hooks on the indexer's fp32 modules divide it.
        attention.prolog = torch.compile(attention.prolog, backend=backend)
        attention.epilog = torch.compile(attention.epilog, backend=backend, fullgraph=True)
    for block in _blocks(model):
        regions = [block.attention_norm, block.ffn_norm]
        if block.moe_enabled:
            regions += [block.moe.router, block.moe.shared_experts]
        else:
            regions.append(block.feed_forward)
        for region in regions:
            if region is not None:
                region.compile(backend=backend, fullgraph=True)


def _blocks(model: DeepSeekV32Model) -> Iterator[Any]:
    yield from model.layers.values()
    if model.mtp_layers is not None:
        yield from model.mtp_layers


def _routed_experts(block: nn.Module) -> nn.Module | None:
    moe: Any = getattr(block, "moe", None)
    return None if moe is None else moe.routed_experts.inner_experts


def _apply_fsdp(
    model: DeepSeekV32Model,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    options: FSDPOptions,
) -> None:
    mesh, mesh_dims, expert_mesh, expert_mesh_dims = _fsdp_meshes(parallel_dims)
    blocks: list[nn.Module | list[nn.Module]] = []
    if model.tok_embeddings is not None:
        blocks.append(model.tok_embeddings)
    blocks += _blocks(model)
    if model.norm is not None and model.lm_head is not None:
        blocks.append([model.norm, model.lm_head])
    kept_for_all_microbatches = parallel_dims.pp_enabled and options.pipeline_reduction == "last"
    reshard = {
        "always": True,
        "never": False,
        # Where a pipeline keeps parameters between microbatches, freeing them in between would
        # gather once for each of them.
        "default": False if kept_for_all_microbatches else None,
    }[parallelism.fsdp_reshard_after_forward]
    shard_model(
        model,
        mesh,
        mesh_dims=mesh_dims,
        blocks=blocks,
        experts=_routed_experts,
        expert_mesh=expert_mesh,
        expert_mesh_dims=expert_mesh_dims,
        full_precision=[
            part
            for _, attention in attention_modules(model)
            for part in attention.indexer.full_precision_modules()
        ],
        mp_policy=MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
            cast_forward_inputs=False,
        ),
        offload_policy=CPUOffloadPolicy() if training.enable_cpu_offload else None,
        reshard_after_forward=reshard,
        # The loss is already divided by the global number of tokens.
        gradient_divide_factor=1.0,
        prefetch=options.prefetch(),
        microbatch_reduction=options.pipeline_reduction if parallel_dims.pp_enabled else "last",
    )


def _fsdp_meshes(parallel_dims: ParallelDims):
    """Dense mesh, its data-parallel dims, expert mesh, its data-parallel dims."""
    if parallel_dims.spmd_backend in ("full_dtensor", "spmd_types"):
        return *resolve_fsdp_mesh(parallel_dims), *resolve_sparse_fsdp_mesh(parallel_dims)
    replicate = ["dp_replicate"] if parallel_dims.dp_replicate_enabled else []
    expert_mesh = None
    if parallel_dims.ep_enabled:
        expert_mesh = parallel_dims.get_optional_mesh([*replicate, "efsdp"])
    return parallel_dims.get_mesh([*replicate, "fsdp"]), None, expert_mesh, None

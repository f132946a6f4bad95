"""Complete training configurations, by the names ``titan-npu train`` and ``--config`` take."""

from typing import Literal

from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    default_adamw,
)
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointing,
    FullAC,
    SelectiveAC,
)

from titan_npu_train.checkpoint import VerifiedCheckpointManager
from titan_npu_train.data import PackedTextDataLoader
from titan_npu_train.deepseek_v32 import DeepSeekV32Model, model_registry
from titan_npu_train.deepseek_v32.mtp import MTPLoss
from titan_npu_train.deepseek_v32.options import DENSE_WARMUP
from titan_npu_train.fsdp import FSDPOptions
from titan_npu_train.metrics import MetricsProcessor
from titan_npu_train.optimizer import SwapOptions, swappable
from titan_npu_train.trainer import Trainer

__all__ = [
    "deepseek_v32_4layers",
    "deepseek_v32_4layers_small",
    "deepseek_v32_8layers",
    "deepseek_v32_8layers_small",
    "deepseek_v32_671b_4k_128die",
    "deepseek_v32_671b_32k_128die",
    "deepseek_v32_671b_32k_128die_pp2",
    "deepseek_v32_debugmodel",
    "deepseek_v32_debugmodel_mtp",
    "deepseek_v32_debugmodel_warmup",
]


def _config(
    flavor: str,
    *,
    training: TrainingConfig,
    optimizer: OptimizersContainer.Config,
    lr_scheduler: LRSchedulersContainer.Config,
    activation_checkpoint: ActivationCheckpointing.Config | None,
    parallelism: ParallelismConfig | None = None,
    n_mtp_layers: int | None = None,
    swap: SwapOptions | None = None,
) -> Trainer.Config:
    """What all configurations share."""
    model_spec = model_registry(flavor, n_mtp_layers=n_mtp_layers)
    model = model_spec.model
    assert isinstance(model, DeepSeekV32Model.Config)
    loss: BaseLoss.Config
    if model.mtp_layers:
        loss = MTPLoss.Config(global_vocab_size=model.vocab_size)
    else:
        loss = ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=model.vocab_size)
        )
    return Trainer.Config(
        model_spec=model_spec,
        loss=loss,
        dataloader=PackedTextDataLoader.Config(),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=VerifiedCheckpointManager.Config(last_save_model_only=False),
        training=training,
        optimizer=swappable(optimizer, swap),
        lr_scheduler=lr_scheduler,
        activation_checkpoint=activation_checkpoint,  # pyrefly: ignore[bad-argument-type]
        parallelism=parallelism or ParallelismConfig(),
    )


def deepseek_v32_debugmodel() -> Trainer.Config:
    """A few million parameters that learn real text on a laptop; what the quickstart trains."""
    return _debugmodel()


def deepseek_v32_debugmodel_mtp() -> Trainer.Config:
    """The debugmodel with one multi-token-prediction layer."""
    return _debugmodel(n_mtp_layers=1)


def deepseek_v32_debugmodel_warmup() -> Trainer.Config:
    """The debugmodel's dense warm-up stage: its indexers alone, at the published rate."""
    config = _debugmodel()
    config.dsa.stage = DENSE_WARMUP
    config.optimizer = swappable(default_adamw(lr=1e-3, weight_decay=0.0))
    config.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0)
    return config


def _debugmodel(n_mtp_layers: int | None = None) -> Trainer.Config:
    return _config(
        "debugmodel",
        n_mtp_layers=n_mtp_layers,
        optimizer=default_adamw(lr=3e-3, weight_decay=0.01),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=10, decay_ratio=0.8, decay_type="cosine", min_lr_factor=0.1
        ),
        training=TrainingConfig(
            local_batch_size=4,
            seq_len=512,
            steps=150,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        activation_checkpoint=None,
    )


def _blocks(
    flavor: str, *, mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
) -> Trainer.Config:
    """One dense layer and some MoE layers at 4K: the published comparison of operators."""
    return _config(
        flavor,
        optimizer=default_adamw(lr=1e-4, weight_decay=0.01),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=10),
        training=TrainingConfig(
            local_batch_size=1,
            seq_len=4096,
            steps=100,
            mixed_precision_param=mixed_precision_param,
            disable_cuda_graphs=True,
        ),
        activation_checkpoint=SelectiveAC.Config(),
    )


def deepseek_v32_4layers() -> Trainer.Config:
    """1 dense + 3 MoE layers of the real widths, 8 experts each, 4K."""
    return _blocks("4layers")


def deepseek_v32_8layers() -> Trainer.Config:
    """1 dense + 7 MoE layers of the real widths, 8 experts each, 4K."""
    return _blocks("8layers")


def deepseek_v32_4layers_small() -> Trainer.Config:
    """4layers with narrow layers: the same shape of work on a laptop."""
    return _blocks("4layers_small", mixed_precision_param="float32")


def deepseek_v32_8layers_small() -> Trainer.Config:
    """8layers with narrow layers: the same shape of work on a laptop."""
    return _blocks("8layers_small", mixed_precision_param="float32")


def _671b(
    parallelism: ParallelismConfig,
    *,
    seq_len: int,
    local_batch_size: int = 1,
    n_mtp_layers: int | None = None,
    fsdp: FSDPOptions | None = None,
) -> Trainer.Config:
    """The 671B model on 128 dies, with the published run's optimizer and precision."""
    config = _config(
        "671B",
        n_mtp_layers=n_mtp_layers,
        optimizer=default_adamw(lr=1e-5, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=2000, decay_type="cosine", min_lr_factor=0.1
        ),
        training=TrainingConfig(
            local_batch_size=local_batch_size,
            seq_len=seq_len,
            steps=15000,
            disable_cuda_graphs=True,
        ),
        parallelism=parallelism,
        activation_checkpoint=FullAC.Config(),
        # AdamW's moments are 40 GiB a die, as much as weights and gradients together.
        swap=SwapOptions(storage="host"),
    )
    config.fsdp = fsdp or FSDPOptions()
    return config


def deepseek_v32_671b_4k_128die() -> Trainer.Config:
    """671B at 4K on 128 dies: FSDP32 TP4 EP64."""
    return _671b(
        ParallelismConfig(
            data_parallel_shard_degree=32,
            tensor_parallel_degree=4,
            expert_parallel_degree=64,
            fsdp_reshard_after_forward="always",
        ),
        seq_len=4096,
    )


def deepseek_v32_671b_32k_128die() -> Trainer.Config:
    """671B at 32K on 128 dies: FSDP4 TP4 CP8 EP64."""
    return _671b(
        ParallelismConfig(
            data_parallel_shard_degree=4,
            tensor_parallel_degree=4,
            context_parallel_degree=8,
            expert_parallel_degree=64,
            fsdp_reshard_after_forward="always",
        ),
        seq_len=32768,
    )


def deepseek_v32_671b_32k_128die_pp2() -> Trainer.Config:
    """671B at 32K on 128 dies as published: PP2 (Interleaved1F1B) TP4 CP16 EP64.

    Without MTP, which does not run in a pipeline.
    """
    return _671b(
        ParallelismConfig(
            data_parallel_shard_degree=1,
            tensor_parallel_degree=4,
            context_parallel_degree=16,
            pipeline_parallel_degree=2,
            pipeline_parallel_schedule="Interleaved1F1B",
            expert_parallel_degree=64,
            fsdp_reshard_after_forward="always",
        ),
        seq_len=32768,
        local_batch_size=16,
        n_mtp_layers=0,
        fsdp=FSDPOptions(pipeline_reduction="each"),
    )

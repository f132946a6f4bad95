"""DeepSeek-V3.2: torchtitan's DeepSeek-V3 with an indexer and sparse attention in every layer."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.pipelining.schedules import get_schedule_class
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.deepseek_v3 import DeepSeekV3Model
from torchtitan.models.deepseek_v3.sharding import set_deepseek_v3_sharding_config
from torchtitan.tools.logging import logger

from npu_dsa_kernels.backends import resolve
from titan_npu_train import platform
from titan_npu_train.context_parallel import ContextParallelOptions
from titan_npu_train.deepseek_v32.attention import Attention, DenseAttention, attention_modules
from titan_npu_train.deepseek_v32.flops import training_flops
from titan_npu_train.deepseek_v32.indexer_loss import DSAMasks
from titan_npu_train.deepseek_v32.moe_sharding import check_moe_parallelism, set_moe_sharding
from titan_npu_train.deepseek_v32.mtp import shifted_tokens
from titan_npu_train.deepseek_v32.options import DENSE_WARMUP, SPARSE, DSAOptions, Stage
from titan_npu_train.deepseek_v32.sharding import set_dsa_sharding_config
from titan_npu_train.deepseek_v32.warmup import freeze_backbone
from titan_npu_train.fsdp import FSDPOptions

__all__ = ["SPLIT_BACKWARD_SCHEDULES", "DeepSeekV32Model"]

SPLIT_BACKWARD_SCHEDULES = ("ZBVZeroBubble", "DualPipeV", "InterleavedZeroBubble")
"""Pipeline schedules that compute the gradients of inputs and of weights at different times."""


class DeepSeekV32Model(DeepSeekV3Model):
    """Decoder with DeepSeek Sparse Attention and optional multi-token-prediction layers."""

    @dataclass(kw_only=True, slots=True)
    class Config(DeepSeekV3Model.Config):
        stage: Stage = SPARSE
        """See :class:`.options.DSAOptions`, which sets it."""
        fsdp: FSDPOptions = field(default_factory=FSDPOptions)

        def update_from_config(self, *, config, **kwargs) -> None:
            _check_parallelism(self, config)
            # Not MTPDecoder's own, which refuses MTP under context parallelism: there, tokens are
            # shifted before they are sharded (see :mod:`.mtp`).
            main_layers = self.layers
            self.layers = [*main_layers, *self.mtp_layers]
            try:
                Decoder.Config.update_from_config(self, config=config, **kwargs)
            finally:
                self.layers = main_layers
            parallelism = config.parallelism
            plan = {
                "enable_sp": parallelism.enable_sequence_parallel,
                "enable_ep": parallelism.expert_parallel_degree > 1,
            }
            set_deepseek_v3_sharding_config(self, **plan)
            options = getattr(config, "dsa", None) or DSAOptions()
            self.stage = options.stage
            self.fsdp = getattr(config, "fsdp", None) or FSDPOptions()
            for layer in [*self.layers, *self.mtp_layers]:
                attention = layer.attention
                attention.apply_options(options)
                set_dsa_sharding_config(attention)
                if layer.moe is not None:
                    set_moe_sharding(layer.moe, **plan)
                attention.indexer.rope = dataclasses.replace(
                    attention.indexer.rope, max_seq_len=attention.rope.max_seq_len
                )

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Total parameters, and training FLOPs a token (see :mod:`.flops`)."""
            sizes = {name: p.numel() for name, p in model.named_parameters()}
            total = sum(sizes.values())
            indexer = sum(n for name, n in sizes.items() if ".indexer." in name)
            routed = sum(n for name, n in sizes.items() if ".routed_experts." in name)
            moe = next((layer.moe for layer in self.layers if layer.moe is not None), None)
            idle = 0 if moe is None else routed - routed * moe.router.top_k // moe.num_experts
            flops = training_flops(self, seq_len)
            logger.info(
                f"Parameters: {total:,} in all, {total - idle:,} active a token, "
                f"{indexer:,} in the indexers"
            )
            logger.info(
                f"Training FLOPs a token at sequence length {seq_len}: {flops.total:.3e} "
                f"(linear {flops.linear:.3e}, attention {flops.attention:.3e}, "
                f"indexer {flops.indexer_linear + flops.indexer_scores:.3e})"
            )
            return total, round(flops.total)

    def __init__(self, config: Config):
        super().__init__(config)
        self._warms_up = config.stage == DENSE_WARMUP
        self._freeze()

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        if self._warms_up and not self.layers:
            raise ValueError(
                "a pipeline stage has no layers, and so no indexers to train in dsa.stage "
                "'dense_warmup': set parallelism.pipeline_parallel_first_stage_less_layers and "
                "_last_stage_less_layers to 0, or use fewer stages"
            )
        super().parallelize(parallel_dims)
        self._freeze()  # sharded parameters are new ones

    def _freeze(self) -> None:
        if self._warms_up:
            freeze_backbone(self)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_masks: DSAMasks | None = None,
        mtp_tokens: torch.Tensor | None = None,
        mtp_exist: torch.Tensor | None = None,
        mtp_masks: Sequence[DSAMasks] | None = None,
    ):
        """Logits [B, S, vocabulary]; with MTP layers, a list of the main ones and each depth's.

        Args:
            tokens: [B, S], or a stage's hidden states [B, S, D].
            positions: [B, S], restarting at every packed document.
            attention_masks: see :class:`.indexer_loss.DSAMasks`; None trains no indexer.
            mtp_tokens, mtp_exist: what :func:`.mtp.shifted_tokens` makes of the whole sequence;
                None where ``tokens`` are the whole sequence.
            mtp_masks: each depth's masks; None takes ``attention_masks``, restricted to
                ``mtp_exist``.
        """
        if self.mtp_layers is None:
            return super().forward(
                tokens,
                positions,
                attention_masks,  # pyrefly: ignore[bad-argument-type]
            )
        depths = len(self.mtp_layers)
        if mtp_tokens is None or mtp_exist is None:
            mtp_tokens, mtp_exist = shifted_tokens(tokens, positions, depths)
        if mtp_masks is None and attention_masks is not None:
            mtp_masks = [attention_masks.restricted_to(mtp_exist[..., d]) for d in range(depths)]
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, attention_masks, positions)
        outputs = [self.norm(h)]
        for depth, layer in enumerate(self.mtp_layers):
            h = layer(
                self.tok_embeddings(mtp_tokens[..., depth]),
                h,
                mtp_exist[..., depth],
                None if mtp_masks is None else mtp_masks[depth],
                positions,
            )
            outputs.append(h)
        return [self.lm_head(output) for output in outputs]

    def get_attention_masks(self, positions: torch.Tensor) -> DSAMasks:
        """The mask every layer shares: causal within each packed document."""
        return DSAMasks.from_positions(positions)

    def take_indexer_losses(self) -> dict[int, torch.Tensor]:
        """Indexer loss by layer since the last call, MTP layers numbered after the main ones.

        Layers of other pipeline stages, and layers that trained no indexer, are absent.
        """
        losses = {}
        for name, attention in attention_modules(self):
            if (value := attention.indexer_loss_meter.take()) is not None:
                losses[self.layer_index(name)] = value
        return losses

    def take_found_keys(self) -> dict[int, torch.Tensor]:
        """In the dense warm-up stage, :func:`.recall.found_keys` by layer since the last call."""
        found = {}
        for name, attention in attention_modules(self):
            inner = attention.inner_attention
            if isinstance(inner, DenseAttention) and (sums := inner.found_keys.take()) is not None:
                found[self.layer_index(name)] = sums
        return found

    def layer_index(self, name: str) -> int:
        """Number of the layer a dotted module name belongs to."""
        kind, index = name.split(".")[:2]
        return int(index) + (len(self.config.layers) if kind == "mtp_layers" else 0)

    @property
    def attention_modules(self) -> list[tuple[str, Attention]]:
        return attention_modules(self)


def _check_parallelism(model: DeepSeekV32Model.Config, config) -> None:
    """Refuse, before anything is built, what could not run or would be wrong."""
    parallelism = config.parallelism
    tensor, context = parallelism.tensor_parallel_degree, parallelism.context_parallel_degree
    pipeline = parallelism.pipeline_parallel_degree
    training = getattr(config, "training", None)
    heads = model.layers[0].attention.n_heads
    if heads % tensor:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(
            f"parallelism.tensor_parallel_degree {tensor} does not divide the model's {heads} "
            f"attention heads; use one of {fitting}"
        )
    if training is not None and tensor > 1 and training.seq_len % (2 * tensor * context):
        parts = 2 * tensor * context
        raise ValueError(
            f"training.seq_len {training.seq_len} is not divisible by {parts} (2 x "
            f"tensor_parallel_degree {tensor} x context_parallel_degree {context}): every "
            "tensor-parallel rank indexes an early and a late part of the queries. Use "
            f"--training.seq_len {max(1, training.seq_len // parts) * parts}"
        )
    if training is not None:
        options = getattr(config, "context_parallel", None) or ContextParallelOptions()
        options.check(parallelism, training.seq_len)
    compiling = getattr(config, "compile", None)
    if (
        compiling is not None
        and compiling.enable
        and parallelism.spmd_backend != "spmd_types"
        and max(tensor, context, pipeline) > 1
    ):
        raise ValueError(
            "compile.enable needs parallelism.spmd_backend spmd_types under tensor, context or "
            "pipeline parallelism: torch 2.14 does not compile such layers with DTensors"
        )
    validator = getattr(config, "validator", None)
    if validator is not None and validator.enable and (context > 1 or model.mtp_layers):
        what = f"context_parallel_degree {context}" if context > 1 else "multi-token prediction"
        raise ValueError(
            f"validator.enable with {what}: torchtitan's validator neither shards sequences for "
            "sparse attention nor shifts labels. Leave it out; titan-npu report measures a run on "
            "held-out text"
        )
    experts = next((layer.moe.num_experts for layer in model.layers if layer.moe is not None), None)
    if experts is not None:
        rows = None
        if training is not None:
            rows = training.local_batch_size
            if pipeline > 1:
                rows = parallelism.pipeline_parallel_microbatch_size
        check_moe_parallelism(
            parallelism,
            num_experts=experts,
            seq_len=None if training is None else training.seq_len,
            rows=rows,
        )
    if pipeline > 1 and model.mtp_layers:
        raise ValueError(
            f"parallelism.pipeline_parallel_degree is {pipeline}, but a multi-token-prediction "
            "layer needs the embedding of the first stage and the hidden states of the last: use "
            "a configuration without MTP, or set it to 1"
        )
    schedule = parallelism.pipeline_parallel_schedule
    if pipeline > 1:
        try:
            get_schedule_class(schedule)
        except ValueError as error:
            raise ValueError(f"parallelism.pipeline_parallel_schedule: {error}") from None
    options = getattr(config, "dsa", None) or DSAOptions()
    if options.stage == DENSE_WARMUP:
        _check_warmup(options, tensor, schedule if pipeline > 1 else None)
    fsdp = getattr(config, "fsdp", None) or FSDPOptions()
    if pipeline > 1 and schedule in SPLIT_BACKWARD_SCHEDULES and fsdp.pipeline_reduction == "each":
        raise ValueError(
            f"parallelism.pipeline_parallel_schedule {schedule} computes the gradients of weights "
            "after those of inputs, when fsdp.pipeline_reduction 'each' has freed the parameters "
            "already: use 'last', or 1F1B or Interleaved1F1B"
        )
    checkpointing = getattr(config, "activation_checkpoint", None)
    if pipeline > 1 and schedule in SPLIT_BACKWARD_SCHEDULES and checkpointing is not None:
        raise ValueError(
            f"parallelism.pipeline_parallel_schedule {schedule} runs the backward of a layer in "
            "two parts, and each would recompute its checkpointed forward: use "
            "activation_checkpoint:none, or 1F1B or Interleaved1F1B"
        )


def _check_warmup(options: DSAOptions, tensor: int, schedule: str | None) -> None:
    if schedule in SPLIT_BACKWARD_SCHEDULES:
        raise ValueError(
            f"parallelism.pipeline_parallel_schedule {schedule} splits the backward of a layer, of "
            "which dsa.stage 'dense_warmup' has none: use 1F1B or Interleaved1F1B"
        )
    if tensor == 1:
        return
    device = torch.device(platform.current().device_type)
    if resolve(options.kl_backend or options.backend, device) == "npu":
        raise ValueError(
            f"parallelism.tensor_parallel_degree is {tensor}: the fused operator of the warm-up "
            "loss needs the keys of all heads, and each rank has those of its own. Use "
            "--dsa.kl_backend torch, which takes the latent that all heads share"
        )

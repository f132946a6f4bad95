"""torchtitan's trainer with the indexer's loss, an accurate gradient norm and per-layer metrics."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper
from torchtitan.distributed import full_dtensor
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer as TitanTrainer

import dtensor_npu_strategies
from titan_custom_cp import current_context
from titan_npu_train.context_parallel import ContextParallelOptions
from titan_npu_train.deepseek_v32.indexer_loss import DSAMasks
from titan_npu_train.deepseek_v32.model import SPLIT_BACKWARD_SCHEDULES, DeepSeekV32Model
from titan_npu_train.deepseek_v32.mtp import shifted_labels, shifted_tokens
from titan_npu_train.deepseek_v32.options import DENSE_WARMUP, DSAOptions
from titan_npu_train.deepseek_v32.warmup import groups_of_indexers
from titan_npu_train.fsdp import FSDPOptions
from titan_npu_train.gradients import clip_grad_norm
from titan_npu_train.metrics import MetricsProcessor
from titan_npu_train.optimizer import SwappedOptimizers

__all__ = ["Trainer"]

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class Trainer(TitanTrainer):
    """Trains any torchtitan model; for DeepSeek-V3.2 it also trains the indexers.

    The indexer loss is the mean over the global batch's valid tokens, exactly the language-model
    loss's normalisation, so its gradient does not depend on how the batch is split.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TitanTrainer.Config):
        metrics: MetricsProcessor.Config = field(default_factory=MetricsProcessor.Config)
        dsa: DSAOptions = field(default_factory=DSAOptions)
        context_parallel: ContextParallelOptions = field(default_factory=ContextParallelOptions)
        fsdp: FSDPOptions = field(default_factory=FSDPOptions)

    config: Config
    metrics_processor: MetricsProcessor
    _global_valid_tokens: torch.Tensor | None = None
    _clock_started: bool = False
    _strategies: dtensor_npu_strategies.Registration | None = None
    _swap_folder: Path | None = None

    def __init__(self, config: Config):
        parallelism = config.parallelism
        if (
            parallelism.pipeline_parallel_degree > 1
            and parallelism.pipeline_parallel_schedule in SPLIT_BACKWARD_SCHEDULES
            and isinstance(config.loss, ChunkedLossWrapper.Config)
        ):
            # Its chunks run backward inside of the forward, where such a schedule does not collect
            # the gradients of the last norm.
            logger.info(f"{parallelism.pipeline_parallel_schedule}: the loss is not chunked")
            config = replace(config, loss=config.loss.loss_fn)
        if config.dsa.stage == DENSE_WARMUP and config.model_spec is not None:
            model = config.model_spec.model
            if not isinstance(model, DeepSeekV32Model.Config):
                raise ValueError("dsa.stage 'dense_warmup' needs a model with indexers")
            groups = groups_of_indexers(config.optimizer.param_groups, model)
            config = replace(config, optimizer=replace(config.optimizer, param_groups=groups))
        optimizer = config.optimizer
        if isinstance(optimizer, SwappedOptimizers.Config) and (
            optimizer.swap.storage == "disk" and optimizer.swap.path is None
        ):
            self._swap_folder = Path(config.dump_folder) / "swap"
            swap = replace(optimizer.swap, path=str(self._swap_folder))
            config = replace(config, optimizer=replace(optimizer, swap=swap))
        spec = config.model_spec
        if spec is not None and not isinstance(spec.model, DeepSeekV32Model.Config):
            config.context_parallel.refuse_if_set("this model has torchtitan's context parallelism")
            config.fsdp.refuse_if_set("this model has torchtitan's FSDP")
        if parallelism.spmd_backend != "spmd_types":
            # Where DTensor decides what is sharded how: matrix products stay where they are.
            self._strategies = dtensor_npu_strategies.register()
        try:
            super().__init__(config)
        except BaseException:
            self._forget_strategies()
            raise

    def close(self) -> None:
        try:
            super().close()  # a checkpoint that is still being written reads the optimizers' states
        finally:
            if isinstance(optimizers := getattr(self, "optimizers", None), SwappedOptimizers):
                optimizers.close()
            if self._swap_folder is not None:
                with suppress(OSError):  # another rank's file is still in it
                    self._swap_folder.rmdir()
            self._forget_strategies()

    def _forget_strategies(self) -> None:
        if self._strategies is not None:
            self._strategies.remove()
            self._strategies = None

    @property
    def trains_indexers(self) -> bool:
        return isinstance(self.model_config, DeepSeekV32Model.Config) and (
            self.config.dsa.indexer_loss_coefficient > 0
        )

    @property
    def mtp_depths(self) -> int:
        return len(getattr(self.model_config, "mtp_layers", ()))

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        if not isinstance(self.model_config, DeepSeekV32Model.Config):
            return super().post_dataloading_process(input_dict, labels)
        # What is here has been sharded by the context that forward_backward_step opened.
        kwargs: dict[str, Any] = dict(input_dict)
        inputs = kwargs.pop("input")
        masks = self._masks(kwargs["positions"], labels if labels.dim() == 2 else labels[..., 0])
        self.ntokens_seen += inputs.numel()
        backend = self.config.parallelism.spmd_backend
        if backend == "full_dtensor":
            wrap = full_dtensor.parallelize_inputs
            inputs, labels, kwargs = wrap(self.parallel_dims, inputs, labels, kwargs)
        elif backend == "spmd_types":
            wrap = annotate_input_spmd_types
            inputs, labels, kwargs = wrap(self.parallel_dims, inputs, labels, kwargs)
            for name in ("mtp_tokens", "mtp_exist"):
                if name in kwargs:
                    wrap(self.parallel_dims, kwargs[name], labels, {})
        kwargs["attention_masks"] = masks
        if self.mtp_depths:
            exist_BSM = input_dict["mtp_exist"]
            kwargs["mtp_masks"] = [
                masks.restricted_to(exist_BSM[..., d]) for d in range(self.mtp_depths)
            ]
        return inputs, labels, kwargs

    def _masks(self, positions_BS: torch.Tensor, labels_BS: torch.Tensor) -> DSAMasks:
        context = current_context()
        index_S = None if context is None else context.index
        if not self.trains_indexers:
            return DSAMasks.from_positions(positions_BS, index_S=index_S)
        assert self._global_valid_tokens is not None
        masks = DSAMasks.from_positions(
            positions_BS,
            index_S=index_S,
            kl_mask_BS=labels_BS != IGNORE_INDEX,
            kl_scale=self.config.dsa.indexer_loss_coefficient / self._global_valid_tokens,
        )
        return masks._replace(measures_recall=self.metrics_processor.should_log(self.step))

    def forward_backward_step(
        self,
        *,
        input_dict: dict[str, torch.Tensor] | list[dict[str, torch.Tensor]],
        labels: torch.Tensor | list[torch.Tensor],
        global_valid_tokens: torch.Tensor,
    ) -> torch.Tensor:
        # post_dataloading_process, called from here, weighs the indexer loss by it.
        self._global_valid_tokens = global_valid_tokens
        if self.mtp_depths and isinstance(self.model_config, DeepSeekV32Model.Config):
            # MTP has no pipeline: one microbatch. Shifted here, while the sequence is whole.
            assert isinstance(input_dict, dict) and isinstance(labels, torch.Tensor)
            positions = input_dict["positions"]
            tokens, exist = shifted_tokens(input_dict["input"], positions, self.mtp_depths)
            input_dict = input_dict | {"mtp_tokens": tokens, "mtp_exist": exist}
            labels = shifted_labels(labels, positions, self.mtp_depths)
        with self._context_parallel(input_dict, labels):
            return super().forward_backward_step(
                input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
            )

    def _context_parallel(self, input_dict, labels) -> AbstractContextManager:
        """A context in which this rank has its part of the sequences; all microbatches share it."""
        if not self.parallel_dims.cp_enabled or not isinstance(
            self.model_config, DeepSeekV32Model.Config
        ):
            return nullcontext()
        inputs = input_dict if isinstance(input_dict, list) else [input_dict]
        targets = labels if isinstance(labels, list) else [labels]
        tensors = [x for one in inputs for x in one.values() if torch.is_tensor(x)] + targets
        return self.config.context_parallel.open(
            self.config.parallelism, self.parallel_dims.get_mesh("cp"), tensors
        )

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        if not self._clock_started:
            self.metrics_processor.start_clock(self.step)
            self._clock_started = True
        self.optimizers.zero_grad(set_to_none=self.config.training.disable_cuda_graphs)
        learning_rates = self.lr_schedulers.get_metrics()

        groups = [
            [next(data_iterator) for _ in range(self.num_pipeline_parallel_microbatches)]
            for _ in range(self.gradient_accumulation_steps)
        ]
        valid_tokens = torch.stack(
            [(labels != IGNORE_INDEX).sum() for group in groups for _, labels in group]
        ).sum()
        global_valid_tokens = self._sum_over(valid_tokens.to(self.device), "batch")
        # A batch without a single valid token has zero loss and zero gradients, not NaN.
        global_valid_tokens = global_valid_tokens.clamp(min=1)

        losses = []
        while groups:
            losses.append(self._forward_backward(groups.pop(0), global_valid_tokens))
        self._refuse_missing_gradients()
        grad_norm = clip_grad_norm(
            [p for part in self.model_parts for p in part.parameters()],
            self.config.training.max_norm,
            pp_mesh=self.parallel_dims.get_optional_mesh("pp"),
        )
        if self._keeps_this_step():
            self._refuse_not_finite("gradient norm", grad_norm.item())
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()

        indexer_losses = self._take_indexer_losses()
        found_keys = self._take_found_keys()
        if self.metrics_processor.should_log(self.step):
            self._log_step(
                torch.stack(losses).sum(),
                valid_tokens,
                global_valid_tokens,
                grad_norm,
                indexer_losses,
                found_keys,
                learning_rates,
            )

    def _keeps_this_step(self) -> bool:
        """Whether this step is logged or saved: worth waiting for the device to check it."""
        checkpoint, steps = self.config.checkpoint, self.config.training.steps
        saved = checkpoint.enable and (self.step % checkpoint.interval == 0 or self.step == steps)
        return saved or self.metrics_processor.should_log(self.step)

    def _refuse_not_finite(self, what: str, value: float) -> None:
        # The value is the same on every rank, so all of them stop, or none.
        if not math.isfinite(value):
            raise RuntimeError(
                f"the {what} of step {self.step} is {value}: training cannot go on. Lower the "
                "learning rate, or resume from an earlier checkpoint"
            )

    def _refuse_missing_gradients(self) -> None:
        if not isinstance(self.model_config, DeepSeekV32Model.Config):
            return
        missing = [
            name
            for part in self.model_parts
            for name, parameter in part.named_parameters()
            if parameter.requires_grad
            and parameter.grad is None
            and (self.trains_indexers or ".indexer." not in name)
        ]
        if missing:
            raise RuntimeError(
                f"step {self.step} left {len(missing)} parameters without a gradient, {missing[0]} "
                "among them: they would stay as they are without a word. The pipeline schedule "
                f"{self.config.parallelism.pipeline_parallel_schedule} or the loss does not reach "
                "them"
            )

    def _forward_backward(
        self, microbatches: list[Batch], global_valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        """One call of forward and backward; its share of the global mean loss, a scalar."""
        inputs = [
            {k: v.to(self.device) if torch.is_tensor(v) else v for k, v in input_dict.items()}
            for input_dict, _ in microbatches
        ]
        labels = [labels.to(self.device) for _, labels in microbatches]
        pipelined = self.parallel_dims.pp_enabled
        loss = self.forward_backward_step(
            input_dict=inputs if pipelined else inputs[0],
            labels=labels if pipelined else labels[0],
            global_valid_tokens=global_valid_tokens,
        )
        if isinstance(loss, DTensor):
            loss = loss.to_local()  # this rank's share, as the other backends have it
        if pipelined and not self.pp_has_last_stage:
            # torchtitan returns -1 here; zero lets the stages be added up.
            loss = torch.zeros_like(loss)
        # A copy: under CUDA graphs the next replay overwrites the tensor.
        return loss.detach().reshape(()).clone()

    def _take_indexer_losses(self) -> torch.Tensor | None:
        """This rank's share of each layer's mean indexer loss, [layers], without coefficient."""
        if not self.trains_indexers:
            return None
        config = self.model_config
        assert isinstance(config, DeepSeekV32Model.Config)
        losses = torch.zeros(len(config.layers) + len(config.mtp_layers), device=self.device)
        for part in self.model_parts:
            for layer, value in cast(DeepSeekV32Model, part).take_indexer_losses().items():
                losses[layer] += value
        return losses / self.config.dsa.indexer_loss_coefficient

    def _take_found_keys(self) -> torch.Tensor | None:
        """This rank's share of the keys each indexer found and should have found, [layers, 2]."""
        if self.config.dsa.stage != DENSE_WARMUP or not self.trains_indexers:
            return None
        config = self.model_config
        assert isinstance(config, DeepSeekV32Model.Config)
        sums = torch.zeros(len(config.layers) + len(config.mtp_layers), 2, device=self.device)
        for part in self.model_parts:
            for layer, value in cast(DeepSeekV32Model, part).take_found_keys().items():
                sums[layer] += value
        return sums

    def _log_step(
        self,
        loss: torch.Tensor,
        valid_tokens: torch.Tensor,
        global_valid_tokens: torch.Tensor,
        grad_norm: torch.Tensor,
        indexer_losses: torch.Tensor | None,
        found_keys: torch.Tensor | None,
        learning_rates: dict[str, float],
    ) -> None:
        # A pipeline stage without the loss contributes zero to both sums.
        rank_mean = loss * global_valid_tokens / valid_tokens.to(self.device).clamp(min=1)
        # A context-parallel rank's loss is a part of its rows', whose tokens they all count.
        row_mean = self._sum_over(self._sum_over(rank_mean, "pp"), "cp")
        max_loss = self._max_over(row_mean, "loss")
        mean_loss = self._sum_over(self._sum_over(loss, "pp"), "loss").item()
        self._refuse_not_finite("loss", mean_loss)
        tokens_seen = torch.tensor(self.ntokens_seen, device=self.device)
        extra: dict[str, Any] = {
            "n_tokens_seen": int(self._sum_over(tokens_seen, "loss")),
            **learning_rates,
        }
        if indexer_losses is not None:
            # Tensor-parallel ranks have the loss of their own queries.
            layers = indexer_losses
            for mesh in ("pp", "loss", "tp"):
                layers = self._sum_over(layers, mesh)
            extra["indexer_loss"] = layers.mean().item()
            extra["indexer_loss_layers"] = layers.tolist()
        if found_keys is not None:
            for mesh in ("pp", "loss", "tp"):
                found_keys = self._sum_over(found_keys, mesh)
            # No query saw more keys than an indexer selects: there is nothing to choose.
            recalls = [found / keys if keys else None for found, keys in found_keys.tolist()]
            known = [recall for recall in recalls if recall is not None]
            extra["topk_recall"] = sum(known) / len(known) if known else None
            extra["topk_recall_layers"] = recalls
        self.metrics_processor.log(
            self.step, mean_loss, max_loss.item(), grad_norm.item(), extra_metrics=extra
        )

    def _sum_over(self, value: torch.Tensor, mesh_name: str) -> torch.Tensor:
        return self._reduce(value, mesh_name, torch.distributed.ReduceOp.SUM)

    def _max_over(self, value: torch.Tensor, mesh_name: str) -> torch.Tensor:
        return self._reduce(value, mesh_name, torch.distributed.ReduceOp.MAX)

    def _reduce(self, value: torch.Tensor, mesh_name: str, op) -> torch.Tensor:
        """All-reduce of a small tensor over a mesh; the tensor itself where there is none."""
        mesh: DeviceMesh | None = self.parallel_dims.get_optional_mesh(mesh_name)
        if mesh is None:
            return value
        value = value.clone()
        torch.distributed.all_reduce(value, op=op, group=mesh.get_group())
        return value

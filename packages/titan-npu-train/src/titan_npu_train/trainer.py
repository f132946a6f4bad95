"""torchtitan's trainer with the indexer's loss, an accurate gradient norm and per-layer metrics."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.trainer import Trainer as TitanTrainer

from titan_npu_train.deepseek_v32.indexer_loss import DSAMasks
from titan_npu_train.deepseek_v32.model import DeepSeekV32Model
from titan_npu_train.deepseek_v32.options import DSAOptions
from titan_npu_train.gradients import clip_grad_norm
from titan_npu_train.metrics import MetricsProcessor

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

    config: Config
    metrics_processor: MetricsProcessor
    _global_valid_tokens: torch.Tensor | None = None
    _clock_started: bool = False

    @property
    def trains_indexers(self) -> bool:
        return isinstance(self.model_config, DeepSeekV32Model.Config) and (
            self.config.dsa.indexer_loss_coefficient > 0
        )

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        inputs, labels, kwargs = super().post_dataloading_process(input_dict, labels)
        if isinstance(self.model_config, DeepSeekV32Model.Config):
            weight_BS = None
            if self.trains_indexers:
                assert self._global_valid_tokens is not None
                weight_BS = (labels != IGNORE_INDEX).float() / self._global_valid_tokens
                weight_BS = weight_BS * self.config.dsa.indexer_loss_coefficient
            kwargs["attention_masks"] = DSAMasks.from_positions(kwargs["positions"], weight_BS)
        return inputs, labels, kwargs

    def forward_backward_step(
        self,
        *,
        input_dict: dict[str, torch.Tensor] | list[dict[str, torch.Tensor]],
        labels: torch.Tensor | list[torch.Tensor],
        global_valid_tokens: torch.Tensor,
    ) -> torch.Tensor:
        # post_dataloading_process, called from here, weighs the indexer loss by it.
        self._global_valid_tokens = global_valid_tokens
        return super().forward_backward_step(
            input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
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
        if self.metrics_processor.should_log(self.step):
            self._log_step(
                torch.stack(losses).sum(),
                valid_tokens,
                global_valid_tokens,
                grad_norm,
                indexer_losses,
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

    def _log_step(
        self,
        loss: torch.Tensor,
        valid_tokens: torch.Tensor,
        global_valid_tokens: torch.Tensor,
        grad_norm: torch.Tensor,
        indexer_losses: torch.Tensor | None,
        learning_rates: dict[str, float],
    ) -> None:
        # A pipeline stage without the loss contributes zero to both sums.
        rank_mean = loss * global_valid_tokens / valid_tokens.to(self.device).clamp(min=1)
        max_loss = self._max_over(self._sum_over(rank_mean, "pp"), "loss")
        mean_loss = self._sum_over(self._sum_over(loss, "pp"), "loss").item()
        self._refuse_not_finite("loss", mean_loss)
        tokens_seen = torch.tensor(self.ntokens_seen, device=self.device)
        extra: dict[str, Any] = {
            "n_tokens_seen": int(self._sum_over(tokens_seen, "loss")),
            **learning_rates,
        }
        if indexer_losses is not None:
            layers = self._sum_over(self._sum_over(indexer_losses, "pp"), "loss")
            extra["indexer_loss"] = layers.mean().item()
            extra["indexer_loss_layers"] = layers.tolist()
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

"""Training metrics: torchtitan's TensorBoard and console output, and one JSON line a step."""

import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.metrics import MetricsProcessor as TitanMetricsProcessor
from torchtitan.tools.logging import logger

from titan_npu_train import platform

__all__ = ["METRICS_FILE", "MetricsProcessor"]

METRICS_FILE = "metrics.jsonl"


class MetricsProcessor(TitanMetricsProcessor):
    """Writes ``<dump_folder>/metrics.jsonl`` on rank 0, besides what torchtitan writes.

    One object a logged step: step, loss, indexer_loss (mean over layers, nats a token),
    indexer_loss_layers, topk_recall (in the dense warm-up stage: the share, 0 to 1, of the keys
    attention looks at most that the indexers choose, mean over layers; null where no query sees
    more keys than they choose), topk_recall_layers, grad_norm (before clipping), lr,
    tokens_per_second (whole job), tokens_per_second_per_device, tflops (model TFLOP/s a device),
    mfu (0 to 1; null where the device's peak is unknown), step_seconds, data_seconds (waiting for
    data, a step), peak_memory_bytes (rank 0, since the last line), tokens_seen. A resumed run
    appends: the last line of a step is the valid one.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TitanMetricsProcessor.Config):
        log_freq: int = 1

    def __init__(self, config: Config, *, dump_folder: str = "./outputs", **kwargs):
        super().__init__(config, dump_folder=dump_folder, **kwargs)
        self._file: Path | None = None
        if torch.distributed.get_rank() == 0:
            self._file = Path(dump_folder) / METRICS_FILE
            self._file.parent.mkdir(parents=True, exist_ok=True)
        self._last_step: int | None = None

    def start_clock(self, step: int) -> None:
        """Begin timing: ``step`` is about to run."""
        self._last_step = step - 1
        self.time_last_log = time.perf_counter()

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log a step. ``extra_metrics`` are scalars, or lists of one value a layer."""
        extra = dict(extra_metrics or {})
        assert self._last_step is not None, "start_clock() was not called"
        seconds = time.perf_counter() - self.time_last_log
        steps = step - self._last_step
        rate = self.ntokens_since_last_log / (seconds * self.parallel_dims.non_data_parallel_size)
        flops = self.num_flops_per_token * rate
        mfu = flops / self.gpu_peak_flops
        peak_memory = platform.current().peak_memory_bytes()
        indexer_layers = extra.pop("indexer_loss_layers", None)
        recall_layers = extra.pop("topk_recall_layers", None)
        lrs = {name: value for name, value in extra.items() if name.startswith("lr")}
        record = {
            "step": step,
            "loss": global_avg_loss,
            "indexer_loss": extra.pop("indexer_loss", None),
            "topk_recall": extra.pop("topk_recall", None),
            "grad_norm": grad_norm,
            "lr": next(iter(lrs.values()), None),
            "tokens_per_second": rate * torch.distributed.get_world_size(),
            "tokens_per_second_per_device": rate,
            "tflops": flops / 1e12,
            "mfu": mfu if math.isfinite(mfu) else None,
            "step_seconds": seconds / steps,
            "data_seconds": sum(self.data_loading_times) / steps,
            "peak_memory_bytes": peak_memory,
            "tokens_seen": extra.get("n_tokens_seen"),
            "indexer_loss_layers": indexer_layers,
            "topk_recall_layers": recall_layers,
        }
        self._write(record)
        self._log_scalars(record, global_max_loss, extra)
        self._print(record)

        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self._last_step = step
        self.time_last_log = time.perf_counter()
        self.device_memory_monitor.reset_peak_stats()

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        # One write call a line: a killed run leaves whole lines behind it.
        line = (json.dumps(record) + "\n").encode()
        descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)

    def _log_scalars(self, record: dict[str, Any], max_loss: float, extra: dict[str, Any]) -> None:
        # torchtitan's names, so that existing dashboards keep working.
        scalars = {
            "loss_metrics/global_avg_loss": record["loss"],
            "loss_metrics/global_max_loss": max_loss,
            "grad_norm": record["grad_norm"],
            "throughput(tps)": record["tokens_per_second_per_device"],
            "tflops": record["tflops"],
            "time_metrics/end_to_end(s)": record["step_seconds"],
            "time_metrics/data_loading(s)": record["data_seconds"],
            "memory/max_reserved(GiB)": record["peak_memory_bytes"] / 2**30,
            **extra,
        }
        if record["mfu"] is not None:
            scalars["mfu(%)"] = 100 * record["mfu"]
        if record["indexer_loss"] is not None:
            scalars["indexer_loss/mean"] = record["indexer_loss"]
            for layer, value in enumerate(record["indexer_loss_layers"]):
                scalars[f"indexer_loss/layer_{layer}"] = value
        if record["topk_recall"] is not None:
            scalars["topk_recall/mean"] = record["topk_recall"]
            for layer, value in enumerate(record["topk_recall_layers"]):
                if value is not None:
                    scalars[f"topk_recall/layer_{layer}"] = value
        self.logger.log(scalars, record["step"])

    def _print(self, record: dict[str, Any]) -> None:
        c = self.color
        indexer = record["indexer_loss"]
        recall = record["topk_recall"]
        mfu = record["mfu"]
        logger.info(
            f"{c.red}step: {record['step']:2}  "
            f"{c.green}loss: {record['loss']:8.5f}  "
            f"{c.yellow}indexer_loss: {'off' if indexer is None else f'{indexer:8.5f}'}  "
            f"{'' if recall is None else f'topk_recall: {recall:6.4f}  '}"
            f"{c.orange}grad_norm: {record['grad_norm']:7.4f}  "
            f"{c.turquoise}memory: {record['peak_memory_bytes'] / 2**30:5.2f}GiB  "
            f"{c.blue}tps: {record['tokens_per_second']:,.0f}  "
            f"{c.cyan}tflops: {record['tflops']:.3f}  "
            f"{c.magenta}mfu: {'unknown' if mfu is None else f'{mfu:.1%}'}{c.reset}"
        )

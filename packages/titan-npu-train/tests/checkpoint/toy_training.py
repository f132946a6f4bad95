"""A training run small enough to be killed a hundred times: torchtitan's optimizer, scheduler,
data loader and checkpoint contract around a two-layer model with dropout."""

import gc
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from titan_npu_train.checkpoint import VerifiedCheckpointManager

WIDTH = 16
STEPS = 6


class Stream(IterableDataset):
    """Endless samples of its own generator; the position is its state."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.position = 0

    def __iter__(self):
        while True:
            self.position += 1
            generator = torch.Generator().manual_seed(1000 * self.rank + self.position)
            yield torch.randn(WIDTH, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Net(nn.Module):
    def __init__(self, width: int = WIDTH, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("bias_E", torch.zeros(width))

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x_BD = self.dropout(torch.tanh(layer(x_BD)))
        return x_BD + self.bias_E


@dataclass
class Toy:
    """The trainer's part: what torchtitan's ``Trainer`` hands to its checkpointer."""

    folder: Path
    options: dict[str, Any] = field(default_factory=dict)
    width: int = WIDTH
    layers: int = 2
    manager: type = VerifiedCheckpointManager

    def __post_init__(self) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.step = 0
        torch.manual_seed(0)
        self.model = self.build_model()
        if self.ranks > 1:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (self.ranks,)))
            self.model.set_force_sum_reduction_for_comms(True)
        torch.manual_seed(self.rank)
        self.optimizers = default_adamw(lr=1e-2).build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=STEPS
        )
        self.dataloader = ParallelAwareDataloader(
            Stream(self.rank), dp_rank=self.rank, dp_world_size=self.ranks, batch_size=4
        )
        config = self.manager.Config(
            **{"enable": True, "interval": 2, "last_save_model_only": False, **self.options}
        )
        self.checkpointer = config.build(
            dataloader=self.dataloader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=str(self.folder),
        )

    def build_model(self) -> nn.Module:
        return Net(self.width, self.layers)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def train(
        self,
        load_step: int = -1,
        steps: int = STEPS,
        total: int = STEPS,
        saved: Callable[[int], None] = lambda step: None,
    ) -> dict[int, str]:
        """Losses by step, bit for bit; stops after ``steps`` of ``total``."""
        self.checkpointer.load(load_step)
        losses = {}
        batches = None
        while self.step < steps:
            if batches is None:
                batches = iter(self.dataloader)
            self.step += 1
            self.optimizers.zero_grad()
            batch_BD = next(batches)
            loss = (self.model(batch_BD) - batch_BD).square().mean()
            loss.backward()
            self.checkpointer.maybe_wait_for_staging()
            self.model.bias_E += 1e-3 * self.step
            self.optimizers.step()
            self.schedulers.step()
            losses[self.step] = float(loss.detach()).hex()
            if self.checkpointer.save(self.step, last_step=self.step == total):
                saved(self.step)
        self.checkpointer.close()
        return losses


def before_each_file_operation(folder: Path, action: Callable[[], None] | None) -> None:
    """Call ``action`` right before this process opens for writing, makes, renames or removes
    anything below ``folder``; None ends that.

    Python announces these through its audit events. What a process has written but not flushed
    by then dies with it, so a kill at these points leaves files of any length.
    """
    global _action
    if not _installed:
        sys.addaudithook(_hook)  # for good: audit hooks cannot be removed
        _installed.append(True)
    _action = None if action is None else (str(folder), action)


_installed: list[bool] = []
_action: tuple[str, Callable[[], None]] | None = None
_lock = threading.RLock()


def _hook(event: str, arguments: tuple) -> None:
    global _action
    if _action is None:
        return
    folder, action = _action
    if event == "open":
        relevant = str(arguments[0]).startswith(folder) and "w" in (arguments[1] or "")
    elif event in ("os.mkdir", "os.rename"):
        relevant = str(arguments[0]).startswith(folder)
    else:  # shutil.rmtree names what it removes relative to a directory it holds open
        relevant = event in ("os.remove", "os.rmdir") and arguments[1] != -1
    if relevant:
        with _lock:
            _action, saved = None, _action  # what the action itself does is not reported
            try:
                action()
            finally:
                _action = saved


def run(
    folder: Path,
    log: Path,
    options: dict[str, Any],
    *,
    kill_at: int = 0,
    killed_rank: int = 0,
    kill_after_step: int = 0,
    rank: int = 0,
    ranks: int = 1,
) -> None:
    """A process of a run. ``log`` takes each step saved as it is saved and the losses at the end.

    Rank ``killed_rank`` is killed at its ``kill_at``-th file operation after ``kill_after_step``.
    """
    torch.set_num_threads(1)
    gc.freeze()  # the manager collects around each save, and the forked heap is large
    dist.init_process_group(
        "gloo",
        init_method=f"file://{log}.store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    with log.with_name(f"{log.name}.{rank}").open("w", buffering=1) as lines:

        def saved(step: int) -> None:
            lines.write(f"saved {step}\n")
            if kill_at and rank == killed_rank and step == kill_after_step:
                operations = itertools.count(1)

                def kill() -> None:
                    if next(operations) == kill_at:
                        os.kill(os.getpid(), signal.SIGKILL)

                before_each_file_operation(folder, kill)

        for step, loss in Toy(folder, options).train(saved=saved).items():
            lines.write(f"loss {step} {loss}\n")
    dist.destroy_process_group()


def read_log(log: Path, rank: int = 0) -> tuple[list[int], dict[int, str]]:
    """Steps saved and losses by step of one rank of a :func:`run`."""
    saved, losses = [], {}
    for line in log.with_name(f"{log.name}.{rank}").read_text().splitlines():
        match line.split():
            case ["saved", step]:
                saved.append(int(step))
            case ["loss", step, loss]:
                losses[int(step)] = loss
    return saved, losses

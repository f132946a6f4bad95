"""A module with a config_registry's contents, whose trainers do next to nothing.

Real processes, real torchrun agent, real Gloo collectives; only the model is missing, so that what
the launcher does with a rank that fails can be tried in seconds. Ranks import it by this name.
"""

import dataclasses
import json
import os
import signal
import time
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import tyro
from tokenizers import Tokenizer, models
from torchtitan.config.configs import DebugConfig, ParallelismConfig, TrainingConfig

from titan_npu_train.failures import UserError


@dataclasses.dataclass(kw_only=True)
class Checkpoint:
    enable: bool = False
    folder: str = "checkpoint"
    initial_load_path: str | None = None
    initial_load_in_hf: bool = False
    create_seed_checkpoint: bool = False


@dataclasses.dataclass(kw_only=True)
class Dataloader:
    dataset_path: str | None = None


@dataclasses.dataclass(kw_only=True)
class Model:
    vocab_size: int = 300
    layers: list[Any] = field(default_factory=list)

    def update_from_config(self, *, config: Any) -> None:
        if config.training.seq_len > 4096:
            raise ValueError(
                f"Training sequence length {config.training.seq_len} exceeds the maximum 4096."
            )


@dataclasses.dataclass
class Spec:
    model: Model = field(default_factory=Model)


@dataclasses.dataclass(kw_only=True)
class FakeConfig:
    model_spec: Annotated[Spec, tyro.conf.Suppress] = field(default_factory=Spec)
    hf_assets_path: str = "./tokenizer"
    dump_folder: str = "./outputs"
    training: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(steps=3, seq_len=64, local_batch_size=1)
    )
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    dataloader: Dataloader = field(default_factory=Dataloader)
    debug: DebugConfig = field(default_factory=lambda: DebugConfig(enable_structured_logging=False))
    act: str = ""
    """What goes wrong after step 2, on which rank: "raise:1", "bug:0", "all:", "kill:0,hang:1"."""

    def build(self) -> "FakeTrainer":
        return FakeTrainer(self)


class FakeTrainer:
    def __init__(self, config: FakeConfig) -> None:
        self.config = config
        self.rank = int(os.environ["RANK"])
        dist.init_process_group("gloo")
        print(f"rank {self.rank} with {os.environ['OMP_NUM_THREADS']} threads")

    def train(self) -> None:
        folder = Path(self.config.dump_folder)
        (folder / f"pid{self.rank}").write_text(str(os.getpid()))
        for step in range(1, self.config.training.steps + 1):
            dist.all_reduce(torch.ones(1))
            if self.rank == 0:
                record = {"step": step, "loss": 8.0 / step, "tokens_per_second": 100.0}
                with (folder / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(record) + "\n")
            if step == 2:
                for act in filter(None, self.config.act.split(",")):
                    kind, _, who = act.partition(":")
                    if not who or self.rank == int(who):
                        self._do(kind)

    def _do(self, kind: str) -> None:
        match kind:
            case "raise":
                raise UserError("the data of rank 1 is bad. Prepare it again.")
            case "all":
                raise UserError("the learning rate is negative. Use a positive one.")
            case "bug":
                raise KeyError("missing")
            case "kill":
                time.sleep(1.0)  # for the launcher to see the step
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(3600)

    def close(self) -> None:
        pass


def fake_debugmodel() -> FakeConfig:
    return FakeConfig()


def fake_larger() -> FakeConfig:
    return FakeConfig()


def write_tokenizer(folder: Path, size: int = 26) -> None:
    """A tokenizer.json of ``size`` tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {chr(0x4E00 + i): i for i in range(size)}
    Tokenizer(models.BPE(vocab=vocabulary, merges=[])).save(str(folder / "tokenizer.json"))

"""A warm-up run on text, resumed, and the sparse run that follows, in one process.

    python warmup_run.py FOLDER SOURCE

Prepares the text in SOURCE, and prints a JSON object of what happened.
"""

import json
import os
import sys
from pathlib import Path

import torch

from titan_npu_train import platform

platform.select("cpu")

from torchtitan.components.optimizer import ParamGroupConfig  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402

from titan_npu_train import data  # noqa: E402
from titan_npu_train.checkpoint import Checkpoint, CheckpointError  # noqa: E402

TOKENS = ["--training.seq_len", "128", "--training.local_batch_size", "4"]
WARMUP = ["--dsa.stage", "dense_warmup"]


def run(folder: Path, name: str, *options: str, spread: bool = False) -> dict:
    """Train to the configured step, or find out why not."""
    arguments = [
        *("--module", "titan_npu_train.deepseek_v32", "--config", "deepseek_v32_debugmodel"),
        *("--dataloader.dataset", "prepared", "--dataloader.dataset_path", str(folder / "data")),
        *("--hf_assets_path", str(folder / "data" / "tokenizer")),
        *("--dump_folder", str(folder / name), "--checkpoint.enable", *TOKENS),
        *("--lr_scheduler.warmup_steps", "0", "--lr_scheduler.decay_ratio", "0"),
        *options,
    ]
    config = ConfigManager().parse_args(arguments)
    (group,) = config.optimizer.param_groups
    of_indexers = {**group.optimizer_kwargs, "lr": 1e-2, "weight_decay": 0.0}
    own = ParamGroupConfig(
        pattern=r"\.indexer\.", optimizer_name="AdamW", optimizer_kwargs=of_indexers
    )
    config.optimizer.param_groups = [own, group]
    trainer = config.build()
    before = weights(trainer)
    try:
        if spread:
            spread_out(trainer.model_parts[0])
            before = weights(trainer)
        trainer.train()
        failure = None
    except CheckpointError as error:
        failure = str(error)
    after = weights(trainer)
    groups = trainer.optimizers.optimizers[0].param_groups
    result = {
        "failure": failure,
        "step": trainer.step,
        "changed": sorted(n for n in after if not torch.equal(after[n], before[n])),
        "gradients": sorted(
            n for n, p in trainer.model_parts[0].named_parameters() if p.grad is not None
        ),
        "rates": [group["initial_lr"] for group in groups],
        "optimized": sorted(name for group in groups for name in group["param_names"]),
    }
    trainer.close()
    torch.distributed.destroy_process_group()
    return result


def weights(trainer) -> dict[str, torch.Tensor]:
    def whole(tensor):
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    state = trainer.model_parts[0].state_dict()
    return {name: whole(value).detach().clone() for name, value in state.items()}


@torch.no_grad()
def spread_out(model) -> None:
    """Attention that looks at some keys more than at others, as a trained one does."""
    for block in model.layers.values():
        for projection in (block.attention.wq_b, block.attention.wkv_b, block.attention.wkv_a):
            projection.weight.mul_(4.0)


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main(folder: Path, source: Path) -> dict:
    data.prepare(source, folder / "data", vocab_size=512)
    warmup, checkpoints = folder / "warmup", folder / "warmup" / "checkpoint"
    found = {"warmup": run(folder, "warmup", *WARMUP, "--training.steps", "24", spread=True)}
    found["stage"] = Checkpoint.open(checkpoints / "step-24").stage
    found["refused"] = run(folder, "warmup", "--training.steps", "25")
    found["resumed"] = run(folder, "warmup", *WARMUP, "--training.steps", "25")
    found["records"] = records(warmup)
    start = ["--checkpoint.initial_load_path", str(checkpoints / "step-25")]
    found["sparse"] = run(folder, "sparse", *start, "--training.steps", "2")
    found["sparse_records"] = records(folder / "sparse")
    return found


if __name__ == "__main__":
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    os.environ.setdefault("MASTER_PORT", "0")
    result = main(Path(sys.argv[1]), Path(sys.argv[2]))
    Path(sys.argv[1], "found.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # torch 2.14 now and then aborts when an interpreter that used Gloo shuts down

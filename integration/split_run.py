"""One rank of comparison runs: train a few steps and keep what each step computed.

    torchrun ... split_run.py JOBS

JOBS is a file of a JSON list of objects, run one after the other: {"mode", "out", "options",
"port"}, with the options of torchtitan and a free port. Mode "seed" writes an unsharded seed
checkpoint with the weights of the random "seed"; "load" writes to OUT the weights that a run begins
with; "train" trains. After training, OUT holds the LM loss, each layer's indexer loss, the gradient
norm and all gradients of every step, and the smallest gaps between a query's k-th and (k+1)-th
score by the indexer (none in the unabsorbed form). With "may_fail", a rank's error goes to
OUT.RANK, and the next job runs.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from npu_dsa_kernels import dsa_attention
from titan_npu_train import platform

platform.select("cpu")

from torchtitan.components.loss import IGNORE_INDEX  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402

from titan_npu_train.deepseek_v32 import attention  # noqa: E402


def main() -> None:
    init_logger()
    # A store for each job: in a shared one, the keys of a job before lead to closed sockets.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for job in json.loads(Path(sys.argv[1]).read_text()):
        os.environ["MASTER_PORT"] = str(job["port"])
        try:
            run(job)
        except Exception as error:
            if not job.get("may_fail"):
                raise
            line = " ".join(str(error).split("\n")[:2]).strip()
            out = Path(f"{job['out']}.{os.environ['RANK']}")
            out.write_text(f"{type(error).__name__}: {line}")
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


def run(job: dict) -> None:
    options = ["--module", "titan_npu_train.deepseek_v32", *job["options"]]
    config = ConfigManager().parse_args(options)
    trainer = config.build()
    try:
        work(trainer, job)
    finally:
        trainer.close()
        # What torch remembers names meshes and modules of this job.
        _clear_sharding_prop_cache()
        torch.compiler.reset()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def work(trainer, job: dict) -> None:
    config = trainer.config
    if job["mode"] == "seed":
        make_everything_matter(trainer.model_parts[0], job["seed"])
        trainer.checkpointer.save(curr_step=0, last_step=True)
    else:
        trainer.checkpointer.load(step=config.checkpoint.load_step)
        if job["mode"] == "load":
            record = {
                name: whole(value) for name, value in trainer.model_parts[0].state_dict().items()
            }
        else:
            record = train(trainer, config.training.steps)
        if torch.distributed.get_rank() == 0:
            torch.save(record, Path(job["out"]))


@torch.no_grad()
def make_everything_matter(model: torch.nn.Module, seed: int) -> None:
    """Weights under which scores are spread out and every part changes the output.

    With the training initialisation the indexer's scores are all but equal, and which keys win is
    a matter of rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.copy_(0.1 * noise + (0.0 if name.endswith("bias") else 1.0))
        else:
            parameter.copy_(noise * parameter.size(-1) ** -0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias_E"):
            buffer.copy_(0.05 * torch.randn(buffer.shape, generator=generator))


def train(trainer, steps: int) -> dict:
    record = {"steps": [], "smallest_gap": watch_gaps()}
    parameters = [
        (name.replace("_checkpoint_wrapped_module.", ""), parameter)
        for part in trainer.model_parts
        for name, parameter in part.named_parameters()
    ]

    def keep_gradients(*_) -> None:
        mine = {name: whole(p.grad) for name, p in parameters}
        record["steps"].append({"gradients": of_all_stages(trainer, mine)})

    def keep_metrics(step, loss, max_loss, grad_norm, extra_metrics) -> None:
        record["steps"][-1] |= {
            "loss": loss,
            "grad_norm": grad_norm,
            "indexer_losses": extra_metrics.get("indexer_loss_layers"),
            "topk_recalls": extra_metrics.get("topk_recall_layers"),
        }

    trainer.optimizers.register_step_pre_hook(keep_gradients)
    trainer.metrics_processor.log = keep_metrics
    batches = map(with_padding, trainer.batch_generator(trainer.dataloader))
    for _ in range(steps):
        trainer.step += 1
        trainer.train_step(batches)
        trainer.checkpointer.save(trainer.step, last_step=trainer.step == steps)
    biases = {
        name.replace("_checkpoint_wrapped_module.", ""): whole(buffer)
        for part in trainer.model_parts
        for name, buffer in part.named_buffers()
        if name.endswith("expert_bias_E")
    }
    record["expert_biases"] = of_all_stages(trainer, biases)
    return record


def with_padding(batch):
    """The batch with some labels that do not count: very many in one row, and few in another.

    Which ones follows from the row alone, however rows are split: a normalisation by anything but
    the number in the global batch would show.
    """
    inputs, labels = batch
    labels = labels.clone()
    for row, tokens in zip(labels, inputs["input"], strict=True):
        row[: int(tokens.sum()) % (3 * len(row) // 4)] = IGNORE_INDEX
    return inputs, labels


def of_all_stages(trainer, mine: dict) -> dict:
    """What the ranks of this one's pipeline have, together."""
    mesh = trainer.parallel_dims.get_optional_mesh("pp")
    if mesh is None:
        return mine
    parts = [None] * mesh.size()
    torch.distributed.all_gather_object(parts, mine, group=mesh.get_group())
    return {name: value for part in parts for name, value in part.items()}


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def watch_gaps() -> list[float]:
    """A list that collects, a forward each, the smallest gap that decided a selection."""
    gaps: list[float] = []

    def watched(q, kv, q_index, k_index, weights, *, topk, bounds, query_split, **kwargs):
        rows = bounds if query_split is None else query_split.take(bounds)
        with torch.no_grad():
            _, scores = attention.lightning_indexer(
                q_index, k_index, weights, topk=topk + 1, bounds=rows
            )
        last, first_out = scores[..., topk - 1], scores[..., topk]
        # Two keys no head responds to both score exactly 0: a tie that position decides, not
        # rounding.
        decided = first_out.isfinite() & ((last != 0) | (first_out != 0))
        gap = (last - first_out)[decided]
        gaps.append(gap.min().item() if gap.numel() else float("inf"))
        return dsa_attention(
            *(q, kv, q_index, k_index, weights),
            topk=topk,
            bounds=bounds,
            query_split=query_split,
            **kwargs,
        )

    attention.dsa_attention = watched
    return gaps


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # torch 2.14 now and then aborts when an interpreter that used Gloo shuts down

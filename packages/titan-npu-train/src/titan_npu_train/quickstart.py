"""Five minutes on a laptop: ``python -m titan_npu_train.quickstart``.

Real text, a small DeepSeek-V3.2 with sparse attention, two processes that share its weights (FSDP2)
and its experts; stopped half-way, resumed from the checkpoint, and reported.
"""

import dataclasses
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from titan_npu_train import cli, failures, launch, platform, preflight
from titan_npu_train.failures import UserError
from titan_npu_train.progress import duration

__all__ = ["main", "quickstart"]

CONFIG = "deepseek_v32_debugmodel"
NPROC = 2
STAGES = 4
STEPS = 120


def quickstart(
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", help="Run folder, made new. Default: runs/quickstart.", show_default=False
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps to train; half of them twice.")] = STEPS,
) -> None:
    """Prepare text, train on two processes, resume from a checkpoint, report."""
    began = time.monotonic()
    folder = _run_folder(directory)
    half = steps // 2

    _stage(1, "the text: Python's standard library, cut into tokens by its own tokenizer")
    base = [
        *("--dump_folder", str(folder)),
        *("--parallelism.expert_parallel_degree", str(NPROC)),
        *("--lr_scheduler.total_steps", str(steps)),  # one schedule over both halves
        *("--checkpoint.enable", "--checkpoint.interval", str(half)),
    ]
    cli.select_platform()
    settings = preflight.load_config(preflight.DEFAULT_MODULE, CONFIG, base)
    base += cli.data_options(settings, base, None)
    cli.say(f"dataset: {base[base.index('--dataloader.dataset_path') + 1]}")

    _stage(2, f"train {CONFIG}, steps 1 to {half}, on {NPROC} processes")
    settings, first = _train(base, half)
    if first.last_step != half:
        raise UserError(f"training ended at step {first.last_step}, not {half}. See {folder}/logs.")

    _stage(3, f"start again from the checkpoint of step {half}, to step {steps}")
    settings, second = _train(base, steps)
    if second.first_step != half + 1 or second.last_step != steps:
        raise UserError(
            f"the resumed run did steps {second.first_step} to {second.last_step}, not {half + 1} "
            f"to {steps}: it did not resume from the checkpoint. See {folder}/logs."
        )

    _stage(4, "report, with the indexer measured on held-out text")
    from titan_npu_train.report import report

    summary = report(folder, console=cli.out)
    if "not_evaluated" in summary["evaluation"]:
        raise UserError(
            f"the indexer could not be evaluated: {summary['evaluation']['not_evaluated']}"
        )
    cli.say("")
    for line in _story(settings, summary, folder, half, time.monotonic() - began):
        cli.say(line)


def _train(base: list[str], steps: int) -> tuple[Any, launch.RunResult]:
    from titan_npu_train.plan.prediction import predict

    options = [*base, "--training.steps", str(steps)]
    settings = preflight.load_config(preflight.DEFAULT_MODULE, CONFIG, options)
    preflight.check(settings, NPROC)
    result = predict(settings, NPROC, platform.current()).run(
        settings, module=preflight.DEFAULT_MODULE, name=CONFIG, options=options, say=cli.say
    )
    return settings, result


def _run_folder(wanted: Path | None) -> Path:
    """An empty folder: the one asked for, or the next free runs/quickstart."""
    if wanted is not None:
        if wanted.exists() and (not wanted.is_dir() or any(wanted.iterdir())):
            raise UserError(f"'{wanted}' is not an empty folder. Choose another --dir.")
        return wanted
    for number in range(1, 10_000):
        folder = Path("runs") / ("quickstart" if number == 1 else f"quickstart-{number}")
        if not folder.exists():
            return folder
    raise UserError("runs/ is full of quickstarts. Choose a --dir.")


def _stage(number: int, what: str) -> None:
    cli.say(f"\n[{number}/{STAGES}] {what}")


def _story(
    settings: Any, summary: dict[str, Any], folder: Path, half: int, seconds: float
) -> Iterator[str]:
    model = settings.model_spec.model
    topk = summary["evaluation"]["topk"]
    yield (
        f"Trained in {duration(seconds)}: {CONFIG}, {_parameters(model) / 1e6:.1f} M parameters in "
        f"{len(model.layers)} layers, each attending to {topk} keys, on rows of "
        f"{settings.training.seq_len} tokens packed from Python's standard library. {NPROC} "
        f"processes shared weights (FSDP2) and experts (EP {NPROC}); stopped at step {half} and "
        f"resumed from the checkpoint, to step {summary['steps']}."
    )
    first, last = summary["first_loss"], summary["last_loss"]
    yield (
        f"LM loss: {first:.2f} to {last:.2f} nats a token ({last / first - 1:+.0%}); "
        f"{summary['heldout_loss']:.2f} on held-out text."
    )
    yield f"Indexer loss: {_trend(summary)}."
    yield f"Gradient norm: {summary['first_grad_norm']:.2f} to {summary['last_grad_norm']:.2f}."
    trained, untrained = summary["indexer_kl_trained"], summary["indexer_kl_untrained"]
    recall, chance = summary["topk_recall"], summary["topk_recall_chance"]
    yield (
        f"The indexer, on held-out text: KL to the attention {trained:.3f}, {untrained:.3f} for an "
        f"untrained one (x {trained / untrained:.2f}); it finds {recall:.0%} of the {topk} keys "
        f"that matter most, {recall / chance:.1f} times what chance finds ({chance:.0%})."
    )
    yield f"Picture: {folder / 'report.png'}    figures: {folder / 'report.json'}"
    command = _command()
    yield "Next:"
    yield (
        f"  {command} train {CONFIG} --nproc {NPROC} --training.steps 1000 --checkpoint.enable "
        "--dump_folder runs/longer"
    )
    vocabulary = model.vocab_size
    yield (
        f"  {command} data prepare FOLDER --out my-data --vocab-size {vocabulary}"
        "    # then: train ... --data my-data"
    )
    yield f"  {command} doctor    # what this machine has, and what an NPU needs"


def _command() -> str:
    """How to call titan-npu: by name where the shell finds it, else by its path."""
    if shutil.which("titan-npu"):
        return "titan-npu"
    path = Path(sys.executable).with_name("titan-npu")
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _trend(summary: dict[str, Any]) -> str:
    """A rising indexer loss is honest early on: attention sharpens away from uniform."""
    first, last = summary["first_indexer_loss"], summary["last_indexer_loss"]
    highest = summary["highest_indexer_loss"]
    text = f"{first:.3f} to {last:.3f} nats a token"
    if highest > 1.2 * max(first, last):
        text += f", after a peak of {highest:.3f} while attention sharpened"
    elif last > first:
        text += "; attention sharpens away from uniform faster than the indexer follows"
    return text


def _parameters(model_config: Any) -> int:
    import torch

    with torch.device("meta"):
        return sum(p.numel() for p in dataclasses.replace(model_config).build().parameters())


def main() -> None:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(quickstart)
    # Without arguments it runs; the command would print its help.
    code = cli.run(sys.argv[1:] or ["--steps", str(STEPS)], app=app)
    if code:
        print(f"{failures.PREFIX}the quickstart did not finish.", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()

"""The command ``titan-npu``. Its verbs import what they need when they run: help is instant."""

import contextlib
import logging
import os
import signal
import sys
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from titan_npu_train import __version__, failures
from titan_npu_train.failures import UserError

__all__ = ["app", "data_options", "main", "run", "say", "select_platform"]

app = typer.Typer(
    name="titan-npu",
    help="Pretrain DeepSeek-V3.2 (DeepSeek Sparse Attention) with TorchTitan, on NPU, CUDA or CPU.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def main() -> None:
    """Entry point: exit code 0, 1 for a failure, 2 for bad input, 128 + n for signal n."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str], *, app: typer.Typer = app) -> int:
    """Run the command (or another one in its manner) and return the exit code."""
    from titan_npu_train.launch import Interrupted, RunFailed

    logging.getLogger().addHandler(logging.NullHandler())  # or logging's last resort prints
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # the ranks report what concerns them, into their logs
    try:
        return app(arguments or ["--help"], standalone_mode=False) or 0
    except typer.Exit as exit:
        return exit.exit_code
    except typer.Abort:
        return 130
    except typer.TyperException as error:
        message = error.format_message()
        _say_error(f"{message}{'' if message.endswith(('.', '?')) else '.'} See --help.")
        return 2
    except KeyboardInterrupt:
        _say_error("interrupted.")
        return 128 + signal.SIGINT
    except Interrupted as interrupted:
        _say_error(str(interrupted))
        return 128 + interrupted.signal
    except RunFailed as error:
        _say_error(str(error))
        return 1
    except Exception as error:
        return _report(error)


def _report(error: Exception) -> int:
    failure = failures.describe(error)
    _say_error(failure.message)
    if failure.unexpected:
        path = failures.write_error_file(error, failure, None, 0)
        err.print(f"This was not foreseen. traceback: {path}", markup=False)
    if failures.tracebacks_wanted():
        sys.excepthook(type(error), error, error.__traceback__)
    return 1 if failure.unexpected else 2


def _say_error(text: str) -> None:
    err.print(f"{failures.PREFIX}{text}", markup=False)


def say(text: str) -> None:
    """Print a line for a person."""
    out.print(text, markup=False)


def select_platform() -> Any:
    """Choose the device, before anything of torchtitan that copies it is imported."""
    from titan_npu_train import platform

    return platform.select()


@contextlib.contextmanager
def _busy(text: str) -> Generator[None]:
    """A spinner on a terminal, a plain line elsewhere."""
    if err.is_terminal:
        with err.status(text):
            yield
    else:
        err.print(text + " ...", markup=False)
        yield


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"titan-npu {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Example:  titan-npu train deepseek_v32_debugmodel --nproc 2 --training.steps 100 "
    "--dump_folder runs/first",
)
def train(
    context: typer.Context,
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help="A configuration, such as deepseek_v32_debugmodel.",
            show_default=False,
        ),
    ] = "",
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes on this machine. Default: one for each accelerator, one on CPU.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A folder made by 'titan-npu data prepare'. Default: Python's standard library as "
            "text, prepared into a cache on first use.",
            show_default=False,
        ),
    ] = None,
    module: Annotated[
        str, typer.Option(help="Where CONFIG is defined: a module with a config_registry.")
    ] = "titan_npu_train.deepseek_v32",
    options: Annotated[
        bool, typer.Option("--options", help="Print CONFIG's torchtitan options and stop.")
    ] = False,
    debug_traceback: Annotated[
        bool, typer.Option("--debug-traceback", help="Print tracebacks, not only messages.")
    ] = False,
) -> None:
    """Train CONFIG. Everything else is a torchtitan option: [cyan]--section.option value[/cyan].

    A run writes into its dump_folder: metrics.jsonl, checkpoint/, every rank's log under logs/, and
    errors/ if it fails. With --checkpoint.enable it saves every --checkpoint.interval steps, and
    the same command goes on from the newest complete checkpoint.
    """
    from titan_npu_train import launch, preflight

    if debug_traceback:
        os.environ["TITAN_NPU_TRACEBACK"] = "1"
    extra = list(context.args)
    if config.startswith("-"):
        raise UserError(
            f"CONFIG comes first, got '{config}'. Write: titan-npu train CONFIG {config} ..."
        )
    with _busy("reading the configuration"):
        platform = select_platform()
        if not config:
            known = ", ".join(preflight.config_names(module))
            raise UserError(f"which configuration? titan-npu train CONFIG, one of: {known}.")
        if options:
            with contextlib.suppress(SystemExit):
                preflight.load_config(module, config, ["--help"])
            raise typer.Exit
        nproc = nproc or launch.default_nproc(platform)
        settings = preflight.load_config(module, config, extra)
    # In front: what follows "activation-checkpoint:full" belongs to it.
    extra = data_options(settings, extra, data) + extra
    settings = preflight.load_config(module, config, extra)
    preflight.check(settings, nproc)

    say(
        f"training {config} to step {settings.training.steps} on {nproc} x {platform.name}: "
        f"{settings.training.seq_len} tokens a row, folder {settings.dump_folder}"
    )
    from titan_npu_train.plan.prediction import predict  # imports models: the platform is chosen

    with _busy("planning its memory"):
        prediction = predict(settings, nproc, platform)
    result = prediction.run(settings, module=module, name=config, options=extra, say=say)
    say(launch.summary(result))
    say(f"curves: titan-npu report {settings.dump_folder}")


data_app = typer.Typer(help="Make datasets to train on.")
app.add_typer(data_app, name="data")


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run's dump_folder.")],
    evaluate: Annotated[
        bool,
        typer.Option(
            help="Load the newest checkpoint and measure the indexer on held-out text.",
        ),
    ] = True,
    data: Annotated[
        Path | None,
        typer.Option(help="Held-out text of this dataset, not the run's.", show_default=False),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Held-out rows to measure on, at most.")] = 16,
) -> None:
    """Show how a run went: a table here, report.png and report.json in RUN_DIR."""
    from titan_npu_train.report import report as make_report

    make_report(run_dir, evaluate=evaluate, data=data, rows=rows, console=out)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Example:  titan-npu plan deepseek_v32_671b_32k_128die --world 128 --device-memory 64GB",
)
def plan(
    context: typer.Context,
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A configuration.", show_default=False)
    ],
    world: Annotated[
        int,
        typer.Option(min=1, help="Devices: for Atlas A3, dies.", show_default=False),
    ],
    device_memory: Annotated[str, typer.Option(help="Memory of each, in units of 1024.")] = "64GB",
    device: Annotated[
        str, typer.Option(help="Kind of device: npu, cuda, or cpu for a run on this machine.")
    ] = "npu",
    wanted: Annotated[
        int,
        typer.Option("--top", min=0, help="Splits to find; 0 looks at CONFIG's own alone."),
    ] = 8,
    look_at_all: Annotated[
        bool, typer.Option("--all", help="Look at every split; takes minutes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out_dir: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Write plan.json and plan.png there.", show_default=False
        ),
    ] = None,
    counting: Annotated[
        str,
        typer.Option(
            help="'published' prints the table of the published 64-card run, by its own counting."
        ),
    ] = "real",
    machine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="What times are of, an Atlas A3 die unless said: flops, utilisation, link, "
            "host_link (bytes/s), latency (s).",
            show_default=False,
        ),
    ] = None,
    module: Annotated[
        str, typer.Option(help="Where CONFIG is defined: a module with a config_registry.")
    ] = "titan_npu_train.deepseek_v32",
) -> None:
    """Say what CONFIG needs on N devices, and which splits of it fit and are fastest.

    Parameters and gradients are exact, those of the real model after the real parallelisation;
    activations are those of its layers' forward and backward, run without data. Times are of a
    simple model.
    Everything else is a torchtitan option: [cyan]--section.option value[/cyan].
    """
    from titan_npu_train import preflight

    if counting not in ("real", "published"):
        raise UserError(f"--counting is 'real' or 'published', got '{counting}'.")
    if device not in ("npu", "cuda", "cpu"):
        raise UserError(f"--device is npu, cuda or cpu, got '{device}'.")
    select_platform()
    from titan_npu_train.plan import command  # imports models: the platform is chosen
    from titan_npu_train.plan.cost import ATLAS_A3

    size = command.memory_size(device_memory)
    on = ATLAS_A3.with_settings(machine or [])
    settings = preflight.load_config(module, config, list(context.args))
    if counting == "published":
        command.plan_published(
            settings, world=world, device_memory=size, machine=on, as_json=as_json, console=out
        )
        return
    command.plan(
        settings,
        config,
        world=world,
        device_memory=size,
        device=device,
        machine=on,
        wanted=None if look_at_all else wanted,
        as_json=as_json,
        out=out_dir,
        console=out,
        errors=err,
    )


@app.command()
def doctor(
    config: Annotated[
        str | None,
        typer.Option(help="Also check this configuration against --nproc.", show_default=False),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Processes for --config.", show_default=False)
    ] = None,
    module: Annotated[
        str, typer.Option(help="Where --config is defined.")
    ] = "titan_npu_train.deepseek_v32",
) -> None:
    """Say what is installed, what works and what is missing; exit code 1 if that is needed."""
    from titan_npu_train import doctor as checks

    raise typer.Exit(checks.run(out, config=config, nproc=nproc, module=module))


@data_app.command()
def prepare(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="Text or code files, .jsonl(.gz/.zst) or .parquet: one file, or a folder of them.",
            show_default=False,
        ),
    ],
    out_dir: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="The dataset's folder.", show_default=False)
    ],
    vocab_size: Annotated[
        int, typer.Option(help="Tokens of the byte-level BPE vocabulary to train.")
    ] = 32768,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A folder with a tokenizer.json to use instead of training one.",
            show_default=False,
        ),
    ] = None,
    text_column: Annotated[
        str, typer.Option(help="JSON key or Parquet column that holds the text.")
    ] = "text",
    heldout: Annotated[
        float, typer.Option(help="Share of the documents kept out of training, to measure on.")
    ] = 0.01,
    deduplicate: Annotated[
        bool, typer.Option("--deduplicate", help="Drop exact duplicates (else only counted).")
    ] = False,
    max_bytes: Annotated[
        int | None,
        typer.Option(help="Keep about this many bytes of text.", show_default=False),
    ] = None,
) -> None:
    """Turn SOURCE into a dataset to train on: tokens, a tokenizer, a manifest."""
    from titan_npu_train import data
    from titan_npu_train.data.progress import progress_bar

    with progress_bar(err) as progress:
        summary = data.prepare(
            source,
            out_dir,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            text_column=text_column,
            heldout=heldout,
            deduplicate=deduplicate,
            max_bytes=max_bytes,
            progress=progress,
        )
    say(str(summary))
    say(f"train on it: titan-npu train CONFIG --data {out_dir}")


def data_options(settings: Any, options: list[str], data: Path | None) -> list[str]:
    """The torchtitan options that point a run at its data, prepared first if need be.

    Args:
        settings: the configuration with ``options`` applied.
        options: what the user gave.
        data: the folder of --data; None: the standard library, unless ``options`` name a dataset.
    """
    from titan_npu_train.data import PackedTextDataLoader, stdlib_corpus
    from titan_npu_train.data.progress import progress_bar

    added = []
    if data is None:
        if not isinstance(settings.dataloader, PackedTextDataLoader.Config):
            return []  # another model's own loader finds its own data
        if settings.dataloader.dataset_path is not None:
            data = Path(settings.dataloader.dataset_path)
        elif settings.dataloader.dataset == "stdlib":
            with progress_bar(err) as progress:
                data = stdlib_corpus(progress=progress)
        else:
            return []
    data = Path(data).absolute()  # the report of this run may be asked for from another folder
    if settings.dataloader.dataset_path is None:
        added += ["--dataloader.dataset_path", str(data)]
    elif Path(settings.dataloader.dataset_path).absolute() != data:
        raise UserError(
            f"--data {data} and dataloader.dataset_path {settings.dataloader.dataset_path} are two "
            "folders. Give one of them."
        )
    if not any(o.startswith(("--hf_assets_path", "--hf-assets-path")) for o in options):
        added += ["--hf_assets_path", str(data / "tokenizer")]
    return added


if __name__ == "__main__":
    main()

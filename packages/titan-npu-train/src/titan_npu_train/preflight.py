"""What can be known to be wrong before a single rank starts.

Reading a configuration and checking it against the machine takes seconds in one process. The same
mistake found by the ranks costs minutes, and is reported by all of them.
"""

import contextlib
import copy
import dataclasses
import difflib
import functools
import importlib
import inspect
import io
import json
import re
import tempfile
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from titan_npu_train import failures
from titan_npu_train.failures import UserError

__all__ = [
    "DEFAULT_MODULE",
    "check",
    "check_layout",
    "checkpoint_problems",
    "config_names",
    "data_problems",
    "folder_problems",
    "load_config",
    "model_problems",
    "newest_checkpoint",
    "option_names",
    "split_arguments",
    "world_problems",
]

DEFAULT_MODULE = "titan_npu_train.deepseek_v32"


# ---------------------------------------------------------------------- reading a configuration


def split_arguments(arguments: Sequence[str]) -> tuple[str, str, list[str]]:
    """Take --module and --config out of a command line: (module, config, the other arguments).

    Raises:
        UserError: one of them is missing or has no value.
    """
    found: dict[str, str] = {}
    rest: list[str] = []
    iterator = iter(arguments)
    for argument in iterator:
        option, equals, value = argument.partition("=")
        if option not in ("--module", "--config"):
            rest.append(argument)
            continue
        if not equals:
            value = next(iterator, "")
        if not value:
            raise UserError(f"{option} needs a value. Example: {option} {_EXAMPLE[option]}")
        found[option] = value
    for option in ("--module", "--config"):
        if option not in found:
            raise UserError(f"{option} is missing. Example: {option} {_EXAMPLE[option]}")
    return found["--module"], found["--config"], rest


_EXAMPLE = {"--module": DEFAULT_MODULE, "--config": "deepseek_v32_debugmodel"}


def config_names(module: str) -> list[str]:
    """Names of the configurations a module's registry defines.

    Raises:
        UserError: there is no such module.
    """
    registry = _registry(module)
    return sorted(
        name
        for name, value in vars(registry).items()
        if not name.startswith("_")
        and inspect.isfunction(value)
        and value.__module__ == registry.__name__
        and _is_config_function(value)
    )


def load_config(module: str, name: str, options: Sequence[str]) -> Any:
    """Read a configuration and apply command line options, as torchtitan does.

    Args:
        module: a torchtitan model name, or a dotted module whose config_registry holds the names.
        name: the configuration function in it.
        options: ``--section.option value`` arguments.

    Returns:
        A ``torchtitan.trainer.Trainer.Config`` or a subclass of it.

    Raises:
        UserError: unknown module, configuration or option, or a value that does not fit.
        SystemExit: code 0, after printing the help that ``--help`` asks for.
    """
    import tyro
    from torchtitan.config.manager import ConfigManager, custom_registry

    known = config_names(module)
    if name not in known:
        raise UserError(
            f"unknown configuration '{name}' in {module}."
            f"{_did_you_mean(name, known)} Known: {', '.join(known) or 'none'}."
        )
    manager = ConfigManager()
    with _tyro_errors_as_text(options):
        default = getattr(_registry(module), name)()
        _, unknown = tyro.cli(
            type(default),
            args=list(options),
            default=default,
            registry=custom_registry,
            return_unknown_args=True,
        )
        if unknown:
            raise UserError(_unknown_option(unknown, option_names(default), name))
        return manager.parse_args(["--module", module, "--config", name, *options])


def option_names(config: Any) -> list[str]:
    """Every ``section.option`` of a configuration, by walking its dataclasses."""

    def walk(node: Any, prefix: str) -> Iterator[str]:
        for field in dataclasses.fields(node):
            value = getattr(node, field.name)
            if field.name == "model_spec":
                continue  # not on the command line
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                yield from walk(value, f"{prefix}{field.name}.")
            else:
                yield f"{prefix}{field.name}"

    return sorted(walk(config, ""))


@functools.cache
def _registry(module: str) -> ModuleType:
    from torchtitan.experiments import _supported_experiments
    from torchtitan.models import _supported_models

    if module in _supported_models | _supported_experiments:
        candidates = [
            f"torchtitan.{kind}.{module}.config_registry" for kind in ("models", "experiments")
        ]
    else:
        candidates = [f"{module}.config_registry", module]
    for candidate in candidates:
        try:
            return importlib.import_module(candidate)
        except ModuleNotFoundError as error:
            # Only "there is no such module" goes on to the next; a broken import is shown.
            if error.name is None or not (candidate + ".").startswith(error.name + "."):
                raise
    raise UserError(
        f"no module '{module}' (tried {', '.join(candidates)}). Give a dotted module that has a "
        f"config_registry, such as {DEFAULT_MODULE}, or a torchtitan model: "
        f"{', '.join(sorted(_supported_models))}."
    )


def _is_config_function(function: Any) -> bool:
    parameters = inspect.signature(function).parameters.values()
    returns = inspect.signature(function).return_annotation
    takes_nothing = all(
        p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters
    )
    return takes_nothing and (
        returns is inspect.Signature.empty or "Config" in getattr(returns, "__name__", str(returns))
    )


def _unknown_option(unknown: Sequence[str], known: Sequence[str], name: str) -> str:
    options = [argument for argument in unknown if argument.startswith("-")]
    if not options:
        return (
            f"unexpected argument '{unknown[0]}' after the options of {name}. Options are written "
            "--section.option value."
        )
    option = options[0].partition("=")[0].lstrip("-")
    # Hyphens and underscores mean the same to the parser.
    spelled = option.replace("-", "_")
    if spelled in known:
        return (
            f"option '{options[0]}' comes too late: what follows 'activation-checkpoint:...' "
            "belongs to it. Put that at the end."
        )
    same_ending = [k for k in known if k.rpartition(".")[2] == spelled.rpartition(".")[2]]
    close = same_ending or _closest(spelled, known, 0.8)
    hint = f" Did you mean --{' or --'.join(close[:3])}?" if close else ""
    sections = sorted({k.partition(".")[0] for k in known if "." in k})
    return (
        f"unknown option '{options[0]}' for {name}.{hint} "
        + (f"Sections: {', '.join(sections)}. " if not close else "")
        + f"All options: titan-npu train {name} --options."
    )


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    close = [k for k in known if word and word in k] or _closest(word, known, 0.6)
    return f" Did you mean {' or '.join(close[:3])}?" if close else ""


def _closest(word: str, known: Sequence[str], cutoff: float) -> list[str]:
    """The most similar of ``known``, and those nearly as similar."""
    likeness = {k: difflib.SequenceMatcher(None, word, k).ratio() for k in known}
    best = max(likeness.values(), default=0.0)
    return [k for k, ratio in likeness.items() if ratio >= max(cutoff, best - 0.05)]


@contextlib.contextmanager
def _tyro_errors_as_text(options: Sequence[str]) -> Generator[None]:
    """tyro prints a box to stderr and exits; one plain sentence is wanted."""
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            yield
    except SystemExit as exit:
        if exit.code in (0, None):
            raise
        told = _unbox(captured.getvalue()) or f"bad options: {' '.join(options)}"
        raise UserError(told) from None
    except UserError:
        raise
    except (ValueError, AssertionError) as error:
        raise UserError(str(error)) from error


def _unbox(text: str) -> str:
    """The first paragraph inside tyro's box, as one line."""
    words: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.startswith("╭"):
            inside = True
            continue
        content = line.strip("│ ")
        if inside and (line.startswith("╰") or set(content) == {"─"}):
            break
        if inside:
            words.append(content)
    # "Error parsing dsa: ": what follows names the option itself. What follows "Error parsing
    # --training.steps: " is Python's own text and does not.
    return re.sub(r"^Error parsing \w[\w.-]*: ", "", " ".join(" ".join(words).split()))


# ------------------------------------------------------------------------------------ checking it


def check(config: Any, world_size: int) -> None:
    """Check a configuration against the number of processes and what is on the disk.

    Raises:
        UserError: every problem found, one a line.
    """
    problems = list(world_problems(config, world_size))
    if not problems:  # these assume a layout that fits
        problems += [*model_problems(config), *data_problems(config, world_size)]
    problems += [*folder_problems(config), *checkpoint_problems(config)]
    if problems:
        raise UserError(f"\n{failures.PREFIX}".join(problems))


def check_layout(config: Any, world_size: int) -> None:
    """The part of :func:`check` that needs no disk; every rank finds the same, before it talks.

    Raises:
        UserError: every problem found, one a line.
    """
    problems = list(world_problems(config, world_size)) or list(model_problems(config))
    if problems:
        raise UserError(f"\n{failures.PREFIX}".join(problems))


def world_problems(config: Any, world_size: int) -> Iterator[str]:
    """Parallel degrees, sequence and batch against the number of processes."""
    parallelism, training = config.parallelism, config.training
    replicate = parallelism.data_parallel_replicate_degree
    shard = parallelism.data_parallel_shard_degree
    context = parallelism.context_parallel_degree
    tensor = parallelism.tensor_parallel_degree
    pipeline = parallelism.pipeline_parallel_degree
    expert = parallelism.expert_parallel_degree

    degrees = {
        "data_parallel_replicate_degree": replicate,
        "context_parallel_degree": context,
        "tensor_parallel_degree": tensor,
        "pipeline_parallel_degree": pipeline,
        "expert_parallel_degree": expert,
    }
    wrong = {name: degree for name, degree in degrees.items() if degree < 1}
    for name, degree in wrong.items():
        yield f"parallelism.{name} must be 1 or more, got {degree}."
    if shard != -1 and shard < 1:
        yield (
            "parallelism.data_parallel_shard_degree must be 1 or more, or -1 for the processes "
            f"left over, got {shard}."
        )
        return
    if wrong:
        return

    fixed = replicate * context * tensor * pipeline
    product = f"replicate {replicate} x context {context} x tensor {tensor} x pipeline {pipeline}"
    if shard == -1 and world_size % fixed:
        yield (
            f"{_processes(world_size)} cannot be divided by the parallel degrees: {product} = "
            f"{fixed}. Use --nproc {_multiples(fixed, world_size)}, or lower a degree under "
            "--parallelism."
        )
        return
    if shard != -1 and fixed * shard != world_size:
        yield (
            f"{_processes(world_size)}, but the parallel degrees need {fixed * shard}: {product} x "
            f"data_parallel_shard {shard}. Use --nproc {fixed * shard}, or "
            "--parallelism.data_parallel_shard_degree -1 to take the processes left over."
        )
        return
    shard = world_size // fixed

    if (stage := shard * context * tensor) % expert:
        yield (
            f"parallelism.expert_parallel_degree {expert} does not divide the {stage} processes of "
            f"a stage (data_parallel_shard {shard} x context {context} x tensor {tensor}). "
            f"Use one of {_divisors(stage)}."
        )
    experts = _experts(config)
    if experts and experts % expert:
        yield (
            f"parallelism.expert_parallel_degree {expert} does not divide the model's {experts} "
            f"routed experts. Use one of {_divisors(experts)}."
        )

    parts = tensor if parallelism.enable_sequence_parallel else 1
    parts *= 2 * context if context > 1 else 1  # head-tail balancing cuts every shard in two
    if training.seq_len < 1 or training.seq_len % parts:
        nearest = max(1, training.seq_len // parts) * parts
        yield (
            f"training.seq_len {training.seq_len} is not divisible by {parts} "
            f"(tensor {tensor}{f' x 2 x context {context}' if context > 1 else ''}). "
            f"Use --training.seq_len {nearest}."
        )

    if training.local_batch_size < 1:
        yield f"training.local_batch_size must be 1 or more, got {training.local_batch_size}."
    elif training.global_batch_size > 0:
        step = training.local_batch_size * replicate * shard
        if training.global_batch_size % step:
            nearest = max(1, training.global_batch_size // step) * step
            yield (
                f"training.global_batch_size {training.global_batch_size} is not a multiple of "
                f"local_batch_size {training.local_batch_size} x {replicate * shard} data-parallel "
                f"ranks = {step}. Use --training.global_batch_size {nearest}, or -1 for {step}."
            )
    if training.steps < 1:
        yield f"training.steps must be 1 or more, got {training.steps}."


def model_problems(config: Any) -> Iterator[str]:
    """What the model itself refuses about this configuration."""
    if config.model_spec is None:
        yield "the configuration has no model_spec: there is nothing to train."
        return
    try:
        # On a copy: the model writes the run's settings into its configuration.
        copy.deepcopy(config.model_spec.model).update_from_config(config=config)
    except (ValueError, AssertionError, NotImplementedError) as error:
        yield str(error)


def data_problems(config: Any, world_size: int) -> Iterator[str]:
    """The dataset and the tokenizer: there, whole, large enough, within the model's vocabulary."""
    from titan_npu_train.data import DataError, PackedTextDataLoader

    vocabulary = _model_vocabulary(config)
    if isinstance(config.dataloader, PackedTextDataLoader.Config):
        try:
            _check_prepared(config, world_size, vocabulary)
        except DataError as error:
            yield str(error)
            return
    else:
        path = getattr(config.dataloader, "dataset_path", None)
        if path and not Path(path).exists():
            yield f"no data at '{path}' (dataloader.dataset_path)."
            return
    tokenizer = Path(config.hf_assets_path) / "tokenizer.json"
    if not tokenizer.is_file():
        yield (
            f"no tokenizer at '{tokenizer}' (hf_assets_path). 'titan-npu data prepare' puts one in "
            "the dataset's folder; --data DIR finds it there."
        )
    elif vocabulary is not None and (size := _tokenizer_size(tokenizer)) > vocabulary:
        yield (
            f"the tokenizer '{tokenizer}' has ids up to {size - 1}, the model's vocabulary is "
            f"{vocabulary}. Prepare the data with --vocab-size {vocabulary}, or use the tokenizer "
            "that belongs to the model."
        )


def _check_prepared(config: Any, world_size: int, vocabulary: int | None) -> None:
    """Raises DataError. Sizes are compared; contents are read by the ranks, which do it anyway."""
    from titan_npu_train import data

    loader, parallelism = config.dataloader, config.parallelism
    dataset = data.PreparedDataset(
        data.dataset_directory(loader.dataset, loader.dataset_path), verify="never"
    )
    if vocabulary is not None:
        data.check_vocab(dataset.manifest, vocabulary)
    split = dataset.split(loader.split)
    if loader.infinite:
        batch_ranks = world_size // (
            parallelism.context_parallel_degree
            * parallelism.tensor_parallel_degree
            * parallelism.pipeline_parallel_degree
        )
        data.check_corpus_size(
            split.info,
            loader.split,
            seq_len=config.training.seq_len,
            batch_rows=batch_ranks * config.training.local_batch_size,
            document_mask=loader.document_mask,
        )


def folder_problems(config: Any) -> Iterator[str]:
    """Whether the run folder can be written. It is created if it does not exist."""
    folder = Path(config.dump_folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield (
            f"cannot write to the run folder '{folder}': {error.strerror or error}. Choose another "
            "with --dump_folder."
        )


def checkpoint_problems(config: Any) -> Iterator[str]:
    """Whether the checkpoint this run would start from fits the model."""
    if not config.checkpoint.enable:
        return
    vocabulary = _model_vocabulary(config)
    newest = newest_checkpoint(Path(config.dump_folder) / config.checkpoint.folder)
    initial = config.checkpoint.initial_load_path
    if newest is not None:
        yield from _stage_problems(newest, config)
        yield from _dcp_problems(newest, vocabulary, "another --dump_folder to start afresh")
    elif not initial:
        return
    elif not Path(initial).is_dir():
        yield f"no checkpoint folder at '{initial}' (checkpoint.initial_load_path)."
    elif config.checkpoint.initial_load_in_hf:
        yield from _hugging_face_problems(Path(initial), vocabulary)
    else:
        yield from _dcp_problems(
            Path(initial), vocabulary, "another --checkpoint.initial_load_path"
        )


def newest_checkpoint(folder: Path) -> Path | None:
    """The ``step-N`` folder with the highest N whose files are all there, or None."""
    from titan_npu_train.checkpoint import Checkpoint, CheckpointError
    from titan_npu_train.checkpoint.folder import list_folder

    for path in reversed(list_folder(Path(folder)).steps.values()):
        with contextlib.suppress(CheckpointError, OSError):
            Checkpoint.open(path)
            return path
    return None


def _stage_problems(path: Path, config: Any) -> Iterator[str]:
    from titan_npu_train.checkpoint import Checkpoint
    from titan_npu_train.checkpoint.stage import stage_problem

    if path.name == "step-0" or not hasattr(config, "dsa"):
        return  # initial weights, which may begin any stage
    if problem := stage_problem(Checkpoint.open(path), config.dsa.stage):
        yield f"{problem}."


def _dcp_problems(path: Path, vocabulary: int | None, otherwise: str) -> Iterator[str]:
    from torch.distributed.checkpoint import FileSystemReader

    from titan_npu_train.checkpoint import Checkpoint, CheckpointError

    try:
        Checkpoint.open(path)
        entries = FileSystemReader(path).read_metadata().state_dict_metadata
    except (CheckpointError, OSError) as error:
        yield f"{error}. Use {otherwise}."
        return
    size = getattr(entries.get("tok_embeddings.weight"), "size", None)
    if vocabulary is not None and size is not None and size[0] != vocabulary:
        yield (
            f"the checkpoint '{path}' has a vocabulary of {size[0]}, the model's is {vocabulary}. "
            f"Use the configuration it was written with, or {otherwise}."
        )


def _hugging_face_problems(path: Path, vocabulary: int | None) -> Iterator[str]:
    if not any(path.glob("*.safetensors")):
        yield (
            f"no .safetensors files in '{path}' (checkpoint.initial_load_path, with "
            "initial_load_in_hf)."
        )
        return
    try:
        theirs = json.loads((path / "config.json").read_text()).get("vocab_size")
    except (OSError, ValueError):
        return  # optional beside the weights
    if vocabulary is not None and theirs is not None and theirs != vocabulary:
        yield (
            f"the weights in '{path}' have a vocabulary of {theirs}, the model's is {vocabulary}. "
            "Use a configuration of that vocabulary, or other weights."
        )


def _model_vocabulary(config: Any) -> int | None:
    return getattr(getattr(config.model_spec, "model", None), "vocab_size", None)


def _tokenizer_size(path: Path) -> int:
    from tokenizers import Tokenizer

    return max(Tokenizer.from_file(str(path)).get_vocab().values(), default=-1) + 1


def _experts(config: Any) -> int | None:
    for layer in getattr(getattr(config.model_spec, "model", None), "layers", None) or []:
        moe = getattr(layer, "moe", None)
        if moe is not None:
            return getattr(getattr(moe, "router", None), "num_experts", None)
    return None


def _processes(count: int) -> str:
    return f"{count} process" if count == 1 else f"{count} processes"


def _multiples(base: int, near: int) -> str:
    below = near // base * base
    return f"{below} or {below + base}" if below else str(base)


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)

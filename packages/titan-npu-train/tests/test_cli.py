"""What a person who types something wrong reads, before a single rank starts."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.config import ParallelismConfig, TrainingConfig

import fake_runs
from titan_npu_train import __version__, cli, data, preflight
from titan_npu_train.failures import UserError

CONFIG = "deepseek_v32_debugmodel"


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared dataset of a few thousand tokens."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"document {number}\n" + "some words " * 100)
    data.prepare(folder, folder.parent / "dataset", vocab_size=300, heldout=0.1)
    return folder.parent / "dataset"


@pytest.fixture
def train(dataset, tmp_path, capfd):
    """Runs ``titan-npu train``; returns the exit code and stderr, and sees that no rank started."""

    def run(*arguments: str, config: str = CONFIG, given: Path | None = dataset):
        where = [] if given is None else ["--data", str(given)]
        if "--dump_folder" not in arguments:
            arguments = (*arguments, "--dump_folder", str(tmp_path / "run"))
        code = cli.run(["train", config, *where, *arguments])
        assert not (tmp_path / "run" / "logs").exists()
        return code, capfd.readouterr().err

    return run


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("reading the conf")]


BAD = {
    "unknown configuration": (
        {"config": "deepseek_v32_debugmodle"},
        ["unknown configuration 'deepseek_v32_debugmodle'", f"Did you mean {CONFIG}", "671b_4k"],
    ),
    "unknown option": (
        ["--training.step", "3"],
        ["unknown option '--training.step'", "Did you mean --training.steps?", "--options"],
    ),
    "unknown section": (
        ["--trainer.bogus=3"],
        ["unknown option '--trainer.bogus=3'", "Sections: checkpoint, ", "parallelism"],
    ),
    "value of another type": (["--training.steps", "many"], ["--training.steps", "'many'"]),
    "no value": (["--training.steps"], ["--training.steps"]),
    "value that is not a choice": (
        ["--parallelism.spmd_backend", "magic"],
        ["'magic'", "spmd_types"],
    ),
    "option behind a subcommand": (
        ["activation-checkpoint:full", "--training.steps", "3"],
        ["option '--training.steps' comes too late", "Put that at the end"],
    ),
    "stray argument": (["foo"], ["unexpected argument 'foo'", "--section.option value"]),
    "options before CONFIG": (
        {"config": "--training.steps"},
        ["CONFIG comes first", "titan-npu train CONFIG --training.steps"],
    ),
    "processes that cannot be divided": (
        ["--nproc", "3", "--parallelism.data_parallel_replicate_degree", "2"],
        ["3 processes cannot be divided", "replicate 2", "--nproc 2 or 4"],
    ),
    "another number of processes": (
        ["--nproc", "2", "--parallelism.data_parallel_shard_degree", "4"],
        ["2 processes, but the parallel degrees need 4", "--nproc 4"],
    ),
    "experts that cannot be divided": (
        ["--nproc", "3", "--parallelism.expert_parallel_degree", "3"],
        ["expert_parallel_degree 3 does not divide the model's 8 routed experts", "1, 2, 4, 8"],
    ),
    "sequence not divisible": (
        ["--nproc", "2", "--parallelism.tensor_parallel_degree", "2", "--training.seq_len", "33"],
        ["training.seq_len 33 is not divisible by 2", "--training.seq_len 32"],
    ),
    "sequence too long for the model": (
        ["--training.seq_len", "1000000", "--dataloader.no-infinite"],
        ["1000000", "exceeds"],
    ),
    "batch not divisible": (
        ["--training.local_batch_size", "4", "--training.global_batch_size", "6"],
        ["global_batch_size 6 is not a multiple", "--training.global_batch_size 4"],
    ),
    "something the model refuses": (["--dsa.topk", "0"], ["dsa.topk must be at least 1, got 0"]),
    "missing data": (
        {"given": Path("/nowhere/data")},
        ["/nowhere/data is missing", "titan-npu data prepare"],
    ),
    "missing tokenizer": (
        ["--hf_assets_path", "/nowhere/tokenizer"],
        ["no tokenizer at '/nowhere/tokenizer/tokenizer.json'", "--data DIR"],
    ),
    "too little text": (
        ["--training.seq_len", "4096", "--training.local_batch_size", "64"],
        ["sequence length 4096", "use more text"],
    ),
    "two folders for the data": (
        ["--dataloader.dataset_path", "/nowhere/else"],
        ["/nowhere/else are two folders", "Give one of them"],
    ),
    "no permission to write": (
        ["--dump_folder", "/proc/run"],
        ["cannot write to the run folder '/proc/run'", "--dump_folder"],
    ),
    "no checkpoint where one should be": (
        ["--checkpoint.enable", "--checkpoint.initial_load_path", "/nowhere/weights"],
        ["no checkpoint folder at '/nowhere/weights'"],
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_gets_one_clear_message(train, what):
    given, fragments = BAD[what]
    code, text = train(*given) if isinstance(given, list) else train(**given)
    assert code == 2
    (line,) = errors(text)
    assert line.startswith("error: ") and len(line) < 600
    for fragment in fragments:
        assert fragment in line


def test_every_problem_is_said_at_once(train):
    code, text = train("--dsa.topk", "4", "--training.seq_len", "33", "--nproc", "2",
                       "--parallelism.tensor_parallel_degree", "2",
                       "--dump_folder", "/proc/run")  # fmt: skip
    assert code == 2
    assert [line[:24] for line in errors(text)] == [
        "error: training.seq_len ",
        "error: cannot write to t",
    ]


def test_vocabularies_that_do_not_fit(train, tmp_path):
    fake_runs.write_tokenizer(tmp_path / "tokenizer", size=301)
    code, text = train(
        *("--module", "fake_runs", "--hf_assets_path", str(tmp_path / "tokenizer")),
        config="fake_debugmodel",
        given=None,
    )
    assert code == 2
    assert "ids up to 300, the model's vocabulary is 300" in text and "--vocab-size 300" in text

    step = tmp_path / "run" / "checkpoint" / "step-7"
    dcp.save({"tok_embeddings.weight": torch.zeros(128, 8)}, checkpoint_id=step, no_dist=True)
    code, text = train("--training.seq_len", "64", "--checkpoint.enable")
    assert code == 2
    config = preflight.load_config(preflight.DEFAULT_MODULE, CONFIG, [])
    vocabulary = config.model_spec.model.vocab_size
    assert f"'{step}' has a vocabulary of 128, the model's is {vocabulary}" in text
    assert "--dump_folder" in text
    # nothing to compare when checkpoints are off, or in an empty folder
    config.dump_folder = str(tmp_path / "run")
    assert list(preflight.checkpoint_problems(config)) == []


def test_the_newest_checkpoint_that_is_whole_counts(tmp_path):
    for step in (3, 20):
        dcp.save({"x": torch.zeros(9)}, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
    (tmp_path / "step-30").mkdir()
    assert preflight.newest_checkpoint(tmp_path) == tmp_path / "step-20"
    next((tmp_path / "step-20").glob("*.distcp")).unlink()
    assert preflight.newest_checkpoint(tmp_path) == tmp_path / "step-3"
    assert preflight.newest_checkpoint(tmp_path / "none") is None


def test_the_command_fails_without_a_traceback():
    command = ["train", "nope", "--module", "fake_runs"]
    result = subprocess.run(
        [sys.executable, "-m", "titan_npu_train.cli", *command],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "TITAN_NPU_PLATFORM": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert len(errors(result.stderr)) == 1 and "unknown configuration 'nope'" in result.stderr
    assert result.stdout == ""


def test_help_names_the_verbs_and_needs_no_torch(capfd):
    assert cli.run(["--help"]) == 0
    text = capfd.readouterr().out
    assert all(verb in text for verb in ("train", "report", "doctor", "data"))
    assert cli.run(["--version"]) == 0
    assert capfd.readouterr().out == f"titan-npu {__version__}\n"
    assert cli.run([]) == 0  # the same as --help
    capfd.readouterr()
    for wrong in (["trian"], ["data"], ["train", CONFIG, "--nproc", "0"], ["report"]):
        assert cli.run(wrong) == 2
        assert len(errors(capfd.readouterr().err)) == 1
    code = "import sys, titan_npu_train.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_options_prints_the_options_of_a_configuration(capfd):
    assert cli.run(["train", CONFIG, "--options"]) == 0
    text = capfd.readouterr().out
    assert "--training.seq-len" in text and "--dsa.topk" in text


def test_data_prepare(tmp_path, capfd):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.txt").write_text("some text " * 300)
    (tmp_path / "source" / "b.txt").write_text("other text " * 300)
    out = tmp_path / "out"
    prepare = ["data", "prepare", str(tmp_path / "source"), "--out", str(out)]
    assert cli.run([*prepare, "--vocab-size", "300", "--heldout", "0.5"]) == 0
    assert "2 documents" in capfd.readouterr().out or (out / "manifest.json").is_file()
    assert data.PreparedDataset(out).manifest.options["vocab_size"] == 300
    assert cli.run(["data", "prepare", str(tmp_path / "none"), "--out", str(out)]) == 2
    assert errors(capfd.readouterr().err)[-1].startswith("error: source ")


def test_where_the_data_comes_from(dataset, monkeypatch):
    monkeypatch.setattr(data, "stdlib_corpus", lambda progress: dataset)
    settings = preflight.load_config(preflight.DEFAULT_MODULE, CONFIG, [])
    both = [
        *("--dataloader.dataset_path", str(dataset), "--hf_assets_path", str(dataset / "tokenizer"))
    ]
    assert cli.data_options(settings, [], None) == both
    assert cli.data_options(settings, [], dataset) == both
    assert cli.data_options(settings, ["--hf_assets_path=x"], dataset) == both[:2]
    settings.dataloader.dataset_path = str(dataset)
    assert cli.data_options(settings, [], None) == both[2:]
    assert cli.data_options(fake_runs.fake_debugmodel(), [], None) == []


def test_configurations_and_options_are_found():
    names = preflight.config_names(preflight.DEFAULT_MODULE)
    assert CONFIG in names and "deepseek_v32_671b_32k_128die_pp2" in names
    assert not any(name.startswith("_") or "." in name for name in names)
    assert "default_adamw" not in names  # imported there, not defined there
    assert preflight.config_names("fake_runs") == ["fake_debugmodel", "fake_larger"]
    assert "llama3_debugmodel" in preflight.config_names("llama3")  # torchtitan's own
    with pytest.raises(UserError, match=r"no module 'nothing\.here'"):
        preflight.config_names("nothing.here")
    options = preflight.option_names(preflight.load_config(preflight.DEFAULT_MODULE, CONFIG, []))
    assert {"training.steps", "dsa.topk", "dump_folder"} <= set(options)


def test_module_and_config_are_taken_out_of_a_command_line():
    split = preflight.split_arguments(["--module=a.b", "--x", "1", "--config", "c", "--y"])
    assert split == ("a.b", "c", ["--x", "1", "--y"])
    for arguments in ([], ["--module", "m"], ["--config", "c"], ["--config", "c", "--module"]):
        with pytest.raises(UserError, match="Example: --"):
            preflight.split_arguments(arguments)


LAYOUTS = [
    # degrees, processes, problems
    ({}, 1, 0),
    ({}, 7, 0),
    ({"expert_parallel_degree": 4}, 8, 0),
    ({"expert_parallel_degree": 8, "tensor_parallel_degree": 4}, 8, 0),  # experts over FSDP x TP
    ({"expert_parallel_degree": 8, "pipeline_parallel_degree": 2}, 8, 1),  # not over stages
    ({"data_parallel_replicate_degree": 2, "expert_parallel_degree": 4}, 4, 1),  # nor replicas
    ({"context_parallel_degree": 2}, 2, 0),
    ({"context_parallel_degree": 2, "tensor_parallel_degree": 4}, 8, 1),  # 24 / (4 * 2 * 2)
    ({"context_parallel_degree": 0, "tensor_parallel_degree": -1}, 2, 2),
    ({"data_parallel_shard_degree": 0}, 2, 1),
    ({"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}, 4, 0),
]


@pytest.mark.parametrize(("degrees", "processes", "count"), LAYOUTS)
def test_layouts(degrees, processes, count):
    config = SimpleNamespace(
        parallelism=ParallelismConfig(**degrees),
        training=TrainingConfig(seq_len=24, local_batch_size=2),
        model_spec=None,
    )
    assert len(list(preflight.world_problems(config, processes))) == count
    # torchtitan agrees on what is a layout at all
    config.training = replace(config.training, seq_len=24 * 16)
    if not list(preflight.world_problems(config, processes)):
        from torchtitan.distributed import ParallelDims

        ParallelDims.from_config(config.parallelism, processes)

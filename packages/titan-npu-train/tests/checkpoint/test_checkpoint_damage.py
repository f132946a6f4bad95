"""A damaged checkpoint is named and skipped, or refused; nothing is ever loaded from it."""

import copy
import itertools
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpointer import CheckpointManager

from titan_npu_train.checkpoint import MANIFEST, Checkpoint, CheckpointError
from titan_npu_train.checkpoint.folder import list_folder
from toy_training import STEPS, WIDTH, Net, Toy

pytestmark = pytest.mark.usefixtures("one_rank")

DATA = "__0_0.distcp"
LAST = 4  # the step the runs below stop at
KEEP = {"interval": 1, "keep_latest_k": 0}


def flip(position: float) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[min(int(len(content) * position), len(content) - 1)] ^= 1
        file.write_bytes(content)

    return damage


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def grow(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


DAMAGES = {
    "flip first": flip(0),
    "flip middle": flip(0.5),
    "flip last": flip(1),
    "truncate": truncate,
    "empty": empty,
    "grow": grow,
    "delete": Path.unlink,
}


@pytest.fixture(scope="module")
def finished(one_rank: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A run of LAST steps with a checkpoint of each, and the losses of the run to its end."""
    path = tmp_path_factory.mktemp("finished")
    losses = Toy(path / "whole", KEEP).train()
    assert Toy(path / "run", KEEP).train(steps=LAST).items() <= losses.items()
    return path / "run", losses


@pytest.fixture
def run(finished: tuple[Path, dict], tmp_path: Path) -> tuple[Path, Path, dict]:
    """A copy of that run to be damaged: its folder, its checkpoints, and the losses."""
    shutil.copytree(finished[0], tmp_path / "run")
    return tmp_path / "run", tmp_path / "run" / "checkpoint", finished[1]


def loaded_state(toy: Toy) -> dict:
    return copy.deepcopy(
        {
            "model": toy.model.state_dict(),
            "optimizer": toy.optimizers.state_dict(),
            "step": toy.step,
        }
    )


def assert_same(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        if isinstance(value, dict):
            assert_same(value, right[key])
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value, right[key]), key
        else:
            assert value == right[key], key


@pytest.mark.parametrize(
    ("file", "damage"),
    # a deleted manifest leaves a checkpoint of stock torchtitan, tested below
    sorted(set(itertools.product([DATA, ".metadata", MANIFEST], DAMAGES)) - {(MANIFEST, "delete")}),
)
def test_damaged_newest_is_skipped_and_refused(run, caplog, file: str, damage: str) -> None:
    folder, checkpoints, losses = run
    newest = checkpoints / f"step-{LAST}"
    DAMAGES[damage](newest / file)

    toy = Toy(folder, KEEP)
    before = loaded_state(toy)
    with pytest.raises(CheckpointError, match=f"step-{LAST}: .*{file}.*load_step is {LAST}"):
        toy.checkpointer.load(LAST)
    assert_same(loaded_state(toy), before)

    caplog.set_level(logging.WARNING)
    resumed = Toy(folder, KEEP).train()
    assert resumed == {step: loss for step, loss in losses.items() if step >= LAST}
    (warning,) = [record for record in caplog.messages if str(newest) in record]
    assert file in warning
    assert warning.endswith("; skipped.")
    assert "\n" not in warning
    # the damaged one was replaced when its step came again
    assert Checkpoint.open(newest).damage() is None


def test_stock_checkpoint_is_accepted_and_checked_by_length(run, caplog) -> None:
    folder, checkpoints, losses = run
    newest = checkpoints / f"step-{LAST}"
    (newest / MANIFEST).unlink()
    caplog.set_level(logging.INFO)
    resumed = Toy(folder, {"interval": 100}).train()
    assert min(resumed) == LAST + 1
    assert resumed.items() <= losses.items()
    assert f"{newest}: has no {MANIFEST}" in caplog.text

    truncate(newest / DATA)
    with pytest.raises(CheckpointError, match=rf"{DATA} has \d+ bytes, should have \d+"):
        Toy(folder).checkpointer.load(LAST)
    (newest / DATA).unlink()
    with pytest.raises(CheckpointError, match=f"{DATA} is missing"):
        Toy(folder).checkpointer.load(LAST)
    (newest / ".metadata").write_bytes(b"not a pickle")
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read"):
        Toy(folder).checkpointer.load(LAST)


def test_stock_torchtitan_reads_ours_and_we_read_its(tmp_path: Path) -> None:
    reference = Toy(tmp_path / "reference", KEEP).train()
    Toy(tmp_path / "ours", KEEP).train(steps=3)
    stock = Toy(tmp_path / "ours", KEEP, manager=CheckpointManager)
    stock.checkpointer.load()
    assert stock.step == 3

    Toy(tmp_path / "theirs", KEEP, manager=CheckpointManager).train(steps=3)
    ours = Toy(tmp_path / "theirs", KEEP)
    ours.checkpointer.load()
    assert ours.step == 3
    assert_same(loaded_state(ours), loaded_state(stock))
    assert reference.keys() == set(range(1, STEPS + 1))


def test_checksums_can_be_left_out(run) -> None:
    folder, checkpoints, _ = run
    intact = Toy(folder, KEEP)
    assert intact.checkpointer.load()
    weight = next(intact.model.parameters()).detach().numpy().tobytes()
    # In a tensor's own bytes: torch notices a damaged header by itself.
    file = checkpoints / f"step-{LAST}" / DATA
    content = bytearray(file.read_bytes())
    content[content.index(weight)] ^= 1
    file.write_bytes(content)
    assert Checkpoint.open(checkpoints / f"step-{LAST}").damage() is not None
    toy = Toy(folder, {**KEEP, "verify_checksums": False})
    assert toy.checkpointer.load()
    assert toy.step == LAST


def test_no_fresh_start_over_damaged_checkpoints(run, caplog) -> None:
    folder, checkpoints, losses = run
    for path in checkpoints.iterdir():
        truncate(path / DATA)
    with pytest.raises(CheckpointError, match=r"--checkpoint\.allow_fresh_start") as error:
        Toy(folder, KEEP).checkpointer.load()
    for step in range(1, LAST + 1):
        assert f"{checkpoints / f'step-{step}'}: {DATA} has" in str(error.value)

    caplog.set_level(logging.WARNING)
    assert Toy(folder, {**KEEP, "allow_fresh_start": True}).train() == losses
    assert "starting anew" in caplog.text


def test_only_half_written_is_a_fresh_start(tmp_path: Path, caplog) -> None:
    half = tmp_path / "checkpoint" / ".incomplete-2-0123abcd"
    half.mkdir(parents=True)
    (half / DATA).write_bytes(b"x")
    caplog.set_level(logging.WARNING)
    assert not Toy(tmp_path).checkpointer.load()
    assert f"{half}: half-written checkpoint of step 2" in caplog.text
    assert not half.exists()


def test_load_only_changes_nothing_on_disk(run) -> None:
    folder, checkpoints, _ = run
    (checkpoints / f"step-{LAST}").rename(checkpoints / f".incomplete-{LAST}-0123abcd")
    (checkpoints / ".discarded-1-0123abcd-0").mkdir()
    before = sorted(path.name for path in checkpoints.iterdir())
    toy = Toy(folder, {**KEEP, "load_only": True})
    assert toy.checkpointer.load()
    assert toy.step == LAST - 1
    assert sorted(path.name for path in checkpoints.iterdir()) == before


def test_a_finished_checkpoint_gets_the_name_it_was_killed_before(run, caplog) -> None:
    folder, checkpoints, losses = run
    (checkpoints / f"step-{LAST}").rename(checkpoints / f".incomplete-{LAST}-0123abcd")
    caplog.set_level(logging.INFO)
    resumed = Toy(folder, {"interval": 100}).train()
    assert resumed == {step: loss for step, loss in losses.items() if step > LAST}
    assert f"step-{LAST}: was complete" in caplog.text


def test_named_step_that_is_not_there(run) -> None:
    folder, _, _ = run
    with pytest.raises(CheckpointError, match=r"step-77: no such checkpoint.*\[1, 2, 3, 4\]"):
        Toy(folder).checkpointer.load(77)


def test_weights_alone_are_not_resumed_from(tmp_path: Path, caplog) -> None:
    losses = Toy(tmp_path, {"interval": 2, "last_save_model_only": True}).train()
    caplog.set_level(logging.WARNING)
    resumed = Toy(tmp_path, {"interval": 2}).train()
    assert resumed == {step: loss for step, loss in losses.items() if step > STEPS - 2}
    assert f"step-{STEPS}: holds the model only" in caplog.text


def test_seed_checkpoint(tmp_path: Path) -> None:
    seed = Toy(tmp_path / "seed", {"last_save_model_only": True})
    with torch.no_grad():
        seed.model.layers[0].weight.fill_(0.25)
    seed.checkpointer.save(0, last_step=True)
    toy = Toy(tmp_path / "seed")
    assert toy.checkpointer.load()
    assert toy.step == 0
    assert (toy.model.layers[0].weight == 0.25).all()

    other = Toy(tmp_path / "run", {"initial_load_path": str(tmp_path / "seed/checkpoint/step-0")})
    assert other.checkpointer.load()
    assert (other.model.layers[0].weight == 0.25).all()

    whole = {
        "initial_load_path": str(tmp_path / "seed/checkpoint/step-0"),
        "initial_load_model_only": False,
    }
    with pytest.raises(CheckpointError, match=r"--checkpoint\.initial_load_model_only"):
        Toy(tmp_path / "run", whole).checkpointer.load()

    # falling back to initial weights would be starting over
    broken = tmp_path / "seed" / "checkpoint" / "step-2"
    broken.mkdir()
    with pytest.raises(CheckpointError, match="initial weights only"):
        Toy(tmp_path / "seed").checkpointer.load()

    truncate(tmp_path / "seed/checkpoint/step-0" / DATA)
    with pytest.raises(CheckpointError, match=f"{DATA} has .*Refusing"):
        Toy(
            tmp_path / "new", {"initial_load_path": str(tmp_path / "seed/checkpoint/step-0")}
        ).checkpointer.load()


@pytest.mark.parametrize(
    ("width", "layers", "words"),
    [
        (
            WIDTH + 4,
            2,
            [f"layers.0.weight: checkpoint [{WIDTH}, {WIDTH}], this run [20, 20]", "model config"],
        ),
        (WIDTH, 3, ["does not hold what this run needs", "layers.2.weight"]),
        (WIDTH, 1, ["parameters this run's model does not have", "layers.1.weight"]),
    ],
)
def test_another_model_is_refused(run, width: int, layers: int, words: list[str]) -> None:
    folder, checkpoints, _ = run
    toy = Toy(folder, KEEP, width=width, layers=layers)
    before = loaded_state(toy)
    with pytest.raises(CheckpointError) as error:
        toy.checkpointer.load()
    for word in [str(checkpoints / f"step-{LAST}"), *words]:
        assert word in str(error.value)
    assert_same(loaded_state(toy), before)


def test_another_vocabulary_is_called_that(tmp_path: Path) -> None:
    def toy(size: int) -> Toy:
        class WithVocabulary(Toy):
            def build_model(self) -> Net:
                model = super().build_model()
                model.tok_embeddings = torch.nn.Embedding(size, WIDTH)
                return model

        return WithVocabulary(tmp_path)

    toy(32).train(steps=2)
    with pytest.raises(
        CheckpointError,
        match=r"tok_embeddings.weight: checkpoint \[32, 16\], this run \[48, 16\]\n.*vocabulary",
    ):
        toy(48).checkpointer.load()


def test_other_data_parallel_degree_is_explained(run) -> None:
    folder, _, _ = run
    toy = Toy(folder, KEEP)
    toy.dataloader._rank_id = "dp_rank_5"  # what rank 5 of a larger run would ask for
    with pytest.raises(CheckpointError, match="exclude_from_loading dataloader"):
        toy.checkpointer.load()


def test_manifest_lists_every_file(run) -> None:
    _, checkpoints, _ = run
    path = checkpoints / f"step-{LAST}"
    manifest = json.loads((path / MANIFEST).read_text())
    assert manifest["step"] == LAST
    assert manifest["files"].keys() | {MANIFEST} == {file.name for file in path.iterdir()}
    # the temporary name is recorded nowhere
    written_to = dcp.FileSystemReader(path).read_metadata().storage_meta.checkpoint_id
    assert Path(written_to).name == path.name


def test_hf_export_is_not_resumed_from(run, caplog) -> None:
    folder, checkpoints, _ = run
    export = checkpoints / "step-9"
    export.mkdir()
    (export / "model-00001-of-00001.safetensors").write_bytes(b"")
    caplog.set_level(logging.WARNING)
    toy = Toy(folder)
    assert toy.checkpointer.load()
    assert toy.step == LAST
    assert f"{export}: holds Hugging Face weights" in caplog.text
    assert list(list_folder(checkpoints).steps) == [1, 2, 3, 4, 9]

"""A save that fails says why and leaves what was there; purging never takes the last good one."""

import errno
import multiprocessing
import resource
import threading
from pathlib import Path

import pytest

from titan_npu_train.checkpoint import Checkpoint, CheckpointError, writer
from titan_npu_train.checkpoint.folder import list_folder
from toy_training import STEPS, Toy, run

MODES = ["disabled", "async"]


class FailingFileSystem(writer.ChecksumFileSystem):
    """Out of space after ``limit`` bytes of any file."""

    limit = 1000

    def create_stream(self, path, mode):
        context = super().create_stream(path, mode)
        limit = self.limit

        class Limited:
            def __enter__(self):
                stream = context.__enter__()
                raw = stream._raw

                class Disk:
                    def write(self, data):
                        if raw.tell() + len(data) > limit:
                            raise OSError(errno.ENOSPC, "No space left on device", str(path))
                        return raw.write(data)

                    def __getattr__(self, name):
                        return getattr(raw, name)

                stream._raw = Disk()
                return stream

            def __exit__(self, *error):
                return context.__exit__(*error)

        return Limited()


def checkpoints(folder: Path) -> list[int]:
    """Steps in ``folder``, each found whole, with nothing beside them."""
    listing = list_folder(folder / "checkpoint")
    assert not listing.incomplete
    assert not listing.discarded
    for path in listing.steps.values():
        assert Checkpoint.open(path).damage() is None
    return list(listing.steps)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("mode", MODES)
def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    options = {"interval": 1, "async_mode": mode}
    toy = Toy(tmp_path, options)

    def fill_disk(step: int) -> None:
        if step == 2:
            toy.checkpointer.maybe_wait_for_saving()
            data = tmp_path / "checkpoint" / "step-2" / "__0_0.distcp"
            # within the tensors, where torch.save says nothing of the disk
            monkeypatch.setattr(FailingFileSystem, "limit", data.stat().st_size - 1000)
            monkeypatch.setattr(writer, "ChecksumFileSystem", FailingFileSystem)

    with pytest.raises(CheckpointError, match=r"step-3 could not be written: .*No space left"):
        toy.train(saved=fill_disk)
    assert checkpoints(tmp_path) == [1, 2]
    # async: noticed when step 4 asks for its turn, before it is saved
    assert toy.step == (3 if mode == "disabled" else 4)
    monkeypatch.undo()
    assert min(Toy(tmp_path, options).train()) == 3
    assert checkpoints(tmp_path) == list(range(1, STEPS + 1))


@pytest.mark.usefixtures("one_rank")
def test_async_failure_surfaces_at_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(tmp_path, {"interval": 1, "async_mode": "async"})
    monkeypatch.setattr(writer, "ChecksumFileSystem", FailingFileSystem)
    toy.step = 1
    toy.checkpointer.save(1)
    with pytest.raises(CheckpointError, match="step-1 could not be written"):
        toy.checkpointer.close()
    toy.checkpointer.close()  # said once


@pytest.mark.usefixtures("one_rank")
def test_close_after_another_failure_keeps_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    toy = Toy(tmp_path, {"interval": 1, "async_mode": "async"})
    monkeypatch.setattr(writer, "ChecksumFileSystem", FailingFileSystem)
    toy.checkpointer.save(1)
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        toy.checkpointer.close()
    assert "step-1 could not be written" in caplog.text


@pytest.mark.usefixtures("one_rank")
def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match=r"could not be written: .*Error.*checkpoint"):
        Toy(tmp_path, {"interval": 1}).train()


@pytest.mark.usefixtures("one_rank")
def test_remote_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gs://bucket/run.*rename"):
        Toy(tmp_path, {"folder": "gs://bucket/run"})


def limited_run(folder: Path, log: Path, mode: str, rank: int) -> None:
    """A run whose rank 1 the operating system lets write only 2000 bytes a file."""
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    try:
        run(folder, log, {"interval": 1, "async_mode": mode}, rank=rank, ranks=2)
    except CheckpointError as error:
        log.with_name(f"error.{rank}").write_text(str(error))
        raise SystemExit(3) from None


@pytest.mark.distributed
@pytest.mark.parametrize("mode", MODES)
def test_operating_system_refuses_one_rank(tmp_path: Path, mode: str) -> None:
    context = multiprocessing.get_context("forkserver")
    ranks = [
        context.Process(target=limited_run, args=(tmp_path / "run", tmp_path / "log", mode, rank))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [3, 3]
    messages = {(tmp_path / f"error.{rank}").read_text() for rank in range(2)}
    assert len(messages) == 1, "both ranks say the same"
    assert "step-1 could not be written: rank 1: OSError" in messages.pop()
    assert checkpoints(tmp_path / "run") == []


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("mode", MODES)
def test_keep_latest_k(tmp_path: Path, mode: str) -> None:
    toy = Toy(tmp_path, {"interval": 1, "keep_latest_k": 2, "async_mode": mode})
    toy.train(steps=5, total=STEPS)
    assert checkpoints(tmp_path) == [4, 5]


@pytest.mark.usefixtures("one_rank")
def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    Toy(tmp_path, {"interval": 1, "keep_latest_k": 0}).train(steps=3)
    (tmp_path / "checkpoint" / "step-3" / "__0_0.distcp").unlink()
    Toy(tmp_path, {"interval": 2, "keep_latest_k": 2}).train(steps=4)
    assert list(list_folder(tmp_path / "checkpoint").steps) == [2, 3, 4]


@pytest.mark.usefixtures("one_rank")
def test_going_back_purges_no_later_step(tmp_path: Path) -> None:
    Toy(tmp_path, {"interval": 1, "keep_latest_k": 0}).train(steps=5)
    Toy(tmp_path, {"interval": 1, "keep_latest_k": 2}).train(load_step=2, steps=3)
    assert checkpoints(tmp_path) == [2, 3, 4, 5]


@pytest.mark.usefixtures("one_rank")
def test_nothing_is_purged_before_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = Toy(tmp_path, {"interval": 1, "keep_latest_k": 2, "async_mode": "async"})
    release, waiting = threading.Event(), threading.Event()
    publish = writer.folder.publish

    def slow_publish(incomplete: Path, final: Path, run: str):
        if final.name == "step-3":
            waiting.set()
            assert release.wait(60)
        return publish(incomplete, final, run)

    monkeypatch.setattr(writer.folder, "publish", slow_publish)
    for step in (1, 2, 3):
        toy.step = step
        toy.checkpointer.save(step)
    assert waiting.wait(60)
    assert list(list_folder(tmp_path / "checkpoint").steps) == [1, 2]
    release.set()
    toy.checkpointer.close()
    assert checkpoints(tmp_path) == [2, 3]

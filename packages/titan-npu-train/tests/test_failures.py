"""Failures in words, without ranks."""

import errno
import os
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from titan_npu_train import failures, launch, platform
from titan_npu_train.data import DataError
from titan_npu_train.failures import UserError, describe
from titan_npu_train.progress import Progress, duration, notable, step_line


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except type(error) as caught:
        return caught


def test_what_was_written_for_people_is_shown_as_it_is():
    for error in (UserError("no data. Prepare it."), DataError("no data; prepare it")):
        assert describe(raised(error)) == failures.Failure(str(error))
    with pytest.raises(ValueError, match="name must be") as caught:  # ours, in a plain type
        platform.select("tpu")
    assert describe(caught.value).message.startswith("name must be one of cpu, cuda, npu")
    assert not describe(caught.value).unexpected


def test_what_nobody_foresaw_keeps_its_type():
    failure = describe(raised(KeyError("missing")))
    assert failure.message == "KeyError: 'missing'" and failure.unexpected
    failure = describe(raised(ValueError("from a library")))
    assert failure.message == "ValueError: from a library" and failure.unexpected
    assert len(describe(raised(RuntimeError("mesh " * 10_000))).message) < 500


@pytest.mark.parametrize(
    ("error", "cause", "cure"),
    [
        (MemoryError(), "out of memory", "--training.local_batch_size"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory", "processes"),
        (OSError(errno.ENOSPC, "No space left", "/a/b"), "no space left", "--dump_folder"),
        (PermissionError(errno.EACCES, "Permission denied", "/a/b"), "/a/b", "--dump_folder"),
        (RuntimeError("Loss is not finite (nan) at step 3."), "not finite", "learning rate"),
    ],
)
def test_common_failures_come_with_a_cure(error, cause, cure):
    failure = describe(raised(error))
    assert cause in failure.message and cure in failure.message and not failure.unexpected


def test_a_rank_that_lost_its_neighbour_is_not_the_cause():
    gloo = RuntimeError("[pair.cc:561] Connection closed by peer [127.0.0.1]:12193. And more")
    failure = describe(raised(gloo))
    assert failure.secondary
    assert failure.message.startswith("lost contact with another rank (connection closed by peer)")


def test_error_files_round_trip_and_are_cleared(tmp_path):
    error = raised(UserError("line one.\nline two."))
    path = failures.write_error_file(error, describe(error), tmp_path, 3)
    assert path == tmp_path / "errors" / "rank3.txt"
    assert "Traceback" in path.read_text()
    assert failures.read_failure(tmp_path, 3) == "line one.\nline two."
    assert failures.read_failure(tmp_path, 0) is None
    assert [failures.claim_console(tmp_path) for _ in range(3)] == [True, False, False]
    failures.clear_error_files(tmp_path, before=time.time() - 60)
    assert path.exists()
    failures.clear_error_files(tmp_path)
    assert list((tmp_path / "errors").iterdir()) == []
    # an unusable folder does not lose the traceback
    (tmp_path / "file").touch()
    path = failures.write_error_file(error, describe(error), tmp_path / "file", 0)
    assert "line one." in path.read_text()
    path.unlink()


def failed(rank: int, exitcode: int) -> ProcessFailure:
    return ProcessFailure(local_rank=rank, pid=rank, exitcode=exitcode, error_file="")


def why(folder: Path, *exit_codes: int, told: dict[int, str]) -> str:
    """The launcher's message for ranks with these exit codes and error files."""
    for rank, text in told.items():
        failures.write_error_file(raised(UserError(text)), failures.Failure(text), folder, rank)
        # in the order they were given, whatever the clock's resolution
        os.utime(failures.error_file(folder, rank), ns=(0, list(told).index(rank)))
    progress = Progress(folder / "metrics.jsonl", folder / "log", 10, print)
    ranks = {rank: failed(rank, code) for rank, code in enumerate(exit_codes) if code}
    return launch._why(ranks, folder, folder, progress, "Go on.")


LOST = f"{failures.LOST_PEER} (connection closed by peer)."


@pytest.mark.parametrize(
    ("exit_codes", "told", "first_line", "contains"),
    [
        # the first to fail, not the lowest
        ((1, 1), {1: "bad data.", 0: "worse."}, "bad data.", "rank 1 before the first step"),
        ((1, 1), {0: "bad.", 1: "bad."}, "bad.", "every rank before"),
        # who only lost its neighbour, or was ended by the agent, is not the cause
        ((1, 1), {0: LOST, 1: "bad."}, "bad.", "rank 1 before"),
        ((-15, 1), {1: "bad."}, "bad.", "rank 1 before"),
        ((-9, 1), {1: "bad."}, "bad.", "rank 0 was killed by SIGKILL"),
        ((1, -9), {0: LOST}, "rank 1 was killed by signal 9 (SIGKILL)", "Go on."),
        ((-15, -11), {}, "rank 1 was killed by signal 11 (SIGSEGV)", "crashed"),
        ((1, 0), {0: LOST}, f"rank 0 {LOST}", "rank0.txt"),
        ((-15, 3), {}, "rank 1 ended with exit code 3", "rank1.stderr.log"),
        ((-15, 0), {}, "rank 0 was killed by signal 15", "rank0.stderr.log"),
    ],
)
def test_the_message_is_about_the_rank_where_it_began(
    tmp_path, exit_codes, told, first_line, contains
):
    message = why(tmp_path, *exit_codes, told=told)
    assert message.splitlines()[0].startswith(first_line)
    assert contains in message


def test_step_lines():
    record = {
        "step": 12,
        "loss": 7.8312,
        "indexer_loss": 0.612,
        "grad_norm": 1.84,
        "tokens_per_second": 4310.2,
        "peak_memory_bytes": 2 * 2**30,
    }
    assert step_line(record, 200, 0.5).split() == (
        [
            "step",
            "12/200",
            "loss",
            "7.8312",
            "indexer",
            "0.6120",
            "grad",
            "1.84",
            "4,310",
            "tok/s",
            "2.00",
            "GiB",
            "left",
            "1:34",
        ]
    )
    # no such figures, and nothing left
    assert step_line({"step": 2, "loss": 1.0, "indexer_loss": None}, 2, 9.0).split() == [
        *("step", "2/2", "loss", "1.0000")
    ]
    assert [duration(s) for s in (6.6, 182, 3723, 183600)] == [
        *("0:07", "3:02", "1:02:03", "2d 03:00")
    ]


def test_log_lines_worth_showing():
    def line(level: str, message: str) -> str:
        return f"[titan] 2026-01-31 12:00:00,000 - root - {level} - {message}"

    assert notable(line("WARNING", "\x1b[31mdata is short\x1b[39m")) == "warning: data is short"
    size = "\x1b[34mModel x y \x1b[31msize: 1,000 total parameters\x1b[39m"
    assert notable(line("INFO", size)) == "Model x y size: 1,000 total parameters"
    assert notable(line("INFO", "Loading the checkpoint from a/b.")) is not None
    assert notable(line("INFO", "step:  1  loss: 8.0")) is None
    assert notable("anything else") is None


def test_progress_leaves_out_what_an_earlier_run_wrote_and_broken_lines(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 9.0}\n')
    said: list[str] = []
    progress = Progress(metrics, tmp_path / "log", 4, said.append)
    with metrics.open("a") as file:
        file.write('{"step": 2, "lo\n{"step": 3, "loss": 7.0}\n{"step": 4, ')
    progress.finish()
    assert [line[:10] for line in said] == ["step 3/4  "]
    assert (progress.first_step, progress.last_step) == (3, 3)

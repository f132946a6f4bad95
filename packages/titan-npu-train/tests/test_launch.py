"""What happens to a run when something happens to a rank: real ranks, nearly no trainer."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fake_runs
from titan_npu_train import launch
from titan_npu_train.launch import RunFailed
from titan_npu_train.run_folder import RunInfo

# ResourceWarning: the agent leaves log files to the garbage collector.
pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::ResourceWarning")]

TESTS = Path(__file__).parent


@pytest.fixture(autouse=True)
def ranks_find_the_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("TITAN_NPU_PLATFORM", "cpu")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def run(folder: Path, act: str = "", nproc: int = 2) -> tuple[launch.RunResult, list[str]]:
    """Launch a fake run; returns what it returned and the lines it printed."""
    said: list[str] = []
    config = fake_runs.fake_debugmodel()
    config.dump_folder = str(folder)
    result = launch.launch(
        config,
        module="fake_runs",
        name="fake_debugmodel",
        options=["--dump_folder", str(folder), "--act", act],
        nproc=nproc,
        say=said.append,
    )
    return result, said


def test_a_run_says_one_line_a_step_and_keeps_every_rank_s_output(tmp_path, capfd):
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    result, said = run(tmp_path)

    assert (result.first_step, result.last_step) == (1, 3)
    assert [line.split()[:2] for line in said] == [["step", f"{n}/3"] for n in (1, 2, 3)]
    assert capfd.readouterr() == ("", "")
    (logs,) = (tmp_path / "logs").iterdir()
    threads = str(max(1, launch.usable_cores() // 2))
    for rank in (0, 1):
        assert f"rank {rank} with {threads} threads" in (logs / f"rank{rank}.log").read_text()
    info = RunInfo.read(tmp_path)
    assert (info.config, info.world_size, info.platform) == ("fake_debugmodel", 2, "cpu")
    assert list((tmp_path / "errors").glob("rank*")) == []
    # nothing of the agent stays behind in this process
    assert handlers == [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    assert launch.LAUNCHER_VARIABLE not in os.environ


def test_one_rank_fails(tmp_path, capfd):
    with pytest.raises(RunFailed) as failed:
        run(tmp_path, "raise:1")
    message = str(failed.value)
    assert message.splitlines() == [
        "the data of rank 1 is bad. Prepare it again.",
        "rank 1 after step 2",
        f"traceback: {tmp_path / 'errors' / 'rank1.txt'}",
    ]
    assert "fake_runs.py" in (tmp_path / "errors" / "rank1.txt").read_text()
    assert capfd.readouterr() == ("", "")


def test_a_killed_rank_ends_the_run(tmp_path):
    began = time.monotonic()
    with pytest.raises(RunFailed) as failed:
        run(tmp_path, "kill:1")
    assert time.monotonic() - began < 60
    message = str(failed.value)
    assert message.startswith("rank 1 was killed by signal 9 (SIGKILL) after step 2.")
    assert "--training.local_batch_size" in message
    assert_gone(tmp_path)


def test_a_rank_that_does_not_answer_does_not_keep_the_others(tmp_path):
    """Rank 1 sleeps in the middle of a step and does not see that rank 0 is gone."""
    began = time.monotonic()
    with pytest.raises(RunFailed, match="rank 0 was killed by signal 9"):
        run(tmp_path, "kill:0,hang:1")
    assert time.monotonic() - began < 60
    assert_gone(tmp_path)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_signal_to_the_command_ends_the_ranks(tmp_path, number, code):
    with command(tmp_path, "--act", "hang:1") as process:
        wait_for(lambda: "step 2/3" in (tmp_path / "out").read_text(), 180)
        process.send_signal(number)
        assert process.wait(timeout=60) == code
        assert_gone(tmp_path)
        errors = (tmp_path / "err").read_text().splitlines()
    told = [line for line in errors if line.startswith("error:")]
    if number == signal.SIGKILL:
        assert told == []
    else:
        assert len(told) == 1 and f"{number.name} after step 2" in told[0]
        assert "--checkpoint.enable" in told[0]  # the cure for having lost the run
        assert not any("Traceback" in line for line in errors)


def test_plain_torchrun_prints_a_failure_once(tmp_path):
    arguments = [
        *("--module", "fake_runs", "--config", "fake_debugmodel"),
        *("--dump_folder", str(tmp_path), "--act", "all:"),
    ]
    result = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "titan_npu_train.train", *arguments),
        ],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert result.returncode != 0
    output = result.stdout + result.stderr
    assert output.count("error: the learning rate is negative. Use a positive one.") == 1
    assert "fake_runs.py" not in output  # no traceback
    assert (tmp_path / "errors" / "rank0.txt").is_file()


class command:
    """``titan-npu train fake_debugmodel`` in a process of its own; never left running."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.arguments = [
            *(sys.executable, "-m", "titan_npu_train.cli", "train", "fake_debugmodel"),
            *("--module", "fake_runs", "--nproc", "2", "--hf_assets_path", str(folder / "tok")),
            *("--dump_folder", str(folder), *options),
        ]
        fake_runs.write_tokenizer(folder / "tok")
        self.folder = folder

    def __enter__(self) -> subprocess.Popen:
        with (self.folder / "out").open("w") as out, (self.folder / "err").open("w") as err:
            self.process = subprocess.Popen(self.arguments, stdout=out, stderr=err)
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        for pid in rank_pids(self.folder):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def rank_pids(folder: Path) -> Iterator[int]:
    return (int(path.read_text()) for path in folder.glob("pid*"))


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def assert_gone(folder: Path) -> None:
    pids = list(rank_pids(folder))
    assert len(pids) == 2
    wait_for(lambda: not any(map(alive, pids)), 10)


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def test_ranks_on_a_cpu_give_memory_back(monkeypatch):
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    assert launch.allocator_settings() == {"MALLOC_MMAP_THRESHOLD_": "4194304"}
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "131072")
    assert launch.allocator_settings() == {}

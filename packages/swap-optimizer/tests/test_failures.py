"""Disks that are full, gone, cut short or taken: the step happens or not, and the error says it."""

import copy
import errno
import gc
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from swap_optimizer import StepError, SwapFileError, SwapOptimizer, swapfile
from training import OPTIMIZERS, Training, assert_same_bits, swapped

SIZE = 16384  # a slice of one such parameter is larger than the largest page


def params(n=4):
    return [nn.Parameter(torch.full((SIZE,), float(i))) for i in range(n)]


def on_disk(path, slices=1):
    return SwapOptimizer(AdamW(params()), slices=slices, storage="disk", path=path)


def give_grads(optimizer, i=0):
    for j, p in enumerate(optimizer.param_groups[0]["params"]):
        p.grad = torch.sin(torch.arange(SIZE, dtype=torch.float32) + i + j)


class Pair:
    """The same training, plain and on disk."""

    def __init__(self, path):
        self.plain = AdamW(params())
        self.swap = on_disk(path, 4)
        self.file = Path(path) / "swap-optimizer-rank0-0.bin"
        self.steps = 0

    def step(self, *optimizers):
        for optimizer in optimizers or (self.plain, self.swap):
            give_grads(optimizer, self.steps)
            optimizer.step()
        self.steps += 1

    def assert_same(self):
        pairs = zip(*(o.param_groups[0]["params"] for o in (self.plain, self.swap)), strict=True)
        assert all(torch.equal(p, q) for p, q in pairs)
        a, b = self.plain.state_dict()["state"], self.swap.state_dict()["state"]
        assert a.keys() == b.keys()
        assert all(torch.equal(a[i][k], b[i][k]) for i in a for k in a[i])


@pytest.fixture
def pair(tmp_path):
    pair = Pair(tmp_path)
    pair.step()
    return pair


def parameters(swap):
    return [p.detach().clone() for p in swap.param_groups[0]["params"]]


def assert_not_done(pair, message):
    """A step is refused, before anything of it happened."""
    before = parameters(pair.swap)
    give_grads(pair.swap, pair.steps)
    with pytest.raises(StepError, match=message) as error:
        pair.swap.step()
    assert error.value.happened is False
    assert all(map(torch.equal, before, parameters(pair.swap)))


# --- the folder and the file, at construction -----------------------------------------------------


def test_a_path_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"path: cannot make a swap file there: .*directory"):
        on_disk(tmp_path / "file" / "folder")
    readonly = Path("/proc/1")
    with pytest.raises(OSError, match="path: cannot make a swap file there: "):
        on_disk(readonly)


def test_a_folder_is_made(tmp_path):
    path = tmp_path / "a" / "b"
    swap = on_disk(path)
    (file,) = path.iterdir()
    assert file.name == "swap-optimizer-rank0-0.bin"
    assert file.stat().st_size >= 4 * 8 * SIZE  # room for all states, before the first step
    assert file.stat().st_mode & 0o777 == 0o600
    swap.close()
    assert not list(path.iterdir())


def test_a_file_that_is_not_ours(tmp_path):
    file = tmp_path / "swap-optimizer-rank0-0.bin"
    file.write_text("my thesis")
    with pytest.raises(SwapFileError, match="is there and was not written by swap-optimizer; move"):
        on_disk(tmp_path)
    assert file.read_text() == "my thesis"
    file.unlink()
    file.mkdir()
    with pytest.raises(OSError, match="path: "):
        on_disk(tmp_path)
    file.rmdir()
    target = tmp_path / "target"
    target.write_text("my thesis")
    file.symlink_to(target)
    with pytest.raises(OSError, match="path: "):
        on_disk(tmp_path)
    assert target.read_text() == "my thesis"


def test_a_file_that_was_torn(tmp_path):
    """A process that died while it wrote the first bytes."""
    file = tmp_path / "swap-optimizer-rank0-0.bin"
    for n in (0, 5, len(swapfile.MAGIC), len(swapfile.MAGIC) + 8):
        file.write_bytes((swapfile.MAGIC + b'{"host": "somewhere"')[:n])
        on_disk(tmp_path).close()
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("nbytes", [0, 10, 1000])
def test_no_room_for_the_first_bytes(tmp_path, nbytes):
    """Nothing is left, and there it is once there is room."""
    with largest_file(nbytes), pytest.raises(OSError, match="path: cannot"):
        on_disk(tmp_path)
    assert not list(tmp_path.iterdir())
    on_disk(tmp_path).close()


def test_a_relative_path(tmp_path, monkeypatch):
    """Of the folder that was current when it was made; and of the user's home."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    swap = on_disk("here")
    monkeypatch.chdir("elsewhere")
    give_grads(swap)
    swap.step()
    assert len(list((tmp_path / "here").iterdir())) == 1
    swap.close()
    assert not list((tmp_path / "here").iterdir())
    monkeypatch.setenv("HOME", str(tmp_path))
    on_disk("~/at home").close()
    assert (tmp_path / "at home").is_dir()


CHILD = """
import os, sys, torch
from swap_optimizer import SwapOptimizer
p = torch.nn.Parameter(torch.ones(4096))
swap = SwapOptimizer(torch.optim.AdamW([p]), slices=1, storage="disk", path=sys.argv[1])
p.grad = torch.ones(4096)
swap.step()
"""


def child(folder, more, **options):
    command = [sys.executable, "-c", CHILD + textwrap.dedent(more), str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)


def test_a_file_of_another_process(tmp_path):
    """It is refused while that lives, and replaced when it was killed."""
    there, here = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        here.close()
        try:
            _held = swapfile.SwapFile(tmp_path)
            there.send(b"ready")
            there.recv(1)  # for as long as the test lives
        finally:
            os._exit(0)
    with here:
        there.close()
        assert here.recv(5) == b"ready"
        message = rf"rank0-0.bin is in use by process {pid} on .*a path of its own"
        with pytest.raises(SwapFileError, match=message):
            on_disk(tmp_path)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert [p.name for p in tmp_path.iterdir()] == ["swap-optimizer-rank0-0.bin"]
    swap = on_disk(tmp_path)
    give_grads(swap)
    swap.step()
    swap.close()
    assert not list(tmp_path.iterdir())


FORK = """
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        del swap  # not its own
        os._exit(0)
    os.waitpid(pid, 0)
    p.grad = torch.ones(4096)
    swap.step()
"""


def test_the_file_goes_with_its_owner(tmp_path):
    """Not with a process forked from it; and at exit."""
    with child(tmp_path, FORK) as process:
        assert process.wait(120) == 0
    assert not list(tmp_path.iterdir())
    swap = on_disk(tmp_path)
    assert list(tmp_path.iterdir())
    del swap
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_ranks_have_files_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    swap = on_disk(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["swap-optimizer-rank3-0.bin"]
    swap.close()
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ValueError, match="RANK in the environment must be a number, got 'first'"):
        on_disk(tmp_path)


def test_a_temporary_folder_goes_away(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    swap = on_disk(None)
    assert [p.name[:15] for p in tmp_path.iterdir()] == ["swap-optimizer-"]
    swap.close()
    assert not list(tmp_path.iterdir())


# --- no room --------------------------------------------------------------------------------------


@contextmanager
def largest_file(nbytes):
    """Files cannot grow over that, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_no_room_is_found_out_before_training(tmp_path):
    with (
        largest_file(100_000),
        pytest.raises(OSError, match=r"no room for [\d,]+ more bytes of optimizer state"),
    ):
        on_disk(tmp_path, 4)
    assert not list(tmp_path.iterdir())


class Full:
    """Writes to the swap file fail while `.now` is set."""

    def __init__(self, monkeypatch):
        self.now = False
        self.error = errno.ENOSPC
        for name in ("pwrite", "posix_fallocate"):
            monkeypatch.setattr(swapfile.os, name, self.failing(getattr(os, name)))

    def failing(self, call):
        def fail(*arguments):
            if self.now:
                raise OSError(self.error, os.strerror(self.error))
            return call(*arguments)

        return fail


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_disk_that_is_full_in_a_step(tmp_path, monkeypatch, error):
    """The step is done, its states are held in memory, and written when there is room again."""
    full = Full(monkeypatch)
    pair = Pair(tmp_path)
    full.error = error
    for _ in range(2):  # in the first step, when there are no states yet, and in a later one
        full.now = True
        for _ in range(2):
            message = r"the step was done, but .* nothing is lost"
            with pytest.raises(StepError, match=message) as said:
                pair.step()
            pair.steps += 1
            assert said.value.happened is True and os.strerror(error) in str(said.value)
            assert pair.swap.stats().held_bytes == 4 * 8 * SIZE
            pair.assert_same()  # saving works, too
        full.now = False
        pair.step()
        assert pair.swap.stats().held_bytes == 0
        pair.assert_same()


def test_one_slice_that_cannot_be_written(pair, monkeypatch):
    full = Full(monkeypatch)
    write = swapfile.SwapFile.write

    def sometimes(self, region, x, start=0):
        full.now = region is pair.swap._storage.regions[2]
        write(self, region, x, start)
        full.now = False

    monkeypatch.setattr(swapfile.SwapFile, "write", sometimes)
    with pytest.raises(StepError, match="the step was done, but 131,072 bytes"):
        pair.step()
    pair.steps += 1
    pair.assert_same()
    monkeypatch.setattr(swapfile.SwapFile, "write", write)
    full.now = False
    pair.step()
    pair.assert_same()


def test_a_disk_that_is_full_in_loading(pair, monkeypatch):
    states = Training(OPTIMIZERS["AdamW"]).run(range(3)).states()["optimizer"]
    full = Full(monkeypatch)
    swap = Training(OPTIMIZERS["AdamW"], swapped("disk"))
    full.now = True
    with pytest.raises(SwapFileError, match=r"the states were loaded, but .* nothing is lost"):
        swap.optimizer.load_state_dict(states)
    full.now = False
    plain = Training(OPTIMIZERS["AdamW"])
    plain.optimizer.load_state_dict(states)
    assert_same_bits(plain, swap)
    assert_same_bits(plain.run(range(2)), swap.run(range(2)))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_disk_that_is_really_full(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(small)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        with pytest.raises(OSError, match=r"no room for .*\(\d+,\d+ free\): No space left"):
            on_disk(small, 4)
    finally:
        subprocess.run(["umount", str(small)], check=True)


# --- the file, later ------------------------------------------------------------------------------


def test_a_file_that_vanished(pair):
    pair.file.unlink()
    assert_not_done(pair, r"has vanished .*state_dict\(\) can still .*The step was not done")
    pair.assert_same()


def test_a_file_that_was_replaced(pair):
    pair.file.rename(pair.file.with_suffix(".old"))
    pair.file.write_bytes(b"x" * 10)
    assert_not_done(pair, f"{pair.file} was replaced by another file.*The step was not done")
    pair.assert_same()
    pair.swap.close()
    assert pair.file.read_bytes() == b"x" * 10  # not ours to remove


def test_a_file_that_was_cut_short(pair):
    os.truncate(pair.file, 100_000)
    assert_not_done(pair, "was cut short: 100,000 bytes, expected .* lost.*The step was not done")
    with pytest.raises(SwapFileError, match="was cut short: 100,000 bytes"):
        pair.swap.state_dict()


def test_a_file_that_is_cut_short_in_a_step(pair, monkeypatch):
    """No signal kills the process; what was updated is said."""
    check = swapfile.SwapFile.check

    def late(self):
        check(self)
        os.truncate(pair.file, pair.swap._storage.regions[2].offset + 1000)

    monkeypatch.setattr(swapfile.SwapFile, "check", late)
    before = parameters(pair.swap)
    message = "was cut short at byte .*: the step was done in part: 2 of 4 slices were updated"
    with pytest.raises(StepError, match=message) as error:
        pair.step(pair.swap)
    assert error.value.happened is None
    same = list(map(torch.equal, before, parameters(pair.swap)))
    assert same == [False, False, True, True]


def test_an_error_in_reading(pair, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(swapfile.os, "preadv", fail)
        assert_not_done(pair, "Input/output error.* no slice was updated: the step was not done")
    pair.step()
    pair.assert_same()


def test_loading_into_a_file_that_is_not_what_it_was(pair):
    states = copy.deepcopy(pair.swap.state_dict())
    pair.file.unlink()
    with pytest.raises(SwapFileError, match=r"has vanished .*\. Nothing was loaded"):
        pair.swap.load_state_dict(states)
    pair.assert_same()


def in_a_fork(function):
    """What it returns in a forked process, which has ten seconds."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        try:
            os.write(writing, function().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


def test_a_forked_process_cannot_step(pair):
    def step():
        try:
            pair.swap.step()
        except StepError as error:
            return f"{error.happened} {error}"
        return "a step"

    give_grads(pair.swap)
    said = in_a_fork(step)
    assert said.startswith("False") and f"belongs to process {os.getpid()}, of which" in said
    pair.step()
    pair.assert_same()


def test_threads_end(tmp_path):
    before = set(threading.enumerate())
    pair = Pair(tmp_path)
    pair.step(), pair.step()
    states = pair.swap.state_dict()
    assert {t.name for t in set(threading.enumerate()) - before} == {
        "swap-optimizer-read_0", "swap-optimizer-write_0", "swap-optimizer-trim",
    }  # fmt: skip
    del states
    pair.swap.close()
    deadline = time.monotonic() + 30
    while set(threading.enumerate()) - before:
        assert time.monotonic() < deadline
        time.sleep(0.01)

"""A file of regions: locked, checked before use, preallocated, and gone when its owner is."""

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import shutil
import socket
import stat
import tempfile
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from swap_optimizer.errors import SwapFileError

MAGIC = b"swap-optimizer 1\n"
PAGE = mmap.ALLOCATIONGRANULARITY
HEADER = PAGE
# Between two looks of the thread that unmaps pages, a reader at 10 GB/s touches 50 MB.
TRIM_SECONDS = 0.005
# read and write take at most 2 GiB less a page at once.
MOST_AT_ONCE = 1 << 30


@dataclass(eq=False)
class Region:
    """Bytes of the file."""

    offset: int
    nbytes: int


class SwapFile:
    """A file in `folder`, by the rank's name, held under an exclusive lock.

    Args:
        folder: where; None for a temporary folder of its own.
        reserve: bytes to preallocate.

    Raises:
        SwapFileError: a file that is in use or is not one of ours.
        OSError: the folder cannot be written, or there is not enough room.
    """

    def __init__(self, folder: Path | None, reserve: int = 0) -> None:
        self.temporary = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="swap-optimizer-")) if folder is None else folder
        self._free: list[Region] = []
        self._maps: dict[Region, weakref.ref[mmap.mmap]] = {}
        self._leaving: list[Region] = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.path, self.fd = _open(self.folder)
        except OSError as error:
            self._remove_folder()
            raise OSError(
                error.errno, f"path: cannot make a swap file there: {error.strerror}", str(folder)
            ) from error
        except BaseException:
            self._remove_folder()
            raise
        self._end = HEADER
        self._inode = _identity(os.fstat(self.fd))
        folder_to_remove = self.folder if self.temporary else None
        self._finalizer = weakref.finalize(
            self, _remove, self.fd, self.path, self._inode, folder_to_remove, os.getpid()
        )
        self._trimmer: threading.Thread | None = None
        if reserve:
            try:
                self._free.append(self._grow(reserve))
            except OSError:
                self.close()
                raise

    def _remove_folder(self) -> None:
        if self.temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    # --- room ------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Region:
        """A region of at least `nbytes`, whole pages, that the disk has room for.

        Raises:
            OSError: there is none.
        """
        nbytes = _pages(nbytes)
        self._take_back()
        for region in self._free:
            if region.nbytes >= nbytes:
                taken = Region(region.offset, nbytes)
                region.offset += nbytes
                region.nbytes -= nbytes
                if not region.nbytes:
                    self._free.remove(region)
                return taken
        return self._grow(nbytes)

    def _grow(self, nbytes: int) -> Region:
        nbytes = _pages(nbytes)
        try:
            os.posix_fallocate(self.fd, self._end, nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, self._end)
            free = shutil.disk_usage(self.folder).free
            raise OSError(
                error.errno,
                f"no room for {nbytes:,} more bytes of optimizer state ({free:,} free): "
                f"{error.strerror}",
                str(self.path),
            ) from error
        region = Region(self._end, nbytes)
        self._end += nbytes
        return region

    def free(self, region: Region) -> None:
        """Give a region back, once no tensor shows it any more."""
        self._leaving.append(region)
        self._take_back()

    def _take_back(self) -> None:
        shown = [region for region in self._leaving if self._live(region) is not None]
        for region in self._leaving:
            if region not in shown:
                self._maps.pop(region, None)
                self._free.append(region)
        self._leaving = shown
        self._free.sort(key=lambda region: region.offset)
        merged: list[Region] = []
        for region in self._free:
            if merged and merged[-1].offset + merged[-1].nbytes == region.offset:
                merged[-1].nbytes += region.nbytes
            else:
                merged.append(region)
        self._free = merged

    @property
    def nbytes(self) -> int:
        return self._end

    # --- reading and writing ---------------------------------------------------------------------

    def check(self) -> None:
        """Raises:
        SwapFileError: the file is not there any more, is another one, or was cut short.
        """
        self._check_size()
        try:
            there = _identity(self.path.stat())
        except OSError as error:
            raise SwapFileError(
                f"the swap file {self.path} has vanished ({error.strerror}). "
                "state_dict() can still read it, through the open file: save it, and resume"
            ) from error
        if there != self._inode:
            raise SwapFileError(
                f"the swap file {self.path} was replaced by another file. "
                "state_dict() can still read it, through the open file: save it, and resume"
            )

    def _check_size(self) -> None:
        size = os.fstat(self.fd).st_size
        if size < self._end:
            raise SwapFileError(
                f"the swap file {self.path} was cut short: {size:,} bytes, expected {self._end:,}; "
                "the state in it is lost. Resume from a checkpoint"
            )

    def read(self, region: Region, x: Tensor, start: int = 0) -> None:
        """Fill bytes `x` from a region, from `start` on."""
        memory, position = memory_of(x), region.offset + start
        while memory:
            n = os.preadv(self.fd, [memory[:MOST_AT_ONCE]], position)
            if n == 0:
                raise SwapFileError(f"the swap file {self.path} was cut short at byte {position:,}")
            memory, position = memory[n:], position + n

    def write(self, region: Region, x: Tensor, start: int = 0) -> None:
        """Write bytes `x` to a region, from `start` on."""
        memory, position = memory_of(x), region.offset + start
        while memory:
            n = os.pwrite(self.fd, memory[:MOST_AT_ONCE], position)
            if n == 0:
                raise OSError(errno.EIO, "nothing was written", str(self.path))
            memory, position = memory[n:], position + n

    # --- tensors over the file -------------------------------------------------------------------

    def show(self, region: Region) -> Tensor:
        """The region's bytes as a tensor over a map of the file.

        While such tensors are alive a thread gives the pages that were touched back, so that
        reading or writing through all of them takes little memory.
        """
        self._check_size()
        found = self._live(region)
        if found is None:
            found = mmap.mmap(self.fd, region.nbytes, offset=region.offset)
            self._maps[region] = weakref.ref(found)
            if self._trimmer is None or not self._trimmer.is_alive():
                self._trimmer = threading.Thread(
                    target=_trim, args=(self._maps,), name="swap-optimizer-trim", daemon=True
                )
                self._trimmer.start()
        return torch.frombuffer(found, dtype=torch.uint8)

    def is_shown(self, region: Region) -> bool:
        return self._live(region) is not None

    def _live(self, region: Region) -> mmap.mmap | None:
        reference = self._maps.get(region)
        return None if reference is None else reference()

    def close(self) -> None:
        """Remove the file. Tensors over it keep what they show until they are gone."""
        self._finalizer()


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def memory_of(x: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor."""
    n = x.nbytes
    if not n:
        return memoryview(b"")
    return memoryview((ctypes.c_char * n).from_address(x.data_ptr())).cast("B")


def _trim(maps: dict[Region, "weakref.ref[mmap.mmap]"]) -> None:
    """Unmap pages for as long as there are maps. The data stays in the file."""
    while sum(_unmap_pages(reference) for reference in list(maps.values())):
        time.sleep(TRIM_SECONDS)


def _unmap_pages(reference: "weakref.ref[mmap.mmap]") -> bool:
    found = reference()
    if found is None:
        return False
    found.madvise(mmap.MADV_DONTNEED)
    return True


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "0")
    if not rank.isdecimal():
        raise ValueError(f"RANK in the environment must be a number, got {rank!r}")
    return int(rank)


def _open(folder: Path) -> tuple[Path, int]:
    """A new file under a lock; one that a dead process left is replaced."""
    rank, number = _rank(), 0
    while True:
        path = folder / f"swap-optimizer-rank{rank}-{number}.bin"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            taken = _take(path, fd)
        except BaseException:
            os.close(fd)
            raise
        if taken is True:
            return path, fd
        os.close(fd)
        if taken is None:
            number += 1


def _take(path: Path, fd: int) -> bool | None:
    """True: ours now. None: another SwapOptimizer of this process has it. False: try again."""
    status = os.fstat(fd)
    header = os.pread(fd, HEADER, 0) if stat.S_ISREG(status.st_mode) else b"?"
    owner = _owner(header)
    if not MAGIC.startswith(header[: len(MAGIC)]):
        raise SwapFileError(
            f"path: {path} is there and was not written by swap-optimizer; "
            "move it away or give another path"
        )
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        if owner == {"host": socket.gethostname(), "pid": os.getpid()}:
            return None
        if owner is None:  # it has just been made
            return False
        raise SwapFileError(
            f"path: {path} is in use by process {owner['pid']} on {owner['host']}; "
            "give each run a path of its own"
        ) from error
    try:
        if _identity(path.stat()) != _identity(status):
            return False
    except FileNotFoundError:
        return False
    me = {"host": socket.gethostname(), "pid": os.getpid()}
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, MAGIC + json.dumps(me).encode(), 0)
        os.posix_fallocate(fd, 0, HEADER)
    except BaseException:
        path.unlink()  # ours: it is locked, and the one at that path
        raise
    return True


def _owner(header: bytes) -> dict | None:
    if not header.startswith(MAGIC):
        return None
    try:
        return json.loads(header[len(MAGIC) :].rstrip(b"\0"))
    except ValueError:
        return None


def _remove(fd: int, path: Path, inode: tuple[int, int], folder: Path | None, owner: int) -> None:
    if os.getpid() == owner:  # not in a process forked from it
        with contextlib.suppress(OSError):
            if _identity(path.stat()) == inode:
                path.unlink()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    os.close(fd)

"""Storage in a file, with a thread that reads ahead and one that writes behind."""

import ctypes
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from swap_optimizer.errors import SwapFileError
from swap_optimizer.layout import Entry, Slice
from swap_optimizer.storage import Slot, Storage, as_bytes, tensors_in
from swap_optimizer.streams import NoStreams, Streams
from swap_optimizer.swapfile import PAGE, Region, SwapFile

# Between an accelerator and the file, bytes pass through pinned memory of this size.
BOUNCE = 16 << 20
# Of glibc; other allocators have none.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


class DiskStorage(Storage):
    """A region of the swap file for each slice.

    ``slot.loaded`` and ``slot.offloaded`` are futures of the two threads. What could not be written
    is held in memory, and written when the slice comes by again.
    """

    def __init__(
        self,
        device: torch.device,
        streams: Streams,
        folder: Path | None,
        nbytes: int,
        slices: int,
    ) -> None:
        super().__init__(device, streams)
        # Each slice may end within a page.
        self.file = SwapFile(folder, reserve=nbytes + slices * PAGE if nbytes else 0)
        self.regions: dict[int, Region] = {}
        self.held: dict[int, Tensor] = {}
        self._failures: list[OSError] = []
        self._reader = ThreadPoolExecutor(1, "swap-optimizer-read")
        self._writer = ThreadPoolExecutor(1, "swap-optimizer-write")
        self._bounces: dict[str, Tensor] = {}
        self._process = os.getpid()

    # --- a step ----------------------------------------------------------------------------------

    def load(self, s: Slice, fresh: bool = False) -> Slot:
        slot = self.next_slot()
        if not fresh and s.nbytes:
            buffer = self.room(slot)[: s.nbytes]
            self.measure()
            slot.loaded = self._reader.submit(self._read, s, buffer, slot.offloaded)
        return slot

    def _read(self, s: Slice, buffer: Tensor, before: Future | None) -> object:
        if before is not None:
            before.result()
        start = time.perf_counter()
        held = self.held.get(s.index)
        streams, arrived = self.streams, None
        if held is not None:
            streams.copy(streams.load, buffer, held)
            arrived = streams.record(streams.load)
        elif isinstance(streams, NoStreams):
            self.file.read(self.regions[s.index], buffer)
        else:
            bounce = self._bounce("load")
            for a in range(0, s.nbytes, BOUNCE):
                streams.synchronize(arrived)
                part = bounce[: min(BOUNCE, s.nbytes - a)]
                self.file.read(self.regions[s.index], part, a)
                streams.copy(streams.load, buffer[a : a + part.numel()], part)
                arrived = streams.record(streams.load)
        self.times.add("load", time.perf_counter() - start)
        return arrived

    def ready(self, s: Slice, slot: Slot) -> None:
        start = time.perf_counter()
        if slot.loaded is not None:
            self.streams.wait(self.streams.current(), slot.loaded.result())
        elif slot.offloaded is not None:
            slot.offloaded.result()
        self._drop_own(slot)
        self.times.add("waited", time.perf_counter() - start)

    def _drop_own(self, slot: Slot) -> None:
        """Let go of tensors that the optimizer made, and of their memory."""
        if slot.own:
            slot.own = []
            self._trim()

    def _trim(self) -> None:
        """malloc keeps what has been freed for later; here that would be all states, by and by."""
        if self.device.type == "cpu" and _malloc_trim is not None:
            _malloc_trim(0)

    def offload(self, s: Slice, slot: Slot, pieces: dict[Entry, Tensor] | None, anew: bool) -> None:
        if anew:
            self._forget(s)
        if not s.nbytes:
            return
        if s.index not in self.regions:
            try:
                self.regions[s.index] = self.file.allocate(s.nbytes)
            except OSError as error:
                self._failures.append(error)
        updated = self.streams.record(self.streams.current())
        slot.offloaded = self._writer.submit(self._write, s, slot, pieces, updated)

    def _write(
        self, s: Slice, slot: Slot, pieces: dict[Entry, Tensor] | None, updated: object
    ) -> None:
        start = time.perf_counter()
        self.streams.wait(self.streams.offload, updated)
        parts: list[tuple[int, Tensor]] = []
        if pieces is None:
            assert slot.buffer is not None
            parts.append((0, slot.buffer[: s.nbytes]))
        else:
            parts.extend((entry.offset, as_bytes(x)) for entry, x in pieces.items())
        try:
            if s.index not in self.regions:
                raise OSError("no region")  # told already
            for offset, part in parts:
                self._put(self.regions[s.index], offset, part)
            self.held.pop(s.index, None)
        except OSError as error:
            if s.index in self.regions:
                self._failures.append(error)
            self._hold(s, slot, parts)
        self.times.add("offload", time.perf_counter() - start)

    def _put(self, region: Region, offset: int, part: Tensor) -> None:
        streams = self.streams
        if isinstance(streams, NoStreams):
            self.file.write(region, part, offset)
            return
        bounce = self._bounce("offload")
        for a in range(0, part.numel(), BOUNCE):
            there = bounce[: min(BOUNCE, part.numel() - a)]
            streams.copy(streams.offload, there, part[a : a + there.numel()])
            streams.synchronize(streams.record(streams.offload))
            self.file.write(region, there, offset + a)

    def _hold(self, s: Slice, slot: Slot, parts: list[tuple[int, Tensor]]) -> None:
        """Keep in memory what could not be written."""
        held = self.held.setdefault(s.index, torch.empty(s.nbytes, dtype=torch.uint8))
        for offset, part in parts:
            self.streams.copy(self.streams.offload, held[offset : offset + part.numel()], part)
        self.streams.synchronize(self.streams.record(self.streams.offload))

    def _bounce(self, name: str) -> Tensor:
        if name not in self._bounces:
            pinned = self.device.type != "cpu"
            self._bounces[name] = torch.empty(BOUNCE, dtype=torch.uint8, pin_memory=pinned)
        return self._bounces[name]

    def _forget(self, s: Slice) -> None:
        self.held.pop(s.index, None)
        if (region := self.regions.pop(s.index, None)) is not None:
            self.file.free(region)

    def finish(self) -> list[BaseException]:
        futures = [f for slot in self.slots for f in (slot.loaded, slot.offloaded) if f is not None]
        errors = [error for f in futures if (error := f.exception()) is not None]
        for slot in self.slots:
            slot.buffer, slot.views, slot.own = None, {}, []
        self._trim()
        self.slots = []
        self._bounces.clear()
        return errors

    # --- between steps ---------------------------------------------------------------------------

    def check(self) -> None:
        if os.getpid() != self._process:  # threads are not forked, and nobody would answer
            raise SwapFileError(
                f"the swap file {self.file.path} belongs to process {self._process}, of which this "
                "one is a fork; make a SwapOptimizer in each process"
            )
        self.file.check()

    def show(self, s: Slice, entries: Sequence[Entry]) -> dict[Entry, Tensor]:
        if not entries:
            return {}
        held = self.held.get(s.index)
        buffer = self.file.show(self.regions[s.index]) if held is None else held
        return tensors_in(buffer, entries)

    def shown(self, s: Slice) -> list[Tensor]:
        held, region = self.held.get(s.index), self.regions.get(s.index)
        found = [] if held is None else [held]
        if region is not None and self.file.is_shown(region):
            found.append(self.file.show(region))
        return found

    @property
    def storage_bytes(self) -> int:
        return self.file.nbytes

    def failures(self) -> list[OSError]:
        failures, self._failures = self._failures, []
        return failures

    @property
    def held_bytes(self) -> int:
        return sum(x.nbytes for x in self.held.values())

    def close(self) -> None:
        self._reader.shutdown()
        self._writer.shutdown()
        self.held.clear()
        self.file.close()

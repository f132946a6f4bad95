"""Storage in host memory: pinned where there is an accelerator."""

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from swap_optimizer.layout import Entry, Slice
from swap_optimizer.storage import Slot, Storage, tensors_in
from swap_optimizer.streams import Streams

# A slice is moved in pieces of this size, so that the next slice comes in where the last one has
# gone out: both directions of the link are busy, with two slices on the device.
PIECE = 64 << 20


class HostStorage(Storage):
    """A buffer of pinned host memory for each slice.

    ``slot.offloaded`` is a list of (end, event): the bytes before `end` are in the storage once
    `event` has happened.
    """

    def __init__(self, device: torch.device, streams: Streams) -> None:
        super().__init__(device, streams)
        self.buffers: dict[int, Tensor] = {}
        self._offloaded: dict[int, Any] = {}

    def load(self, s: Slice, fresh: bool = False) -> Slot:
        slot = self.next_slot()
        if fresh or not s.nbytes:
            return slot
        streams, host, buffer = self.streams, self.buffers[s.index], self.room(slot)
        self.measure()
        # The slice's own bytes: they went out in an earlier step.
        streams.wait(streams.load, self._offloaded.get(s.index))
        gone, free, start = list(slot.offloaded or []), 0, None
        for a, b in _pieces(s.nbytes):
            while gone and free < b:
                free, event = gone.pop(0)
                streams.wait(streams.load, event)
            start = start or streams.record(streams.load)
            streams.copy(streams.load, buffer[a:b], host[a:b])
        slot.loaded = streams.record(streams.load)
        self.times.events.append(("load", start, slot.loaded))
        return slot

    def ready(self, s: Slice, slot: Slot) -> None:
        streams = self.streams
        current = streams.current()
        before = streams.record(current)
        streams.wait(current, slot.loaded)
        if slot.own or slot.loaded is None:
            for _, event in slot.offloaded or []:
                streams.wait(current, event)
            slot.own = []  # after the wait: what is computed next may get this memory
        self.times.events.append(("waited", before, streams.record(current)))

    def offload(self, s: Slice, slot: Slot, pieces: dict[Entry, Tensor] | None, anew: bool) -> None:
        if anew:
            self.buffers.pop(s.index, None)
        if not s.nbytes:
            return
        if s.index not in self.buffers:
            self.buffers[s.index] = _host_bytes(s.nbytes, pinned=self.device.type != "cpu")
        streams, host = self.streams, self.buffers[s.index]
        streams.wait(streams.offload, streams.record(streams.current()))
        start = streams.record(streams.offload)
        slot.offloaded = []
        if pieces is None:
            assert slot.buffer is not None
            for a, b in _pieces(s.nbytes):
                streams.copy(streams.offload, host[a:b], slot.buffer[a:b])
                slot.offloaded.append((b, streams.record(streams.offload)))
        else:
            for entry, x in pieces.items():
                streams.copy(streams.offload, entry.view(host), x)
            slot.offloaded.append((sys.maxsize, streams.record(streams.offload)))
        self._offloaded[s.index] = end = slot.offloaded[-1][1]
        self.times.events.append(("offload", start, end))

    def finish(self) -> list[BaseException]:
        for slot in self.slots:
            for x in (slot.buffer, *slot.own):
                if x is not None:
                    self.streams.keep_until_done(self.streams.offload, x)
        self.slots = []
        return []

    def check(self) -> None:
        pass

    def show(self, s: Slice, entries: Sequence[Entry]) -> dict[Entry, Tensor]:
        if not entries:
            return {}
        self.streams.synchronize(self._offloaded.get(s.index))
        return tensors_in(self.buffers[s.index], entries)

    def shown(self, s: Slice) -> list[Tensor]:
        return [self.buffers[s.index]] if s.index in self.buffers else []

    @property
    def storage_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def close(self) -> None:
        for event in self._offloaded.values():
            self.streams.synchronize(event)
        self.buffers.clear()


def _host_bytes(n: int, pinned: bool) -> Tensor:
    return torch.empty(n, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def _pieces(nbytes: int) -> list[tuple[int, int]]:
    return list(pairwise([*range(0, nbytes, PIECE), nbytes]))

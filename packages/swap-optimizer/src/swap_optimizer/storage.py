"""What the storages share: two slots on the device, and the order of load, update and offload."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from swap_optimizer.layout import Entry, Layout, Slice, State, dense_stride, local, slot_bytes
from swap_optimizer.streams import Streams
from swap_optimizer.wrapped import bare_step


@dataclass(eq=False)
class Slot:
    """Room for one slice on the device.

    Attributes:
        size: of the buffer, in bytes.
        buffer: bytes; None until something is loaded into it.
        views: the tensors in it that the optimizer got, by their place.
        own: tensors that the optimizer made itself and that are being offloaded.
        loaded: when the slice is there.
        offloaded: when it is in the storage; the storage knows what it put here.
    """

    size: int = 0
    buffer: Tensor | None = None
    views: dict[Entry, Tensor] = field(default_factory=dict)
    own: list[Tensor] = field(default_factory=list)
    loaded: Any = None
    offloaded: Any = None

    @property
    def nbytes(self) -> int:
        held = 0 if self.buffer is None else self.buffer.nbytes
        return held + sum(x.nbytes for x in self.own)


@dataclass
class Times:
    """Seconds of a step: given on the host, or as pairs of events that are read when asked for."""

    host: dict[str, float] = field(default_factory=dict)
    events: list[tuple[str, Any, Any]] = field(default_factory=list)

    def add(self, name: str, seconds: float) -> None:
        self.host[name] = self.host.get(name, 0.0) + seconds

    def seconds(self, name: str, streams: Streams) -> float:
        measured = (streams.seconds(a, b) for n, a, b in self.events if n == name)
        return self.host.get(name, 0.0) + sum(measured)


class Storage(ABC):
    """Moves slices between the storage and two slots of the device.

    A step is `begin`; then for each slice `load` (as early as possible), `ready`, `update` and
    `store`; then `finish`, whatever happened.
    """

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self.device = device
        self.streams = streams
        self.times = Times()
        self.device_peak = 0
        self.slots: list[Slot] = []
        self._turn = 0

    # --- a step ----------------------------------------------------------------------------------

    def begin(self, slices: Sequence[Slice]) -> None:
        """Two slots, each for the largest of those `slices` that it will have."""
        self.times = Times()
        self.device_peak = 0
        self.slots = [Slot(size) for size in slot_bytes([s.nbytes for s in slices])]
        self._turn = 0

    def next_slot(self) -> Slot:
        slot = self.slots[self._turn % 2]
        self._turn += 1
        slot.views, slot.loaded = {}, None
        return slot

    def room(self, slot: Slot) -> Tensor:
        if slot.buffer is None:
            slot.buffer = torch.empty(slot.size, dtype=torch.uint8, device=self.device)
            # The allocator may give memory that what was computed last still uses.
            self.streams.wait(self.streams.load, self.streams.record(self.streams.current()))
        return slot.buffer

    def measure(self) -> None:
        self.device_peak = max(self.device_peak, sum(slot.nbytes for slot in self.slots))

    @abstractmethod
    def load(self, s: Slice, fresh: bool = False) -> Slot:
        """Start to bring a slice into a slot; with `fresh` only get the slot."""

    @abstractmethod
    def ready(self, s: Slice, slot: Slot) -> None:
        """Let the computation wait until the slice is there and the slot is its own."""

    def state(self, s: Slice, slot: Slot) -> State:
        """The state in a slot, for the optimizer."""
        if s.layout is None:
            return {}
        if slot.buffer is not None:
            slot.views = {e: e.wrap(e.view(slot.buffer)) for e in s.layout.entries}
        return s.layout.tensors(s.params, slot.views)

    def store(self, s: Slice, slot: Slot, state: State) -> None:
        """Start to bring a slice's updated state to the storage.

        Where the optimizer updated the tensors that it got, that is one copy. Tensors it made
        itself are copied to their places; if there are others than before, the slice is laid out
        anew.
        """
        layout = Layout.of(s.params, state)
        entries = list(layout.entries)
        tensors = {e: state[s.params[e.param]][e.key] for e in entries}
        given = slot.views
        anew = s.layout is None or entries != list(s.layout.entries)
        s.layout = layout if any(layout.values) else None
        if given and not anew:
            assert slot.buffer is not None
            for entry, tensor in tensors.items():
                place = entry.view(slot.buffer)
                if tensor is not given[entry] or not _is_at(local(tensor), place):
                    place.copy_(local(tensor))
            self.offload(s, slot, None, anew)
        else:
            views = {id(view) for view in given.values()}
            pieces = {e: _as_laid_out(e, local(x)) for e, x in tensors.items()}
            slot.own = [x for e, x in pieces.items() if id(tensors[e]) not in views]
            self.measure()
            self.offload(s, slot, pieces, anew)

    @abstractmethod
    def offload(self, s: Slice, slot: Slot, pieces: dict[Entry, Tensor] | None, anew: bool) -> None:
        """Start to write a slot's buffer, or the `pieces` of a slice; `anew`: to a new place."""

    @abstractmethod
    def finish(self) -> list[BaseException]:
        """End a step: give the slots back. Returns what went wrong in the background."""

    def update(self, optimizer: Optimizer) -> None:
        """The wrapped optimizer's step, on the slice that it now has."""
        start = self.streams.record(self.streams.current())
        bare_step(optimizer)(optimizer)
        self.times.events.append(("update", start, self.streams.record(self.streams.current())))

    # --- between steps ---------------------------------------------------------------------------

    @abstractmethod
    def check(self) -> None:
        """Raise SwapFileError if a step could not find what it needs. Changes nothing."""

    @abstractmethod
    def show(self, s: Slice, entries: Sequence[Entry]) -> dict[Entry, Tensor]:
        """State tensors of a slice, on the host, for reading and writing."""

    def shown(self, s: Slice) -> list[Tensor]:
        """Bytes that tensors which `show` gave out may be in, if any are still alive."""
        return []

    @property
    @abstractmethod
    def storage_bytes(self) -> int:
        """Bytes that the storage takes."""

    def failures(self) -> list[OSError]:
        """What could not be written since this was asked for last."""
        return []

    @property
    def held_bytes(self) -> int:
        """Bytes of slices that could not be written and are in memory."""
        return 0

    @abstractmethod
    def close(self) -> None: ...


def _as_laid_out(entry: Entry, x: Tensor) -> Tensor:
    return x if x.stride() == entry.stride or x.numel() == 0 else x.contiguous()


def _is_at(x: Tensor, place: Tensor) -> bool:
    # Tensor.is_set_to is not there for every device.
    return x.untyped_storage() is place.untyped_storage() and (
        (x.storage_offset(), x.shape, x.stride())
        == (place.storage_offset(), place.shape, place.stride())
    )


def tensors_in(buffer: Tensor, entries: Sequence[Entry]) -> dict[Entry, Tensor]:
    """The state tensors in a buffer, each with a storage of its own size.

    What is saved of such a tensor is it alone, not the slice.
    """
    tensors = {}
    for e in entries:
        part = buffer.untyped_storage()[e.offset : e.offset + e.nbytes]
        tensors[e] = e.wrap(torch.empty(0, dtype=e.dtype).set_(part, 0, e.shape, e.stride))
    return tensors


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of a dense tensor in the order in which they are in memory."""
    assert x.stride() == dense_stride(x), "not dense"
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)

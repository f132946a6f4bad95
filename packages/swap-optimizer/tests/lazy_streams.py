"""Streams that run on the CPU in any order that their events allow, for finding missing waits.

The optimizer computes at once. What is given to another stream runs when somebody waits for it (the
latest moment there is), or some of it by chance earlier. A copy for which nothing waits as it
should then reads or writes at a wrong time, and bits differ.
"""

import random
import threading
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(eq=False)
class Stream:
    """Work in order: copies, and events of other streams to wait for."""

    name: str
    work: list = field(default_factory=list)
    done: int = 0


@dataclass(eq=False)
class Event:
    stream: Stream
    position: int


class Misuse(AssertionError):
    """Something that a real device would not forgive."""


class LazyStreams:
    """The interface of swap_optimizer.streams.

    Args:
        chance: of running a piece of work before anybody waits for it.
        strict: offloads are given by the thread that computes, right after the update.
    """

    def __init__(self, chance: float, seed: int = 0, strict: bool = True) -> None:
        self.strict = strict
        self.compute, self.load, self.offload = map(Stream, ("compute", "load", "offload"))
        self.chance = chance
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.kept: list[Tensor] = []
        self.log: list[tuple[str, str]] = []

    def current(self) -> Stream:
        return self.compute

    def record(self, stream: Stream) -> Event:
        with self.lock:
            if stream is self.compute:
                stream.work.append(None)
                stream.done += 1
            return Event(stream, len(stream.work))

    def wait(self, stream: Stream, event: Event | None) -> None:
        with self.lock:
            if event is None:
                return
            if stream is self.compute:
                self._run(event.stream, event.position)
            else:
                stream.work.append(event)
            self._some()

    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        with self.lock:
            if stream is self.offload and self.strict:
                self._has_seen_the_update(stream)
            stream.work.append((target, source))
            self._some()

    def _has_seen_the_update(self, stream: Stream) -> None:
        events = [w for w in stream.work if isinstance(w, Event)]
        seen = [event.position for event in events if event.stream is self.compute]
        if max(seen, default=0) < len(self.compute.work):
            raise Misuse("a slice goes out without waiting for what was computed last")

    def keep_until_done(self, stream: Stream, x: Tensor) -> None:
        self.kept.append(x)

    def synchronize(self, event: Event | None) -> None:
        with self.lock:
            if event is not None:
                self._run(event.stream, event.position)

    def seconds(self, start: Event, end: Event) -> float:
        self.synchronize(end)
        return 0.0

    def _run(self, stream: Stream, position: int) -> None:
        while stream.done < position:
            item = stream.work[stream.done]
            if isinstance(item, Event):
                self._run(item.stream, item.position)
            elif item is not None:
                target, source = item
                target.copy_(source)
                self.log.append((stream.name, f"{target.numel()} bytes"))
            stream.done += 1

    def _some(self) -> None:
        for stream in (self.load, self.offload):
            while stream.done < len(stream.work) and self.random.random() < self.chance:
                self._run(stream, stream.done + 1)

    def check_kept(self, host: set[int]) -> None:
        """Memory of copies that are still to come is kept from the allocator.

        Args:
            host: addresses of the storage, which nobody frees.
        """
        kept = {x.untyped_storage().data_ptr() for x in self.kept}
        for stream in (self.load, self.offload):
            for item in stream.work[stream.done :]:
                for x in item if isinstance(item, tuple) else ():
                    address = x.untyped_storage().data_ptr()
                    if address not in kept and address not in host:
                        raise Misuse(f"the {stream.name} stream uses memory that was given back")

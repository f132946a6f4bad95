"""Two extra streams of a device, or their absence, behind the few calls that the storages need."""

import time
from typing import Any

import torch
from torch import Tensor


class DeviceStreams:
    """Streams and events of an accelerator, by torch's device-neutral API.

    Attributes:
        load, offload: the two streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.load: Any = torch.Stream(device)
        self.offload: Any = torch.Stream(device)

    def current(self) -> Any:
        """The stream on which the optimizer computes."""
        return torch.accelerator.current_stream(self.device)

    def record(self, stream: Any) -> Any:
        """An event after all that `stream` has been given so far."""
        event = torch.Event(self.device, enable_timing=True)
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """What `stream` is given from now on begins after `event`. None: it begins at once."""
        if event is not None:
            stream.wait_event(event)

    def copy(self, stream: Any, target: Tensor, source: Tensor) -> None:
        with stream:
            target.copy_(source, non_blocking=True)

    def keep_until_done(self, stream: Any, x: Tensor) -> None:
        """The allocator gives the memory of `x` to no one before `stream` gets here."""
        x.record_stream(stream)

    def synchronize(self, event: Any) -> None:
        """The host waits for an event."""
        if event is not None:
            event.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class NoStreams:
    """A CPU: every copy is over when the call returns, and an event is its time."""

    load: Any = None
    offload: Any = None

    def current(self) -> None:
        return None

    def record(self, stream: Any) -> float:
        return time.perf_counter()

    def wait(self, stream: Any, event: Any) -> None:
        pass

    def copy(self, stream: Any, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def keep_until_done(self, stream: Any, x: Tensor) -> None:
        pass

    def synchronize(self, event: Any) -> None:
        pass

    def seconds(self, start: float, end: float) -> float:
        return end - start


Streams = DeviceStreams | NoStreams


def streams_of(device: torch.device) -> Streams:
    return NoStreams() if device.type == "cpu" else DeviceStreams(device)

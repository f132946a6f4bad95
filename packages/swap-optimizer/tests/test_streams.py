"""The order of load, update and offload, on streams that use every freedom they are given."""

import pytest
import torch

from lazy_streams import Event, LazyStreams, Misuse
from swap_optimizer import disk, host
from swap_optimizer import optimizer as module
from swap_optimizer.host import HostStorage
from training import OPTIMIZERS, Training, assert_same_bits, swapped


@pytest.fixture(params=["late", "now and then", "often", "at once"])
def lazy(request, monkeypatch):
    """The streams of the SwapOptimizer that is made next; pieces are small, so there are many."""
    chance = {"late": 0.0, "now and then": 0.2, "often": 0.7, "at once": 1.0}[request.param]
    streams = LazyStreams(chance)
    monkeypatch.setattr(module, "streams_of", lambda device: streams)
    monkeypatch.setattr(host, "PIECE", 1000)
    monkeypatch.setattr(disk, "BOUNCE", 1000)
    return streams


def addresses(storage):
    return {x.untyped_storage().data_ptr() for x in storage.buffers.values()}


@pytest.mark.parametrize("slices", [1, 2, 3, 7])
@pytest.mark.parametrize("name", ["AdamW", "Adam amsgrad", "Adafactor", "SGD momentum"])
def test_host(lazy, name, slices):
    plain, swap = Training(OPTIMIZERS[name]), Training(OPTIMIZERS[name], swapped("host", slices))
    storage = swap.optimizer._storage
    assert isinstance(storage, HostStorage)
    for i in range(12):
        assert torch.equal(plain.step(i), swap.step(i)), i
        lazy.check_kept(addresses(storage))
        lazy.kept.clear()
        largest = max(s.nbytes for s in swap.optimizer._slices)
        # In the second step a layer gets its first gradient, and its states come on top.
        assert storage.device_peak <= (3 if i == 1 else 2) * largest
    assert_same_bits(plain, swap)
    states = swap.optimizer.state_dict()
    swap.optimizer.load_state_dict(states)
    assert_same_bits(plain, swap)


@pytest.mark.parametrize("name", ["AdamW", "Adam amsgrad"])
def test_disk_through_bounce_buffers(lazy, name):
    lazy.strict = False
    plain, swap = Training(OPTIMIZERS[name]), Training(OPTIMIZERS[name], swapped("disk"))
    for i in range(8):
        assert torch.equal(plain.step(i), swap.step(i)), i
    assert_same_bits(plain, swap)
    swap.optimizer.load_state_dict(swap.optimizer.state_dict())
    assert_same_bits(plain, swap)


def test_both_directions_at_once(monkeypatch):
    """The next slice comes in piece by piece where the last one has gone out."""
    streams = LazyStreams(chance=0.0)
    monkeypatch.setattr(module, "streams_of", lambda device: streams)
    monkeypatch.setattr(host, "PIECE", 512)
    params = [torch.nn.Parameter(torch.ones(256)) for _ in range(4)]
    swap = module.SwapOptimizer(torch.optim.AdamW(params), slices=4)
    for _ in range(2):
        for p in params:
            p.grad = torch.ones(256)
        swap.step()
    # The last load waits for one piece after the other, not for all of them before the first.
    order = ["wait" if hasattr(w, "position") else "copy" for w in streams.load.work[-8:]]
    assert order == ["wait", "copy"] * 4


def test_what_is_written_to_disk_waits_for_the_update(monkeypatch):
    """The lazy streams compute at once; a device would still be at it."""
    streams = LazyStreams(chance=0.0, strict=False)
    monkeypatch.setattr(module, "streams_of", lambda device: streams)
    swap = Training(OPTIMIZERS["AdamW"], swapped("disk", 3)).run(range(2))
    for _ in range(2):
        del streams.offload.work[streams.offload.done :]
        before, first = len(streams.compute.work), len(streams.offload.work)
        swap.step(4)
        # Between the copies of two slices there is a wait for an update that was later.
        seen, copied = before, set()
        for item in streams.offload.work[first:]:
            if isinstance(item, Event) and item.stream is streams.compute:
                seen = item.position
            elif isinstance(item, tuple):
                copied.add(seen)
        assert before not in copied and len(copied) == 3


@pytest.mark.parametrize("storage", ["host", "disk"])
def test_memory_of_the_slots_may_still_be_computed_with(monkeypatch, storage):
    """What the allocator gives has been freed, but perhaps not yet used up, by the computation."""
    streams = LazyStreams(chance=0.0, strict=False)
    monkeypatch.setattr(module, "streams_of", lambda device: streams)
    swap = Training(OPTIMIZERS["AdamW"], swapped(storage, 3)).run(range(2))
    before, first = len(streams.compute.work), len(streams.load.work)
    swap.step(4)
    work = streams.load.work[first:]
    copy = next(i for i, item in enumerate(work) if isinstance(item, tuple))
    waits = [w for w in work[:copy] if isinstance(w, Event) and w.stream is streams.compute]
    assert waits and waits[-1].position > before


# --- the checks themselves notice what is missing -------------------------------------------------


def train(steps=6):
    plain, swap = Training(OPTIMIZERS["AdamW"]), Training(OPTIMIZERS["AdamW"], swapped("host", 4))
    for i in range(steps):
        plain.step(i), swap.step(i)
        swap.optimizer._storage.streams.check_kept(addresses(swap.optimizer._storage))
        swap.optimizer._storage.streams.kept.clear()
    assert_same_bits(plain, swap)


def without(monkeypatch, method, condition):
    original = getattr(LazyStreams, method)

    def changed(self, stream, what):
        if not condition(self, stream, what):
            original(self, stream, what)

    monkeypatch.setattr(LazyStreams, method, changed)


MISSING = {
    "load waits for the slot": ("wait", lambda self, s, e: s is self.load),
    "update waits for load": ("wait", lambda self, s, e: s is self.compute),
    "offload waits for update": ("wait", lambda self, s, e: s is self.offload),
    "memory is kept": ("keep_until_done", lambda self, s, x: True),
}


@pytest.mark.parametrize("what", MISSING)
def test_a_missing_wait_is_noticed(monkeypatch, what):
    streams = LazyStreams(chance=0.0)
    monkeypatch.setattr(module, "streams_of", lambda device: streams)
    train()
    without(monkeypatch, *MISSING[what])
    with pytest.raises((AssertionError, Misuse)):
        train()

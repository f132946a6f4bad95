"""The storages on fake tensors of device "npu", with the real torch_npu."""

import inspect

import pytest
import torch
import torch.distributed as dist
import torch_npu
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Adam, AdamW
from torch.testing._internal.distributed.fake_pg import FakeStore

from swap_optimizer import SwapOptimizer, host, npu_swapped
from swap_optimizer import optimizer as module
from swapped_memory import SwappedMemory

NPU = torch.device("npu", 0)
SCHEMAS = {
    "empty_with_swapped_memory": (
        "(int[] size, *, ScalarType? dtype=None, Device? device=None) -> Tensor"
    ),
    "npu_apply_adam_w.out": (
        "(Scalar beta1_power, Scalar beta2_power, Scalar lr, Scalar weight_decay, Scalar beta1, "
        "Scalar beta2, Scalar epsilon, Tensor grad, Tensor? max_grad_norm, bool? amsgrad, "
        "bool? maximize, *, Tensor[] out) -> (Tensor, Tensor, Tensor)"
    ),
}


class Copies:
    """Streams that are not there: which copies there are, and from where to where."""

    load, offload = "load", "offload"

    def __init__(self):
        self.copies = []

    def current(self):
        return "compute"

    def record(self, stream):
        return stream

    def wait(self, stream, event):
        pass

    def synchronize(self, event):
        pass

    def keep_until_done(self, stream, x):
        assert x.device == NPU

    def copy(self, stream, target, source):
        self.copies.append((stream, source.device.type, target.device.type, target.nbytes))
        target.copy_(source, non_blocking=True)

    def seconds(self, start, end):
        return 0.0


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    # torch_npu asks the device for its name to find out what foreach is good for.
    monkeypatch.setattr(torch_npu.npu, "current_device", lambda: 0)
    monkeypatch.setattr(torch_npu.npu, "get_device_name", lambda index: "Ascend910_9392")
    with FakeTensorMode():
        yield


@pytest.fixture
def streams(monkeypatch):
    streams = Copies()
    monkeypatch.setattr(module, "streams_of", lambda device: streams)

    def views(buffer, entries):  # storages of fake tensors have no parts
        return {e: e.wrap(e.view(buffer)) for e in entries}

    monkeypatch.setattr(host, "tensors_in", views)
    return streams


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield dist.init_device_mesh("npu", (8,))
    dist.destroy_process_group()


def plain_params():
    return [nn.Parameter(torch.empty(64, 128, device=NPU)) for _ in range(6)]


def sharded_params(mesh):
    def one():
        local = torch.empty(8, 128, device=NPU)
        return nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))

    return [one() for _ in range(6)]


def step(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.empty_like(p)
    optimizer.step()


MAKES = {
    "AdamW": AdamW,
    "foreach": lambda p: AdamW(p, foreach=True),
    "fused": lambda p: AdamW(p, fused=True),
    "amsgrad": lambda p: Adam(p, amsgrad=True),
}


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "DTensor"])
@pytest.mark.parametrize("name", MAKES)
def test_host(streams, mesh, name, sharded):
    params = sharded_params(mesh) if sharded else plain_params()
    swap = SwapOptimizer(MAKES[name](params), slices=3)
    step(swap)
    assert {c[:3] for c in streams.copies} == {("offload", "npu", "cpu")}
    streams.copies.clear()
    step(swap)
    sizes = [s.nbytes for s in swap._slices]
    out = [("offload", "npu", "cpu", n) for n in sizes]
    into = [("load", "cpu", "npu", n) for n in sizes]
    assert streams.copies == [into[0], into[1], out[0], into[2], out[1], out[2]]
    stats = swap.stats()
    assert stats.device_peak_bytes == 2 * max(sizes) and stats.storage_bytes == sum(sizes)
    states = swap.state_dict()
    for state in states["state"].values():
        assert isinstance(state["step"], torch.Tensor)
        for key, value in state.items():
            if key != "step":
                assert isinstance(value, DTensor) == sharded
                local = value.to_local() if sharded else value
                assert local.device.type == "cpu"
    streams.copies.clear()
    swap.load_state_dict(states)
    assert {c[:3] for c in streams.copies} == {("offload", "npu", "cpu")}
    step(swap)


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema_is_the_one_we_write_against(name):
    operator, _, overload = name.partition(".")
    real = getattr(getattr(torch.ops.npu, operator), overload or "default")._schema
    assert str(real) == str(torch._C.parse_schema(f"npu::{name}{SCHEMAS[name]}"))
    for function in ("empty_with_swapped_memory", "npu_apply_adam_w"):
        assert callable(getattr(torch_npu, function))


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "DTensor"])
def test_npu_swapped(monkeypatch, mesh, sharded):
    """The real kernel's shape function; swapped memory is made up, and guarded."""
    memory = SwappedMemory(torch_npu.npu_apply_adam_w)
    monkeypatch.setattr(npu_swapped.importlib, "import_module", {"torch_npu": memory}.get)
    params = sharded_params(mesh) if sharded else plain_params()
    swap = SwapOptimizer(AdamW(params, lr=0.1, betas=(0.5, 0.25)), slices=3, storage="npu_swapped")
    with memory:
        step(swap)
        step(swap)
        updates = list(memory.calls)
        states = swap.state_dict()
        swap.load_state_dict(states)
        step(swap)
    assert len(updates) == 12
    for call, powers in ((updates[0], (1.0, 1.0)), (updates[6], (0.5, 0.25))):
        *scalars, grad, norm, amsgrad, maximize, (var, m, v) = call
        assert scalars == [*powers, 0.1, 0.01, 0.5, 0.25, 1e-8]
        assert (norm, amsgrad, maximize) == (None, False, False)
        assert not isinstance(grad, DTensor) and grad.shape == var.shape == m.shape == v.shape
        assert memory.is_swapped(m) and memory.is_swapped(v) and not memory.is_swapped(var)
    for state in states["state"].values():
        assert state["step"].device.type == "cpu"
        for key in ("exp_avg", "exp_avg_sq"):
            local = state[key].to_local() if sharded else state[key]
            assert local.device.type == "cpu" and isinstance(state[key], DTensor) == sharded
    assert swap.stats().state_bytes == 8 * 6 * 128 * (8 if sharded else 64)


def test_signatures_of_streams():
    """What is called on a device's streams and events is there."""
    for method in ("wait_event", "record_event", "synchronize"):
        assert hasattr(torch.Stream(NPU), method)
    assert hasattr(torch.Event(NPU, enable_timing=True), "elapsed_time")
    assert "device" in str(inspect.signature(torch.accelerator.current_stream))

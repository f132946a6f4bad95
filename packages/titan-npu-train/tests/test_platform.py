import logging
import math
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from titan_npu_train import platform
from titan_npu_train.platform import CPUDeviceModule, Platform
from titan_ranks import run_ranks


def run_fresh(code: str, **environment: str) -> str:
    """Run code in a new interpreter that sees no accelerator: a process has one platform."""
    env = {k: v for k, v in os.environ.items() if k != platform.ENVIRONMENT_VARIABLE}
    env |= {"CUDA_VISIBLE_DEVICES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} | environment
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def cpu_platform() -> Platform:
    return Platform("cpu", "cpu", CPUDeviceModule(), "gloo", needs_sum_reduction=True)


def test_torchtitan_runs_on_the_selected_platform_and_is_restored():
    run_fresh("""
        import torch
        from torchtitan.tools import utils
        from titan_npu_train import platform

        # What makes this file necessary. If one of these fails, drop the part that replaces it.
        assert (utils.device_type, utils.device_module) == ("cuda", torch.cuda)
        assert utils.get_peak_flops("a CPU") == 312e12

        stock = utils.get_peak_flops
        cpu = platform.select("cpu")
        assert platform.select() is cpu and platform.select("cpu") is cpu
        assert platform.current() is cpu
        assert (cpu.device_type, cpu.comm_backend, cpu.needs_sum_reduction) == ("cpu", "gloo", True)
        assert utils.get_peak_flops("a CPU") not in (0, 312e12)

        from torchtitan.components.metrics import build_device_memory_monitor
        from torchtitan.distributed.utils import device_type
        monitor = build_device_memory_monitor()
        stats = monitor.get_peak_stats()
        assert device_type == "cpu" and monitor.device_capacity > 2**28
        assert 0.01 < stats.max_reserved_gib < 64 and 0 < stats.max_reserved_pct < 100

        platform.deselect()
        assert (utils.device_type, utils.device_module) == ("cuda", torch.cuda)
        assert utils.get_peak_flops is stock
        assert torch.distributed.tensor._random._rng_tracker is None
        try:
            platform.current()
        except RuntimeError as error:
            assert "select()" in str(error)
        else:
            raise AssertionError("a platform is still selected")
    """)


def test_refused_selections():
    out = run_fresh(
        """
        import importlib.metadata, os
        from titan_npu_train import platform

        def attempt(name=None):
            try:
                print("selected", platform.select(name).name)
            except (ValueError, RuntimeError) as error:
                print(type(error).__name__, error)

        attempt()
        attempt("cuda")
        attempt("npu")
        os.environ["TITAN_NPU_PLATFORM"] = "cpu"
        attempt()
        attempt("cuda")
        platform.deselect()
        del os.environ["TITAN_NPU_PLATFORM"]
        attempt()
        platform.deselect()

        version = importlib.metadata.version
        importlib.metadata.version = lambda name: "0.4.0"
        attempt("cpu")
        importlib.metadata.version = version

        import torchtitan.tools.profiler
        attempt("cpu")
        assert torchtitan.tools.utils.device_type == "cuda", "half applied"
        """,
        TITAN_NPU_PLATFORM="tpu",
    )
    variable, cuda, npu, by_variable, second, by_default, version, late = out.splitlines()
    assert variable == "ValueError TITAN_NPU_PLATFORM must be one of cpu, cuda, npu, got 'tpu'"
    assert cuda.startswith("RuntimeError platform 'cuda' does not work here")
    assert npu.startswith("RuntimeError platform 'npu' does not work here: importing torch_npu")
    assert by_variable == by_default == "selected cpu"
    assert second.startswith("RuntimeError platform 'cpu' was selected before, 'cuda'")
    assert version.startswith("RuntimeError torchtitan 0.4.0 is installed")
    assert "too late: torchtitan.tools.profiler already copied" in late


def test_broken_torch_npu_is_reported_and_not_chosen(monkeypatch, caplog):
    monkeypatch.setattr(platform.importlib.util, "find_spec", lambda name: object())

    def broken(name):
        raise ImportError("libhccl.so: cannot open shared object file")

    monkeypatch.setattr(platform.importlib, "import_module", broken)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.WARNING):
        assert platform._best_available() == "cpu"
    assert "libhccl.so" in caplog.text


def test_peak_memory_follows_the_resident_set():
    cpu = cpu_platform()
    cpu.reset_peak_memory()
    before = cpu.peak_memory_bytes()
    block = torch.ones(2**28, dtype=torch.uint8)
    assert cpu.peak_memory_bytes() >= before + 0.9 * 2**28
    del block
    high = cpu.peak_memory_bytes()
    cpu.reset_peak_memory()
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the operating system does not reset a process's peak")
    assert cpu.peak_memory_bytes() < high - 0.9 * 2**28


def test_peak_memory_where_it_cannot_be_reset(monkeypatch, caplog):
    def refuse(self, text):
        raise PermissionError("read-only")

    platform._warn_no_reset.cache_clear()
    monkeypatch.setattr(platform.Path, "write_text", refuse)
    with caplog.at_level(logging.WARNING):
        CPUDeviceModule().reset_peak_memory_stats()
    assert "cannot be reset" in caplog.text


def test_capacity_is_bounded_by_the_control_group(monkeypatch):
    text = platform.Path.read_text
    limits = {"/sys/fs/cgroup/memory.max": "1073741824\n"}
    monkeypatch.setattr(
        platform.Path, "read_text", lambda self, *a: limits.get(str(self)) or text(self, *a)
    )
    assert CPUDeviceModule().get_device_properties().total_memory == 2**30
    limits["/sys/fs/cgroup/memory.max"] = "max\n"
    assert CPUDeviceModule().get_device_properties().total_memory > 2**30


def test_cpu_module_falls_back_to_torch_cpu_and_explains_what_is_missing():
    module = CPUDeviceModule()
    assert module.synchronize() is None
    assert module.current_device() == 0
    with pytest.raises(AttributeError, match="enable_memory_snapshot"):
        _ = module.memory
    assert not hasattr(module, "no_such_thing")


def test_measured_peak_is_stable_and_draws_no_random_numbers():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    platform._measure_matmul_flops.cache_clear()
    first = cpu_platform().peak_flops(torch.float32)
    assert 1e8 < first < 1e15
    assert cpu_platform().peak_flops(torch.float32) == first
    assert torch.equal(torch.get_rng_state(), state)


def test_npu_peak_is_published_or_unknown():
    def npu(name):
        module = SimpleNamespace(get_device_name=lambda: name)
        return Platform("npu", "npu", module, "hccl", needs_sum_reduction=True)

    assert npu("Ascend910_9392").peak_flops() == 376e12
    assert npu("Ascend910_9392").peak_flops(torch.float32) is None
    assert npu("Ascend950PR").peak_flops() is None
    assert math.isnan(platform._torchtitan_peak_flops(npu("Ascend950PR"))("Ascend950PR"))


def _fill_shards(rank):
    import torch.distributed as dist
    import torch.distributed.tensor._random as dtensor_random
    from torch.distributed.tensor import Replicate, Shard, empty

    mesh = dist.init_device_mesh("cpu", (2, 2))
    sharded, halved, whole = [Shard(0), Shard(0)], [Replicate(), Shard(1)], [Replicate()] * 2

    def draw(placements, generator=None):
        tensor = empty(8, 8, device_mesh=mesh, placements=placements)
        return tensor.normal_(generator=generator).to_local()

    supported = dtensor_random.is_rng_supported_mesh(mesh)
    dtensor_random._rng_tracker = None
    torch.manual_seed(5)
    stock = draw(sharded)
    dtensor_random._rng_tracker = platform._CPURandomTracker()
    torch.manual_seed(5)
    drawn = [draw(sharded), draw(halved), draw(whole), torch.rand(1)]
    generator = torch.Generator().manual_seed(7)
    drawn += [draw(sharded, generator), generator.get_state()]
    return supported, stock.numpy(), [t.numpy() for t in drawn]


@pytest.mark.distributed
def test_shards_of_a_random_tensor_differ_and_replicas_agree():
    ranks = run_ranks(_fill_shards, 4)
    same = np.array_equal
    assert all(not supported for supported, _, _ in ranks)
    stock = [stock for _, stock, _ in ranks]
    assert all(same(s, stock[0]) for s in stock), "torch tells shards apart: drop the tracker"

    sharded, halved, whole, after, own, state = zip(*(drawn for _, _, drawn in ranks), strict=True)
    for shards in (sharded, own):
        assert not any(same(shards[i], shards[j]) for i in range(4) for j in range(i))
    assert same(halved[0], halved[2]) and same(halved[1], halved[3])
    assert not same(halved[0], halved[1])
    for replicas in (whole, after, state):
        assert all(same(r, replicas[0]) for r in replicas)

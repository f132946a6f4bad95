"""The device platform of a process: cpu, cuda or npu, chosen once, before the trainer exists.

``select()`` is called by the entry point before ``torchtitan.trainer`` or any model code is
imported. Everything torchtitan 0.3 needs in order to run where it does not run by itself (CPU,
and the figures it would otherwise invent) is set here and nowhere else; ``deselect()`` undoes it.

What is set in ``torchtitan.tools.utils``, and why:

``device_type``, ``device_module``
    torchtitan computes both at import and offers no setter. On a machine without an accelerator
    they are "cuda" and ``torch.cuda``, so the first tensor fails. Five torchtitan modules copy
    the names when they are imported, which is why the choice must come first: a choice that
    comes too late is refused, never half applied.
``get_peak_flops`` (cpu and npu)
    torchtitan falls back to an A100's 312 TFLOP/s for any device it does not know, and MFU is
    computed from that. Here it is measured (cpu), published (npu), or NaN (unknown).

And in ``torch.distributed.tensor._random`` (cpu):

``_rng_tracker``
    DTensor's random operators know only accelerators. On CPU every rank fills its shard from the
    same generator state, so all shards of a weight start out as copies of each other: row i of
    the embedding equals row i + vocab/2, and each rank's experts equal the next rank's.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed.tensor._random as dtensor_random

__all__ = ["CPUDeviceModule", "Platform", "current", "deselect", "select"]

logger = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE = "TITAN_NPU_PLATFORM"
NAMES = ("cpu", "cuda", "npu")

# Dense bf16/fp16 peak of one die in FLOP/s, by torch.npu.get_device_name(). The figure is the one
# published for the dies of the Ascend 910C in the CloudMatrix384 paper (arXiv 2506.12708: 376
# TFLOP/s a die, 752 a package); it is assumed to hold for the two full-size Atlas A3 parts.
# Parts with fewer cores have no published figure and get none.
_NPU_PEAK_FLOPS = {"Ascend910_9391": 376e12, "Ascend910_9392": 376e12}


@dataclasses.dataclass(frozen=True)
class Platform:
    """What the rest of the package may know about the device.

    Attributes:
        name: "cpu", "cuda" or "npu".
        device_type: the ``torch.device`` type.
        device_module: ``torch.cuda``, ``torch.npu``, or for CPU a :class:`CPUDeviceModule`.
        comm_backend: the ``torch.distributed`` backend: "gloo", "nccl" or "hccl".
        needs_sum_reduction: the backend has neither AVG nor PREMUL_SUM, so that gradients must be
            reduced by sums with an explicit division.
    """

    name: str
    device_type: str
    device_module: Any
    comm_backend: str
    needs_sum_reduction: bool

    def peak_flops(self, dtype: torch.dtype = torch.bfloat16) -> float | None:
        """Peak dense matmul rate of one device in FLOP/s, or None where no figure is known.

        cpu: measured once per process and dtype by a short matrix product, with the threads this
        process has. npu: the published figure of the die, bf16 and fp16 only. cuda: torchtitan's
        table, bf16 and fp16 only (it assumes an A100, with a warning, for an unknown GPU).
        """
        if self.name == "cpu":
            return _measure_matmul_flops(dtype)
        if dtype not in (torch.bfloat16, torch.float16):
            return None
        if self.name == "npu":
            return _NPU_PEAK_FLOPS.get(self.device_module.get_device_name())
        from torchtitan.tools import utils

        return utils.get_peak_flops(self.device_module.get_device_name())

    def peak_memory_bytes(self) -> int:
        """Peak memory of this process since :meth:`reset_peak_memory`, in bytes.

        cuda, npu: what the caching allocator reserved on the device. cpu: the resident set, which
        includes the interpreter and libraries; where the operating system cannot reset it (see
        :meth:`CPUDeviceModule.reset_peak_memory_stats`), the peak since the process began.
        """
        return int(self.device_module.memory_stats()["reserved_bytes.all.peak"])

    def reset_peak_memory(self) -> None:
        self.device_module.reset_peak_memory_stats()


@dataclasses.dataclass(frozen=True)
class CPUProperties:
    """name: processor model. total_memory: bytes this process may use."""

    name: str
    total_memory: int


class CPUDeviceModule:
    """``torch.cpu`` with the parts of an accelerator's module that torchtitan asks for.

    Every figure is a real one: memory is this process's resident set, capacity the machine's (or
    the control group's) memory. Names not defined here come from ``torch.cpu``.
    """

    def __init__(self) -> None:
        self._properties: CPUProperties | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(torch.cpu, name)
        except AttributeError:
            hint = ""
            if name == "memory":
                hint = (
                    ": memory snapshots record a device's caching allocator, which the CPU does "
                    "not have; switch off profiler.enable_memory_snapshot"
                )
            raise AttributeError(f"the cpu platform has no '{name}'{hint}") from None

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        # torch.cpu says "cpu"; torchtitan passes this on as a device index (barrier).
        return 0

    def get_device_name(self, device: Any = None) -> str:
        return self.get_device_properties(device).name

    def get_device_properties(self, device: Any = None) -> CPUProperties:
        del device
        if self._properties is None:
            self._properties = CPUProperties(_processor_name(), _memory_capacity())
        return self._properties

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """Resident set, now and at its peak, under the names of the CUDA allocator, in bytes.

        "active" and "reserved" are the same number: the CPU allocator keeps no pool to report.
        """
        del device
        now, peak = _resident_bytes()
        stats = {"num_alloc_retries": 0, "num_ooms": 0}
        for kind in ("allocated", "active", "reserved"):
            stats[f"{kind}_bytes.all.current"] = now
            stats[f"{kind}_bytes.all.peak"] = peak
        return stats

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Start a new peak at the present resident set.

        Linux does this for a process on request. Elsewhere, or where /proc is read-only, the peak
        cannot be reset and remains that of the whole process.
        """
        del device
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            _warn_no_reset()

    def empty_cache(self) -> None:
        """Nothing to do: the CPU allocator keeps no cache."""


class _CPURandomTracker(dtensor_random._RNGStateTracker):
    """Gives each shard of a DTensor its own random numbers on CPU, and replicas the same ones.

    Every rank must enter with the same generator state, as DTensor asks of accelerators too. The
    shard's stream is seeded by one draw from that state and the shard's index, so all ranks leave
    with the same state again. Tensors that are not sharded are filled exactly as without it.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    @contextlib.contextmanager
    def _distribute_region(
        self, spec: Any, generator: torch.Generator | None = None
    ) -> Generator[None]:
        source = torch.default_generator if generator is None else generator
        shard, shards = 0, 1
        for placement, coordinate, size in zip(
            spec.placements, spec.mesh.get_coordinate(), spec.mesh.shape, strict=True
        ):
            if not (placement.is_replicate() or placement.is_partial()):
                shard = shard * size + coordinate
                shards *= size
        if shards == 1 and generator is None:
            yield
            return
        # The operator itself always draws from the default generator, so that one is lent out.
        seed = int(torch.randint(2**62, (), generator=source, dtype=torch.int64))
        state = torch.default_generator.get_state()
        torch.default_generator.manual_seed((seed + shard * 0x9E3779B97F4A7C15) % 2**63)
        try:
            yield
        finally:
            torch.default_generator.set_state(state)


def select(name: str | None = None) -> Platform:
    """Choose the platform of this process and prepare torchtitan for it.

    Args:
        name: "cpu", "cuda" or "npu". None takes the environment variable TITAN_NPU_PLATFORM, and
            without that the best there is: npu if torch_npu works, else cuda, else cpu. Once a
            platform is chosen, None returns it.

    Raises:
        ValueError: an unknown name.
        RuntimeError: the platform does not work on this machine; another one was chosen before;
            torchtitan's version is not one this file knows; or torchtitan modules that copied the
            default device were imported first.
    """
    global _selected
    source = "name"
    if name is None and _selected is None and os.environ.get(ENVIRONMENT_VARIABLE):
        name, source = os.environ[ENVIRONMENT_VARIABLE], ENVIRONMENT_VARIABLE
    if name is not None and name not in NAMES:
        raise ValueError(f"{source} must be one of {', '.join(NAMES)}, got {name!r}")
    if _selected is not None:
        if name in (None, _selected.name):
            return _selected
        raise RuntimeError(
            f"platform '{_selected.name}' was selected before, '{name}' was asked for now: "
            "a process has one platform; select it once, at its start"
        )
    if name is None:
        name = _best_available()
    if reason := _unavailable(name):
        raise RuntimeError(f"platform '{name}' does not work here: {reason}")

    platform = _describe(name)
    _install(platform)
    _selected = platform
    return platform


def current() -> Platform:
    """The selected platform.

    Raises:
        RuntimeError: none was selected yet.
    """
    if _selected is None:
        raise RuntimeError("no platform selected: call titan_npu_train.platform.select() first")
    return _selected


def deselect() -> None:
    """Undo :func:`select`. torchtitan modules imported in between keep the device they copied."""
    global _selected
    if _selected is None:
        return
    for module, attribute, value in reversed(_originals):
        setattr(module, attribute, value)
    _originals.clear()
    _selected = None


_selected: Platform | None = None
_originals: list[tuple[ModuleType, str, Any]] = []


def _describe(name: str) -> Platform:
    if name == "cpu":
        return Platform("cpu", "cpu", CPUDeviceModule(), "gloo", needs_sum_reduction=True)
    if name == "cuda":
        return Platform("cuda", "cuda", torch.cuda, "nccl", needs_sum_reduction=False)
    npu = torch.get_device_module("npu")
    return Platform("npu", "npu", npu, "hccl", needs_sum_reduction=True)


def _best_available() -> str:
    if importlib.util.find_spec("torch_npu") is not None:
        reason = _unavailable("npu")
        if reason is None:
            return "npu"
        logger.warning("torch_npu is installed but not used: %s", reason)
    return "cuda" if torch.cuda.is_available() else "cpu"


def _unavailable(name: str) -> str | None:
    """Why the platform does not work on this machine; None if it does."""
    if name == "cuda" and not torch.cuda.is_available():
        return "torch.cuda.is_available() is False (no GPU, no driver, or a CPU build of torch)"
    if name == "npu":
        try:
            importlib.import_module("torch_npu")
        except (ImportError, OSError, RuntimeError) as error:
            return f"importing torch_npu failed with {type(error).__name__}: {error}"
        if not torch.get_device_module("npu").is_available():
            return "torch_npu is imported, but torch.npu.is_available() is False"
    return None


def _install(platform: Platform) -> None:
    version = importlib.metadata.version("torchtitan")
    if version.split(".")[:2] != ["0", "3"]:
        raise RuntimeError(
            f"torchtitan {version} is installed; the platform layer knows 0.3 and would have to "
            "guess which of its attributes hold the device"
        )
    from torchtitan.tools import utils

    if late := _modules_with_another_device(utils, platform):
        raise RuntimeError(
            f"select('{platform.name}') came too late: {', '.join(late)} already copied "
            f"torchtitan's default device ('{utils.device_type}') at import; call select() before "
            "importing torchtitan.trainer or any model"
        )
    replacements: list[tuple[ModuleType, str, Any]] = [
        (utils, "device_type", platform.device_type),
        (utils, "device_module", platform.device_module),
    ]
    if platform.name != "cuda":
        replacements.append((utils, "get_peak_flops", _torchtitan_peak_flops(platform)))
    if platform.name == "cpu":
        replacements.append((dtensor_random, "_rng_tracker", _CPURandomTracker()))
    for module, attribute, value in replacements:
        _originals.append((module, attribute, getattr(module, attribute)))
        setattr(module, attribute, value)


def _modules_with_another_device(utils: ModuleType, platform: Platform) -> list[str]:
    """torchtitan modules that hold a device_type or device_module other than the platform's."""
    wanted = {"device_type": platform.device_type, "device_module": platform.device_module}
    late = []
    for name, module in list(sys.modules.items()):
        if not name.startswith("torchtitan.") or module is utils:
            continue
        held = vars(module)
        if any(key in held and held[key] != value for key, value in wanted.items()):
            late.append(name)
    return sorted(late)


def _torchtitan_peak_flops(platform: Platform) -> Callable[[str], float]:
    def get_peak_flops(device_name: str) -> float:
        del device_name
        if platform.name == "cpu":
            # Not every CPU is faster in bf16; the ceiling of the machine is the better of the two.
            return max(_measure_matmul_flops(torch.bfloat16), _measure_matmul_flops(torch.float32))
        peak = platform.peak_flops()
        # torchtitan divides by the result; NaN makes its MFU say "unknown" too.
        return math.nan if peak is None else peak

    return get_peak_flops


@functools.cache
def _measure_matmul_flops(dtype: torch.dtype) -> float:
    """FLOP/s of a 1024^3 matrix product on the CPU: the best of those that fit into half a second.

    The best, because whatever else runs on the machine only makes single ones slower. No random
    numbers are drawn: a run's seed means the same with and without it.
    """
    n = 1024
    a_NN = torch.full((n, n), 0.5, dtype=dtype, device="cpu")
    with torch.inference_mode():
        torch.mm(a_NN, a_NN)  # warm-up
        best = math.inf
        end = time.perf_counter() + 0.5
        while best == math.inf or time.perf_counter() < end:
            start = time.perf_counter()
            torch.mm(a_NN, a_NN)
            best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return f"{os.uname().machine} CPU"


def _memory_capacity() -> int:
    """Physical memory, or less where a control group allows this process less, in bytes."""
    capacity = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in (
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    ):
        try:
            text = Path(limit).read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # version 2 says "max" where there is no limit
            capacity = min(capacity, int(text))
    return capacity


def _resident_bytes() -> tuple[int, int]:
    """Resident set of this process in bytes: now, and the highest since the last reset."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        # Not Linux: getrusage counts kilobytes, but bytes on macOS, and knows only the peak.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak *= 1 if sys.platform == "darwin" else 1024
        return peak, peak
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return _kilobytes(fields["VmRSS"]), _kilobytes(fields["VmHWM"])


def _kilobytes(field: str) -> int:
    return int(field.split()[0]) * 1024


@functools.cache
def _warn_no_reset() -> None:
    logger.warning("peak memory cannot be reset here: it is reported since the process began")

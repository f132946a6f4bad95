"""What a figure depends on: the machine, the versions, who else was working."""

import importlib.metadata
import os
import platform
import time
from pathlib import Path
from typing import Any

import psutil
import torch

import npu_dsa_kernels

PEERS = (
    *("torch", "triton", "torchtitan", "megatron-core", "npu-dsa-kernels", "titan-npu-train"),
    *("torch-npu", "tilelang", "sgl-flash-mla", "flash-mla"),
)
# Load average at the start above which others are at work.
QUIET = 0.5


def facts(threads: int, device: str) -> dict[str, Any]:
    """Everything worth knowing when reading the figures elsewhere."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cpu": _cpu("model name") or platform.processor() or platform.machine(),
        "cpu_flags": sorted(
            flag
            for flag in (_cpu("flags") or _cpu("Features") or "").split()
            if flag.startswith(("avx", "amx", "fma", "asimd", "sve", "bf16"))
        ),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": psutil.cpu_count(),
        "threads": threads,
        "memory_bytes": psutil.virtual_memory().total,
        "device": _device(device),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in PEERS if (version := _version(name))},
        "npu_dsa_kernels_backends": npu_dsa_kernels.backends(),
        "load_average": list(os.getloadavg()),
    }


def load() -> float:
    return os.getloadavg()[0]


def _device(device: str) -> str:
    if device == "cpu":
        return device
    return f"{device}: {torch.get_device_module(device).get_device_name()}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu(field: str) -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return None

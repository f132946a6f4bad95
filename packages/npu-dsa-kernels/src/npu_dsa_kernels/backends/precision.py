"""The precision in which every backend computes."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything below it."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def no_autocast(x: Tensor) -> AbstractContextManager:
    """Keep an ambient autocast from turning the fp32 matmuls of an operator into bf16 ones."""
    if torch.amp.is_autocast_available(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()

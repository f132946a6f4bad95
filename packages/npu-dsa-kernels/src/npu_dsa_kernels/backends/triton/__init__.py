"""The "triton" backend: one source of kernels for CUDA, Ascend A3, and Triton's interpreter.

Importing this module imports no triton; `status` does, and so does the first use of an operator.
"""

import importlib
from collections.abc import Callable
from typing import Any

from npu_dsa_kernels import checks
from npu_dsa_kernels.backends.triton.availability import AVAILABLE, devices, status, takes

__all__ = ["devices", "status", "takes"]

_MODULES = {
    "attention_target": "dsa",
    "indexer_kl_loss": "dsa",
    "indexer_kl_loss_backward": "dsa",
    "lightning_indexer": "dsa",
    "sparse_attention": "dsa",
    "sparse_attention_backward": "dsa",
    "sparse_attention_with_target": "dsa",
    "hadamard": "base",
    "moe_permute": "base",
    "moe_permute_backward": "base",
    "moe_unpermute": "base",
    "moe_unpermute_backward": "base",
    "rms_norm": "base",
    "rms_norm_backward": "base",
    "rotary_mul": "base",
    "rotary_mul_backward": "base",
}

_WITHOUT_KERNEL = {
    "dense_attention",
    "dense_attention_backward",
    "dense_indexer_kl_loss",
    "dense_indexer_kl_loss_backward",
    "grouped_matmul",
    "grouped_matmul_backward",
    "swiglu",
    "swiglu_backward",
}


def __getattr__(name: str) -> Callable[..., Any]:
    """The implementation of an operator, imported with triton at its first use."""
    if name not in _MODULES and name not in _WITHOUT_KERNEL:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if (said := status()) != AVAILABLE:
        raise checks.bad("backend", "'triton'", f"it is {said}")
    if name in _WITHOUT_KERNEL:
        operator = name.removesuffix("_backward")
        want = f"it has no kernel for {operator}; backend='torch' runs on the same device"
        raise checks.bad("backend", "'triton'", want)
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)

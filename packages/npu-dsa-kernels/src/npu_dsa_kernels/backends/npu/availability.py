"""Whether torch_npu's fused operators can be called here, and what is missing if not."""

import ctypes
import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib import metadata

import torch

SUPPORTED = ((2, 13), (2, 15))
"""torch_npu, from and below."""

OPERATORS = (
    "npu_dense_lightning_indexer_grad_kl_loss",
    "npu_dense_lightning_indexer_softmax_lse",
    "npu_fusion_attention",
    "npu_fusion_attention_grad",
    "npu_grouped_matmul",
    "npu_lightning_indexer",
    "npu_moe_token_permute",
    "npu_moe_token_permute_grad_v2",
    "npu_moe_token_unpermute",
    "npu_moe_token_unpermute_grad_v2",
    "npu_rms_norm",
    "npu_rms_norm_backward",
    "npu_rotary_mul",
    "npu_sparse_flash_attention",
    "npu_sparse_flash_attention_grad",
    "npu_sparse_lightning_indexer_grad_kl_loss",
    "npu_swiglu",
    "npu_swiglu_backward",
)

AVAILABLE = "available"
_INSTALL = 'pip install "npu-dsa-kernels[npu]"'


_found: str | None = None


def _constant_when_traced(function: Callable[[], str]) -> Callable[[], str]:
    """Decorating imports torch._dynamo: seconds that are spent only where torch_npu is."""
    if importlib.util.find_spec("torch_npu") is None:
        return function
    return torch.compiler.assume_constant_result(function)


@_constant_when_traced
def status() -> str:
    """``"available"``, or the reason why not. Found out once for the process."""
    global _found
    if _found is None:
        checks = (_installed, _version, _runtime, _imported, _device, _operators)
        reason = next((reason for check in checks if (reason := check())), None)
        _found = AVAILABLE if reason is None else f"not usable here: {reason}"
    return _found


def _installed() -> str | None:
    if "torch_npu" in sys.modules or importlib.util.find_spec("torch_npu") is not None:
        return None
    return f"torch_npu is not installed: {_INSTALL}"


def _version() -> str | None:
    try:
        version = metadata.version("torch-npu")
    except metadata.PackageNotFoundError:
        version = getattr(sys.modules.get("torch_npu"), "__version__", "0.0")
    lowest, above = SUPPORTED
    if not lowest <= _minor(version) < above:
        wanted = f">={lowest[0]}.{lowest[1]},<{above[0]}.{above[1]}"
        return f"torch-npu {version} is installed, {wanted} is needed: {_INSTALL}"
    if _minor(version) != _minor(torch.__version__):
        return (
            f"torch-npu {version} does not go with torch {torch.__version__}: both must be of the "
            f"same minor version, {_INSTALL}"
        )
    return None


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _runtime() -> str | None:
    """Look for CANN first: a torch_npu that fails half way leaves torch with half a device."""
    if "torch_npu" in sys.modules:
        return None
    try:
        ctypes.CDLL("libascendcl.so")
    except OSError as error:
        return (
            "CANN's libraries are not on the library path: install CANN 8.5 or newer and source "
            f"its set_env.sh before Python starts ({error})"
        )
    return None


def _imported() -> str | None:
    try:
        importlib.import_module("torch_npu")
    except Exception as error:  # whatever a vendor's import may raise
        return f"torch_npu cannot be imported: {type(error).__name__}: {error}"
    return None


def _device() -> str | None:
    npu = getattr(torch, "npu", None)
    if npu is None or not npu.is_available():
        return "torch_npu sees no NPU (look at npu-smi info and ASCEND_RT_VISIBLE_DEVICES)"
    return None


def _operators() -> str | None:
    missing = [name for name in OPERATORS if not hasattr(torch.ops.npu, name)]
    if missing:
        return f"this torch_npu lacks {', '.join(missing)}: a newer torch-npu is needed"
    return None

"""Whether the Triton kernels can run here, and what is missing if not."""

import importlib.util
import os

import torch

AVAILABLE = "available"
_INTERPRET = "TRITON_INTERPRET=1"

_found: str | None = None


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def status() -> str:
    """``"available"``, or the reason why not. Found out once for the process."""
    global _found
    if torch.compiler.is_compiling():
        return AVAILABLE  # the operators' bodies, which are not traced, ask again
    if _found is None:
        reason = _missing()
        _found = AVAILABLE if reason is None else f"not usable here: {reason}"
    return _found


def _missing() -> str | None:
    try:
        import triton
        from triton import language
    except ModuleNotFoundError as error:
        if error.name != "triton":
            return f"triton cannot be imported: {error}"
        return (
            'Triton is not installed: pip install "npu-dsa-kernels[triton]", '
            "or triton-ascend on an NPU"
        )
    except Exception as error:  # whatever a vendor's import may raise
        return f"triton cannot be imported: {type(error).__name__}: {error}"
    # Triton's own functions are compiled or interpreted from its first import on.
    if interpreted() is isinstance(language.sum, triton.JITFunction):
        return f"{_INTERPRET} was changed after triton was imported: set it before Python starts"
    if interpreted():
        return None
    if torch.cuda.is_available():
        return None
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        if importlib.util.find_spec("triton.backends.ascend") is None:
            return "this Triton has no Ascend backend: pip install triton-ascend"
        return None
    return f"there is no CUDA device and no NPU ({_INTERPRET} runs the kernels slowly on CPU)"


def devices() -> str:
    """Where tensors must be, in words."""
    return f"CPU, since {_INTERPRET}" if interpreted() else "a CUDA device or an NPU"


def takes(device: torch.device) -> bool:
    """Whether tensors of `device` can be given to the kernels, if they are available at all."""
    return device.type in (("cpu", "meta") if interpreted() else ("cuda", "npu", "meta"))

"""Which implementation runs an operator, and why the others do not."""

import os
from types import ModuleType

import torch

from npu_dsa_kernels import checks
from npu_dsa_kernels.backends import blocked, compiled, npu, triton
from npu_dsa_kernels.backends.npu import limits

ENVIRONMENT_VARIABLE = "NPU_DSA_BACKEND"

# Backends behind the custom operators. "reference" is not among them: it is plain differentiable
# torch code and needs no operator of its own.
_KERNELS: dict[str, ModuleType] = {"torch": blocked, "triton": triton, "npu": npu}

_NAMES = ("reference", "torch", "triton", "npu", "compiled")


def backends() -> dict[str, str]:
    """Every backend by name: ``"available"``, or the reason why it is not.

    ``reference``: the formulas as written, over all S x T scores, differentiated by autograd.
    ``torch``: blocked over queries on any device, memory linear in the sequence length.
    ``compiled``: no backend of its own; which compiled kernels serve ``torch`` on CPU, or why none.
    ``triton``: fused kernels for CUDA and, with triton-ascend, for NPUs; on CPU in Triton's
    interpreter, for tests, if ``TRITON_INTERPRET=1`` is set before Python starts. ``npu``:
    torch_npu's fused operators.

    The default is ``npu`` for tensors on an NPU and ``torch`` for all others; where ``npu`` is not
    available, or does not take some argument, an error says so, since a default that quietly ran
    something slower would be the worse one. The environment variable ``NPU_DSA_BACKEND`` overrides
    the default, and the `backend` argument overrides both.

    To find out, torch_npu and triton are imported if they are installed.
    """
    return {name: _status(name) for name in _NAMES}


def _status(name: str) -> str:
    if name == "npu":
        return npu.status()
    if name == "compiled":
        return compiled.status()
    return triton.status() if name == "triton" else "available"


def resolve(backend: str | None, device: torch.device) -> str:
    """The backend to run on `device`: the argument, else the environment, else the default.

    Raises:
        ValueError: the name is unknown, or the backend is not available or not for `device`.
    """
    source = "backend"
    if backend is None:
        backend = os.environ.get(ENVIRONMENT_VARIABLE) or None
        source = ENVIRONMENT_VARIABLE
    if backend is None:
        source = f"backend (the default for {device.type})"
        backend = "npu" if device.type == "npu" else "torch"
    if backend not in _NAMES:
        raise checks.bad(source, repr(backend), f"expected one of {', '.join(_NAMES)}")
    status = _status(backend)
    if status != "available":
        usable = [name for name in ("reference", *_KERNELS) if _status(name) == "available"]
        want = f"it is {status} (available: {', '.join(usable)})"
        raise checks.bad(source, repr(backend), want)
    if backend == "npu" and device.type not in (limits.current().device, "meta"):
        raise checks.bad(source, "'npu'", f"expected tensors on an NPU, these are on {device}")
    if backend == "triton" and not triton.takes(device):
        want = f"expected tensors on {triton.devices()}, these are on {device}"
        raise checks.bad(source, "'triton'", want)
    return backend


def kernels(backend: str) -> ModuleType:
    """The module that implements the custom operators for `backend`."""
    return _KERNELS[backend]

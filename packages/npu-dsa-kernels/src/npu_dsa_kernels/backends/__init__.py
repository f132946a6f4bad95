"""Which implementation runs an operator, and why the others do not."""

import os
from types import ModuleType

import torch

from npu_dsa_kernels import checks
from npu_dsa_kernels.backends import blocked

ENVIRONMENT_VARIABLE = "NPU_DSA_BACKEND"

# Backends behind the custom operators. "reference" is not among them: it is plain differentiable
# torch code and needs no operator of its own.
_KERNELS: dict[str, ModuleType] = {"torch": blocked}

_STATUS = {
    "reference": "available",
    "torch": "available",
    "triton": "not in this version: no Triton kernels are shipped yet; use 'torch'",
    "npu": "not in this version: torch_npu's fused operators are not bound yet; use 'torch'",
}


def backends() -> dict[str, str]:
    """Every backend by name: ``"available"``, or the reason why it is not.

    ``reference``: the formulas as written, over all S x T scores, differentiated by autograd.
    ``torch``: blocked over queries on any device, memory linear in the sequence length.
    ``triton``, ``npu``: fused kernels. The default is the best one available for the device of
    the arguments; the environment variable ``NPU_DSA_BACKEND`` overrides the default, and the
    `backend` argument overrides both.
    """
    return dict(_STATUS)


def resolve(backend: str | None, device: torch.device) -> str:
    """The backend to run on `device`: the argument, else the environment, else the default.

    Raises:
        ValueError: the name is unknown or the backend is not available.
    """
    source = "backend"
    if backend is None:
        backend = os.environ.get(ENVIRONMENT_VARIABLE) or None
        source = ENVIRONMENT_VARIABLE
    if backend is None:
        return "torch"
    status = _STATUS.get(backend)
    if status is None:
        raise checks.bad(source, repr(backend), f"expected one of {', '.join(_STATUS)}")
    if status != "available":
        usable = [name for name, s in _STATUS.items() if s == "available"]
        raise checks.bad(source, repr(backend), f"it is {status} (available: {', '.join(usable)})")
    return backend


def kernels(backend: str) -> ModuleType:
    """The module that implements the custom operators for `backend`."""
    return _KERNELS[backend]

"""Runs backend "npu" on fake tensors of device "npu", through the real operators of torch_npu."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch_npu  # noqa: F401 - it registers the device and the operators
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten
from torch_npu.op_plugin.meta import _meta_registrations as shapes

import npu_operators
from npu_dsa_kernels.backends import blocked, kernels
from npu_dsa_kernels.backends.npu import sequences

DEVICE = torch.device("npu", 0)

# Its shape function starts the device to find out whether to warn about compilation, once.
shapes._npu_fusion_attention_warning_printed = True


class Mismatch(AssertionError):
    """Our fake kernel says something else than the real operators."""


class Contract(TorchDispatchMode):
    """Follows our operators into their bodies, and checks every call of torch_npu's.

    Under fake tensors an operator of ours would stop at its fake kernel. Here its body runs, too,
    down to the real operators' shape functions, and both must agree. A call of a real operator is
    first checked against the stated limits, which the shape functions do not know.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.operators: list[str] = []
        self.torch_operators: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if func.namespace == "npu":
            self.calls.append(name)
            npu_operators.check(name, args, kwargs)
            return func(*args, **kwargs)
        if func.namespace == "aten":
            self.torch_operators.add(func.name())
        if func.namespace != "npu_dsa" or args[-1] != "npu":
            return func(*args, **kwargs)
        self.operators.append(name)
        promised = func(*args)
        with self:
            real = getattr(kernels("npu"), name)(*args[:-1])
        self._compare(name, promised, real)
        return real

    def _compare(self, name: str, promised: object, real: object) -> None:
        pairs = zip(tree_flatten(promised)[0], tree_flatten(real)[0], strict=True)
        for i, (ours, theirs) in enumerate(pairs):
            for what in ("shape", "dtype", "device"):
                a, b = getattr(ours, what), getattr(theirs, what)
                if a != b:
                    raise Mismatch(f"{name}, output {i}: {what} {a} promised, {b} given")
            if ours.stride() != theirs.stride() and ours.numel():
                strides = f"{ours.stride()} promised, {theirs.stride()} given"
                raise Mismatch(f"{name}, output {i}: strides {strides}")


_bounds: dict[int, Tensor] = {}


def _plan(bounds: Tensor, T: int) -> sequences.Plan:
    """The plan of the real bounds that fake ones stand for, with fake tensors in it."""
    with _disable_current_modes():
        plan = sequences._make(_bounds[id(bounds)], T, torch.device("cpu"))
    return _fake(plan)


def _fake(x):
    if isinstance(x, Tensor):
        return torch.empty(x.shape, dtype=x.dtype, device=DEVICE)
    if isinstance(x, list) and x and dataclasses.is_dataclass(x[0]):
        return [_fake(item) for item in x]
    if dataclasses.is_dataclass(x):
        values = {f.name: _fake(getattr(x, f.name)) for f in dataclasses.fields(x)}
        return type(x)(**values)
    return x


@contextmanager
def contract(monkeypatch) -> Iterator[Contract]:
    """Tensors made inside are fake; what runs inside is recorded and checked."""
    monkeypatch.setattr(sequences, "plan", _plan)
    with FakeTensorMode(), Contract() as mode:
        yield mode
    _bounds.clear()
    blocked._hadamard_matrix.cache_clear()  # fake tensors of another mode do not mix


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=DEVICE, requires_grad=grad)


def fake_bounds(make: Callable[[], Tensor]) -> Tensor:
    """A fake tensor that stands for the real one that `make` returns."""
    with _disable_current_modes():
        bounds = make()
    fake = torch.empty(bounds.shape, dtype=bounds.dtype, device=DEVICE)
    _bounds[id(fake)] = bounds
    return fake

"""Swapped memory of an NPU, as its documentation limits it, for where there is none."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALLOWED = {"aten::zero_", "aten::fill_.Scalar", "npu::npu_apply_adam_w.out"}


class Forbidden(AssertionError):
    """An operator that cannot use swapped memory."""


class SwappedMemory(TorchDispatchMode):
    """torch_npu's two functions, and no operator but those allowed on what the first one gives.

    Args:
        apply: npu_apply_adam_w.
    """

    def __init__(self, apply: Callable[..., Any]) -> None:
        super().__init__()
        self.apply = apply
        self.swapped: list[Tensor] = []
        self.calls: list[tuple[Any, ...]] = []
        self._inside = False

    def empty_with_swapped_memory(self, size, *, dtype=None, device=None) -> Tensor:
        x = torch.empty(list(size), dtype=dtype, device=device)
        self.swapped.append(x)
        return x

    def npu_apply_adam_w(self, *arguments, out) -> Any:
        self.calls.append((*arguments, out))
        self._inside = True
        try:
            return self.apply(*arguments, out=out)
        finally:
            self._inside = False

    def is_swapped(self, x: object) -> bool:
        return any(x is y for y in self.swapped)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        used = any(self.is_swapped(x) for x in tree_leaves((args, kwargs)))
        if used and not self._inside and func.name() not in ALLOWED:
            raise Forbidden(func.name())
        return func(*args, **kwargs)


def apply_adam_w(
    beta1_power, beta2_power, lr, weight_decay, beta1, beta2, epsilon, grad, max_grad_norm,
    amsgrad, maximize, *, out,
):  # fmt: skip
    """What the kernel computes, by its documentation; the powers are those of the step before."""
    assert max_grad_norm is None and not amsgrad and not maximize
    var, m, v = out
    m.copy_(m * beta1 + (1 - beta1) * grad)
    v.copy_(v * beta2 + (1 - beta2) * grad * grad)
    denominator = (v / (1 - beta2_power * beta2)).sqrt() + epsilon
    var.copy_(var * (1 - lr * weight_decay) - lr * m / (1 - beta1_power * beta1) / denominator)
    return out

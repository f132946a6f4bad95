"""The kernels at the model's widths, on a CUDA device, against the definitions in float64.

The cases are those of the Ascend gate: indices outside of the tensors, rows without keys, dropped
slots, ties. What the package's own tests have is smaller, and float32.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ascend.cases import CASES, LIMITS, Case, error
from npu_dsa_kernels.backends.triton import base, dsa

DEVICE = "cuda"

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


class Operators:
    """The operators of the backend: tensors go to the device, and results come back."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operator = getattr(dsa if hasattr(dsa, name) else base, name)
        return lambda *arguments: _moved(operator(*_moved(arguments, DEVICE)), "cpu")


def _moved(x: Any, device: str) -> Any:
    if isinstance(x, tuple):
        return tuple(_moved(one, device) for one in x)
    return x.to(device) if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.operator}: {case.inputs}")
def test_on_device(case: Case, dtype: torch.dtype) -> None:
    for name, actual, expected in case.check(Operators(), dtype):
        off = error(actual, expected)
        assert off <= LIMITS[dtype], f"{name} is off by {off:.1e} of its largest value"

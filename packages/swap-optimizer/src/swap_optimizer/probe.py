"""Which optimizers can be swapped: by kind, and by a trial."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer, SparseAdam


def refuse_groups(groups: Sequence[dict[str, Any]]) -> None:
    for i, group in enumerate(groups):
        if group.get("differentiable"):
            raise ValueError(f"param group {i} has differentiable=True, which cannot be swapped")


def probe(optimizer: Optimizer) -> int:
    refuse_groups(optimizer.param_groups)
    if isinstance(optimizer, LBFGS):
        raise TypeError("optimizer: LBFGS couples parameters")
    if isinstance(optimizer, SparseAdam):
        raise TypeError("optimizer: SparseAdam")
    return 0

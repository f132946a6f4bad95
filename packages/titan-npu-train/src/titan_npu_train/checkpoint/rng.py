"""Random number generator state, which torchtitan leaves out of its checkpoints."""

import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

RNG = "rng"


def _host_state() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "python": pickle.dumps(random.getstate()),
        "numpy": pickle.dumps(np.random.get_state()),
    }


def _set_host_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(pickle.loads(state["python"]))
    np.random.set_state(pickle.loads(state["numpy"]))


class RngState(Stateful):
    """This rank's generators: torch on the host and on the accelerator, Python's, NumPy's.

    Loading sets them twice: at once, and again right before the first forward pass. In between
    the data loader starts, which draws a seed from torch's generator; in the uninterrupted run
    that draw lies long before the checkpoint.
    """

    def __init__(self, model_parts: Sequence[nn.Module]) -> None:
        self._model_parts = model_parts
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._cancel: Callable[[], None] | None = None

    def state_dict(self) -> dict[str, Any]:
        state = _host_state()
        if (device := torch.accelerator.current_accelerator(check_available=True)) is not None:
            state[device.type] = torch.get_device_module(device).get_rng_state()
        return {f"rank_{self._rank}": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = state_dict[f"rank_{self._rank}"]
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is not None and device.type in state:
            torch.get_device_module(device).set_rng_state(state[device.type])
        host = {key: state[key] for key in _host_state()}
        _set_host_state(host)
        self._before_first_forward(lambda: _set_host_state(host))

    def _before_first_forward(self, action: Callable[[], None]) -> None:
        if self._cancel is not None:
            self._cancel()
        handles = []

        def cancel() -> None:
            for handle in handles:
                handle.remove()

        def hook(*_: Any) -> None:
            cancel()
            action()

        handles += [part.register_forward_pre_hook(hook) for part in self._model_parts]
        self._cancel = cancel

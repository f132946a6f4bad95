"""Storage in torch_npu's swapped memory: tensors on the host that an NPU kernel updates in place.

`torch_npu.empty_with_swapped_memory` gives a tensor that is of the NPU for its kernels and lies in
host memory. The wheel's documentation allows fill_, zero_ and npu_apply_adam_w on it, and nothing
else. So the update is that kernel, and so are reading and writing the states for a checkpoint: with
the right constants it copies.

    m' = beta1 m + (1 - beta1) g
    v' = beta2 v + (1 - beta2) g^2
    p' = p (1 - lr wd) - lr m' / (1 - beta1^t) / (sqrt(v' / (1 - beta2^t)) + eps)

`beta1_power` and `beta2_power` are those of the step before: the kernel multiplies once more.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from swap_optimizer.layout import Entry, Layout, Slice, State, local
from swap_optimizer.storage import Slot, Storage
from swap_optimizer.streams import streams_of

DEVICE = "npu"
MOMENTS = ("exp_avg", "exp_avg_sq")


class SwappedStorage(Storage):
    """The moments of AdamW, each a tensor of swapped memory for good. Nothing is moved in slices.

    Raises:
        TypeError, ValueError: what npu_apply_adam_w does not do, by name.
    """

    def __init__(self, device: torch.device, optimizer: Optimizer) -> None:
        if device.type != DEVICE:
            raise ValueError(
                f"storage='npu_swapped' is for parameters on an NPU, these are on {device}; "
                "use 'host' or 'disk'"
            )
        _refuse(optimizer)
        super().__init__(device, streams_of(device))
        self.operators: Any = importlib.import_module("torch_npu")
        self.tensors: dict[int, dict[Entry, Tensor]] = {}
        self._new: list[Tensor] = []

    # --- a step ----------------------------------------------------------------------------------

    def load(self, s: Slice, fresh: bool = False) -> Slot:
        return self.next_slot()

    def ready(self, s: Slice, slot: Slot) -> None:
        pass

    def state(self, s: Slice, slot: Slot) -> State:
        return s.layout.tensors(s.params, self.tensors[s.index]) if s.layout else {}

    def update(self, optimizer: Optimizer) -> None:
        _refuse(optimizer)
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group, optimizer.state[p])

    def _update(
        self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        x = local(p)
        if not state:
            state["step"] = torch.tensor(0.0)
            for key in MOMENTS:
                state[key] = self._swapped(x)
        state["step"] += 1
        before = state["step"].item() - 1
        beta1, beta2 = group["betas"]
        self._apply(
            powers=(beta1**before, beta2**before),
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            betas=(beta1, beta2),
            eps=group["eps"],
            grad=local(grad),
            out=(x, state["exp_avg"], state["exp_avg_sq"]),
        )

    def _apply(
        self,
        *,
        powers: tuple[float, float],
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        grad: Tensor,
        out: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        if grad.numel():
            scalars = *powers, lr, weight_decay, *betas, eps
            self.operators.npu_apply_adam_w(*scalars, grad, None, False, False, out=out)

    def _swapped(self, like: Tensor) -> Tensor:
        """Zeros on the host."""
        x = self.operators.empty_with_swapped_memory(
            like.shape, dtype=like.dtype, device=self.device
        )
        self._new.append(x.zero_())
        return x

    def _written(self, value: Tensor) -> Tensor:
        """A copy of `value` in swapped memory: m' = 0 m + (1 - 0) g, with m = 0 and g = value."""
        x = self._swapped(value)
        nowhere = torch.zeros_like(value), torch.zeros_like(value)
        self._apply(
            powers=(0.0, 0.0), lr=0.0, weight_decay=0.0, betas=(0.0, 0.0), eps=1.0,
            grad=value, out=(nowhere[0], x, nowhere[1]),
        )  # fmt: skip
        return x

    def _read(self, x: Tensor, entry: Entry) -> Tensor:
        """A copy of swapped memory on the host.

        p' = 0 (1 - 0) + 1 m' / (1 - 0) / (sqrt(0) + 1), with m' = 1 m + 0 g.
        """
        value, v, g = (
            torch.zeros(entry.shape, dtype=entry.dtype, device=self.device) for _ in range(3)
        )
        self._apply(
            powers=(0.0, 0.0), lr=-1.0, weight_decay=0.0, betas=(1.0, 0.0), eps=1.0,
            grad=g, out=(value, x, v),
        )  # fmt: skip
        return value.cpu()

    def store(self, s: Slice, slot: Slot, state: State) -> None:
        """Keep the states; those that were loaded are written to swapped memory."""
        swapped = {id(x) for x in [*self._new, *self.tensors.get(s.index, {}).values()]}
        layout, tensors = Layout(), {}
        for i, param in enumerate(s.params):
            values: dict[str, Any] = {}
            for key, value in state.get(param, {}).items():
                if key not in MOMENTS:
                    # On the host, where the kernel's powers of beta are made from it.
                    values[key] = value.cpu() if isinstance(value, Tensor) else value
                    continue
                x = local(value)
                # By the parameter, which has its shape: no operator may look at swapped memory.
                entry = layout.place(i, key, local(param), getattr(param, "_spec", None))
                values[key] = entry
                tensors[entry] = x if id(x) in swapped else self._written(x.contiguous())
            layout.values.append(values)
        s.layout = layout if any(layout.values) else None
        self.tensors[s.index] = tensors
        self._new.clear()

    def offload(self, s: Slice, slot: Slot, pieces: dict[Entry, Tensor] | None, anew: bool) -> None:
        raise AssertionError("nothing is moved")

    def finish(self) -> list[BaseException]:
        self.slots = []
        return []

    # --- between steps ---------------------------------------------------------------------------

    def check(self) -> None:
        pass

    def show(self, s: Slice, entries: Sequence[Entry]) -> dict[Entry, Tensor]:
        """Copies: the host cannot look at swapped memory."""
        return {e: e.wrap(self._read(self.tensors[s.index][e], e)) for e in entries}

    @property
    def storage_bytes(self) -> int:
        return sum(e.nbytes for tensors in self.tensors.values() for e in tensors)

    def close(self) -> None:
        self.tensors.clear()


def _refuse(optimizer: Optimizer) -> None:
    """What the kernel does is AdamW, and Adam without weight decay, in fp32."""
    name = type(optimizer).__name__
    if type(optimizer) not in (Adam, AdamW):
        raise TypeError(
            f"storage='npu_swapped' updates by npu_apply_adam_w, which is AdamW; got {name}. "
            "Use storage='host'"
        )
    for i, group in enumerate(optimizer.param_groups):
        where = f"storage='npu_swapped': param group {i} of {name}"
        for option in ("amsgrad", "maximize", "capturable"):
            if group[option]:
                raise ValueError(f"{where} has {option}=True, which npu_apply_adam_w cannot do")
        if group["weight_decay"] and not group["decoupled_weight_decay"]:
            raise ValueError(
                f"{where} has weight_decay={group['weight_decay']} as an L2 penalty, which "
                "npu_apply_adam_w cannot do; AdamW's decay it can"
            )
        for p in group["params"]:
            if p.dtype != torch.float32 or not local(p).is_contiguous():
                raise ValueError(
                    f"{where} has a parameter {tuple(p.shape)} of {p.dtype}; expected contiguous "
                    "torch.float32"
                )

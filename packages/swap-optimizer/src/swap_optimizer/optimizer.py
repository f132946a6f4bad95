"""The optimizer around an optimizer."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from swap_optimizer.disk import DiskStorage
from swap_optimizer.errors import StepError, SwapFileError
from swap_optimizer.host import HostStorage
from swap_optimizer.layout import Slice, State, check_plain, is_fake, local, partition, share
from swap_optimizer.npu_swapped import SwappedStorage
from swap_optimizer.probe import GroupChanged, probe, refuse_groups, refuse_rebound
from swap_optimizer.storage import Slot, Storage
from swap_optimizer.streams import streams_of
from swap_optimizer.view import StateView
from swap_optimizer.wrapped import acting_on, groups_of, narrow, params_of

STORAGES = ("host", "disk", "npu_swapped")
# What GradScaler sets on an optimizer around a step that does the unscaling itself.
SCALER = ("grad_scale", "found_inf")


@dataclass(frozen=True)
class Stats:
    """What is where, and what the last step took.

    Attributes:
        slices: how many slices there are.
        state_bytes: the swapped state tensors: 8 a parameter for the two fp32 moments of Adam.
        storage_bytes: what the storage takes for them: each tensor is aligned to 512 bytes, and a
            file has a header and whole pages.
        kept_bytes: states that stay where they are: tensors of no dimension, such as `step`.
        held_bytes: slices that are in host memory because the disk could not take them.
        device_peak_bytes: the most that slices took on the device (on a CPU: in memory) in the
            last step, or in loading since. Between steps it is 0.
        step_seconds: the last step, as the host saw it.
        load_seconds, offload_seconds: how long the transfers were busy in it.
        update_seconds: how long the wrapped optimizer computed.
        waited_seconds: how long it waited for a slice to arrive, or for room: what overlap could
            not hide.
    """

    slices: int
    state_bytes: int
    storage_bytes: int
    kept_bytes: int
    held_bytes: int
    device_peak_bytes: int
    step_seconds: float
    load_seconds: float
    update_seconds: float
    offload_seconds: float
    waited_seconds: float


class SwapOptimizer(Optimizer):
    """Keeps another optimizer's states in host memory or on disk; the results are the same bits.

    A step brings the states to the device slice by slice: while one slice is updated, by the
    wrapped optimizer's own step, the one before it goes out and the next one comes in. At most
    two slices are on the device, also in the first step, in saving and in loading.

    It has the wrapped optimizer's param_groups (the same objects), states, state_dict and hooks,
    and takes its place in schedulers, gradient scalers and checkpoints. The wrapped optimizer is
    not to be used by itself any more.

    Args:
        optimizer: any optimizer that updates each parameter by itself. States that it has already
            are taken over.
        slices: into how many parts of about the same size the parameters are divided.
        storage: "host": memory of the host, pinned where there is an accelerator. "disk": a file.
            "npu_swapped": torch_npu's tensors on the host that one NPU kernel updates where they
            are; AdamW only, and the kernel's rounding.
        path: for "disk", the folder of the file, of which there is one for each rank and
            optimizer. None: a temporary folder. The file is removed by `close` and at exit.

    Raises:
        ValueError: slices, storage or path; parameters on several devices; differentiable=True.
        TypeError: an optimizer, parameter or state of a kind that cannot be swapped.
        SwapFileError: a file of that name that is in use or is not ours.
        OSError: `path` cannot be written, or has not enough room.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        slices: int = 16,
        storage: Literal["host", "disk", "npu_swapped"] = "host",
        path: str | Path | None = None,
    ) -> None:
        _check_arguments(optimizer, storage, path)
        params = params_of(optimizer)
        _check_slices(slices, len(params))
        _refuse_twice(params)
        device = _device(params)
        nbytes = probe(optimizer)
        self._wrapped = optimizer
        # What Optimizer.__init__ does but for param_groups and states: those are the wrapped one's.
        super().__setstate__({"defaults": optimizer.defaults})
        self._slices: list[Slice] = []
        self._known = [id(p) for p in params]
        self._step_seconds = 0.0
        self._closed = False
        self._torn = False
        self._storage = _storage(storage, optimizer, device, path, nbytes, slices)
        self._state = StateView(self._storage)
        self._divide(params, groups_of(optimizer), slices)
        try:
            self._take_over()
        except BaseException:
            self.close()
            raise

    def _divide(self, params: Sequence[Tensor], groups: Sequence[int], parts: int) -> None:
        """Add slices of whole, consecutive parameters."""
        ends = partition([share(p) for p in params], parts)
        for a, b in pairwise([0, *ends]):
            s = Slice(len(self._slices), list(params[a:b]), list(groups[a:b]))
            self._slices.append(s)
            self._state.add(s)

    # --- what it shares with the wrapped optimizer -----------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._wrapped.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._wrapped.param_groups = groups

    @property
    def state(self) -> StateView:
        """The states in the storage: a mapping from parameters, its tensors no copies."""
        return self._state

    @property
    def _step_supports_amp_scaling(self) -> bool:
        own = isinstance(self._storage, SwappedStorage)
        return not own and getattr(self._wrapped, "_step_supports_amp_scaling", False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._wrapped.zero_grad(set_to_none=set_to_none)

    def __repr__(self) -> str:
        return f"SwapOptimizer of {len(self._slices)} slices around {self._wrapped!r}"

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a SwapOptimizer cannot be copied or pickled: its storage belongs to it alone. "
            "Use state_dict() and load_state_dict()"
        )

    # --- the step --------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the wrapped optimizer.

        Args:
            closure: evaluates the model again and returns the loss. It is called once.

        Raises:
            StepError: the step could not be done, or its results could not be stored; whether it
                happened is in the message and in `.happened`. What the wrapped optimizer itself
                raises comes through, with a note that says it.
        """
        began = time.perf_counter()
        wrapped = self._wrapped
        arguments: tuple[Any, ...] = (wrapped,) if closure is None else (wrapped, closure)
        keywords: dict[str, Any] = {}
        for hook in wrapped._optimizer_step_pre_hooks.values():
            result = hook(wrapped, arguments, keywords)
            if result is not None:
                arguments, keywords = result
                closure = arguments[1] if len(arguments) > 1 else keywords.get("closure")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check()
        self._run([s for s in self._slices if any(p.grad is not None for p in s.params)])
        for hook in wrapped._optimizer_step_post_hooks.values():
            hook(wrapped, arguments, keywords)
        if "step" in vars(wrapped):
            vars(wrapped)["_opt_called"] = True  # a scheduler made before us watches that step
        self._step_seconds = time.perf_counter() - began
        if failures := self._storage.failures():
            raise StepError(
                f"the step was done, but {self._storage.held_bytes:,} bytes of its states could "
                f"not be written: {failures[0]}. They are held in memory and nothing is lost: make "
                "room and go on, the next step writes them",
                happened=True,
            ) from failures[0]
        return loss

    def _check(self) -> None:
        """All that can be known before the first slice is touched."""

        def refuse(why: str) -> NoReturn:
            raise StepError(f"{why}. The step was not done", happened=False)

        if self._closed:
            refuse("the SwapOptimizer is closed")
        if self._torn:
            refuse("loading states failed before it was through: load them again")
        if [id(p) for p in params_of(self._wrapped)] != self._known:
            refuse("param_groups have other parameters than before; add_param_group adds some")
        for i, group in enumerate(self.param_groups):
            for j, p in enumerate(group["params"]):
                layout = torch.strided if p.grad is None else local(p.grad).layout
                if layout is not torch.strided:
                    refuse(
                        f"the gradient of parameter {j} in param group {i} is sparse ({layout}), "
                        "and sparse gradients cannot be used"
                    )
        try:
            self._storage.check()
        except SwapFileError as error:
            raise StepError(f"{error}. The step was not done", happened=False) from error

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("the SwapOptimizer is closed: its states are gone")

    def _run(self, active: list[Slice]) -> None:
        storage, begun, done = self._storage, 0, 0

        def happened() -> str:
            if not begun:
                return "no slice was updated: the step was not done"
            said = (
                f"the step was done in part: {done} of {len(active)} slices were updated and stored"
            )
            if begun > done:
                return f"{said}, one more may be changed in part, any others were not"
            return f"{said}, the others were not"

        storage.begin(active)
        try:
            coming = storage.load(active[0]) if active else Slot()
            for s, following in zip_longest(active, active[1:]):
                slot = coming
                storage.ready(s, slot)
                if following is not None:
                    coming = storage.load(following)
                state = storage.state(s, slot)
                begun += 1
                state = self._update(s, state)
                storage.store(s, slot, state)
                del state  # else the last slice's would be alive while the next one's are made
                done += 1
        except (SwapFileError, OSError, GroupChanged) as error:
            raise StepError(f"{error}: {happened()}", None if begun > 0 else False) from error
        except BaseException as error:
            error.add_note(f"swap-optimizer: {happened()}")
            raise
        finally:
            background = storage.finish()
        if background:
            raise background[0]

    def _update(self, s: Slice, state: State) -> State:
        wrapped = self._wrapped
        scaler = {name: vars(self)[name] for name in SCALER if name in vars(self)}
        groups = narrow(wrapped.param_groups, s.params, s.groups)
        before = [dict(group) for group in groups]
        with acting_on(wrapped, groups, state):
            for name, value in scaler.items():
                setattr(wrapped, name, value)
            try:
                self._storage.update(wrapped)
            finally:
                for name in scaler:
                    delattr(wrapped, name)
            refuse_rebound(before, groups)
            return dict(wrapped.state)

    # --- states ----------------------------------------------------------------------------------

    def _take_over(self) -> None:
        """Move the states that the wrapped optimizer has to the storage."""
        old = self._wrapped.state
        self._wrapped.state = self._state  # pyrefly: ignore[bad-assignment]
        if old:
            self._fill(lambda s: {p: old.pop(p) for p in s.params if p in old})

    @torch.no_grad()
    def _fill(self, state_of: Callable[[Slice], State]) -> None:
        """Fill the storage with states that come slice by slice."""
        storage, done = self._storage, 0
        storage.begin(self._slices)
        self._torn = True
        try:
            for s in self._slices:
                slot = storage.load(s, fresh=True)
                storage.ready(s, slot)
                storage.store(s, slot, state_of(s))
                done += 1
        except BaseException as error:
            error.add_note(
                f"swap-optimizer: the states of {done} of {len(self._slices)} slices were loaded; "
                "load again before the next step"
            )
            raise
        finally:
            background = storage.finish()
        if background:
            raise background[0]
        self._torn = False
        if failures := storage.failures():
            raise SwapFileError(
                f"the states were loaded, but {storage.held_bytes:,} bytes could not be written: "
                f"{failures[0]}. They are held in memory and nothing is lost: make room and go on, "
                "the next step writes them"
            ) from failures[0]

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state_dict. Its tensors are the storage itself, not copies.

        They show the states as they are now; after another step, ask again.
        """
        self._refuse_closed()
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = self._wrapped.state_dict()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            result = post_hook(self, state_dict)
            if result is not None:
                state_dict = result
        return state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of this or of the wrapped optimizer, slice by slice.

        The wrapped optimizer's own load_state_dict does each slice, and casts as it always does.

        Raises:
            ValueError: groups that do not fit; nothing was changed.
            SwapFileError: the file is not what it was, and nothing was changed; or loaded, but the
                disk had no room, and nothing is lost. The message says which.
            RuntimeError: it is closed.
        """
        self._refuse_closed()
        try:
            self._storage.check()
        except SwapFileError as error:
            raise SwapFileError(f"{error}. Nothing was loaded") from error
        wrapped = self._wrapped
        state_dict = state_dict.copy()
        for owner in (self, wrapped):
            for pre_hook in owner._optimizer_load_state_dict_pre_hooks.values():
                result = pre_hook(owner, state_dict)
                if result is not None:
                    state_dict = result
        with acting_on(wrapped, wrapped.param_groups, {}):
            wrapped.load_state_dict({**state_dict, "state": {}})
            groups = wrapped.param_groups
        state_dict = {**state_dict, "state": self._apart(state_dict)}
        wrapped.param_groups = groups
        self._fill(lambda s: self._load(s, state_dict))
        for owner in (wrapped, self):
            for post_hook in owner._optimizer_load_state_dict_post_hooks.values():
                post_hook(owner)

    def _apart(self, state_dict: dict[str, Any]) -> dict[Any, Any]:
        """The states to load, with copies of tensors that loading would overwrite first.

        Such are our own storage, in the place of another state: of a state_dict that was permuted.
        """
        spans = [
            (x.data_ptr(), x.data_ptr() + x.nbytes)
            for s in self._slices
            for x in self._storage.shown(s)
            if not is_fake(x)
        ]
        if not spans:
            return state_dict["state"]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        of = dict(zip(numbers, params_of(self._wrapped), strict=True))
        states: dict[Any, Any] = {}
        for number, values in state_dict["state"].items():
            own = self._state[of[number]] if number in of else {}

            def apart(key: str, value: Any, own: Mapping[str, Any] = own) -> Any:
                if not isinstance(value, Tensor) or local(value).is_meta:
                    return value
                at = local(value).data_ptr()
                if not any(a <= at < b for a, b in spans):
                    return value
                there = own.get(key)
                same = isinstance(there, Tensor) and local(there).data_ptr() == at
                return value if same else value.clone()

            is_dict = isinstance(values, Mapping)
            states[number] = {k: apart(k, v) for k, v in values.items()} if is_dict else values
        return states

    def _load(self, s: Slice, state_dict: dict[str, Any]) -> State:
        """A slice's states out of a state_dict, as the wrapped optimizer loads them."""
        wrapped, saved = self._wrapped, state_dict["param_groups"]
        mine = {id(p) for p in s.params}
        numbers = [number for group in saved for number in group["params"]]
        pairs = zip(numbers, params_of(wrapped), strict=True)
        numbers = [number for number, p in pairs if id(p) in mine]
        states = state_dict["state"]
        part = {
            **state_dict,
            "state": {number: states[number] for number in numbers if number in states},
            "param_groups": narrow(saved, numbers, s.groups),
        }
        with acting_on(wrapped, narrow(wrapped.param_groups, s.params, s.groups), {}):
            wrapped.load_state_dict(part)
            state = dict(wrapped.state)
        for values in state.values():
            for key, value in values.items():
                if isinstance(value, Tensor) and value.dim() == 0:
                    values[key] = value.clone()  # what stays is ours, not the caller's
        return state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, in slices of their own that are about as large as the others."""
        self._refuse_closed()
        wrapped = self._wrapped
        wrapped.add_param_group(param_group)
        added = wrapped.param_groups[-1]["params"]
        try:
            refuse_groups(wrapped.param_groups)
            _refuse_twice(params_of(wrapped))
            _device(params_of(wrapped))
        except BaseException:
            wrapped.param_groups.pop()
            raise
        if added:
            usual = max(sum(share(p) for p in s.params) for s in self._slices)
            parts = -(-sum(share(p) for p in added) // max(1, usual))
            groups = [len(wrapped.param_groups) - 1] * len(added)
            self._divide(added, groups, min(max(1, parts), len(added)))
        self._known = [id(p) for p in params_of(wrapped)]

    def stats(self) -> Stats:
        """Bytes, and the last step's times. Waits for the device."""
        storage = self._storage
        layouts = [s.layout for s in self._slices if s.layout is not None]
        times = {
            f"{name}_seconds": storage.times.seconds(name, storage.streams)
            for name in ("load", "update", "offload", "waited")
        }
        return Stats(
            slices=len(self._slices),
            state_bytes=sum(layout.state_bytes for layout in layouts),
            storage_bytes=storage.storage_bytes,
            kept_bytes=sum(layout.kept_bytes for layout in layouts),
            held_bytes=storage.held_bytes,
            device_peak_bytes=storage.device_peak,
            step_seconds=self._step_seconds,
            **times,
        )

    def close(self) -> None:
        """Give the storage back and remove its file. The states are gone; do it at the end."""
        if not self._closed:
            self._closed = True
            for s in self._slices:
                s.layout = None
            self._storage.close()


def _check_arguments(optimizer: object, storage: object, path: object) -> None:
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, SwapOptimizer):
        raise TypeError(
            "optimizer must be a torch.optim.Optimizer that is not swapped already, "
            f"got {type(optimizer).__name__}"
        )
    if isinstance(optimizer.state, StateView):
        raise TypeError(
            f"optimizer: this {type(optimizer).__name__} is or was in a SwapOptimizer; "
            "make a new one"
        )
    if storage not in STORAGES:
        raise ValueError(f"storage must be one of {', '.join(STORAGES)}, got {storage!r}")
    if path is not None and storage != "disk":
        raise ValueError(f"path is for storage='disk', got {str(path)!r} with {storage!r}")


def _check_slices(slices: object, params: int) -> None:
    if isinstance(slices, bool) or not isinstance(slices, int) or not 1 <= slices <= params:
        raise ValueError(
            f"slices must be an integer from 1 to {params}, the number of parameters, "
            f"got {slices!r}"
        )


def _refuse_twice(params: Sequence[Tensor]) -> None:
    first: dict[int, int] = {}
    for i, p in enumerate(params):
        if (j := first.setdefault(id(p), i)) != i:
            raise ValueError(
                f"parameter {i} is the same tensor as parameter {j}; expected each parameter once, "
                "also where modules share it"
            )


def _device(params: Sequence[Tensor]) -> torch.device:
    for i, p in enumerate(params):
        check_plain(p, f"parameter {i}")
    devices = {local(p).device for p in params}
    if len(devices) > 1:
        raise ValueError(
            f"the parameters are on {', '.join(sorted(map(str, devices)))}; expected one device, "
            "with an optimizer for each"
        )
    return devices.pop()


def _storage(
    storage: str,
    optimizer: Optimizer,
    device: torch.device,
    path: str | Path | None,
    nbytes: int,
    slices: int,
) -> Storage:
    if storage == "npu_swapped":
        return SwappedStorage(device, optimizer)
    streams = streams_of(device)
    if storage == "host":
        return HostStorage(device, streams)
    folder = None if path is None else Path(path).expanduser().absolute()
    return DiskStorage(device, streams, folder, nbytes, slices)

"""The optimizer around an optimizer."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from swap_optimizer.disk import DiskStorage
from swap_optimizer.host import HostStorage
from swap_optimizer.layout import Slice, State, check_plain, local, partition, share
from swap_optimizer.probe import probe, refuse_groups
from swap_optimizer.storage import Storage
from swap_optimizer.streams import streams_of

STORAGES = ("host", "disk")
# What GradScaler sets on the optimizer around a step that does the unscaling itself.
_SCALER = ("grad_scale", "found_inf")


class StepError(RuntimeError):
    """A step that went wrong. The message says whether it happened.

    Attributes:
        happened: True: wholly, and the states are safe. False: not at all. None: in part.
    """

    def __init__(self, message: str, happened: bool | None) -> None:
        super().__init__(message)
        self.happened = happened


@dataclass(frozen=True)
class Stats:
    """What is where, and what the last step took.

    Attributes:
        slices: how many slices there are.
        state_bytes: the swapped state tensors: 8 a parameter for the two fp32 moments of Adam.
        storage_bytes: what they take in the storage: each tensor is aligned to 512 bytes, and a
            file has a header and whole pages.
        kept_bytes: states that stay where they are: tensors of no dimension, such as `step`.
        held_bytes: slices that are in host memory because the disk could not take them.
        device_peak_bytes: the most that slices took on the device (on a CPU: in memory) in the
            last step. Nothing is left there between steps.
        step_seconds: the last step, as the host saw it.
        load_seconds, offload_seconds: how long the transfers were busy.
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
    """Keeps another optimizer's states in host memory or on disk, and its results bit for bit.

    A step brings the states to the device slice by slice: while one slice is updated, by the
    wrapped optimizer's own step, the one before it goes out and the next one comes in. At most
    two slices are on the device, also in the first step, in saving and in loading.

    It has the wrapped optimizer's `param_groups` (the same objects), `state`, and `state_dict`.
    The wrapped optimizer is not to be used by itself any more.

    Args:
        optimizer: any optimizer that updates each parameter by itself. States that it has already
            are taken over.
        slices: into how many parts of about the same size the parameters are divided.
        storage: "host", memory of the host, pinned where there is an accelerator; or "disk", a file.
        path: for "disk", the folder for the file; one file for each rank and optimizer. None: a
            temporary folder.

    Raises:
        ValueError: slices, storage or path; a group with differentiable=True.
        TypeError: an optimizer, parameter or state of a kind that cannot be swapped.
        SwapFileError: a file of that name that is in use or is not ours.
        OSError: `path` cannot be written, or has not enough room.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        slices: int = 16,
        storage: Literal["host", "disk"] = "host",
        path: str | Path | None = None,
    ) -> None:
        _check_arguments(optimizer, storage, path)
        self._wrapped = optimizer
        params = _params(optimizer)
        _check_slices(slices, len(params))
        device = _device(params)
        state_bytes = probe(optimizer)
        # What Optimizer.__init__ does but for param_groups and state: those are the wrapped one's.
        super().__setstate__({"defaults": optimizer.defaults})
        self._known = [id(p) for p in params]
        self._slices = self._divide(0, params, slices)
        self._step_seconds = 0.0
        self._storage: Storage
        if storage == "host":
            self._storage = HostStorage(device, streams_of(device))
        else:
            folder = None if path is None else Path(path)
            self._storage = DiskStorage(device, streams_of(device), folder, state_bytes)
        self._state = _StateView(self)
        try:
            self._take_over()
        except BaseException:
            self._storage.close()
            raise

    def _divide(self, group: int, params: Sequence[Tensor], parts: int) -> list[Slice]:
        """Slices of whole, consecutive parameters; the first belongs to param group `group`."""
        groups = [
            i for i, g in enumerate(self.param_groups[group:], group) for _ in g["params"]
        ]
        ends = partition([share(p) for p in params], parts)
        first = len(getattr(self, "_slices", ()))
        return [
            Slice(first + i, list(params[a:b]), groups[a:b])
            for i, (a, b) in enumerate(pairwise([0, *ends]))
        ]

    # --- what it shares with the wrapped optimizer -------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyrefly: ignore
        return self._wrapped.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._wrapped.param_groups = groups

    @property
    def state(self) -> Mapping[Tensor, dict[str, Any]]:  # pyrefly: ignore
        """The states in the storage: tensors of the host, not copies. Read-only as a mapping."""
        return self._state

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return getattr(self._wrapped, "_step_supports_amp_scaling", False)

    @contextmanager
    def _narrowed(self, s: Slice, state: State) -> Iterator[None]:
        """The wrapped optimizer with nothing but a slice, and with no hooks.

        What its groups and hooks are otherwise is put back, whatever happens.
        """
        wrapped = self._wrapped
        saved = dict(wrapped.__dict__)
        try:
            wrapped.param_groups = narrow(saved["param_groups"], s.params, s.groups)
            wrapped.state = _defaultdict(state)
            for name in saved:
                if name.startswith("_optimizer_") and name.endswith("_hooks"):
                    setattr(wrapped, name, type(saved[name])())
            yield
        finally:
            for name, value in saved.items():
                if name in ("param_groups", "state") or name.endswith("_hooks"):
                    setattr(wrapped, name, value)

    # --- the step --------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyrefly: ignore
        """One step of the wrapped optimizer.

        Args:
            closure: evaluates the model again and returns the loss. It is called once.

        Raises:
            StepError: the step could not be done, or its results could not be stored; whether it
                happened is in the message and in `.happened`.
            SwapFileError: the file is gone or cut short; nothing was done.
        """
        began = time.perf_counter()
        wrapped = self._wrapped
        arguments, keywords = (wrapped,) if closure is None else (wrapped, closure), {}
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
        active = [s for s in self._slices if any(p.grad is not None for p in s.params)]
        self._run(active)
        for hook in wrapped._optimizer_step_post_hooks.values():
            hook(wrapped, arguments, keywords)
        self._step_seconds = time.perf_counter() - began
        return loss

    def _check(self) -> None:
        """All that can be known before the first slice is touched."""
        if self._storage is None:
            raise StepError("the SwapOptimizer is closed; the step was not done", False)
        if [id(p) for p in _params(self._wrapped)] != self._known:
            raise StepError(
                "param_groups have other parameters than before; add new ones with "
                "add_param_group. The step was not done",
                False,
            )
        for i, group in enumerate(self.param_groups):
            for j, p in enumerate(group["params"]):
                if p.grad is not None and local(p.grad).layout is not torch.strided:
                    raise StepError(
                        f"the gradient of parameter {j} in param group {i} is sparse "
                        f"({local(p.grad).layout}); only dense gradients can be used. "
                        "The step was not done",
                        False,
                    )
        self._storage.check()

    def _run(self, active: list[Slice]) -> None:
        storage, done = self._storage, 0
        storage.begin(active)
        try:
            coming = storage.load(active[0]) if active else None
            for i, s in enumerate(active):
                slot = coming
                storage.ready(s, slot)
                if i + 1 < len(active):
                    coming = storage.load(active[i + 1])
                state = storage.state(s, slot)
                self._update(s, state)
                done += 1
                storage.store(s, slot, self._updated)
        except Exception as error:
            storage.finish()
            said = f"{done} of {len(active)} slices were updated"
            raise StepError(f"the step was done in part: {said}. {error}", None) from error
        except BaseException:
            storage.finish()
            raise
        self._raise_after(storage.finish(), "the step was done wholly")

    def _update(self, s: Slice, state: State) -> None:
        streams, times = self._storage.streams, self._storage.times
        wrapped = self._wrapped
        with self._narrowed(s, state):
            start = streams.record(streams.current())
            scaler = {name: self.__dict__[name] for name in _SCALER if name in self.__dict__}
            for name, value in scaler.items():
                setattr(wrapped, name, value)
            try:
                bare_step(wrapped)(wrapped)
            finally:
                for name in scaler:
                    delattr(wrapped, name)
            times.events.append(("update", start, streams.record(streams.current())))
            self._updated = dict(wrapped.state)

    def _raise_after(self, background: list[BaseException], happened: str) -> None:
        if background:
            raise background[0]
        errors = getattr(self._storage, "errors", [])
        if errors:
            error = errors[0]
            errors.clear()
            raise StepError(
                f"{happened}, but {self._storage.held_bytes:,} bytes of its states could not be "
                f"written ({error}). They are in memory, nothing is lost: make room and go on, the "
                "next step writes them",
                True,
            ) from error

    # --- states ----------------------------------------------------------------------------------

    def _take_over(self) -> None:
        """Move the states that the wrapped optimizer has to the storage."""
        old = self._wrapped.state
        self._wrapped.state = self._state
        if not old:
            return
        self._fill(lambda s: {p: old.pop(p) for p in s.params if p in old})

    def _fill(self, state_of: Callable[[Slice], State]) -> None:
        """Fill the storage with states that come slice by slice."""
        storage = self._storage
        storage.begin(self._slices)
        try:
            for s in self._slices:
                slot = storage.load(s, fresh=True)
                storage.ready(s, slot)
                storage.store(s, slot, state_of(s))
        finally:
            background = storage.finish()
        self._raise_after(background, "the states were loaded")

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state_dict; its tensors are the storage itself, not copies."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state_dict = self._wrapped.state_dict()
        for hook in self._optimizer_state_dict_post_hooks.values():
            result = hook(self, state_dict)
            if result is not None:
                state_dict = result
        return state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of this or of the wrapped optimizer, slice by slice.

        The wrapped optimizer's own load_state_dict does each slice: it casts as it always does.
        """
        state_dict = state_dict.copy()
        for owner in (self, self._wrapped):
            for hook in owner._optimizer_load_state_dict_pre_hooks.values():
                result = hook(owner, state_dict)
                if result is not None:
                    state_dict = result
        self._check_loadable(state_dict)
        wrapped = self._wrapped
        everything = Slice(-1, _params(wrapped), self._groups())
        with self._narrowed(everything, {}):
            wrapped.load_state_dict({**state_dict, "state": {}})
            groups = wrapped.param_groups
        wrapped.param_groups = groups
        self._fill(lambda s: self._load_slice(s, state_dict))
        for owner in (wrapped, self):
            for hook in owner._optimizer_load_state_dict_post_hooks.values():
                hook(owner)

    def _groups(self) -> list[int]:
        return [i for i, group in enumerate(self.param_groups) for _ in group["params"]]

    def _check_loadable(self, state_dict: dict[str, Any]) -> None:
        ours = [len(group["params"]) for group in self.param_groups]
        theirs = [len(group["params"]) for group in state_dict["param_groups"]]
        if ours != theirs:
            raise ValueError(
                f"state_dict: its param groups have {theirs} parameters; expected {ours}"
            )

    def _load_slice(self, s: Slice, state_dict: dict[str, Any]) -> State:
        saved = state_dict["param_groups"]
        names = [name for group in saved for name in group["params"]]
        mine = {id(p) for p in s.params}
        names = [n for n, p in zip(names, _params(self._wrapped), strict=True) if id(p) in mine]
        part = {
            **state_dict,
            "state": {n: state_dict["state"][n] for n in names if n in state_dict["state"]},
            "param_groups": narrow(saved, names, s.groups),
        }
        with self._narrowed(s, {}):
            self._wrapped.load_state_dict(part)
            state = dict(self._wrapped.state)
        for values in state.values():
            for key, value in values.items():
                if isinstance(value, Tensor) and value.dim() == 0:
                    values[key] = value.clone()  # what stays is ours, not the caller's
        return state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, in slices of their own of about the size of the others."""
        wrapped = self._wrapped
        wrapped.add_param_group(param_group)
        added = wrapped.param_groups[-1]["params"]
        try:
            refuse_groups(wrapped.param_groups[-1:])
            for p in added:
                check_plain(p, "a parameter")
        except BaseException:
            wrapped.param_groups.pop()
            raise
        if added:
            usual = max(sum(share(p) for p in s.params) for s in self._slices)
            parts = -(-sum(share(p) for p in added) // max(1, usual))
            group = len(wrapped.param_groups) - 1
            self._slices += self._divide(group, added, min(max(1, parts), len(added)))
        self._known = [id(p) for p in _params(wrapped)]

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
        """Give the storage back: the file is removed. The states are gone."""
        if self._storage is not None:
            storage, self._storage = self._storage, None
            storage.close()
            for s in self._slices:
                s.layout = None

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a SwapOptimizer cannot be copied or pickled: its states are in a storage that belongs "
            "to it. Use state_dict() and load_state_dict()"
        )


class _StateView(Mapping):
    """A parameter's states, made from the storage when asked for."""

    def __init__(self, owner: SwapOptimizer) -> None:
        self._owner = owner

    def _found(self, param: object) -> tuple[Slice, int] | None:
        for s in self._owner._slices:
            if s.layout is not None:
                for i, p in enumerate(s.params):
                    if p is param and s.layout.values[i]:
                        return s, i
        return None

    def __getitem__(self, param: Tensor) -> dict[str, Any]:
        found = self._found(param)
        if found is None:
            raise KeyError(param)
        s, i = found
        return self._states(s)[s.params[i]]

    def _states(self, s: Slice) -> State:
        assert s.layout is not None
        if not s.nbytes:
            return s.layout.tensors(s.params, {})
        storage = self._owner._storage.bytes_of(s)
        return s.layout.tensors(
            s.params, {e: e.wrap(own_view(e, storage)) for e in s.layout.entries}
        )

    def __iter__(self) -> Iterator[Tensor]:
        for s in self._owner._slices:
            if s.layout is not None:
                yield from (p for p, v in zip(s.params, s.layout.values, strict=True) if v)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def items(self):
        for s in self._owner._slices:
            if s.layout is not None:
                yield from self._states(s).items()


def own_view(entry, buffer: Tensor) -> Tensor:
    """A state in a buffer, with a storage of its own size: what is saved of it is it alone."""
    part = buffer.untyped_storage()[entry.offset : entry.offset + entry.nbytes]
    return torch.empty(0, dtype=entry.dtype).set_(part, 0, entry.shape, entry.stride)


def bare_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The optimizer's step without the hooks that torch wraps around it."""
    step = type(optimizer).step
    return step.__wrapped__ if getattr(step, "__code__", None) is _HOOKED else step


_HOOKED = Optimizer.profile_hook_step(lambda self: None).__code__


def narrow(
    groups: Sequence[dict[str, Any]], params: Sequence[Any], of: Sequence[int]
) -> list[dict[str, Any]]:
    """Copies of the groups that `params` are of, with nothing but these."""
    narrowed = []
    for i in dict.fromkeys(of):
        group = groups[i]
        mine = [p for p, g in zip(params, of, strict=True) if g == i]
        part = {**group, "params": mine}
        if "param_names" in group:
            ids = {id(p) for p in mine}
            names = zip(group["params"], group["param_names"], strict=True)
            part["param_names"] = [name for p, name in names if id(p) in ids]
        narrowed.append(part)
    return narrowed


def _defaultdict(state: State) -> Any:
    from collections import defaultdict

    return defaultdict(dict, state)


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _check_arguments(optimizer: object, storage: object, path: object) -> None:
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, SwapOptimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer that is not swapped yet, got {optimizer!r}"
        )
    if storage not in STORAGES:
        raise ValueError(f"storage must be one of {', '.join(STORAGES)}, got {storage!r}")
    if path is not None and storage != "disk":
        raise ValueError(f'path is for storage="disk"; got {str(path)!r} with {storage!r}')


def _check_slices(slices: object, params: int) -> None:
    if isinstance(slices, bool) or not isinstance(slices, int) or not 1 <= slices <= params:
        raise ValueError(
            f"slices must be between 1 and {params}, the number of parameters, got {slices!r}"
        )


def _device(params: Sequence[Tensor]) -> torch.device:
    for i, p in enumerate(params):
        check_plain(p, f"parameter {i}")
    devices = {local(p).device for p in params}
    if len(devices) > 1:
        raise ValueError(
            f"the parameters are on {', '.join(sorted(map(str, devices)))}; expected one device"
        )
    return devices.pop()

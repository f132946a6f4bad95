"""Where the state of a slice's parameters lies in one flat buffer, and the slices themselves."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

# What device allocators align to. Kernels take their vectorized paths on such addresses.
ALIGNMENT = 512

State = dict[Tensor, dict[str, Any]]


@dataclass(frozen=True)
class Entry:
    """A state tensor's place in its slice's buffer.

    Attributes:
        param: position of its parameter in the slice.
        key: its name in the parameter's state.
        offset: in bytes.
        shape, stride, dtype: of the local tensor.
        spec: how the local tensor is part of a DTensor; None for a plain tensor.
    """

    param: int
    key: str
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    spec: Any = None

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """The local tensor [shape] in a buffer of bytes."""
        flat = buffer[self.offset : self.offset + self.nbytes].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)

    def wrap(self, local: Tensor) -> Tensor:
        """The tensor that the optimizer knows."""
        if self.spec is None:
            return local
        # Not DTensor.from_local: that moves the local tensor to the mesh's device, and the storage
        # is on the host. FSDP2 makes its CPU-offloaded parameters the same way.
        return DTensor(local, self.spec, requires_grad=False)


@dataclass
class Layout:
    """The state of a slice's parameters with `Entry` in place of what is swapped.

    Attributes:
        values: for each parameter its state, in the optimizer's order of keys; `Entry` where a
            tensor is swapped. Tensors of no dimension (`step`) and what is no tensor stay.
        nbytes: size of the buffer.
    """

    values: list[dict[str, Any]] = field(default_factory=list)
    nbytes: int = 0

    @property
    def entries(self) -> Iterator[Entry]:
        return (v for values in self.values for v in values.values() if isinstance(v, Entry))

    @property
    def state_bytes(self) -> int:
        """Bytes of the swapped tensors, without what alignment adds."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def kept_bytes(self) -> int:
        kept = (v for values in self.values for v in values.values() if isinstance(v, Tensor))
        return sum(tensor.nbytes for tensor in kept)

    @classmethod
    def of(cls, params: Sequence[Tensor], state: State) -> "Layout":
        """Lay out the state of `params`.

        Raises:
            TypeError: a state that cannot be swapped, by its parameter and key.
        """
        layout = cls()
        for i, param in enumerate(params):
            values: dict[str, Any] = {}
            for key, value in state.get(param, {}).items():
                if is_swapped(key, value):
                    spec = value._spec if isinstance(value, DTensor) else None
                    value = layout.place(i, key, local(value), spec)
                values[key] = value
            layout.values.append(values)
        return layout

    def place(self, param: int, key: str, x: Tensor, spec: Any) -> Entry:
        """The next place in the buffer, for a local tensor."""
        entry = Entry(param, key, self.nbytes, x.shape, dense_stride(x), x.dtype, spec)
        # Also what has no elements has a place: then only a slice without states has no bytes.
        self.nbytes += max(1, -(-entry.nbytes // ALIGNMENT)) * ALIGNMENT
        return entry

    def tensors(self, params: Sequence[Tensor], views: dict[Entry, Tensor]) -> State:
        """The optimizer's state of those parameters that have one."""
        return {
            param: {
                key: views[value] if isinstance(value, Entry) else value
                for key, value in values.items()
            }
            for param, values in zip(params, self.values, strict=True)
            if values
        }


@dataclass
class Slice:
    """Whole parameters that are updated together.

    Attributes:
        index: its place among the slices.
        params: its parameters, in the optimizer's order.
        groups: the param group of each, by position.
        layout: where their state is; None before it exists.
    """

    index: int
    params: list[Tensor]
    groups: list[int]
    layout: Layout | None = None

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes if self.layout else 0


def is_swapped(key: str, value: Any) -> bool:
    """Whether a value in a parameter's state goes to the storage.

    Raises:
        TypeError: a tensor that can neither be moved as bytes nor stay.
    """
    if not isinstance(value, Tensor):
        for inner in _inside(value):
            if inner.dim() > 0:
                raise TypeError(
                    f"the optimizer keeps tensors inside a {type(value).__name__} (state {key!r}); "
                    "only tensors that are values of a parameter's state can be swapped"
                )
        return False
    if value.dim() == 0:
        return False
    check_plain(value, f"state {key!r}")
    return True


def check_plain(x: Tensor, what: str) -> None:
    """A strided tensor, or a DTensor of such ones, is bytes; other subclasses are not.

    Raises:
        TypeError: naming `what` and its type.
    """
    inner = local(x)
    if type(inner) not in _PLAIN and not is_fake(inner):
        raise TypeError(
            f"{what} is a {type(inner).__name__}; expected a plain torch.Tensor or a DTensor of one"
        )
    if inner.layout is not torch.strided:
        raise TypeError(f"{what} has layout {inner.layout}; expected torch.strided")


_PLAIN = (Tensor, torch.nn.Parameter)


def is_fake(x: Tensor) -> bool:
    return isinstance(x, torch._subclasses.FakeTensor)


def _inside(value: Any) -> list[Tensor]:
    leaves = tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def local(x: Tensor) -> Tensor:
    """This rank's part of a DTensor; a plain tensor itself."""
    if isinstance(x, DTensor):
        with torch.no_grad():  # with gradients it would be a new view each time
            return x.to_local()
    return x


def dense_stride(x: Tensor) -> tuple[int, ...]:
    """The strides of `x`, or contiguous ones where its elements do not fill one block."""
    return torch.empty_like(x, device="meta", memory_format=torch.preserve_format).stride()


def share(param: Tensor) -> int:
    """Bytes of a parameter on the rank that has most of it: the same number on every rank.

    All ranks then make the same slices, and an optimizer that communicates (Muon on DTensors)
    meets its peers at the same parameter.
    """
    if not isinstance(param, DTensor):
        return param.nbytes
    shape = list(param.shape)
    for size, placement in zip(param.device_mesh.shape, param.placements, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            shape[dim] = -(-shape[dim] // size)
    return torch.Size(shape).numel() * param.dtype.itemsize


def partition(weights: Sequence[int], parts: int) -> list[int]:
    """Ends of `parts` contiguous, non-empty runs of `weights` whose heaviest is lightest.

    Among such divisions one whose other runs are about even: where a single weight decides the
    heaviest run, the others are not filled up to it. `parts` is between 1 and ``len(weights)``.
    """
    until = [0, *accumulate(weights)]
    low, high = max(weights), max(1, until[-1])
    while low < high:
        middle = (low + high) // 2
        if _fewest(until, middle)[0] <= parts:
            high = middle
        else:
            low = middle + 1
    fewest, n = _fewest(until, low), len(weights)
    single = _heavier_than_even(weights, parts)
    light = [0, *accumulate(w if i not in single else 0 for i, w in enumerate(weights))]
    heavy = [0, *accumulate(int(i in single) for i in range(n))]
    ends = [0]
    for left in range(parts, 1, -1):
        start = ends[-1]
        # What can follow: `left - 1` runs that are not empty and not too heavy.
        first = max(start + 1, bisect_left(fewest, 1 - left, key=lambda runs: -runs))
        last = min(bisect_right(until, until[start] + low) - 1, n - left + 1)
        rest, runs = light[n] - light[start], max(1, left - (heavy[n] - heavy[start]))
        ends.append(min(range(first, last + 1), key=_distance(until, start, rest, runs)))
    return [*ends[1:], n]


def _distance(until: Sequence[int], start: int, rest: int, runs: int) -> Callable[[int], int]:
    """How far a run that ends there is from an even share of the rest, in whole numbers."""
    return lambda end: abs((until[end] - until[start]) * runs - rest)


def _fewest(until: Sequence[int], limit: int) -> list[int]:
    """From each weight on, the fewest runs of at most `limit`; `until` are sums of weights."""
    n = len(until) - 1
    fewest = [0] * (n + 1)
    for i in range(n - 1, -1, -1):
        fewest[i] = 1 + fewest[bisect_right(until, until[i] + limit) - 1]
    return fewest


def _heavier_than_even(weights: Sequence[int], parts: int) -> set[int]:
    """Weights that are more than an even share of what such weights leave over."""
    rest, single = sum(weights), set()
    for i in sorted(range(len(weights)), key=weights.__getitem__, reverse=True):
        left = parts - len(single)
        if left < 2 or weights[i] * left <= rest:
            break
        single.add(i)
        rest -= weights[i]
    return single


def peak_bytes(sizes: Sequence[int], slices: int) -> int:
    """Bytes that two slots take on the device in a step: what ``Stats.device_peak_bytes`` will be.

    Args:
        sizes: bytes of each parameter's states on this device, in the optimizer's order.
        slices: as SwapOptimizer has them.

    Returns:
        Bytes, without what alignment adds: less than 512 for each state tensor.

    Raises:
        ValueError: `slices` is not between 1 and the number of parameters.
    """
    if not 1 <= slices <= len(sizes):
        raise ValueError(
            f"slices must be an integer from 1 to {len(sizes)}, the number of sizes, got {slices!r}"
        )
    parts = [sum(sizes[a:b]) for a, b in pairwise([0, *partition(sizes, slices)])]
    return sum(slot_bytes(parts))


def slot_bytes(slices: Sequence[int]) -> tuple[int, int]:
    """Sizes of the two slots for slices of these bytes, which take turns."""
    return max(slices[0::2], default=0), max(slices[1::2], default=0)

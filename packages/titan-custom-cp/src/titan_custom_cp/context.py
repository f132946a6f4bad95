"""Contexts: inside, every rank holds its rows of the inputs, and the model knows where they are."""

import importlib
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Self

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_custom_cp.balancers import HeadTail, LoadBalancer
from titan_custom_cp.collectives import (
    Order,
    check_alike,
    gather_in_order,
    heads_to_sequence,
    one_dimension,
    sequence_to_heads,
)

# B batch, S rows of the sequence, R ranks, L = S / R rows of a rank, H heads, D features

# A list, not a context variable: recomputation under activation checkpointing runs in the threads
# of autograd, which must find the context of the forward.
_entered: list["CustomContextParallelContext"] = []


def current_context() -> "CustomContextParallelContext | None":
    """The context that is open around this call, the innermost one, or None."""
    return _entered[-1] if _entered else None


class CustomContextParallelContext:
    """Shards inputs along the sequence while it is open, and restores them when it closes.

    That is all the base class does; subclasses say how a model's attention sees the rest of the
    sequence. Modules reach the open context through `current_context`.

    Forward and backward both belong inside: recomputed layers ask for the context again. It can be
    opened again after it was closed, for the next batch in the same buffers.

    Args:
        mesh: of one dimension, the ranks that share a sequence.
        buffers: tensors that hold the whole sequence on every rank, e.g. tokens, labels, positions.
            Inside, each holds this rank's rows. They must not require gradients.
        buffer_seq_dims: the dimension of the sequence in each of them.
        no_restore_buffers: those of `buffers` that stay as they are inside.
        load_balancer: how rows are shared out; `HeadTail` if None.

    Raises:
        TypeError: no DeviceMesh, no load balancer, or something that is no tensor.
        ValueError: a mesh of several dimensions, lists of different lengths, a sequence dimension
            that is not there, buffers with sequences of different lengths, or a length that the
            balancer does not take. Nothing has been changed or sent by then.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        buffers: Sequence[Tensor],
        buffer_seq_dims: Sequence[int],
        no_restore_buffers: Collection[Tensor] | None = None,
        load_balancer: LoadBalancer | None = None,
    ) -> None:
        one_dimension(mesh)
        self.mesh = mesh
        self.load_balancer = HeadTail() if load_balancer is None else load_balancer
        self._buffers, self._dims = list(buffers), list(buffer_seq_dims)
        self._length = _sequence_length(self._buffers, self._dims)
        kept = list(no_restore_buffers or ())
        for x in kept:
            if not any(x is buffer for buffer in self._buffers):
                raise ValueError(
                    f"no_restore_buffers: got a tensor of shape {tuple(x.shape)} that is not one "
                    "of buffers"
                )
        self._restored = [not any(x is buffer for x in kept) for buffer in self._buffers]
        self._order = Order.of(self.load_balancer, self._length, mesh.size())
        self._order_on: dict[torch.device, Order] = {}
        self._whole: list[Tensor] | None = None

    @property
    def index(self) -> Tensor:
        """int64 [L]: where in the sequence each of this rank's rows is."""
        sent_S = self.order_on(self._buffers[0].device).sent_S
        return sent_S.chunk(self.mesh.size())[self.mesh.get_local_rank()]

    def order_on(self, device: torch.device) -> Order:
        """The order of rows, copied to a device once: a copy for each layer would wait for it."""
        if device not in self._order_on:
            self._order_on[device] = self._order.to(device)
        return self._order_on[device]

    def __enter__(self) -> Self:
        if self._whole is not None:
            raise RuntimeError("this context is open already: close it first, or make another one")
        for i, (x, dim) in enumerate(zip(self._buffers, self._dims, strict=True)):
            if x.shape[dim] != self._length:
                raise RuntimeError(
                    f"buffers[{i}]: its sequence is {x.shape[dim]} long and was {self._length} "
                    "when this context was made; buffers of no_restore_buffers are used up"
                )
        index_L = self.index
        shards = [
            x.data.index_select(dim, index_L.to(x.device))
            for x, dim in zip(self._buffers, self._dims, strict=True)
        ]
        self._whole = [x.data for x in self._buffers]
        for x, shard in zip(self._buffers, shards, strict=True):
            x.data = shard
        _entered.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _entered.remove(self)
        whole, self._whole = self._whole or [], None
        for x, data, restored in zip(self._buffers, whole, self._restored, strict=True):
            if restored:
                x.data = data


class DSAContextParallelContext(CustomContextParallelContext):
    """For sparse attention: queries stay where they are, and every rank gets all keys.

    In the absorbed form there is one key head, 576 wide, for all query heads; gathering it costs
    little beside what it is used for. Which keys a query may see is for a mask over the natural
    order: give it `index`, e.g. ``npu_dsa_kernels.causal_bounds(positions, index=cp.index)``.
    """

    def gather_keys(self, *tensors: Tensor, dim: int = 1) -> tuple[Tensor, ...]:
        """All rows of each tensor, in their natural order: latent, rope and index keys at once.

        One all-gather forward, one reduce-scatter backward, whatever the number of tensors.

        Args:
            tensors: this rank's rows, e.g. [B, L, D] and [B, L, Di], of one dtype.
            dim: the dimension of the sequence.

        Returns:
            [B, S, D], [B, S, Di].

        Raises:
            ValueError: as `gather_sequences`; also where the rows are not those of this context.
        """
        check_alike(tensors, dim)
        _check_rows("tensors[0]", tensors[0].shape[dim], self._length, self.mesh.size())
        order = self.order_on(tensors[0].device)
        return gather_in_order(tensors, self.mesh.get_group(), dim, order)


class UlyssesContextParallelContext(CustomContextParallelContext):
    """For dense attention: each rank gets the whole sequence for some of the heads.

    DeepSpeed-Ulysses (Jacobs et al., 2023). Its bandwidth falls with the number of ranks, where
    gathering keys and values does not; it needs as many heads as ranks.
    """

    def to_heads(self, x: Tensor) -> Tensor:
        """[B, L, H, D] to [B, S, H / R, D], in the sequence's natural order: one all-to-all.

        Raises:
            ValueError: not four dimensions, rows that are not those of this context, or heads that
                do not divide by the ranks.
        """
        _check_heads(x, "B, L, H, D")
        R = self.mesh.size()
        _check_rows("x", x.shape[1], self._length, R)
        if x.shape[2] % R:
            raise ValueError(
                f"x: got H={x.shape[2]} heads; expected a multiple of {R}, the number of ranks"
            )
        return sequence_to_heads(x, self.mesh.get_group(), self.order_on(x.device))

    def to_sequence(self, x: Tensor) -> Tensor:
        """[B, S, H / R, D] to [B, L, H, D]: the inverse of `to_heads`.

        Raises:
            ValueError: not four dimensions, or not the whole sequence.
        """
        _check_heads(x, "B, S, H / R, D")
        if x.shape[1] != self._length:
            raise ValueError(f"x: got {x.shape[1]} rows; expected {self._length}, all of them")
        return heads_to_sequence(x, self.mesh.get_group(), self.order_on(x.device))

    def attend(self, attention: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """`attention` over the whole sequence, for the heads of this rank.

        Args:
            attention: takes what `to_heads` makes of `tensors` and returns [B, S, H / R, D].
            tensors: [B, L, H, D], e.g. queries, keys and values.

        Returns:
            [B, L, H, D].
        """
        return self.to_sequence(attention(*(self.to_heads(x) for x in tensors)))


def load_context(path: str) -> type[CustomContextParallelContext]:
    """The class at a dotted path, e.g. "my_package.my_module.MyContext", for configuration files.

    Raises:
        ValueError: no such module or class, or not a subclass of `CustomContextParallelContext`.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name.strip(".") or module_name.startswith(".") or not name:
        raise ValueError(f"path: got {path!r}; expected 'module.Class'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; what it imports is not
        raise ValueError(f"path: got {path!r}; there is no module {error.name!r}") from None
    found = getattr(module, name, None)
    if found is None:
        raise ValueError(f"path: got {path!r}; {module_name} has no {name!r}")
    if not isinstance(found, type):
        raise ValueError(f"path: got {path!r}, a {type(found).__name__}; expected a class")
    if not issubclass(found, CustomContextParallelContext):
        manager = hasattr(found, "__enter__") and hasattr(found, "__exit__")
        what = "a context manager, but not" if manager else "no context manager, and not"
        raise ValueError(
            f"path: got {path!r}, which is {what} a subclass of CustomContextParallelContext"
        )
    return found


def _sequence_length(buffers: list[Tensor], dims: list[int]) -> int:
    if not buffers:
        raise ValueError("buffers: got none; expected at least one tensor")
    if len(dims) != len(buffers):
        raise ValueError(f"buffer_seq_dims: got {len(dims)} dimensions for {len(buffers)} buffers")
    for i, (x, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not isinstance(x, Tensor):
            raise TypeError(f"buffers[{i}]: got {type(x).__name__}; expected a torch.Tensor")
        if x.requires_grad:
            raise ValueError(f"buffers[{i}]: it requires gradients, which its shard would not have")
        if any(x is other for other in buffers[:i]):
            raise ValueError(f"buffers[{i}]: the same tensor is in buffers twice")
        if not -x.dim() <= dim < x.dim():
            raise ValueError(f"buffer_seq_dims[{i}]: got {dim} for shape {tuple(x.shape)}")
        if x.shape[dim] != buffers[0].shape[dims[0]]:
            raise ValueError(
                f"buffers[{i}]: got a sequence of {x.shape[dim]} (dimension {dim}); expected "
                f"{buffers[0].shape[dims[0]]}, as buffers[0] has"
            )
    return buffers[0].shape[dims[0]]


def _check_heads(x: Tensor, layout: str) -> None:
    if x.dim() != 4:
        raise ValueError(f"x: got shape {tuple(x.shape)}; expected [{layout}]")


def _check_rows(name: str, rows: int, length: int, ranks: int) -> None:
    if rows * ranks != length:
        raise ValueError(
            f"{name}: got {rows} rows; expected {length // ranks}, a rank's share of {length}"
        )

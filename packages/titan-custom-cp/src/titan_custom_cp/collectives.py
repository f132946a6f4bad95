"""Collectives along the sequence, with the gradients they ask for."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from titan_custom_cp.balancers import HeadTail, LoadBalancer

# B batch, S rows of the sequence, R ranks, L = S / R rows of a rank, H heads, D features


def gather_sequence(
    x: Tensor, mesh: DeviceMesh, dim: int, load_balancer: LoadBalancer | None = None
) -> Tensor:
    """The whole sequence, in its natural order, from the rows that each rank holds.

    One all-gather forward; backward, one reduce-scatter that sums what all ranks did with a row.

    Args:
        x: this rank's rows, along `dim`; any dtype and layout.
        mesh: of one dimension, the ranks that share the sequence.
        dim: the dimension of the sequence.
        load_balancer: how rows are shared out; `HeadTail` if None.

    Returns:
        Like `x`, with `dim` as many times as long as there are ranks.

    Raises:
        TypeError: no DeviceMesh, or no load balancer.
        ValueError: a mesh of several dimensions, no such dimension, or a length that the balancer
            does not take or does not cover.
    """
    return gather_sequences((x,), mesh, dim, load_balancer)[0]


def gather_sequences(
    tensors: Sequence[Tensor],
    mesh: DeviceMesh,
    dim: int,
    load_balancer: LoadBalancer | None = None,
) -> tuple[Tensor, ...]:
    """`gather_sequence` of several tensors in one collective, forward and backward.

    Args:
        tensors: of one dtype, and of the same sizes up to and including `dim`.
        mesh, dim, load_balancer: as in `gather_sequence`; `dim` not negative.

    Raises:
        ValueError: as there; tensors of different dtypes or leading sizes.
    """
    one_dimension(mesh)
    check_alike(tensors, dim)
    balancer = HeadTail() if load_balancer is None else load_balancer
    rows = tensors[0].shape[dim]
    order = Order.of(balancer, rows * mesh.size(), mesh.size()).to(tensors[0].device)
    return gather_in_order(tensors, mesh.get_group(), dim, order)


class Order(NamedTuple):
    """Which row of the sequence each rank's rows are, and where a row of the sequence went."""

    sent_S: Tensor
    """The sequence's rows in the order of the ranks that hold them."""
    natural_S: Tensor
    """The inverse."""

    @classmethod
    def of(cls, balancer: LoadBalancer, length: int, ranks: int) -> "Order":
        """What `balancer` says, checked.

        Raises:
            TypeError: not a load balancer.
            ValueError: it does not take the length, or drops or repeats rows.
        """
        if isinstance(balancer, type) or not callable(getattr(balancer, "order", None)):
            raise TypeError(
                f"load_balancer: got {balancer!r}; expected an object with order(length, ranks), "
                "e.g. HeadTail()"
            )
        sent_S = balancer.order(length, ranks)
        natural_S = sent_S.argsort()
        if not torch.equal(sent_S[natural_S], torch.arange(length, device=sent_S.device)):
            raise ValueError(
                f"load_balancer: the order of {type(balancer).__name__} for {length} rows is no "
                "permutation of them"
            )
        return cls(sent_S, natural_S)

    def to(self, device: torch.device) -> "Order":
        return Order(self.sent_S.to(device), self.natural_S.to(device))


def gather_in_order(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, dim: int, order: Order
) -> tuple[Tensor, ...]:
    """`gather_sequences`, checked before, in a known order on the device of the tensors."""
    first = tensors[0]
    dim %= first.dim()
    if len(tensors) == 1:
        return (_GatherSequence.apply(first, group, dim, *order),)
    # All that belongs to a row of the sequence goes side by side.
    flat = [x.flatten(dim + 1) if x.dim() > dim + 1 else x.unsqueeze(-1) for x in tensors]
    whole = _GatherSequence.apply(torch.cat(flat, -1), group, dim, *order)
    parts = whole.split([x.shape[-1] for x in flat], -1)
    return tuple(
        part.reshape(*part.shape[: dim + 1], *x.shape[dim + 1 :])
        for part, x in zip(parts, tensors, strict=True)
    )


def sequence_to_heads(x_BLHD: Tensor, group: dist.ProcessGroup, order: Order) -> Tensor:
    """[B, L, H, D] of all heads to [B, S, H / R, D] of the whole sequence: one all-to-all."""
    return _SequenceToHeads.apply(x_BLHD, group, order)


def heads_to_sequence(x_BSHD: Tensor, group: dist.ProcessGroup, order: Order) -> Tensor:
    """The inverse of `sequence_to_heads`."""
    return _HeadsToSequence.apply(x_BSHD, group, order)


def one_dimension(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: got {type(mesh).__name__}; expected a DeviceMesh")
    if mesh.ndim != 1:
        names = "" if mesh.mesh_dim_names is None else f" {tuple(mesh.mesh_dim_names)}"
        raise ValueError(
            f"mesh: got {mesh.ndim} dimensions{names}; expected the one that shares the sequence, "
            "e.g. mesh['cp']"
        )


def check_alike(tensors: Sequence[Tensor], dim: int) -> None:
    if not tensors:
        raise ValueError("tensors: got none; expected at least one")
    first = tensors[0]
    if not -first.dim() <= dim < first.dim():
        raise ValueError(f"dim: got {dim}; expected one of the {first.dim()} dimensions of x")
    if len(tensors) > 1 and dim < 0:
        raise ValueError(f"dim: got {dim}; expected it from the front, for several tensors")
    for i, x in enumerate(tensors):
        if x.dtype != first.dtype:
            raise ValueError(
                f"tensors[{i}]: got {x.dtype}; expected {first.dtype}, as tensors[0] is, since one "
                "collective carries both"
            )
        if len(tensors) > 1 and x.shape[: dim + 1] != first.shape[: dim + 1]:
            raise ValueError(
                f"tensors[{i}]: got shape {tuple(x.shape)}; expected it to start with "
                f"{tuple(first.shape[: dim + 1])}, as tensors[0] does"
            )


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, sent_S: Tensor, natural_S: Tensor
    ) -> Tensor:
        ctx.group, ctx.dim = group, dim
        ctx.save_for_backward(sent_S)
        rows = x.movedim(dim, 0).contiguous()
        whole = rows.new_empty(sent_S.numel(), *rows.shape[1:])
        dist.all_gather_single(whole, rows, group=group)
        return whole.index_select(0, natural_S).movedim(0, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_whole: Tensor):
        (sent_S,) = ctx.saved_tensors
        rows = d_whole.movedim(ctx.dim, 0).index_select(0, sent_S)
        d_x = rows.new_empty(rows.shape[0] // ctx.group.size(), *rows.shape[1:])
        dist.reduce_scatter_single(d_x, rows, group=ctx.group)
        return d_x.movedim(0, ctx.dim), None, None, None, None


class _SequenceToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BLHD: Tensor, group: dist.ProcessGroup, order: Order) -> Tensor:
        ctx.group, ctx.order = group, order
        return _to_heads(x_BLHD, group, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x_BSHD: Tensor):
        return _to_sequence(d_x_BSHD, ctx.group, ctx.order), None, None


class _HeadsToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSHD: Tensor, group: dist.ProcessGroup, order: Order) -> Tensor:
        ctx.group, ctx.order = group, order
        return _to_sequence(x_BSHD, group, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x_BLHD: Tensor):
        return _to_heads(d_x_BLHD, ctx.group, ctx.order), None, None


def _to_heads(x_BLHD: Tensor, group: dist.ProcessGroup, order: Order) -> Tensor:
    R = group.size()
    sent_RLBHD = x_BLHD.unflatten(2, (R, -1)).permute(2, 1, 0, 3, 4).contiguous()
    received_RLBHD = torch.empty_like(sent_RLBHD)
    dist.all_to_all_single(received_RLBHD, sent_RLBHD, group=group)
    return received_RLBHD.flatten(0, 1).index_select(0, order.natural_S).transpose(0, 1)


def _to_sequence(x_BSHD: Tensor, group: dist.ProcessGroup, order: Order) -> Tensor:
    R = group.size()
    sent_RLBHD = x_BSHD.transpose(0, 1).index_select(0, order.sent_S).unflatten(0, (R, -1))
    received_RLBHD = torch.empty_like(sent_RLBHD)
    dist.all_to_all_single(received_RLBHD, sent_RLBHD.contiguous(), group=group)
    return received_RLBHD.permute(2, 1, 0, 3, 4).flatten(2, 3)

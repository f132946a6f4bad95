"""DTensors from whole tensors, with any placements, and what ranks compute of them."""

import itertools

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode

R, P = Replicate(), Partial()


def mesh(*shape: int):
    names = ("a", "b", "c")[: len(shape)]
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=names)


def distribute(x, device_mesh, placements: tuple[Placement, ...]) -> DTensor:
    """The whole tensor on all ranks, as a DTensor; a sum has another part on every rank."""
    if not isinstance(x, Tensor):
        return x
    sums = [d for d, p in enumerate(placements) if isinstance(p, Partial)]
    whole = [R if isinstance(p, Partial) else p for p in placements]
    local = distribute_tensor(x, device_mesh, whole).to_local().clone()
    for d in sums:
        n, rank = device_mesh.size(d), device_mesh.get_local_rank(d)
        # Parts that differ between ranks and add up to the tensor.
        local = local * (rank + 1) * 2 / (n * (n + 1))
    return DTensor.from_local(
        local, device_mesh, placements, shape=x.shape, stride=x.stride(), run_check=False
    )


def choices(x: Tensor, ndim: int) -> list[tuple[Placement, ...]]:
    """All placements of a tensor: whole, sharded along any dimension, or a sum."""
    one = [R, *(Shard(d) for d in range(x.dim())), *([P] if x.is_floating_point() else [])]
    return list(itertools.product(one, repeat=ndim))


def moved(comm: CommDebugMode) -> int:
    return comm.get_total_counts()


def close(got, wanted: Tensor, what: object = "") -> None:
    got = got.full_tensor() if isinstance(got, DTensor) else got
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9, msg=lambda m: f"{what}: {m}")

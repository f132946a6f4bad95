"""DTensors of fake tensors on device "npu", on meshes of eight ranks that are not there."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch_npu.op_plugin.meta import _meta_registrations as shapes

R, P = Replicate(), Partial()

# Its shape function starts the device to find out whether to warn about compilation, once.
shapes._npu_fusion_attention_warning_printed = True

dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
GRID = dist.init_device_mesh("npu", (4, 2))
LINE = dist.init_device_mesh("npu", (8,))


def shard_shape(shape, mesh, placements: tuple[Placement, ...]) -> tuple[int, ...]:
    """Of rank 0: shards like torch.chunk's, cut again for each mesh dimension."""
    shape = list(shape)
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            shape[placement.dim] = -(-shape[placement.dim] // mesh.size(dim))
    return tuple(shape)


def placed(x: Tensor, mesh, placements: tuple[Placement, ...], grad: bool = False) -> DTensor:
    """A DTensor of the shape and dtype of `x`."""
    local = torch.empty(shard_shape(x.shape, mesh, placements), dtype=x.dtype, device="npu")
    stride, size = [], 1
    for n in reversed(x.shape):
        stride.insert(0, size)
        size *= n
    y = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=x.shape, stride=tuple(stride)
    )
    return y.requires_grad_(grad)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="npu")

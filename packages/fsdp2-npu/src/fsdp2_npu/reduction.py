"""Which process groups can average gradients, and which can only sum them."""

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# Backends with ReduceOp.AVG and ReduceOp.PREMUL_SUM. All others get sums and an explicit division,
# which are right everywhere; Gloo and HCCL, for two, refuse PREMUL_SUM. "fake" reduces nothing.
_AVERAGING_BACKENDS = frozenset({"nccl", "fake"})


def needs_sum_reduction(mesh: DeviceMesh, dims: Sequence[str] | None = None) -> bool:
    """Whether gradients on this mesh must be reduced with sums and an explicit division.

    Args:
        mesh: the mesh over which gradients are reduced.
        dims: names of the dimensions that reduce them; all by default.

    Returns:
        False if the backend of every group has AVG and PREMUL_SUM (NCCL), else True.
    """
    groups = (
        [mesh.get_group(dim) for dim in range(mesh.ndim)]
        if dims is None
        else [mesh.get_group(name) for name in dims]
    )
    return any(_backend(group, mesh.device_type) not in _AVERAGING_BACKENDS for group in groups)


def _backend(group: dist.ProcessGroup, device_type: str) -> str:
    # "cpu:gloo,cuda:nccl"
    for entry in dist.get_backend_config(group).split(","):
        device, _, backend = entry.partition(":")
        if device == device_type:
            return backend
    return dist.get_backend(group)

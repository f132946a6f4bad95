"""Global gradient norm and clipping, accurate and the same under every mesh."""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial

__all__ = ["clip_grad_norm", "global_grad_norm"]


@torch.no_grad()
def global_grad_norm(
    parameters: Iterable[nn.Parameter], *, pp_mesh: DeviceMesh | None = None
) -> torch.Tensor:
    """L2 norm of all gradients seen as one vector: a scalar on the gradients' device.

    Squares are summed in fp64 (fp32 where the device has no fp64): an fp32 sum over a large tensor
    is off in the fourth digit on CPU, and differently for every sharding. Each element counts
    once, whether its tensor is sharded, replicated or both.

    Args:
        parameters: parameters without a gradient are left out.
        pp_mesh: pipeline mesh over whose stages the squares are added up.

    Raises:
        ValueError: a gradient is a pending partial sum.
    """
    # One sum for each set of mesh dimensions over which the elements are spread.
    sums: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        groups: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(grad, DTensor):
            mesh = grad.device_mesh
            if any(isinstance(p, Partial) for p in grad.placements):
                raise ValueError(
                    f"gradient with placements {grad.placements} is a partial sum: reduce it "
                    "before taking its norm"
                )
            groups = tuple(
                mesh.get_group(i) for i, p in enumerate(grad.placements) if not p.is_replicate()
            )
            grad = grad.to_local()
        dtype = torch.float32 if grad.device.type in ("npu", "mps") else torch.float64
        sums[groups].append(torch.linalg.vector_norm(grad, dtype=dtype).square())
    if not sums:
        raise ValueError("no parameter has a gradient")
    totals = []
    for groups, squares in sums.items():
        square = torch.stack(squares).sum()
        for group in groups:
            dist.all_reduce(square, group=group)
        totals.append(square)
    total = torch.stack(totals).sum()
    if pp_mesh is not None:
        dist.all_reduce(total, group=pp_mesh.get_group())
    return total.sqrt()


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter], max_norm: float, *, pp_mesh: DeviceMesh | None = None
) -> torch.Tensor:
    """Scale all gradients so that their :func:`global_grad_norm` is at most ``max_norm``.

    Returns the norm before clipping.
    """
    parameters = list(parameters)
    norm = global_grad_norm(parameters, pp_mesh=pp_mesh)
    # Local shards: gradients may be spread over different meshes (dense, experts), which torch's
    # own function cannot scale in one call.
    grads = [_local(p.grad) for p in parameters if p.grad is not None]
    torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0).float())
    return norm


def _local(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad

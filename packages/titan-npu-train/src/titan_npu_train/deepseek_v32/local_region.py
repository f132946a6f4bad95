"""Where a layer leaves sharded tensor types: from here on, every rank computes on its own part.

Sparse attention selects by value, so no sharding rule can describe it. Its inputs become local
tensors with a stated layout, its output gets a layout again. Under torchtitan's backend spmd_types
tensors are local already, and only their types are set aside and put back.
"""

import contextlib

import spmd_types as spmd
import torch
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.sharding import SpmdLayout, resolve_placements

__all__ = ["LocalRegion", "retyped", "untyped"]


class LocalRegion:
    """The border between a layer's sharded tensors and its local computation."""

    def __init__(self, parallel_dims: ParallelDims) -> None:
        self._parallel_dims = parallel_dims

    def enter(
        self, x: torch.Tensor, layout: SpmdLayout, gradient: SpmdLayout | None = None
    ) -> torch.Tensor:
        """This rank's part of ``x``.

        Args:
            x: a tensor of ``layout``, sharded or local already.
            gradient: layout of the gradient that comes back, e.g. a pending sum (P) where each
                rank uses the whole of ``x`` for its own part of the result; ``layout`` if None.
        """
        if not isinstance(x, DTensor):
            return x
        mesh = x.device_mesh
        expected = resolve_placements(layout, mesh)
        assert tuple(x.placements) == expected, (x.placements, expected)
        return x.to_local(grad_placements=resolve_placements(gradient or layout, mesh))

    def leave(self, x: torch.Tensor, layout: SpmdLayout) -> torch.Tensor:
        """A sharded tensor of ``layout`` whose part on this rank is ``x``."""
        if self._parallel_dims.spmd_backend == "spmd_types":
            return x
        mesh = self._parallel_dims.resolve_mesh(layout.axes())
        if mesh is None:
            return x
        return DTensor.from_local(x, mesh, resolve_placements(layout, mesh), run_check=False)


def retyped(x: torch.Tensor, layout: SpmdLayout) -> torch.Tensor:
    """``x``, which comes from an :func:`untyped` computation, with the SPMD type of ``layout``."""
    if not torch.compiler.is_compiling() and spmd.is_type_checking():
        spmd.assert_type(x, layout.axis_types, layout.partition_spec)
    return x


def untyped() -> contextlib.AbstractContextManager:
    """Sets SPMD types aside, where they are checked at all."""
    if torch.compiler.is_compiling() or not spmd.is_type_checking():
        return contextlib.nullcontext()
    return spmd.no_typecheck()

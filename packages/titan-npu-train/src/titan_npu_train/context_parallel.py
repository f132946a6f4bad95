"""Which context shards a sequence over context-parallel ranks, and how evenly."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config import ParallelismConfig

from titan_custom_cp import (
    Contiguous,
    CustomContextParallelContext,
    DSAContextParallelContext,
    HeadTail,
    LoadBalancer,
    load_context,
)

__all__ = ["ContextParallelOptions"]

_BALANCERS: dict[str | None, type[LoadBalancer]] = {
    "headtail": HeadTail,
    "contiguous": Contiguous,
    None: Contiguous,
}
_DEFAULT = "titan_custom_cp.DSAContextParallelContext"


@dataclass(kw_only=True, slots=True)
class ContextParallelOptions:
    context: str = _DEFAULT
    """
    Dotted path of the context that shards a batch, a subclass of
    titan_custom_cp.DSAContextParallelContext. Load balancing is
    parallelism.context_parallel_load_balancer: headtail or contiguous.
    """

    def check(self, parallelism: ParallelismConfig, seq_len: int) -> None:
        """Refuse what could not run, before any rank communicates.

        Raises:
            ValueError: an unknown context or balancer, or a sequence it does not share out.
        """
        try:
            found = load_context(self.context)
        except ValueError as error:
            raise ValueError(f"context_parallel.context: {error}") from None
        if not issubclass(found, DSAContextParallelContext):
            raise ValueError(
                f"context_parallel.context is {self.context!r}, which gathers no keys: sparse "
                "attention needs a subclass of titan_custom_cp.DSAContextParallelContext"
            )
        ranks = parallelism.context_parallel_degree
        balancer = _balancer(parallelism)
        if ranks == 1:
            return
        try:
            balancer.order(seq_len, ranks)
        except ValueError as error:
            raise ValueError(
                f"training.seq_len {seq_len} cannot be shared out to "
                f"parallelism.context_parallel_degree {ranks} ranks: {error}"
            ) from None

    def refuse_if_set(self, why: str) -> None:
        """Refuse a choice that nothing would use.

        Raises:
            ValueError: a context other than the default.
        """
        if self.context != _DEFAULT:
            raise ValueError(f"context_parallel.context is {self.context!r}, but {why}")

    def open(
        self, parallelism: ParallelismConfig, mesh: DeviceMesh, tensors: Sequence[torch.Tensor]
    ) -> CustomContextParallelContext:
        """A context, not yet entered, that shards ``tensors`` ([B, S] or [B, S, *]) in place."""
        return load_context(self.context)(
            mesh,
            buffers=tensors,
            buffer_seq_dims=[1] * len(tensors),
            load_balancer=_balancer(parallelism),
        )


def _balancer(parallelism: ParallelismConfig) -> LoadBalancer:
    name = parallelism.context_parallel_load_balancer
    if name not in _BALANCERS:
        raise ValueError(
            "parallelism.context_parallel_load_balancer must be 'headtail' or 'contiguous' for "
            f"sparse attention, got {name!r}"
        )
    return _BALANCERS[name]()

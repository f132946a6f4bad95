"""Expert-parallel token dispatch that every backend can run, with a deterministic backward.

torchtitan's dispatcher decides who gets which token; what differs here is how tokens move:

- Its eager exchange is a list all-to-all with chunks of different sizes, which Gloo refuses
  ("invalid tensor size"). ``all_to_all_single`` with split sizes moves the same bytes on Gloo,
  NCCL and HCCL; torchtitan itself uses it in compiled code.
- Its gather of tokens into expert order repeats each token top-k times, and the gradient adds
  those copies up with an indexed accumulation, whose order varies from run to run with several
  threads. Here it is a gather and a sum over the copies, the same bits every time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config import override
from torchtitan.config.override import derive
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

__all__ = ["ExpertDispatcher", "expert_dispatcher"]

# Shapes, as in torchtitan: T tokens of this rank, D model width, K experts a token, N = T * K
# routed tokens, R tokens that arrive at this rank's experts, E experts.


class ExpertDispatcher(AllToAllTokenDispatcher):
    """torchtitan's all-to-all dispatcher over ``all_to_all_single``, with a deterministic backward.

    Without expert parallelism tokens are only reordered. Experts that get no token, and ranks that
    send or receive none, are ordinary cases.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pass

    def _local_reorder(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens in the order of their experts: x_ND, the token each row is, and its score."""
        order_N = torch.argsort(topk_expert_ids_TK.view(-1), stable=True)
        scores_N = topk_scores_TK.view(-1)[order_N]
        x_ND = _untyped(_GatherRepeated.apply, x_TD, order_N, self.top_k)
        return x_ND, order_N // self.top_k, scores_N

    def _token_count_exchange(
        self,
        num_local_tokens_per_expert_E: torch.Tensor,
        pg: dist.ProcessGroup,
        ep_size: int,
    ) -> torch.Tensor:
        counts = num_local_tokens_per_expert_E.view(ep_size, -1)
        return _untyped(_all_to_all, counts, [1] * ep_size, [1] * ep_size, self.ep_mesh)

    def _dispatch_token_exchange(
        self,
        routed_input_ND: torch.Tensor,
        pg: dist.ProcessGroup,
        output_splits: list[int],
        input_splits: list[int],
    ) -> torch.Tensor:
        return _untyped(_all_to_all, routed_input_ND, output_splits, input_splits, self.ep_mesh)

    def _combine_token_exchange(
        self,
        routed_output_RD: torch.Tensor,
        pg: dist.ProcessGroup,
        input_splits: list[int],
        output_splits: list[int],
    ) -> torch.Tensor:
        return _untyped(_all_to_all, routed_output_RD, input_splits, output_splits, self.ep_mesh)


@override(
    target=AllToAllTokenDispatcher.Config,
    exact=True,
    description="Expert dispatch by all_to_all_single (Gloo, NCCL, HCCL).",
)
def expert_dispatcher(config: AllToAllTokenDispatcher.Config) -> ExpertDispatcher.Config:
    """For stock models: override.imports titan_npu_train.expert_dispatch.expert_dispatcher."""
    return derive(config, ExpertDispatcher.Config)


def _all_to_all(
    x: torch.Tensor, output_splits: list[int], input_splits: list[int], mesh: DeviceMesh
) -> torch.Tensor:
    """Send ``input_splits[r]`` rows to rank r and receive ``output_splits[r]`` from it."""
    # The functional operator differentiates, is traced by torch.compile, and is one that selective
    # activation checkpointing keeps instead of communicating again.
    return funcol.wait_tensor(
        funcol.all_to_all_single(x.contiguous(), output_splits, input_splits, mesh)
    )


class _GatherRepeated(torch.autograd.Function):
    """x_ND[i] = x_TD[order_N[i] // K] for a permutation order_N of the T * K copies.

    The gradient puts the copies of a token side by side and adds them: no accumulation into shared
    rows.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, order_N: torch.Tensor, k: int) -> torch.Tensor:
        ctx.save_for_backward(order_N)
        ctx.k = k
        return x_TD[order_N // k]

    @staticmethod
    def backward(ctx: Any, grad_ND: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (order_N,) = ctx.saved_tensors
        position_N = torch.empty_like(order_N)
        position_N[order_N] = torch.arange(order_N.numel(), device=order_N.device)
        grad_TKD = grad_ND[position_N].unflatten(0, (-1, ctx.k))
        return grad_TKD.sum(1), None, None


def _untyped(function: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any) -> torch.Tensor:
    """Call ``function(x, *args)`` outside SPMD type checking; the result has the type of ``x``.

    The checker knows neither the functional all-to-all nor the autograd function. Neither changes
    the type: what varied from rank to rank still does.
    """
    if torch.compiler.is_compiling() or not spmd.is_type_checking():
        return function(x, *args)
    with spmd.no_typecheck():
        result = function(x, *args)
    spmd.assert_local_type_like(result, x)
    return result

"""The indexer under tensor parallelism: its queries split over the ranks; its heads cannot be."""

import torch
import torch.distributed as dist
from torch import Tensor

from npu_dsa_kernels import checks

# B batch, S queries, R ranks, L = S / R queries of a rank, K keys of a query, H heads of all ranks,
# h = H / R heads of a rank, D head dim, * any further dimensions


class QuerySplit:
    """Gives each of the ranks that hold different heads of the same tokens a share of the queries.

    The scores, the selection and the loss of the indexer are the work of one query, so each rank
    does them for its share. What crosses ranks is small: the selected keys, gathered, and the
    attention's target, which is summed over everyone's heads and scattered; K numbers a token
    each way, where gathering all heads' queries would be H x D. (`rows_of_all_heads` is that
    exchange for operators that need all heads at once, as an all-to-all.)

    Of 2 R equal parts, rank r has the r-th from the front and the r-th from the back: causal
    queries see more keys the later they are, and in one document every rank gets the same work.

    Args:
        group: the tensor-parallel ranks, in the order of their heads.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def share(self, S: int) -> int:
        """How many of S queries each rank has.

        Raises:
            ValueError: S does not divide by twice the number of ranks.
        """
        R = self.group.size()
        if S % (2 * R):
            raise checks.bad(
                "q",
                f"S={S}",
                f"expected a multiple of {2 * R}: each of the {R} ranks of query_split takes two "
                "parts of the queries, an early and a late one",
            )
        return S // R

    def rows(self, S: int, *, device: torch.device | None = None) -> Tensor:
        """int64 [L]: which of S queries are this rank's.

        Raises:
            ValueError: S does not divide by twice the number of ranks.
        """
        return self._order(S, device).chunk(self.group.size())[self.group.rank()]

    def take(self, x_BS: Tensor) -> Tensor:
        """[B, S, *] to this rank's rows [B, L, *]."""
        return x_BS.index_select(1, self.rows(x_BS.shape[1], device=x_BS.device))

    def gather(self, x_BL: Tensor) -> Tensor:
        """[B, L, *] of each rank to all rows [B, S, *]: one all-gather. Not differentiable."""
        order_S = self._order(x_BL.shape[1] * self.group.size(), x_BL.device)
        rows_LB = x_BL.detach().transpose(0, 1).contiguous()
        whole_SB = rows_LB.new_empty(order_S.numel(), *rows_LB.shape[1:])
        dist.all_gather_single(whole_SB, rows_LB, group=self.group)
        return whole_SB.index_select(0, order_S.argsort()).transpose(0, 1).contiguous()

    def sum_rows(self, x_BS: Tensor) -> Tensor:
        """[B, S, *] of each rank to the sum of this rank's rows [B, L, *]: one reduce-scatter.

        Not differentiable.
        """
        order_S = self._order(x_BS.shape[1], x_BS.device)
        whole_SB = x_BS.detach().transpose(0, 1).index_select(0, order_S)
        rows_LB = whole_SB.new_empty(whole_SB.shape[0] // self.group.size(), *whole_SB.shape[1:])
        dist.reduce_scatter_single(rows_LB, whole_SB, group=self.group)
        return rows_LB.transpose(0, 1).contiguous()

    def rows_of_all_heads(self, x_BSh: Tensor) -> Tensor:
        """[B, S, h, *], this rank's heads, to its rows [B, L, H, *]: one all-to-all.

        Not differentiable.
        """
        R = self.group.size()
        order_S = self._order(x_BSh.shape[1], x_BSh.device)
        sent_SBh = x_BSh.detach().transpose(0, 1).index_select(0, order_S)
        received_SBh = torch.empty_like(sent_SBh)
        dist.all_to_all_single(received_SBh, sent_SBh, group=self.group)
        received_RLBh = received_SBh.unflatten(0, (R, -1))
        return received_RLBh.movedim(0, 2).transpose(0, 1).flatten(2, 3).contiguous()

    def _order(self, S: int, device: torch.device | None) -> Tensor:
        """int64 [S]: the queries in the order of the ranks that have them."""
        self.share(S)
        R = self.group.size()
        part_PN = torch.arange(S, device=device).view(2 * R, -1)
        return torch.stack([part_PN[:R], part_PN[R:].flip(0)], 1).flatten()

"""The one mask: a half-open range of visible keys per query."""

import torch
from torch import Tensor

from npu_dsa_kernels import checks

# B batch, S queries


def causal_bounds(positions: Tensor, *, index: Tensor | None = None) -> Tensor:
    """Visible key range of each query: causal, and never across a document's start.

    The query at global row index ``g`` with position ``p`` inside its document sees the keys
    ``[g - p, g + 1)``. With packed documents `positions` restarts at 0 at each document; under
    context parallelism `index` says where in the full row the local queries sit.

    Args:
        positions: integer [B, S], the position of each query within its document. -1 hides the
            query (padding): its range is empty.
        index: integer [S] or [B, S], the global row index of each query; ``arange(S)`` if None.

    Returns:
        int32 [B, S, 2], the half-open range ``[lo, hi)``. ``lo`` is at least 0: of a document that
        began before this row, the part inside the row is visible.

    Raises:
        ValueError: wrong rank, dtype, shape or device.
    """
    checks.tensor("positions", positions, "B S")
    checks.dtype("positions", positions, (torch.int32, torch.int64))
    B, S = positions.shape
    if index is None:
        index = torch.arange(S, device=positions.device)
    elif not isinstance(index, Tensor) or index.dim() != 1:
        checks.tensor("index", index, "B S")
        checks.shape("index", index, B=B, S=S)
    else:
        checks.shape("index", index, S=S)
    checks.dtype("index", index, (torch.int32, torch.int64))
    checks.same_device("positions", positions, index=index)

    # In int64: a sum past int32 would wrap around to a range of other keys.
    hi_BS = (index.long() + 1).expand(B, S)
    lo_BS = torch.minimum((index.long() - positions.long()).clamp(min=0), hi_BS)
    return torch.stack([lo_BS, hi_BS], dim=-1).clamp(max=checks.INT32_MAX).to(torch.int32)

"""Bounds as sequences: what the fused operators know instead of a mask.

They mask by sequence lengths: with ``sparse_mode=3`` the n queries of a sequence are its last n
positions, so query i of n sees the first ``m - n + i + 1`` of m keys. Visible rows that follow each
other in a batch row, whose ``lo`` stays and whose ``hi`` grows by one, are such a sequence, over
the keys ``[lo, last hi)``. A packed document is one, a context parallel shard one or two for each
document it touches.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from npu_dsa_kernels import checks
from npu_dsa_kernels.backends.npu import limits

# B batch, S queries, T keys, N = B * S, n queries and m keys of all sequences, R sequences

MOST_KEYS = 8
"""Keys that sequences share are repeated: at most this many times all keys."""


@dataclass(frozen=True)
class Part:
    """The sequences of one call, as ranges of the plan's queries and keys."""

    queries: slice
    keys: slice
    query_ends: list[int]
    key_ends: list[int]
    query_ends_R: Tensor = field(repr=False)
    key_ends_R: Tensor = field(repr=False)
    """The same as int32 tensors on the device; some operators take the one, some the other."""


@dataclass(frozen=True)
class Plan:
    """Which rows make up the sequences."""

    query_n: Tensor | None
    """Rows of [B * S]; None if all of them in order. Hidden rows are left out."""
    key_m: Tensor | None
    """Rows of [B * T], repeated where sequences share keys; None if all of them in order."""
    first_key_n1: Tensor
    """int32 [n, 1]: the key of [0, T) that is number 0 of the query's sequence."""
    visible_n1: Tensor
    """int32 [n, 1]: the number of keys that the query sees."""
    parts: list[Part]

    def queries(self, x_BS: Tensor) -> Tensor:
        """Rows of `x`, [B, S, ...] -> [n, ...]."""
        return _rows(x_BS, self.query_n)

    def keys(self, x_BT: Tensor) -> Tensor:
        """Rows of `x`, [B, T, ...] -> [m, ...]."""
        return _rows(x_BT, self.key_m)

    def put_queries(self, x_n: Tensor, like_BS: Tensor, fill: float) -> Tensor:
        """Rows back to [B, S, ...], hidden rows filled."""
        shape = (*like_BS.shape[:2], *x_n.shape[1:])
        if self.query_n is None:
            return x_n.view(shape)
        y_N = x_n.new_full((shape[0] * shape[1], *shape[2:]), fill)
        return y_N.index_copy_(0, self.query_n, x_n).view(shape)

    def add_keys(self, x_m: Tensor, like_BT: Tensor) -> Tensor:
        """The adjoint of `keys`: rows added up where they were repeated, in float32."""
        if self.key_m is None:
            return x_m.view(like_BT.shape)
        B, T = like_BT.shape[:2]
        sum_N = x_m.new_zeros(B * T, *x_m.shape[1:], dtype=torch.float32)
        return sum_N.index_add_(0, self.key_m, x_m.float()).to(x_m.dtype).view(like_BT.shape)


_plans: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def plan(bounds_BS2: Tensor, T: int) -> Plan:
    """The sequences of `bounds`; reads them from the device once for a tensor and its version.

    Raises:
        ValueError: too few neighbouring rows belong together.
    """
    version = None if bounds_BS2.is_inference() else bounds_BS2._version
    known = _plans.get(bounds_BS2)
    if known is not None and version is not None and known[:2] == (version, T):
        return known[2]
    made = _make(read(bounds_BS2), T, bounds_BS2.device)
    _plans[bounds_BS2] = (version, T, made)
    return made


def read(bounds_BS2: Tensor) -> Tensor:
    """The values on the host. Waits for the device."""
    return bounds_BS2.cpu()


def _make(bounds_BS2: Tensor, T: int, device: torch.device) -> Plan:
    B, S = bounds_BS2.shape[:2]
    lo_N, hi_N = bounds_BS2.long().flatten(0, 1).clamp(0, T).unbind(-1)
    row_n = (lo_N < hi_N).nonzero().squeeze(1)
    lo_n, hi_n, batch_n = lo_N[row_n], hi_N[row_n], row_n // S
    joins_n = torch.zeros(len(row_n), dtype=torch.bool)
    joins_n[1:] = (
        (batch_n[1:] == batch_n[:-1]) & (lo_n[1:] == lo_n[:-1]) & (hi_n[1:] == hi_n[:-1] + 1)
    )
    start_R = (~joins_n).nonzero().squeeze(1)
    end_R = torch.cat([start_R[1:], torch.tensor([len(row_n)])]) if len(start_R) else start_R
    length_R = hi_n[end_R - 1] - lo_n[start_R]
    total = int(length_R.sum())
    if total > MOST_KEYS * B * T:
        got = f"rows that make {len(start_R)} sequences over {total} keys, of B * T = {B * T}"
        want = (
            "these are no sequences: backend 'npu' needs neighbouring rows with the same lo and a "
            "hi that grows by one; backend='torch' runs any bounds on the same device"
        )
        raise checks.bad("bounds", got, want)

    query_end_R, key_end_R = end_R, length_R.cumsum(0)
    first_R = batch_n[start_R] * T + lo_n[start_R]
    offset_R = first_R - (key_end_R - length_R)
    key_m = torch.arange(total) + offset_R.repeat_interleave(length_R)
    whole = total == B * T and bool((key_m == torch.arange(total)).all())
    return Plan(
        query_n=None if len(row_n) == B * S else row_n.to(device),
        key_m=None if whole else key_m.to(device),
        first_key_n1=lo_n.int().unsqueeze(1).to(device),
        visible_n1=(hi_n - lo_n).int().unsqueeze(1).to(device),
        parts=list(_parts(query_end_R, key_end_R, device)),
    )


def _parts(query_end_R: Tensor, key_end_R: Tensor, device: torch.device) -> Iterator[Part]:
    query, key = 0, 0
    for query_ends_R, key_ends_R in zip(
        query_end_R.split(limits.current().batch),
        key_end_R.split(limits.current().batch),
        strict=True,
    ):
        if len(query_ends_R) == 0:
            return
        last_query, last_key = int(query_ends_R[-1]), int(key_ends_R[-1])
        query_ends_R, key_ends_R = query_ends_R - query, key_ends_R - key
        yield Part(
            slice(query, last_query),
            slice(key, last_key),
            query_ends_R.tolist(),
            key_ends_R.tolist(),
            query_ends_R.int().to(device),
            key_ends_R.int().to(device),
        )
        query, key = last_query, last_key


def _rows(x: Tensor, index: Tensor | None) -> Tensor:
    flat = x.flatten(0, 1)
    return flat.contiguous() if index is None else flat.index_select(0, index)

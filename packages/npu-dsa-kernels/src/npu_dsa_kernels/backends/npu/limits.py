"""What torch_npu's fused operators accept, checked before they are called.

Their shape functions check almost nothing, so a wrong argument would reach the device. The numbers
are those of the operators' public documentation (torch_npu's API reference and the aclnn operator
reference, CANN 8.5 and later).
"""

import dataclasses
from collections.abc import Collection, Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from npu_dsa_kernels import checks

ELSEWHERE = "; backend='torch' runs it on the same device"


@dataclasses.dataclass(frozen=True)
class Limits:
    """The supported values; one object, so that a test without a device can widen them."""

    device: str = "npu"
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    wide_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    """Of the base operators."""
    latent: int = 512
    rope: int = 64
    heads: Collection[int] = (1, 2, 4, 8, 16, 32, 64, 128)
    loss_heads: Collection[int] = (8, 16, 32, 64, 128)
    dense_heads: Collection[int] = (32, 64, 128)
    dense_head_dim: int = 128
    fusion_heads: int = 256
    fusion_dim: int = 768
    fusion_rows: int = 2**20
    """Tokens of a row of a batch, or of all sequences in one call."""
    index_heads: Collection[int] = (8, 16, 32, 64)
    """Of the losses, and taken to be the indexer's: its older documentation names 64 alone."""
    index_dim: int = 128
    slots: int = 2048
    """Width of the index rows that the attention takes; fewer keys leave empty slots."""
    topk: Collection[int] = (*range(1, 2049), *range(3072, 8193, 1024))
    batch: int = 256
    """Rows of a batch, or sequences in one call."""
    sequence: int = 128 * 1024
    groups: int = 1024
    inner: int = 65535
    """Largest last dim of a grouped matmul's operands."""
    rotary_dim: int = 894
    rotary_heads: int = 999
    slots_per_call: int = 2**24 - 2
    """Entries of an expert map."""
    experts_per_token: int = 512


_limits = Limits()


def current() -> Limits:
    return _limits


@contextmanager
def override(**changes: object) -> Generator[None, None, None]:
    """Replace limits while an emulation of the operators, without a device, is tested."""
    global _limits
    before = _limits
    _limits = dataclasses.replace(before, **changes)  # pyrefly: ignore
    try:
        yield
    finally:
        _limits = before


def unsupported(name: str, got: object, want: str) -> ValueError:
    return checks.bad(name, got, f"torch_npu's operator takes {want}{ELSEWHERE}")


def dtype(name: str, x: Tensor, allowed: tuple[torch.dtype, ...] | None = None) -> None:
    allowed = allowed or _limits.dtypes
    if x.dtype not in allowed:
        names = " or ".join(str(d).removeprefix("torch.") for d in allowed)
        raise unsupported(name, x.dtype, names)


def one_of(name: str, what: str, got: int, allowed: Collection[int]) -> None:
    if got not in allowed:
        raise unsupported(name, f"{what}={got}", f"{what} in {_listed(allowed)}")


def rows(name: str, B: int, S: int) -> None:
    if _limits.batch < B:
        raise unsupported(name, f"B={B}", f"at most {_limits.batch} rows of a batch")
    if _limits.sequence < S:
        raise unsupported(name, f"{S} tokens", f"sequences of at most {_limits.sequence} tokens")


def topk(value: int, B: int, S: int) -> None:
    if value not in _limits.topk:
        want = f"topk in {_listed(_limits.topk)}"
        raise unsupported("topk", value, want)
    countable("topk", B * S * value)


def countable(name: str, entries: int) -> None:
    if entries > checks.INT32_MAX:
        raise unsupported(name, f"{entries} index entries", f"at most {checks.INT32_MAX}")


def slots(indices_BSK: Tensor) -> None:
    K = indices_BSK.shape[2]
    if _limits.slots < K:
        raise unsupported("indices", f"K={K}", f"at most {_limits.slots} keys of a query")
    countable("indices", indices_BSK.shape[0] * indices_BSK.shape[1] * _limits.slots)


def same_dtype(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    if x.dtype != other.dtype:
        want = f"{str(other.dtype).removeprefix('torch.')}, the dtype of {other_name}"
        raise unsupported(name, x.dtype, want)


def indexer(q_BSHD: Tensor, k_BTD: Tensor, w_BSH: Tensor) -> None:
    B, S, H, D = q_BSHD.shape
    dtype("q_index", q_BSHD)
    one_of("q_index", "H", H, _limits.index_heads)
    one_of("q_index", "D", D, (_limits.index_dim,))
    rows("q_index", B, S)
    rows("k_index", B, k_BTD.shape[1])
    if w_BSH.dtype != q_BSHD.dtype:
        name = str(q_BSHD.dtype).removeprefix("torch.")
        want = f"{name}, the dtype of q_index (weights.to(torch.{name}) rounds them)"
        raise unsupported("weights", w_BSH.dtype, want)


def attention(q_BSHD: Tensor, kv_BTD: Tensor, v_dim: int | None, heads: Collection[int]) -> None:
    B, S, H, D = q_BSHD.shape
    dtype("q", q_BSHD)
    one_of("q", "H", H, heads)
    one_of("q", "D", D, (_limits.latent + _limits.rope,))
    if v_dim is not None:
        one_of("v_dim", "v_dim", v_dim, (_limits.latent,))
    rows("q", B, S)
    rows("kv", B, kv_BTD.shape[1])


def fusion_attention(q_BSHD: Tensor, k_BTHD: Tensor, v_BTHV: Tensor) -> None:
    (S, H, D), T, V = q_BSHD.shape[1:], k_BTHD.shape[1], v_BTHV.shape[3]
    dtype("q", q_BSHD, _limits.wide_dtypes)
    if _limits.fusion_heads < H:
        raise unsupported("q", f"H={H}", f"at most {_limits.fusion_heads} heads")
    if _limits.fusion_dim < D:
        raise unsupported("q", f"D={D}", f"at most D={_limits.fusion_dim}")
    if V > D:
        raise unsupported("v", f"V={V}", f"values no wider than the keys, D={D}")
    fusion_rows("q", S)
    fusion_rows("k", T)


def fusion_rows(name: str, tokens: int) -> None:
    if _limits.fusion_rows < tokens:
        raise unsupported(name, f"{tokens} tokens", f"at most {_limits.fusion_rows} in a call")


def dense_attention(q_BSHD: Tensor, k_BTHD: Tensor) -> None:
    B, S, H, D = q_BSHD.shape
    if k_BTHD.dim() != 4:
        want = "keys [B, T, H, D] of every head, as they are before absorption"
        raise unsupported("kv", f"shape {tuple(k_BTHD.shape)}", want)
    dtype("q", q_BSHD)
    one_of("q", "H", H, _limits.dense_heads)
    one_of("q", "D", D, (_limits.dense_head_dim + _limits.rope,))
    rows("q", B, S)
    rows("kv", B, k_BTHD.shape[1])


def _listed(values: Collection[int]) -> str:
    """1, 2, 4 or, of consecutive numbers, 1..2048."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    parts = []
    for first, last in runs:
        parts += [f"{first}..{last}"] if last > first + 1 else map(str, range(first, last + 1))
    return ", ".join(parts)

"""What the kernels are compiled for: every operator at the model's widths.

Tensors are on the device "meta": compiling asks for their dtypes, and whether sizes are multiples
of 16.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from npu_dsa_kernels.backends.triton import base, dsa

# B batch, S queries, T keys, H heads, D head dim, V value dim, K selected keys, C index head dim
# N tokens, F features, E experts, k experts of a token, M rows of the permuted tokens

B, S, T, V, K = 1, 4096, 32768, 512, 2048
INDEX_HEADS, C = 64, 128
N, E, k = 4096, 256, 8
SCALE = 0.135234


@dataclass(frozen=True)
class Case:
    operator: str
    inputs: str
    run: Callable[[torch.dtype], object]


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _attention(operator: str, H: int, D: int, K: int, T: int) -> Case:
    def run(dtype: torch.dtype) -> object:
        q, kv = empty(B, S, H, D, dtype=dtype), empty(B, T, D, dtype=dtype)
        indices, lse = empty(B, S, K, dtype=torch.int32), empty(B, S, H)
        if operator == "sparse_attention":
            return dsa.sparse_attention(q, kv, indices, SCALE, V)
        if operator == "attention_target":
            return dsa.attention_target(q, kv, indices, lse, SCALE)
        out = empty(B, S, H, V, dtype=dtype)
        return dsa.sparse_attention_backward(out, lse, q, kv, indices, out, lse, SCALE)

    return Case(operator, f"H {H}, D {D}, K {K}, T {T}", run)


def _index_inputs(dtype: torch.dtype, H: int, T: int) -> tuple[Tensor, Tensor, Tensor]:
    return empty(B, S, H, C, dtype=dtype), empty(B, T, C, dtype=dtype), empty(B, S, H)


def _indexer(H: int, T: int, K: int) -> Case:
    def run(dtype: torch.dtype) -> object:
        return dsa.lightning_indexer(*_index_inputs(dtype, H, T), None, K)

    return Case("lightning_indexer", f"H {H} x {C}, K {K}, T {T}", run)


def _loss(H: int, scores: bool) -> Case:
    def run(dtype: torch.dtype) -> object:
        selected = empty(B, S, K, dtype=torch.int32), empty(B, S, K)
        known = empty(B, S, K) if scores else None
        return dsa.indexer_kl_loss(*_index_inputs(dtype, H, T), *selected, known)

    return Case("indexer_kl_loss", f"H {H} x {C}, K {K}" + ", scores" * scores, run)


def _loss_backward(H: int) -> Case:
    def run(dtype: torch.dtype) -> object:
        selected = empty(B, S, K, dtype=torch.int32), empty(B, S, K)
        return dsa.indexer_kl_loss_backward(empty(B, S), *_index_inputs(dtype, H, T), *selected)

    return Case("indexer_kl_loss_backward", f"H {H} x {C}, K {K}", run)


def _rms_norm(F: int, backward: bool) -> Case:
    def run(dtype: torch.dtype) -> object:
        x, weight = empty(N, F, dtype=dtype), empty(F, dtype=dtype)
        if backward:
            return base.rms_norm_backward(x, x, weight, empty(N, 1))
        return base.rms_norm(x, weight, 1e-6)

    return Case("rms_norm" + "_backward" * backward, f"{N} x {F}", run)


def _rotary(H: int, D: int, interleaved: bool, backward: bool) -> Case:
    def run(dtype: torch.dtype) -> object:
        operator = base.rotary_mul_backward if backward else base.rotary_mul
        return operator(empty(B, S, H, D, dtype=dtype), empty(S, D), empty(S, D), interleaved)

    kind = "interleaved" if interleaved else "halves"
    return Case("rotary_mul" + "_backward" * backward, f"H {H} x {D}, {kind}", run)


def _moe(operator: str, F: int) -> Case:
    def run(dtype: torch.dtype) -> object:
        M = N * k
        tokens, rows = empty(N, F, dtype=dtype), empty(M, F, dtype=dtype)
        slots, probs = empty(N, k, dtype=torch.int32), empty(N, k)
        arguments = {
            "moe_permute": (tokens, slots, probs, E, M),
            "moe_permute_backward": (rows, empty(M), slots),
            "moe_unpermute": (rows, slots, probs),
            "moe_unpermute_backward": (tokens, rows, slots, probs, M),
        }
        return getattr(base, operator)(*arguments[operator])

    return Case(operator, f"{N} x {F}, {k} of {E} experts", run)


CASES = (
    *(
        _attention(operator, *sizes)
        for operator in ("sparse_attention", "sparse_attention_backward", "attention_target")
        for sizes in (
            (128, 576, K, T),
            (64, 576, K, T),
            (32, 576, K, T),
            (16, 576, K, T),
            (16, 512, K, T),
            (128, 576, 1000, 4099),
        )
    ),
    *(_indexer(INDEX_HEADS, *sizes) for sizes in ((T, K), (4099, 1000))),
    *(_loss(INDEX_HEADS, scores) for scores in (False, True)),
    _loss_backward(INDEX_HEADS),
    *(_rms_norm(F, backward) for F in (7168, 1536, 512) for backward in (False, True)),
    *(
        _rotary(H, 64, interleaved, backward)
        for H, interleaved in ((128, True), (1, True), (64, False))
        for backward in (False, True)
    ),
    *(
        _moe(f"moe_{way}permute{backward}", 7168)
        for way in ("", "un")
        for backward in ("", "_backward")
    ),
)

"""Calls of every operator that can be computed here: the operator's name, and its arguments."""

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

import stand_ins
from dtensor_npu_strategies.rules import OPERATORS, Rule

# B batch, S queries, T keys, H heads, D key dim, V value dim, K selected keys, G index heads,
# E index head dim or experts, N tokens, k experts of a token; none divides by 2, 3 and 4
B, S, T, H, D, V, K, G, E, N, k = 5, 7, 9, 5, 6, 4, 3, 2, 4, 7, 2


def _random(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=g, dtype=torch.float64)


def _indices() -> Tensor:
    g = torch.Generator().manual_seed(3)
    indices = torch.rand(B, S, T, generator=g).argsort(-1)[..., :K].int()
    indices[:, ::3, -1] = -1
    return indices


def _bounds() -> Tensor:
    high = torch.arange(S) + 3
    return torch.stack([high - 3, high], -1).int().repeat(B, 1, 1)


def _dsa() -> dict[str, list[dict]]:
    q, kv, indices = _random(B, S, H, D), _random(B, T, D), _indices()
    indexer = {"q_index": _random(B, S, G, E), "k_index": _random(B, T, E),
               "weights": _random(B, S, G)}  # fmt: skip
    causal = {**indexer, "k_index": _random(B, S, E)}
    sparse = {"q": q, "kv": kv, "indices": indices, "scale": 0.4}
    out, lse, target = stand_ins.sparse_attention_with_target(**sparse, v_dim=V, backend="")
    d_out, d_lse, d_loss = _random(B, S, H, V, seed=1), _random(B, S, H, seed=1), _random(B, S)
    k, v, bounds = _random(B, T, H, D), _random(B, T, H, V), _bounds()
    dense = {"q": q, "k": k, "v": v, "bounds": bounds, "scale": 0.4}
    whole, whole_lse = stand_ins.dense_attention(**dense, backend="")
    of_dense = {"d_out": d_out, "d_lse": d_lse, **dense, "out": whole, "lse": whole_lse}
    teacher = {**indexer, "q": q, "bounds": bounds, "scale": 0.4}
    fused = {"q": q, "kv": kv, **indexer, "indices": indices, "lse": lse, "scale": 0.4}
    of_sparse = {**sparse, "d_out": d_out, "out": out, "lse": lse}
    kl = {**indexer, "indices": indices, "target": target}
    return {
        "lightning_indexer": [
            {**indexer, "bounds": bounds, "topk": K}, {**causal, "bounds": None, "topk": K},
        ],
        "sparse_attention": [{**sparse, "v_dim": V}],
        "sparse_attention_with_target": [{**sparse, "v_dim": V}],
        "sparse_attention_backward": [{**of_sparse, "d_lse": d_lse}, {**of_sparse, "d_lse": None}],
        "attention_target": [{**sparse, "lse": lse}],
        "dense_attention": [dense],
        "dense_attention_backward": [of_dense, {**of_dense, "d_lse": None}],
        "indexer_kl_loss": [{**kl, "scores": None}, {**kl, "scores": target}],
        "indexer_kl_loss_backward": [{**kl, "d_loss": d_loss}],
        "dense_indexer_kl_loss": [{**teacher, "kv": kv}, {**teacher, "kv": k},
                                  {**teacher, **causal, "kv": _random(B, S, D), "bounds": None}],
        "dense_indexer_kl_loss_backward": [{**teacher, "kv": kv, "d_loss": d_loss}],
        "fused_kl_loss": [{**fused, "bounds": bounds}, {**fused, "bounds": None}],
        "fused_dense_kl_loss": [{**teacher, "k": k}, {**teacher, "k": kv}],
        "fused_kl_loss_backward": [{
            "d_loss": torch.tensor(0.7, dtype=torch.float64), "dq": indexer["q_index"],
            "dk": indexer["k_index"], "dw": indexer["weights"],
        }],
    }  # fmt: skip


def _norm_rope() -> dict[str, list[dict]]:
    x, d_y, weight = _random(3, S, D), _random(3, S, D, seed=1), _random(D)
    rstd = stand_ins.rms_norm(x, None, 1e-6, "")[1]
    q, d_q = _random(B, S, H, D), _random(B, S, H, D, seed=1)
    one = {"cos": _random(S, D), "sin": _random(S, D)}
    each = {"cos": _random(B, S, D), "sin": _random(B, S, D)}
    wide, d_wide = _random(3, S, 8), _random(3, S, 4)
    return {
        "rms_norm": [{"x": x, "weight": weight, "eps": 1e-6}, {"x": x, "weight": None, "eps": 0.1}],
        "rms_norm_backward": [{"d_y": d_y, "x": x, "weight": w, "rstd": rstd}
                              for w in (weight, None)],
        "rotary_mul": [{"x": q, **one, "interleaved": False},
                       {"x": q, **each, "interleaved": True}],
        "rotary_mul_backward": [{"d_y": d_q, **one, "interleaved": True},
                                {"d_y": d_q, **each, "interleaved": False}],
        "swiglu": [{"x": wide, "dim": -1}, {"x": _random(3, 4, 5), "dim": 1}],
        "swiglu_backward": [{"d_y": d_wide, "x": wide, "dim": -1}],
        "hadamard": [{"x": wide, "scale": 0.3}],
    }  # fmt: skip


def experts() -> Tensor:
    g = torch.Generator().manual_seed(5)
    found = torch.rand(N, E, generator=g).argsort(-1)[:, :k].int()
    found[2, 1] = -1  # an expert of another rank
    return found


def _moe() -> dict[str, list[dict]]:
    tokens, probs, M = _random(N, D), _random(N, k), N * k
    sizes = {"num_experts": E, "num_out_tokens": M}
    rows = stand_ins._slots(experts(), E, M)[0]
    permuted, d_permuted, d_y = _random(M, D), _random(M, D, seed=1), _random(N, D, seed=1)
    x, weight, ends = _random(M, D), _random(E, D, 5), torch.tensor([3, 3, 8, M - 1])
    return {
        "moe_permute": [{"tokens": tokens, "experts": experts(), "probs": p, **sizes}
                        for p in (probs, None)],
        "moe_permute_backward": [{"d_tokens": d_permuted, "d_probs": p, "rows": rows}
                                 for p in (_random(M), None)],
        "moe_unpermute": [{"x": permuted, "rows": rows, "probs": p} for p in (probs, None)],
        "moe_unpermute_backward": [
            {"d_y": d_y, "x": permuted, "rows": rows, "probs": probs, "num_rows": M},
            {"d_y": d_y, "x": None, "rows": rows, "probs": None, "num_rows": M},
        ],
        "grouped_matmul": [{"x": x, "weight": weight, "ends": ends}],
        "grouped_matmul_backward": [{"d_y": _random(M, 5), "x": x, "weight": weight, "ends": ends}],
    }  # fmt: skip


MATMULS = {  # shapes of both factors
    "q_lora": ((2, 7, 6), (6, 5)),
    "matrices": ((7, 6), (6, 5)),
    "batches": ((3, 2, 7, 6), (3, 2, 6, 5)),
    "repeated": ((1, 2, 7, 6), (3, 1, 6, 5)),
    "longer right": ((7, 6), (3, 6, 5)),
    "vector left": ((6,), (3, 6, 5)),
    "vector right": ((3, 7, 6), (6,)),
    "vectors": ((6,), (6,)),
}


def _matmul() -> dict[str, list[dict]]:
    forward, backward = [], []
    for left, right in MATMULS.values():
        factors = {"self": _random(*left), "other": _random(*right, seed=1)}
        grad = _random(*(factors["self"] @ factors["other"]).shape, seed=2)
        forward.append(factors)
        backward += [{"grad": grad, **factors, "mask": m} for m in ([True, True], [False, True])]
    return {"aten::matmul": forward, "aten::matmul_backward": backward}


def all_cases() -> list[tuple[str, dict]]:
    kernels = {**_dsa(), **_norm_rope(), **_moe()}
    cases = {**_matmul(), **{f"npu_dsa::{name}": calls for name, calls in kernels.items()}}
    return [(name, _complete(name, call)) for name, calls in cases.items() for call in calls]


def schema(name: str):
    namespace, _, op = name.partition("::")
    return getattr(getattr(torch.ops, namespace), op).default._schema


def _complete(name: str, call: dict) -> dict:
    """The call's arguments in the operator's order."""
    names = [argument.name for argument in schema(name).arguments]
    assert set(call) | {"backend"} == set(names) | {"backend"}, (name, set(call) ^ set(names))
    return {n: call.get(n, "torch") for n in names}


def compute(name: str, call: dict):
    """The outputs of a call, on plain tensors."""
    op = name.partition("::")[2]
    arguments = tuple(call.values())
    if name == "aten::matmul":
        found = torch.matmul(*arguments)
    else:
        found = getattr(stand_ins, op)(*arguments)
    return found if isinstance(found, tuple) else (found,)


def is_local(name, rule: Rule) -> bool:
    """Whether the rule is about rows that are each rank's own: see test_moe."""
    pinned = OPERATORS[name].pinned
    rows = {n for n, p in rule.inputs.items() if p == Shard(0)}
    return bool(rows & pinned.keys()) or (name == "npu_dsa::moe_permute" and "experts" in rows)

"""The base operators: ours, plain small operators, torch's own fused ones, the machine.

Shape letters: N tokens, D model dim, H heads, P rotary dim, F expert hidden dim, E experts,
k experts of a token, M = N * k routed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import npu_dsa_kernels as dsa
from benchmarks import limits
from benchmarks.checks import Check
from benchmarks.dsa import FORWARD, TRAINING, grad
from benchmarks.measure import Case, Implementation, Params, Result, Task

EPS = 1e-6
OURS, SMALL = "ours", "small operators"

Function = Callable[..., Tensor]


def dtype_of(p: Params) -> torch.dtype:
    return getattr(torch, p["dtype"])


def operator_task(p: Params, function: Function, leaves: list[Tensor], like: Tensor) -> Task:
    """A function of differentiable `leaves` to one tensor of the shape of `like`."""
    d_out = torch.empty_like(like).normal_() if grad(p) else None

    def run():
        if d_out is None:
            with torch.no_grad():
                return function(*leaves), ()
        out = function(*leaves)
        return out, torch.autograd.grad(out, leaves, d_out)

    def result(outcome):
        out, grads = outcome
        return {"out": out} | {f"gradient {i}": g for i, g in enumerate(grads)}

    return Task(run, result)


def leaf(*shape: int, dtype: torch.dtype, std: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * std).to(dtype).requires_grad_()


def implementations(
    build: Callable[..., Task], functions: dict[str, str], limit: Implementation, **more
) -> tuple[Implementation, ...]:
    """Ours first, then the others, then the limit; `functions` names what `build` looks up."""
    made = [
        Implementation(name=name, build=build, options={"_function": function}, **more)
        for name, function in functions.items()
    ]
    return (*made, limit)


def element_bytes(p: Params) -> int:
    return dtype_of(p).itemsize


# rms_norm


def norm_ours(x: Tensor, w: Tensor) -> Tensor:
    return dsa.rms_norm(x, w, eps=EPS)


def norm_small(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (wide * rstd * w.float()).to(x.dtype)


def norm_torch(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), w, EPS)


def build_norm(p: Params) -> Task:
    torch.manual_seed(1)
    x = leaf(p["N"], p["D"], dtype=dtype_of(p))
    w = leaf(p["D"], dtype=dtype_of(p))
    return operator_task(p, globals()[p["_function"]], [x, w], x)


def norm_bytes(p: Params) -> float:
    """Forward reads x and writes y; backward reads x and dy and writes dx."""
    return p["N"] * p["D"] * element_bytes(p) * (5 if grad(p) else 2)


# rotary_mul


def angles(p: Params) -> tuple[Tensor, Tensor]:
    f = torch.outer(torch.arange(p["N"]).float(), 1e4 ** -(torch.arange(0, p["P"], 2) / p["P"]))
    f = f.repeat_interleave(2, -1) if p["pairs"] == "interleaved" else torch.cat([f, f], -1)
    return f.cos(), f.sin()


def rotate_ours(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    return dsa.rotary_mul(x, cos, sin, interleaved=interleaved)


def rotate_small(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    wide = x.float()
    if interleaved:
        a, b = wide[..., 0::2], wide[..., 1::2]
        turned = torch.stack([-b, a], -1).flatten(-2)
    else:
        a, b = wide.chunk(2, -1)
        turned = torch.cat([-b, a], -1)
    return (wide * cos.unsqueeze(1) + turned * sin.unsqueeze(1)).to(x.dtype)


def rotate_complex(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """As models do it with torch's complex numbers; only where pairs are neighbours."""
    turn = torch.complex(cos[..., 0::2], sin[..., 0::2]).unsqueeze(1)
    z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(z * turn).flatten(-2).to(x.dtype)


def build_rotary(p: Params) -> Task:
    torch.manual_seed(1)
    x = leaf(1, p["N"], p["H"], p["P"], dtype=dtype_of(p))
    cos, sin = angles(p)
    function = partial(globals()[p["_function"]], interleaved=p["pairs"] == "interleaved")
    return operator_task(p, lambda x: function(x, cos, sin), [x], x)


def rotary_bytes(p: Params) -> float:
    return p["N"] * p["H"] * p["P"] * element_bytes(p) * (4 if grad(p) else 2)


# swiglu


def swiglu_ours(x: Tensor) -> Tensor:
    return dsa.swiglu(x)


def swiglu_small(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


def build_swiglu(p: Params) -> Task:
    torch.manual_seed(1)
    x = leaf(p["N"], 2 * p["F"], dtype=dtype_of(p))
    return operator_task(p, globals()[p["_function"]], [x], x[:, : p["F"]].detach())


def swiglu_bytes(p: Params) -> float:
    """Forward reads 2F and writes F; backward reads 3F and writes 2F."""
    return p["N"] * p["F"] * element_bytes(p) * (8 if grad(p) else 3)


# grouped_matmul


def routed(p: Params) -> tuple[Tensor, Tensor]:
    """Experts of every token [N, k] and rows of every expert [E]: uneven, the last one empty."""
    torch.manual_seed(2)
    popularity = torch.rand(p["N"], p["E"]) + torch.linspace(0, 0.5, p["E"])
    popularity[:, -1] = -1.0
    experts = popularity.topk(p["k"], dim=-1).indices
    return experts, torch.bincount(experts.flatten(), minlength=p["E"])


def matmul_ours(x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    return dsa.grouped_matmul(x, w, counts=counts)


def matmul_small(x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    """One product an expert."""
    parts = x.split(counts.tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, w, strict=True)])


def matmul_torch(x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    return torch._grouped_mm(x, w, offs=counts.cumsum(0, dtype=torch.int32))


def build_matmul(p: Params) -> Task:
    _, counts = routed(p)
    x = leaf(p["N"] * p["k"], p["D"], dtype=dtype_of(p))
    w = leaf(p["E"], p["D"], p["F"], dtype=dtype_of(p), std=p["D"] ** -0.5)
    function = globals()[p["_function"]]
    like = torch.empty(p["N"] * p["k"], p["F"], dtype=dtype_of(p))
    return operator_task(p, lambda x, w: function(x, w, counts), [x, w], like)


def matmul_flops(p: Params) -> float:
    return 2 * p["N"] * p["k"] * p["D"] * p["F"] * (3 if grad(p) else 1)


# moe_permute, moe_unpermute


def permute_ours(x: Tensor, experts: Tensor, E: int) -> Tensor:
    return dsa.moe_permute(x, experts, num_experts=E).tokens


def permute_small(x: Tensor, experts: Tensor, E: int) -> Tensor:
    flat = experts.flatten()
    torch.bincount(flat, minlength=E)  # the counts are part of the work
    order = flat.argsort(stable=True)
    return x[order // experts.shape[1]]


def build_permute(p: Params) -> Task:
    experts, _ = routed(p)
    x = leaf(p["N"], p["D"], dtype=dtype_of(p))
    function = globals()[p["_function"]]
    like = torch.empty(p["N"] * p["k"], p["D"], dtype=dtype_of(p))
    return operator_task(p, lambda x: function(x, experts, p["E"]), [x], like)


def unpermute_ours(x: Tensor, probs: Tensor, rows: Tensor) -> Tensor:
    return dsa.moe_unpermute(x, rows, probs=probs)


def unpermute_small(x: Tensor, probs: Tensor, rows: Tensor) -> Tensor:
    gathered = x[rows.long()]
    return (probs.unsqueeze(1) @ gathered.float()).squeeze(1).to(x.dtype)


def unpermute_index_add(x: Tensor, probs: Tensor, rows: Tensor) -> Tensor:
    """Scattered: each row is weighed and added to its token."""
    N, k = rows.shape
    slot = torch.empty_like(rows, dtype=torch.int64).view(-1)
    slot[rows.flatten().long()] = torch.arange(N * k)
    weighed = x.float() * probs.flatten()[slot].unsqueeze(-1)
    out = torch.zeros(N, x.shape[1])
    return out.index_add(0, slot // k, weighed).to(x.dtype)


def build_unpermute(p: Params) -> Task:
    experts, _ = routed(p)
    rows = torch.empty(p["N"] * p["k"], dtype=torch.int32)
    rows[experts.flatten().argsort(stable=True)] = torch.arange(p["N"] * p["k"]).int()
    x = leaf(p["N"] * p["k"], p["D"], dtype=dtype_of(p))
    probs = torch.rand(p["N"], p["k"]).requires_grad_()
    function = globals()[p["_function"]]
    like = torch.empty(p["N"], p["D"], dtype=dtype_of(p))
    rows = rows.view(p["N"], p["k"])
    return operator_task(p, lambda x, w: function(x, w, rows), [x, probs], like)


def permute_bytes(p: Params) -> float:
    """Forward reads N rows and writes M; backward reads M and writes N."""
    return p["N"] * (1 + p["k"]) * p["D"] * element_bytes(p) * (2 if grad(p) else 1)


def unpermute_bytes(p: Params) -> float:
    """Forward reads M rows and writes N; backward reads M and N (dprobs) and writes M."""
    rows = 1 + p["k"] + (1 + 2 * p["k"] if grad(p) else 0)
    return p["N"] * rows * p["D"] * element_bytes(p)


# hadamard


def hadamard_ours(x: Tensor) -> Tensor:
    return dsa.hadamard(x)


def hadamard_small(x: Tensor) -> Tensor:
    """Butterflies."""
    D, y, half = x.shape[-1], x.float(), 1
    while half < D:
        a, b = y.reshape(*x.shape[:-1], D // (2 * half), 2, half).unbind(-2)
        y = torch.stack([a + b, a - b], -2).reshape(x.shape)
        half *= 2
    return (y * D**-0.5).to(x.dtype)


def build_hadamard(p: Params) -> Task:
    torch.manual_seed(1)
    x = leaf(p["N"], p["H"], p["D"], dtype=dtype_of(p))
    return operator_task(p, globals()[p["_function"]], [x], x)


def hadamard_bytes(p: Params) -> float:
    return p["N"] * p["H"] * p["D"] * element_bytes(p) * (4 if grad(p) else 2)


# Which cases there are


def preload(chosen: list[Case]) -> tuple[str, ...]:
    return ()


def _case(name: str, p: Params, build, functions: dict[str, str], limit, small: Params) -> Case:
    return Case(
        name=name,
        params=p,
        implementations=implementations(build, functions, limit),
        small=small,
        tolerance=1e-5 if p["dtype"] == "float32" else 2e-2,
    )


def cases(quick: bool) -> Iterator[Case]:
    N = 64 if quick else 4096
    # The model's own widths in bf16, and narrow ones in fp32.
    for real, dtype in ((False, "float32"), (True, "bfloat16")):
        wide = real and not quick
        D = 7168 if wide else 128 if quick else 1024
        H = 128 if wide else 4 if quick else 16
        F_ = 2048 if wide else 64 if quick else 256
        E, k = (256 if wide else 16), (8 if wide else 4)
        for which in (TRAINING,) if quick else (FORWARD, TRAINING):
            p = {"dtype": dtype, "pass": which}
            yield _case(
                "rms_norm", {"N": N, "D": D, **p}, build_norm,
                {OURS: "norm_ours", SMALL: "norm_small", "torch F.rms_norm": "norm_torch"},
                limits.copy(norm_bytes), {"N": 6},
            )  # fmt: skip
            for pairs in ("interleaved", "half"):
                functions = {OURS: "rotate_ours", SMALL: "rotate_small"}
                if pairs == "interleaved":
                    functions["torch complex"] = "rotate_complex"
                yield _case(
                    "rotary_mul", {"N": N, "H": H, "P": 64, "pairs": pairs, **p}, build_rotary,
                    functions, limits.copy(rotary_bytes), {"N": 6},
                )  # fmt: skip
            yield _case(
                "swiglu", {"N": N, "F": 8 * F_, **p}, build_swiglu,
                {OURS: "swiglu_ours", SMALL: "swiglu_small"},
                limits.copy(swiglu_bytes), {"N": 6},
            )  # fmt: skip
            # 8 experts, as in the published comparison of layers: 256 do not fit in memory.
            yield _case(
                "grouped_matmul", {"N": N, "k": 4, "E": 8, "D": D, "F": 2 * F_, **p}, build_matmul,
                {OURS: "matmul_ours", SMALL: "matmul_small", "torch._grouped_mm": "matmul_torch"},
                limits.gemm(matmul_flops), {"N": 12},
            )  # fmt: skip
            routing = {"N": N, "k": k, "E": E, "D": D}
            yield _case(
                "moe_permute", {**routing, **p}, build_permute,
                {OURS: "permute_ours", SMALL: "permute_small"},
                limits.copy(permute_bytes), {"N": 12},
            )  # fmt: skip
            yield _case(
                "moe_unpermute", {**routing, **p}, build_unpermute,
                {
                    OURS: "unpermute_ours",
                    SMALL: "unpermute_small",
                    "torch index_add": "unpermute_index_add",
                },
                limits.copy(unpermute_bytes), {"N": 12},
            )  # fmt: skip
            yield _case(
                "hadamard", {"N": N, "H": H, "D": 128, **p}, build_hadamard,
                {OURS: "hadamard_ours", SMALL: "hadamard_small"},
                limits.copy(hadamard_bytes), {"N": 6},
            )  # fmt: skip


def checks(results: list[Result]) -> Iterator[Check]:
    yield from ()


def findings(results: list[Result]) -> Iterator[str]:
    yield from ()

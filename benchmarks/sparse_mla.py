"""The DSA operators on a CUDA device, in bfloat16 at the model's sizes, next to their peers.

`T` keys may be more than `S` queries, as under context parallelism. Rows are "full" (`K` keys of
all) or "causal": query s has min(K, s + 1) keys of the first s + 1, as TileLang's backward wants
it, and empty slots after them. FLOPs are those that the peers publish their figures in, which count
every slot.

Shape letters: B batch (1), S queries, T keys, H heads, D = V + 64 the width of a key, V that of a
value, K selected keys, I index heads, C index head dim.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import npu_dsa_kernels as dsa
from benchmarks.checks import Check, at_least
from benchmarks.measure import Case, Implementation, Params, Result, Task

D, V = 576, 512
INDEX_HEADS, INDEX_DIM = 64, 128
SCALE = 192**-0.5 * (0.1 * math.log(40) + 1) ** 2

FORWARD, BACKWARD = "sparse_attention", "sparse_attention backward"
TRITON, TORCH, TILELANG, FLASH_MLA = "triton", "torch", "TileLang", "FlashMLA"


# What the peers say of themselves


@dataclass(frozen=True)
class Published:
    peer: str
    case: str
    tflops: float
    card: str


# TileLang: README of its examples/deepseek_v32. FlashMLA: its announcement of the sparse kernels.
PUBLISHED = (
    Published(TILELANG, FORWARD, 600, "H800"),
    Published(TILELANG, BACKWARD, 115, "H200"),
    Published(TILELANG, BACKWARD, 100, "H800"),
    Published(FLASH_MLA, FORWARD, 640, "H800"),
)
_CLASS = ("H100", "H200", "H800")
"""Cards with the same multiprocessors; they differ in memory and links."""


def published(peer: str, case: str, card: str | None) -> Published | None:
    """The peer's figure for this card, or for one of the same class, or none."""
    if card is None or not any(name in card for name in _CLASS):
        return None
    figures = [p for p in PUBLISHED if (p.peer, p.case) == (peer, case)]
    return next((p for p in figures if p.card in card), figures[0] if figures else None)


def missing_device() -> str | None:
    """Why nothing can be measured here, if so."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    if (status := dsa.backends()["triton"]) != "available":
        return f"backend 'triton' is {status}"
    return None


# Problems


def _normal(p: Params, seed: int, *shape: int, std: float = 1.0) -> Tensor:
    torch.manual_seed(seed)
    return (torch.randn(*shape) * std).to(getattr(torch, p["dtype"]))


def attention_inputs(p: Params) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``q_BSHD``, ``kv_BTD``, ``d_out_BSHV`` and ``indices_BSK``; logits of a deviation near 2."""
    q = _normal(p, 1, 1, p["S"], p["H"], D, std=(SCALE * D**0.5) ** -0.5)
    kv = _normal(p, 2, 1, p["T"], D, std=2 * (SCALE * D**0.5) ** -0.5)
    d_out = _normal(p, 3, 1, p["S"], p["H"], V)
    return q, kv, d_out, selected_keys(p)


def selected_keys(p: Params) -> Tensor:
    """int32 [1, S, K]: distinct keys in random order, then -1."""
    S, T, K, causal = p["S"], p["T"], p["K"], p["rows"] == "causal"
    torch.manual_seed(4)
    blocks = []
    for start in range(0, S, 512):
        query_n = torch.arange(start, min(start + 512, S))
        score_nT = torch.rand(len(query_n), T)
        if causal:
            score_nT.masked_fill_(torch.arange(T) > query_n[:, None], -1.0)
        best = score_nT.topk(min(K, T), dim=-1)
        keys_nK = best.indices.masked_fill(best.values < 0, -1).int()
        blocks.append(torch.nn.functional.pad(keys_nK, (0, K - keys_nK.shape[1]), value=-1))
    return torch.cat(blocks).unsqueeze(0)


def index_inputs(p: Params) -> tuple[Tensor, Tensor, Tensor]:
    """``q_BSIC``, ``k_BTC``, ``w_BSI``: leaves."""
    q = _normal(p, 5, 1, p["S"], INDEX_HEADS, INDEX_DIM)
    k = _normal(p, 6, 1, p["T"], INDEX_DIM)
    w = _normal(p, 7, 1, p["S"], INDEX_HEADS, std=(INDEX_HEADS * INDEX_DIM) ** -0.5).float()
    return q.requires_grad_(), k.requires_grad_(), w.requires_grad_()


# FLOPs


def forward_flops(p: Params) -> float:
    return 2 * p["S"] * p["K"] * p["H"] * (D + V)


def backward_flops(p: Params) -> float:
    return 2 * p["S"] * p["K"] * p["H"] * (2 * V + 3 * D)


def target_flops(p: Params) -> float:
    return 2 * p["S"] * p["K"] * p["H"] * D


def indexer_flops(p: Params) -> float:
    """Only keys that a query may see have a score."""
    visible = sum(min(s + 1, p["T"]) for s in range(p["S"]))
    return 2 * visible * INDEX_HEADS * INDEX_DIM


def loss_flops(p: Params) -> float:
    """Scores, forward and again backward, and two products for the gradients."""
    return 2 * p["S"] * p["K"] * INDEX_HEADS * INDEX_DIM * 4


# Ours. "_backend" is an implementation's own parameter


def build_forward(p: Params) -> Task:
    q, kv, _, indices = attention_inputs(p)

    def run():
        return dsa.sparse_attention(q, kv, indices, scale=SCALE, v_dim=V, backend=p["_backend"])[0]

    return Task(run, lambda out: {"out": out})


def build_backward(p: Params) -> Task:
    """The backward alone: what it needs of the forward is there."""
    q, kv, d_out, indices = attention_inputs(p)
    leaves = (q.requires_grad_(), kv.requires_grad_())
    out, _ = dsa.sparse_attention(q, kv, indices, scale=SCALE, v_dim=V, backend=p["_backend"])

    def run():
        return torch.autograd.grad(out, leaves, d_out, retain_graph=True)

    return Task(run, lambda grads: {"dq": grads[0], "dkv": grads[1]})


def build_target(p: Params) -> Task:
    q, kv, _, indices = attention_inputs(p)
    backend = p["_backend"]
    _, lse = dsa.sparse_attention(q, kv, indices, scale=SCALE, v_dim=V, backend=backend)

    def run():
        return dsa.attention_target(q, kv, indices, lse, scale=SCALE, backend=backend)

    return Task(run, lambda target: {"target": target})


def build_indexer(p: Params) -> Task:
    q, k, w = (x.detach() for x in index_inputs(p))

    def run():
        return dsa.lightning_indexer(q, k, w, topk=p["K"], backend=p["_backend"])

    # Keys whose scores differ by rounding alone may change places.
    return Task(run, lambda r: {"scores": r[1].masked_fill(r[0] < 0, 0.0)})


def build_loss(p: Params) -> Task:
    leaves, indices = index_inputs(p), selected_keys(p)
    target = _normal(p, 8, 1, p["S"], p["K"]).float().exp()
    target = target.masked_fill(indices < 0, 0.0)
    d_loss = torch.full((1, p["S"]), 1.0 / p["S"])

    def run():
        loss = dsa.indexer_kl_loss(*leaves, indices, target, backend=p["_backend"])
        return loss, torch.autograd.grad(loss, leaves, d_loss)

    def result(r):
        return {"loss": r[0]} | dict(zip(("dq index", "dk index", "dweights"), r[1], strict=True))

    return Task(run, result)


# The peers, called as their own tests call them


def build_flash_mla_forward(p: Params) -> Task:
    try:
        kernel = importlib.import_module("flash_mla").flash_mla_sparse_fwd
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"left out: FlashMLA's sparse kernel cannot be imported ({error}); "
            "pip install sgl-flash-mla has it"
        ) from None
    q, kv, _, indices = attention_inputs(p)
    arguments = (q[0], kv[0].unsqueeze(1), indices[0].unsqueeze(1), SCALE)
    # Newer versions keep the kernels for this width and for Hopper apart.
    legacy = "use_legacy" in inspect.signature(kernel).parameters
    options = {"use_legacy": True} if legacy else {}
    return Task(lambda: kernel(*arguments, **options)[0], lambda out: {"out": out.unsqueeze(0)})


def _tilelang_inputs(p: Params) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """With its axis of key groups. A slot is empty to it where causality hides the key: `T` is."""
    q, kv, d_out, indices = attention_inputs(p)
    return q, kv.unsqueeze(2), d_out, indices.masked_fill(indices < 0, p["T"]).unsqueeze(2)


def _tilelang(p: Params, module: str) -> Any:
    """A module of TileLang's examples/deepseek_v32, which its wheel does not have."""
    folder = p.get("_tilelang_examples")
    if folder is None:
        raise RuntimeError(
            "left out: its sparse MLA kernels are examples of its repository, not part of its "
            "package; --tilelang-examples takes a checkout's folder examples/deepseek_v32"
        )
    sys.path.insert(0, str(Path(folder)))
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RuntimeError(f"left out: {folder}/{module}.py cannot be imported: {error}") from None


def build_tilelang_forward(p: Params) -> Task:
    kernel = _tilelang(p, "sparse_mla_fwd_pipelined").sparse_mla_fwd_interface
    q, kv, _, indices = _tilelang_inputs(p)
    # Queries start behind the last key: full rows, of which its causal mask hides nothing.
    place = p["T"] if p["rows"] == "full" else 0

    def run():
        return kernel(q, kv, indices, place, 1, sm_scale=SCALE)[0]

    return Task(run, lambda out: {"out": out})


def build_tilelang_backward(p: Params) -> Task:
    forward = _tilelang(p, "sparse_mla_fwd").sparse_mla_fwd_interface
    backward = _tilelang(p, "sparse_mla_bwd").sparse_mla_bwd
    q, kv, d_out, indices = _tilelang_inputs(p)
    out, lse = forward(q, kv, indices, sm_scale=SCALE)

    def run():
        return backward(q, kv, out, d_out, indices, lse, sm_scale=SCALE)

    return Task(run, lambda grads: {"dq": grads[0], "dkv": grads[1].squeeze(2)})


# Which cases there are


def cases(quick: bool, tilelang_examples: Path | None = None) -> Iterator[Case]:
    """The cases, peers included; without a device, too."""
    examples = {"_tilelang_examples": tilelang_examples and str(tilelang_examples)}
    tilelang_forward = Implementation(
        name=TILELANG, build=build_tilelang_forward, options=examples, flops=forward_flops
    )
    tilelang_backward = Implementation(
        name=TILELANG, build=build_tilelang_backward, options=examples, flops=backward_flops
    )
    flash_mla = Implementation(name=FLASH_MLA, build=build_flash_mla_forward, flops=forward_flops)

    def case(
        name: str,
        build: Callable[[Params], Task],
        flops: Callable[[Params], float],
        S: int,
        T: int,
        H: int | None,
        rows: str | None,
        *peers: Implementation,
    ) -> Case:
        ours = [
            Implementation(name=backend, build=build, flops=flops, options={"_backend": backend})
            for backend in (TRITON, TORCH)
        ]
        S, T, K = (256, 512, 128) if quick else (S, T, 2048)
        sizes = {"S": S, "T": T, "H": H, "K": K, "dtype": "bfloat16", "rows": rows}
        return Case(
            name=name,
            params={k: v for k, v in sizes.items() if v is not None},
            implementations=(*ours, *peers),
            small={"S": 128, "T": 256, "K": 64},
            tolerance=3e-2,
        )

    for T in (4096, 8192):
        yield case(
            FORWARD, build_forward, forward_flops, 4096, T, 128, "full", tilelang_forward, flash_mla
        )
    yield case(
        BACKWARD, build_backward, backward_flops, 4096, 8192, 64, "causal", tilelang_backward
    )
    yield case(BACKWARD, build_backward, backward_flops, 4096, 8192, 128, "causal")
    yield case("attention_target", build_target, target_flops, 4096, 8192, 128, "full")
    yield case("lightning_indexer", build_indexer, indexer_flops, 4096, 4096, None, None)
    yield case(
        "indexer_kl_loss, forward + backward", build_loss, loss_flops, 4096, 8192, None, "causal"
    )


def preload(chosen: list[Case]) -> tuple[str, ...]:
    return ()


# What the results must show


def tflops(result: Result, name: str) -> float:
    """NaN where it was not measured."""
    found = result.measurements.get(name)
    if found is None or not (found.ok and found.seconds and found.flops):
        return math.nan
    return found.flops / found.median / 1e12


def findings(results: list[Result], card: str | None = None) -> Iterator[str]:
    """TFLOP/s, beside what the peers publish."""
    card = card or _card()
    for result in results:
        name = result.case.name
        measured = [
            f"{who} {rate:.0f}"
            for who in result.measurements
            if not math.isnan(rate := tflops(result, who))
        ]
        line = f"{result.case.title}: {', '.join(measured) or 'nothing measured'} TFLOP/s on {card}"
        said = [f"{p.peer} {p.tflops:g} on {p.card}" for p in PUBLISHED if p.case == name]
        yield f"{line}; published: {', '.join(said)}" if said else line


CLAIMS = (
    # case, its parameters, how many times the peer's rate
    (FORWARD, {"S": 4096, "T": 4096, "H": 128, "K": 2048}, 0.6),
    (BACKWARD, {"S": 4096, "T": 8192, "H": 64, "K": 2048}, 1.5),
)


def checks(results: list[Result], card: str | None = None) -> Iterator[Check]:
    """Ours against TileLang: in the same run, else its published figure."""
    card = card or _card()
    for name, sizes, least in CLAIMS:
        for result in results:
            if result.case.name == name and sizes.items() <= result.case.params.items():
                ratio, by = _over_tilelang(result, card)
                text = f"{name} S {sizes['S']}, T {sizes['T']}, H {sizes['H']}, K {sizes['K']}"
                yield at_least(f"{text} on {card}: our rate over {by}", ratio, least)


def _over_tilelang(result: Result, card: str | None) -> tuple[float, str]:
    ratio = result.ratio(TILELANG)
    if not math.isnan(ratio):
        return ratio, "TileLang's in this run"  # of times, theirs over ours: FLOPs are the same
    figure = published(TILELANG, result.case.name, card)
    if figure is None:
        return math.nan, "TileLang's, of which there is no figure for this card"
    ratio = tflops(result, TRITON) / figure.tflops
    return ratio, f"TileLang's published {figure.tflops:g} TFLOP/s on {figure.card}"


def _card() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None

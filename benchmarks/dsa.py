"""The DSA operators: ours, the small operators, megatron-core, dense attention, the machine.

Shape letters: B batch, S queries, T = S keys, H heads, N no-position dim, P rotary dim, V value dim
of a head, X = N + P, L latent, A = L + P, I index heads, C index head dim, K selected keys. B is 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import npu_dsa_kernels as dsa
from benchmarks import limits, megatron, small_operators
from benchmarks.checks import Check, at_least, at_most
from benchmarks.measure import Case, Implementation, Params, Result, Task

# The model's head: these do not vary between the cases.
N, P, V, L = 128, 64, 128, 512
A = L + P
INDEX_HEADS, INDEX_DIM = 16, 128
SCALE = (N + P) ** -0.5 * (0.1 * math.log(40) + 1) ** 2

FORWARD, TRAINING = "forward", "forward + backward"
OURS, PLAIN = "ours", "ours, no compiled helper"
SMALL, ABSORBED = "small operators", "absorbed S x S"
MEGATRON, DENSE = "megatron-core", "dense SDPA"
NO_HELPER = {"NPU_DSA_COMPILED": "0"}


# Problems: the same numbers in every form, whichever process makes them


@dataclass
class Layer:
    """What one attention layer is given, before it takes a form."""

    q_nope_BSHN: Tensor
    q_rope_BSHP: Tensor
    latent_BSL: Tensor
    k_rope_BSP: Tensor
    w_uk_HNL: Tensor
    w_uv_HVL: Tensor
    d_out_BSHV: Tensor

    @classmethod
    def make(cls, p: Params) -> Layer:
        S, H, dtype = p["S"], p["H"], getattr(torch, p["dtype"])
        torch.manual_seed(1)

        def normal(*shape: int, std: float = 1.0) -> Tensor:
            return (torch.randn(*shape) * std).to(dtype)

        return cls(
            normal(1, S, H, N),
            normal(1, S, H, P),
            normal(1, S, L),
            normal(1, S, P),
            normal(H, N, L, std=L**-0.5),
            normal(H, V, L, std=L**-0.5),
            normal(1, S, H, V),
        )

    def absorbed(self) -> tuple[Tensor, Tensor, Tensor]:
        """``q_BSHA``, ``kv_BSA`` (both leaves) and the gradient of the output, ``d_out_BSHL``."""
        q_BSHL = torch.einsum("bshn,hnl->bshl", self.q_nope_BSHN, self.w_uk_HNL)
        q_BSHA = torch.cat([q_BSHL, self.q_rope_BSHP], -1)
        kv_BSA = torch.cat([self.latent_BSL, self.k_rope_BSP], -1)
        d_out_BSHL = torch.einsum("bshv,hvl->bshl", self.d_out_BSHV, self.w_uv_HVL)
        return q_BSHA.requires_grad_(), kv_BSA.requires_grad_(), d_out_BSHL

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """``q_BSHX``, ``k_BSHX``, ``v_BSHV``: leaves, keys and values of every head."""
        k_BSHN = torch.einsum("bsl,hnl->bshn", self.latent_BSL, self.w_uk_HNL)
        k_BSHP = self.k_rope_BSP.unsqueeze(2).expand_as(self.q_rope_BSHP)
        v_BSHV = torch.einsum("bsl,hvl->bshv", self.latent_BSL, self.w_uv_HVL)
        q_BSHX = torch.cat([self.q_nope_BSHN, self.q_rope_BSHP], -1)
        k_BSHX = torch.cat([k_BSHN, k_BSHP], -1)
        return q_BSHX.requires_grad_(), k_BSHX.requires_grad_(), v_BSHV.requires_grad_()


@dataclass
class Maps:
    """Takes results of either form to the quantities both share."""

    w_uk_HNL: Tensor
    w_uv_HVL: Tensor

    def absorbed(self, out_BSHL: Tensor, grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
        w_uk, w_uv = self.w_uk_HNL.float(), self.w_uv_HVL.float()
        result = {"out": torch.einsum("bshl,hvl->bshv", out_BSHL.float(), w_uv)}
        if grads:
            dq_BSHA, dkv_BSA = (g.float() for g in grads)
            dq_nope = torch.einsum("bshl,hnl->bshn", dq_BSHA[..., :L], w_uk)
            result["dq"] = torch.cat([dq_nope, dq_BSHA[..., L:]], -1)
            result["dkv"] = dkv_BSA
        return result

    def heads(self, out_BSHV: Tensor, grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
        w_uk, w_uv = self.w_uk_HNL.float(), self.w_uv_HVL.float()
        result = {"out": out_BSHV.float()}
        if grads:
            dq_BSHX, dk_BSHX, dv_BSHV = (g.float() for g in grads)
            d_latent_BSL = torch.einsum("bshn,hnl->bsl", dk_BSHX[..., :N], w_uk)
            d_latent_BSL += torch.einsum("bshv,hvl->bsl", dv_BSHV, w_uv)
            result["dq"] = dq_BSHX
            result["dkv"] = torch.cat([d_latent_BSL, dk_BSHX[..., N:].sum(2)], -1)
        return result


def selected_keys(p: Params) -> Tensor:
    """int32 [1, S, K]: K random keys of those a query may see, in random order, then -1.

    With ``rows`` "full" a query may see all keys, as in the middle of a long sequence.
    """
    S, K, causal = p["S"], p["K"], p.get("rows", "causal") == "causal"
    torch.manual_seed(2)
    blocks = []
    for start in range(0, S, 512):
        stop = min(start + 512, S)
        score_nT = torch.rand(stop - start, S)
        if causal:
            future_nT = torch.arange(S) > torch.arange(start, stop)[:, None]
            score_nT.masked_fill_(future_nT, -1.0)
        best = score_nT.topk(min(K, S), dim=-1)
        blocks.append(best.indices.masked_fill(best.values < 0, -1).int())
    return torch.cat(blocks).unsqueeze(0)


def filled(indices_BSK: Tensor) -> Tensor:
    """The same sets as torch.topk gives them: empty slots hold a key that causality hides."""
    return indices_BSK.long().masked_fill(indices_BSK < 0, indices_BSK.shape[1] - 1)


def index_inputs(p: Params) -> tuple[Tensor, Tensor, Tensor]:
    """Leaves ``q_BSIC``, ``k_BSC``, ``w_BSI``; scores have a standard deviation of about 0.6."""
    S, dtype = p["S"], getattr(torch, p["dtype"])
    torch.manual_seed(3)
    q = torch.randn(1, S, INDEX_HEADS, INDEX_DIM).to(dtype)
    k = torch.randn(1, S, INDEX_DIM).to(dtype)
    w = torch.randn(1, S, INDEX_HEADS) * (INDEX_HEADS * INDEX_DIM) ** -0.5
    return q.requires_grad_(), k.requires_grad_(), w.requires_grad_()


def seq_first(x: Tensor) -> Tensor:
    """[B, S, ...] -> [S, B, ...], megatron's layout, as a leaf."""
    return x.detach().transpose(0, 1).contiguous().requires_grad_(x.requires_grad)


def batch_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


def grad(p: Params) -> bool:
    return p["pass"] == TRAINING


def task(
    p: Params,
    forward: Callable[[], tuple[list[Tensor], list[Tensor]]],
    leaves: tuple[Tensor, ...],
    result: Callable[[list[Tensor], tuple[Tensor, ...]], dict[str, Tensor]],
) -> Task:
    """`forward` gives outputs and their gradients; the task adds the backward where asked for."""

    def run():
        with torch.set_grad_enabled(grad(p)):
            outputs, d_outputs = forward()
        if not grad(p):
            return outputs, ()
        differentiable = [(o, d) for o, d in zip(outputs, d_outputs, strict=True) if d is not None]
        outs, d_outs = zip(*differentiable, strict=True)
        return outputs, torch.autograd.grad(outs, leaves, d_outs)

    return Task(run, lambda r: result(*r))


# FLOPs: a multiply-add is two; only pairs a formulation cannot avoid are counted as its own


def pairs(p: Params) -> float:
    """Query-key pairs that are attended to."""
    S, K = p["S"], min(p["K"], p["S"])
    if p.get("rows", "causal") == "full":
        return S * K
    return K * (K + 1) / 2 + (S - K) * K


def visible(p: Params) -> float:
    return p["S"] * (p["S"] + 1) / 2


def sparse_flops(p: Params) -> float:
    """Two products forward; five backward, for the probabilities are computed again."""
    per_pair = A + L + (3 * A + 2 * L if grad(p) else 0)
    return 2 * pairs(p) * p["H"] * per_pair


def heads_flops(p: Params) -> float:
    """S x S scores of every head, hidden or not."""
    return 2 * p["S"] ** 2 * p["H"] * (N + P + V) * (3 if grad(p) else 1)


def absorbed_flops(p: Params) -> float:
    return 2 * p["S"] ** 2 * p["H"] * (A + L) * (3 if grad(p) else 1)


def dense_flops(p: Params) -> float:
    """Causal, and the scores computed again backward."""
    training = (N + P) * 3 + V * 2
    return 2 * visible(p) * p["H"] * (N + P + V + (training if grad(p) else 0))


def target_flops(p: Params) -> float:
    return 2 * pairs(p) * p["H"] * A


def select_flops(p: Params) -> float:
    return 2 * visible(p) * INDEX_HEADS * INDEX_DIM


def loss_flops(p: Params) -> float:
    return 2 * pairs(p) * INDEX_HEADS * INDEX_DIM * (4 if grad(p) else 1)


def indexer_flops(p: Params) -> float:
    """The loss takes the scores from the selection; only its gradient computes them again."""
    return select_flops(p) + (loss_flops(p) * 3 / 4 if grad(p) else 0)


def small_indexer_flops(p: Params) -> float:
    return 2 * p["S"] ** 2 * INDEX_HEADS * INDEX_DIM * (3 if grad(p) else 1)


def layer_flops(p: Params) -> float:
    return sparse_flops(p) + indexer_flops(p)


def small_layer_flops(p: Params) -> float:
    return heads_flops(p) + small_indexer_flops(p)


def square_bytes(p: Params, *, copies: float, heads: bool = True, index: bool = False) -> float:
    """Memory of a formulation that holds `copies` of the S x S fp32 scores of all heads."""
    wide = (p["H"] if heads else 0) + (INDEX_HEADS if index else 0)
    return copies * p["S"] ** 2 * 4 * wide * (1.0 if grad(p) else 0.75)


# sparse_attention


def build_sparse(p: Params) -> Task:
    layer, indices = Layer.make(p), selected_keys(p)
    q, kv, d_out = layer.absorbed()
    maps = Maps(layer.w_uk_HNL, layer.w_uv_HVL)

    def forward():
        out, _ = dsa.sparse_attention(q, kv, indices, scale=SCALE, v_dim=L)
        return [out], [d_out]

    return task(p, forward, (q, kv), lambda outs, grads: maps.absorbed(outs[0], grads))


def build_absorbed(p: Params) -> Task:
    layer, indices = Layer.make(p), filled(selected_keys(p))
    q, kv, d_out = layer.absorbed()
    maps = Maps(layer.w_uk_HNL, layer.w_uv_HVL)

    def forward():
        hidden = small_operators.hidden_keys(indices, causal_or_all(p))
        out = small_operators.absorbed_attention(q, kv, hidden, SCALE, L)
        return [out], [d_out]

    return task(p, forward, (q, kv), lambda outs, grads: maps.absorbed(outs[0], grads))


def causal_or_all(p: Params) -> Tensor:
    hidden_ST = small_operators.causal(p["S"], torch.get_default_device())
    return hidden_ST if p.get("rows", "causal") == "causal" else torch.zeros_like(hidden_ST)


def build_heads(p: Params) -> Task:
    layer, indices = Layer.make(p), filled(selected_keys(p))
    q, k, v = layer.heads()
    maps, d_out = Maps(layer.w_uk_HNL, layer.w_uv_HVL), layer.d_out_BSHV

    def forward():
        hidden = small_operators.hidden_keys(indices, causal_or_all(p))
        out, _ = small_operators.attention(q, k, v, hidden, SCALE)
        return [out], [d_out]

    return task(p, forward, (q, k, v), lambda outs, grads: maps.heads(outs[0], grads))


def build_megatron(p: Params) -> Task:
    layer, indices = Layer.make(p), filled(selected_keys(p))
    q, k, v = (seq_first(x) for x in layer.heads())
    maps = Maps(layer.w_uk_HNL, layer.w_uv_HVL)
    d_out = layer.d_out_BSHV.transpose(0, 1).flatten(2)

    def forward():
        return [megatron.attention(q, k, v, indices, SCALE)], [d_out]

    def result(outs, grads):
        out_BSHV = batch_first(outs[0]).unflatten(-1, (-1, V))
        return maps.heads(out_BSHV, tuple(batch_first(g) for g in grads))

    return task(p, forward, (q, k, v), result)


def build_dense(p: Params) -> Task:
    """Dense causal attention; values padded to the keys' width, without which torch's flash
    kernel is not taken and S x S scores are."""
    layer = Layer.make(p)
    q, k, v = layer.heads()
    maps, d_out = Maps(layer.w_uk_HNL, layer.w_uv_HVL), layer.d_out_BSHV

    def forward():
        heads = (x.transpose(1, 2) for x in (q, k, F.pad(v, (0, N + P - V))))
        out = F.scaled_dot_product_attention(*heads, is_causal=True, scale=SCALE)
        return [out.transpose(1, 2)[..., :V]], [d_out]

    return task(p, forward, (q, k, v), lambda outs, grads: maps.heads(outs[0], grads))


def sparse_attention(
    S: int,
    K: int,
    H: int = 16,
    *,
    dtype: str = "float32",
    which: str = TRAINING,
    rows: str = "causal",
    square_forms: bool = True,
    note: str = "",
) -> Case:
    implementations = [
        Implementation(name=OURS, build=build_sparse, flops=sparse_flops),
        Implementation(name=PLAIN, build=build_sparse, flops=sparse_flops, environment=NO_HELPER),
    ]
    if square_forms:
        heads = partial(square_bytes, copies=4.0)
        more = partial(square_bytes, copies=6.0)
        implementations += [
            Implementation(name=SMALL, build=build_heads, flops=heads_flops, bytes_needed=heads),
            Implementation(
                name=ABSORBED, build=build_absorbed, flops=absorbed_flops, bytes_needed=heads
            ),
            Implementation(
                name=MEGATRON, build=build_megatron, flops=heads_flops, bytes_needed=more
            ),
        ]
    if rows == "causal":
        implementations.append(
            Implementation(name=DENSE, build=build_dense, flops=dense_flops, compare="small")
        )
    implementations.append(limits.gemm(sparse_flops))
    return Case(
        name="sparse_attention",
        params={"S": S, "K": K, "H": H, "dtype": dtype, "rows": rows, "pass": which},
        implementations=tuple(implementations),
        # Every key is selected: dense attention computes the same, and all slots are tried.
        small={"S": 80, "K": 80, "H": 2},
        tolerance=1e-4 if dtype == "float32" else 3e-2,
        note=note,
    )


# The indexer: scores, top-k, loss. `target` is given, except where a name says otherwise


def targets(p: Params) -> tuple[Tensor, Tensor]:
    """Head-summed attention of the selected keys [1, S, K], zero elsewhere, and its keys."""
    with torch.no_grad():
        q, k, w = index_inputs(p)
        indices, _ = dsa.lightning_indexer(q, k, w, topk=p["K"])
        layer_q, kv, _ = Layer.make(p).absorbed()
        _, lse = dsa.sparse_attention(layer_q, kv, indices, scale=SCALE, v_dim=L)
        return dsa.attention_target(layer_q, kv, indices, lse, scale=SCALE), indices


def loss_gradient(p: Params) -> Tensor:
    return torch.full((1, p["S"]), 1.0 / p["S"])


def index_result(outs: list[Tensor], grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
    result = {"mean loss": outs[0].float().mean()}
    if grads:
        result |= dict(zip(("dq index", "dk index", "dweights"), grads, strict=True))
    return result


def build_indexer(p: Params) -> Task:
    target, _ = targets(p)
    q, k, w = index_inputs(p)
    d_loss = loss_gradient(p)

    def forward():
        indices, scores = dsa.lightning_indexer(q, k, w, topk=p["K"])
        return [dsa.indexer_kl_loss(q, k, w, indices, target, scores=scores)], [d_loss]

    return task(p, forward, (q, k, w), index_result)


def build_indexer_and_target(p: Params) -> Task:
    q, k, w = index_inputs(p)
    d_loss = loss_gradient(p)
    with torch.no_grad():
        layer_q, kv, _ = Layer.make(p).absorbed()
        indices, _ = dsa.lightning_indexer(q, k, w, topk=p["K"])
        _, lse = dsa.sparse_attention(layer_q, kv, indices, scale=SCALE, v_dim=L)

    def forward():
        indices, scores = dsa.lightning_indexer(q, k, w, topk=p["K"])
        target = dsa.attention_target(layer_q, kv, indices, lse, scale=SCALE)
        return [dsa.indexer_kl_loss(q, k, w, indices, target, scores=scores)], [d_loss]

    return task(p, forward, (q, k, w), index_result)


def build_small_indexer(p: Params) -> Task:
    target_BSK, indices_BSK = targets(p)
    target_BST = torch.zeros(1, p["S"], p["S"])
    target_BST.scatter_(-1, filled(indices_BSK), target_BSK.masked_fill(indices_BSK < 0, 0.0))
    # filled() points at the last key, which the last query may really have selected.
    target_BST[:, -1].zero_().scatter_(-1, indices_BSK[:, -1].long(), target_BSK[:, -1])
    target_BST /= target_BST.sum(-1, keepdim=True)
    q, k, w = index_inputs(p)
    d_loss = loss_gradient(p)
    del target_BSK, indices_BSK

    def forward():
        causal = small_operators.causal(p["S"], q.device)
        scores = small_operators.index_scores(q, k, w)
        hidden = small_operators.hidden_keys(
            small_operators.select(scores, causal, min(p["K"], p["S"])), causal
        )
        return [small_operators.indexer_loss(scores, hidden, target_BST)], [d_loss]

    return task(p, forward, (q, k, w), index_result)


def build_megatron_indexer(p: Params) -> Task:
    q, k, w = (seq_first(x) for x in index_inputs(p))
    layer_q, layer_k, _ = (seq_first(x) for x in Layer.make(p).heads())

    def forward():
        scores = megatron.index_scores(q, k, w)
        indices = scores.topk(min(p["K"], p["S"]), dim=-1)[1]
        loss = megatron.indexer_loss(scores, indices, layer_q, layer_k, SCALE)
        return [loss], [torch.ones(())]

    def result(outs, grads):
        return index_result(outs, tuple(batch_first(g) for g in grads))

    return task(p, forward, (q, k, w), result)


TARGET = "ours, target included"
MEGATRON_TARGET = "megatron-core, target included"


def indexer(
    S: int, K: int, H: int = 16, *, dtype: str = "float32", which: str = TRAINING, note: str = ""
) -> Case:
    small = partial(square_bytes, copies=4.0, heads=False, index=True)
    more = partial(square_bytes, copies=4.0, index=True)
    return Case(
        name="lightning_indexer + indexer_kl_loss",
        params={"S": S, "K": K, "H": H, "dtype": dtype, "pass": which},
        implementations=(
            Implementation(name=OURS, build=build_indexer, flops=indexer_flops),
            Implementation(
                name=PLAIN, build=build_indexer, flops=indexer_flops, environment=NO_HELPER
            ),
            Implementation(name=TARGET, build=build_indexer_and_target),
            Implementation(
                name=SMALL,
                build=build_small_indexer,
                flops=small_indexer_flops,
                bytes_needed=small,
            ),
            Implementation(name=MEGATRON_TARGET, build=build_megatron_indexer, bytes_needed=more),
            limits.gemm(indexer_flops),
        ),
        small={"S": 80, "K": 24, "H": 2},
        # A key at the edge of the top-k may fall either way by rounding.
        tolerance=1e-3 if dtype == "float32" else 3e-2,
        note=note,
    )


def build_select(p: Params) -> Task:
    q, k, w = index_inputs(p)

    def run():
        return dsa.lightning_indexer(q, k, w, topk=p["K"])

    return Task(run, lambda r: {"scores": r[1].masked_fill(r[0] < 0, 0.0)})


def build_small_select(p: Params) -> Task:
    q, k, w = index_inputs(p)

    def run():
        with torch.no_grad():
            causal = small_operators.causal(p["S"], q.device)
            scores = small_operators.index_scores(q, k, w).masked_fill_(causal, float("-inf"))
            return scores.topk(min(p["K"], p["S"]), dim=-1)

    def result(best):
        return {"scores": best.values.masked_fill(best.values == float("-inf"), 0.0)}

    return Task(run, result)


def build_megatron_select(p: Params) -> Task:
    q, k, w = (seq_first(x) for x in index_inputs(p))

    def run():
        with torch.no_grad():
            return megatron.index_scores(q, k, w).topk(min(p["K"], p["S"]), dim=-1)

    def result(best):
        return {"scores": best.values.masked_fill(best.values == float("-inf"), 0.0)}

    return Task(run, result)


def select_case(S: int, K: int) -> Case:
    """Not differentiable: the forward is all there is."""
    needed = partial(square_bytes, copies=3.0, heads=False, index=True)
    return Case(
        name="lightning_indexer",
        params={"S": S, "K": K, "dtype": "float32", "pass": FORWARD},
        implementations=(
            Implementation(name=OURS, build=build_select, flops=select_flops),
            Implementation(
                name=PLAIN, build=build_select, flops=select_flops, environment=NO_HELPER
            ),
            Implementation(name=SMALL, build=build_small_select, bytes_needed=needed),
            Implementation(name=MEGATRON, build=build_megatron_select, bytes_needed=needed),
            limits.gemm(select_flops),
        ),
        small={"S": 80, "K": 24},
        tolerance=1e-4,
    )


def build_target(p: Params) -> Task:
    indices = selected_keys(p)
    with torch.no_grad():
        q, kv, _ = Layer.make(p).absorbed()
        _, lse = dsa.sparse_attention(q, kv, indices, scale=SCALE, v_dim=L)

    def run():
        return dsa.attention_target(q, kv, indices, lse, scale=SCALE)

    return Task(run, lambda target: {"target": target})


def build_small_target(p: Params) -> Task:
    """From S x S scores, as where the attention's probabilities were not kept."""
    indices = selected_keys(p)
    columns = filled(indices)
    q, k, _ = Layer.make(p).heads()

    def run():
        with torch.no_grad():
            hidden = small_operators.hidden_keys(columns, causal_or_all(p))
            scores = (q.transpose(1, 2) * SCALE) @ k.permute(0, 2, 3, 1)
            scores.masked_fill_(hidden.unsqueeze(1), float("-inf"))
            return scores.softmax(-1).sum(1).gather(-1, columns).masked_fill_(indices < 0, 0.0)

    return Task(run, lambda target: {"target": target})


def target_case(S: int, K: int, H: int = 16) -> Case:
    """No gradient: the forward is all there is."""
    return Case(
        name="attention_target",
        params={"S": S, "K": K, "H": H, "dtype": "float32", "pass": FORWARD},
        implementations=(
            Implementation(name=OURS, build=build_target, flops=target_flops),
            Implementation(
                name=PLAIN, build=build_target, flops=target_flops, environment=NO_HELPER
            ),
            Implementation(
                name=SMALL, build=build_small_target, bytes_needed=partial(square_bytes, copies=3.0)
            ),
            limits.gemm(target_flops),
        ),
        small={"S": 80, "K": 24, "H": 2},
    )


def build_loss(p: Params) -> Task:
    target, indices = targets(p)
    q, k, w = index_inputs(p)
    d_loss = loss_gradient(p)

    def forward():
        return [dsa.indexer_kl_loss(q, k, w, indices, target)], [d_loss]

    return task(p, forward, (q, k, w), index_result)


def build_gathered_loss(p: Params) -> Task:
    """The loss over gathered keys: small operators that need no S x S, but S x K rows."""
    target, indices = targets(p)
    q, k, w = index_inputs(p)
    d_loss = loss_gradient(p)
    empty = indices < 0
    rows = indices.long().clamp(min=0)
    target = (target / target.sum(-1, keepdim=True)).masked_fill(empty, 0.0)

    def forward():
        relu = (q @ k[0][rows].transpose(-1, -2)).relu_()
        scores = (w.unsqueeze(2) @ relu).squeeze(2).masked_fill(empty, float("-inf"))
        log_y = scores.log_softmax(-1).masked_fill(empty, 0.0)
        return [(torch.xlogy(target, target) - target * log_y).sum(-1)], [d_loss]

    return task(p, forward, (q, k, w), index_result)


def gathered_bytes(p: Params) -> float:
    return p["S"] * p["K"] * 4 * (3 * INDEX_DIM + 3 * INDEX_HEADS)


GATHERED = "small operators, gathered"


def loss_case(S: int, K: int, H: int = 16, *, which: str = TRAINING) -> Case:
    return Case(
        name="indexer_kl_loss",
        params={"S": S, "K": K, "H": H, "dtype": "float32", "pass": which},
        implementations=(
            Implementation(name=OURS, build=build_loss, flops=loss_flops),
            Implementation(name=PLAIN, build=build_loss, flops=loss_flops, environment=NO_HELPER),
            Implementation(name=GATHERED, build=build_gathered_loss, bytes_needed=gathered_bytes),
            limits.gemm(loss_flops),
        ),
        small={"S": 80, "K": 24, "H": 2},
    )


def build_dense_loss(p: Params) -> Task:
    layer_q, kv, _ = Layer.make(p).absorbed()
    layer_q, kv = layer_q.detach(), kv.detach()
    q, k, w = index_inputs(p)
    d_loss = loss_gradient(p)

    def forward():
        loss = dsa.dense_indexer_kl_loss(q, k, w, layer_q, kv, scale=SCALE)
        return [loss], [d_loss]

    return task(p, forward, (q, k, w), index_result)


def build_small_dense_loss(p: Params) -> Task:
    layer_q, layer_k, _ = (x.detach() for x in Layer.make(p).heads())
    q, k, w = index_inputs(p)
    d_loss = loss_gradient(p)

    def forward():
        hidden = small_operators.causal(p["S"], q.device).unsqueeze(0)
        with torch.no_grad():
            scores = (layer_q.transpose(1, 2) * SCALE) @ layer_k.permute(0, 2, 3, 1)
            scores.masked_fill_(hidden.unsqueeze(1), float("-inf"))
            target = scores.softmax(-1).sum(1).div_(p["H"])
            del scores
        index = small_operators.index_scores(q, k, w)
        return [small_operators.indexer_loss(index, hidden, target)], [d_loss]

    return task(p, forward, (q, k, w), index_result)


def dense_loss_flops(p: Params) -> float:
    index = INDEX_HEADS * INDEX_DIM * (4 if grad(p) else 1)
    return 2 * visible(p) * (p["H"] * A + index)


def dense_loss_case(S: int, H: int = 16, *, which: str = TRAINING) -> Case:
    """The warm-up stage's loss, over every visible key."""
    needed = partial(square_bytes, copies=3.0, index=True)
    return Case(
        name="dense_indexer_kl_loss",
        params={"S": S, "H": H, "dtype": "float32", "pass": which},
        implementations=(
            Implementation(name=OURS, build=build_dense_loss, flops=dense_loss_flops),
            Implementation(
                name=PLAIN, build=build_dense_loss, flops=dense_loss_flops, environment=NO_HELPER
            ),
            Implementation(name=SMALL, build=build_small_dense_loss, bytes_needed=needed),
            limits.gemm(dense_loss_flops),
        ),
        small={"S": 80, "H": 2},
    )


# The whole layer: indexer, top-k, attention, loss


def layer_result(maps_form, outs: list[Tensor], grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
    attention, index = grads[:-3], grads[-3:]
    return maps_form(outs[0], attention) | index_result(outs[1:], index)


def build_layer(p: Params) -> Task:
    layer = Layer.make(p)
    q, kv, d_out = layer.absorbed()
    index, d_loss = index_inputs(p), loss_gradient(p)
    maps = Maps(layer.w_uk_HNL, layer.w_uv_HVL)
    del layer

    def forward():
        result = dsa.dsa_attention(q, kv, *index, topk=p["K"], scale=SCALE, v_dim=L)
        return [result.out, result.kl], [d_out, d_loss]

    return task(p, forward, (q, kv, *index), partial(layer_result, maps.absorbed))


def build_small_layer(p: Params) -> Task:
    layer = Layer.make(p)
    q, k, v = layer.heads()
    index, d_loss, d_out = index_inputs(p), loss_gradient(p), layer.d_out_BSHV
    maps = Maps(layer.w_uk_HNL, layer.w_uv_HVL)
    del layer

    def forward():
        outs = small_operators.dsa_attention(q, k, v, *index, topk=p["K"], scale=SCALE)
        return list(outs), [d_out, d_loss]

    return task(p, forward, (q, k, v, *index), partial(layer_result, maps.heads))


def build_megatron_layer(p: Params) -> Task:
    layer = Layer.make(p)
    q, k, v = (seq_first(x) for x in layer.heads())
    index = tuple(seq_first(x) for x in index_inputs(p))
    d_out = layer.d_out_BSHV.transpose(0, 1).flatten(2)
    maps = Maps(layer.w_uk_HNL, layer.w_uv_HVL)
    del layer

    def forward():
        outs = megatron.dsa_attention(q, k, v, *index, topk=p["K"], scale=SCALE)
        return list(outs), [d_out, torch.ones(())]

    def result(outs, grads):
        out = batch_first(outs[0]).unflatten(-1, (-1, V))
        return layer_result(maps.heads, [out, outs[1]], tuple(batch_first(g) for g in grads))

    return task(p, forward, (q, k, v, *index), result)


def layer_case(
    S: int,
    K: int,
    H: int = 16,
    *,
    which: str = TRAINING,
    square_forms: bool = True,
    timed: bool = True,
    name: str = "dsa_attention",
    note: str = "",
) -> Case:
    implementations = [
        Implementation(name=OURS, build=build_layer, flops=layer_flops),
        Implementation(name=PLAIN, build=build_layer, flops=layer_flops, environment=NO_HELPER),
    ]
    if square_forms:
        implementations += [
            Implementation(
                name=SMALL,
                build=build_small_layer,
                flops=small_layer_flops,
                bytes_needed=partial(square_bytes, copies=4.0, index=True),
            ),
            Implementation(
                name=MEGATRON,
                build=build_megatron_layer,
                bytes_needed=partial(square_bytes, copies=6.0, index=True),
            ),
        ]
    if timed:
        implementations += [
            # No indexer, no loss: what a model without DSA would do.
            Implementation(name=DENSE, build=build_dense, flops=dense_flops, compare="never"),
            limits.gemm(layer_flops),
        ]
    return Case(
        name=name,
        params={"S": S, "K": K, "H": H, "dtype": "float32", "pass": which},
        implementations=tuple(implementations),
        small={"S": 80, "K": 24, "H": 2},
        # A key at the edge of the top-k may fall either way by rounding.
        tolerance=1e-3,
        timed=timed,
        note=note,
    )


def crossover_case(S: int, K: int, H: int = 16, *, whole: bool) -> Case:
    """Only ours and dense attention, at lengths the S x S forms do not reach."""
    ours = (
        Implementation(name=OURS, build=build_layer, flops=layer_flops)
        if whole
        else Implementation(name=OURS, build=build_sparse, flops=sparse_flops)
    )
    compare = "never" if whole else "small"
    dense = Implementation(name=DENSE, build=build_dense, flops=dense_flops, compare=compare)
    return Case(
        name="crossover, whole layer" if whole else "crossover, attention",
        params={"S": S, "K": K, "H": H, "dtype": "float32", "pass": TRAINING},
        implementations=(ours, dense),
        small={"S": 80, "K": 80, "H": 2},
        tolerance=1e-3,
    )


# Which cases there are


def preload(chosen: list[Case]) -> tuple[str, ...]:
    """megatron-core's import takes seconds: once, and only where a case needs it."""
    names = {i.name for case in chosen for i in case.implementations}
    return (megatron.MODULE,) if names & {MEGATRON, MEGATRON_TARGET} else ()


def cases(quick: bool) -> Iterator[Case]:
    if quick:
        yield sparse_attention(192, 32, 2, which=FORWARD)
        yield sparse_attention(192, 32, 2)
        yield sparse_attention(192, 128, 4, dtype="bfloat16", square_forms=False)
        yield sparse_attention(192, 128, 4, dtype="bfloat16", square_forms=False, rows="full")
        yield select_case(192, 32)
        yield target_case(192, 32, 2)
        yield loss_case(192, 32, 2)
        yield indexer(192, 32, 2)
        yield dense_loss_case(192, 2)
        yield layer_case(192, 32, 2)
        yield layer_case(256, 32, 2, timed=False, square_forms=False, name="memory")
        for whole in (False, True):
            for S in (128, 256, 512):
                yield crossover_case(S, 32, 2, whole=whole)
        return
    # The published claims and the project's own.
    for S in (2048, 4096):
        yield sparse_attention(S, 512, note="(a)")
    for rows in ("causal", "full"):
        yield sparse_attention(
            2304, 2048, 128, dtype="bfloat16", rows=rows, square_forms=False, note="(b)"
        )
    for dtype in ("float32", "bfloat16"):
        yield indexer(2048, 512, dtype=dtype, note="(c)")
    for S in (2048, 4096, 8192):
        yield layer_case(S, 512, timed=False, square_forms=S == 4096, name="memory", note="(d)")
    # Over S, K and H, forward alone too.
    for which in (FORWARD, TRAINING):
        for S, K, H in ((1024, 512, 16), (2048, 256, 16), (2048, 1024, 16), (2048, 512, 64)):
            yield sparse_attention(S, K, H, which=which)
        yield sparse_attention(2048, 512, 16, dtype="bfloat16", which=which)
    for S in (2048, 4096):
        yield sparse_attention(S, 512, which=FORWARD)
    for S, K in ((1024, 512), (2048, 512), (4096, 512), (4096, 2048)):
        yield select_case(S, K)
        yield target_case(S, K)
        for which in (FORWARD, TRAINING):
            yield loss_case(S, K, which=which)
    yield indexer(4096, 512)
    for S in (1024, 2048, 4096):
        yield dense_loss_case(S)
    for S in (1024, 2048, 4096):
        yield layer_case(S, 512)
    yield layer_case(4096, 2048)
    for whole in (False, True):
        for S in (1024, 2048, 4096, 8192, 16384):
            yield crossover_case(S, 512, whole=whole)


# What the results must show


def checks(results: list[Result]) -> Iterator[Check]:
    compiled = "with the compiled helper"
    for result in results:
        p, note = result.case.params, result.case.note
        where = f"S {p['S']}"
        if note == "(a)":
            least = 2.5 if p["S"] == 4096 else 1.5
            for name, limit in ((SMALL, least), (MEGATRON, least), (ABSORBED, 7.0)):
                if name == ABSORBED and p["S"] != 4096:
                    continue
                text = f"(a) {where}: ours faster than {name}"
                yield at_least(f"{text}, {compiled}", result.ratio(name), limit)
                yield at_least(f"{text}, without it", result.ratio(name, PLAIN), limit / 2)
            yield at_most(f"(a) {where}: time over GEMM", result.ratio(OURS, _limit(result)), 1.3)
        elif note == "(b)":
            text = f"(b) {p['rows']} rows: time over bf16 GEMM"
            yield at_most(text, result.ratio(OURS, _limit(result)), 1.6)
        elif note == "(c)":
            text = f"(c) {p['dtype']}: ours faster than"
            yield at_least(f"{text} small operators", result.ratio(SMALL), 15)
            both = result.ratio(MEGATRON_TARGET, TARGET)
            yield at_least(f"{text} megatron-core, target in both", both, 15)
    memory = {
        (r.case.params["S"], name): m.peak_bytes
        for r in results
        if r.case.note == "(d)"
        for name, m in r.measurements.items()
        if m.ok and m.peak_bytes is not None
    }
    if not memory:
        return
    for name in (OURS, PLAIN):
        for S in (2048, 4096):
            growth = _quotient(memory, (2 * S, name), (S, name))
            yield at_most(f"(d) {name}: memory S {S} -> {2 * S}", growth, 2.2)
        share = _quotient(memory, (4096, name), (4096, SMALL))
        yield at_most(f"(d) {name}: memory over small operators, S 4096", share, 0.25)


def _limit(result: Result) -> str:
    return next(n for n in result.measurements if n.startswith("limit"))


def _quotient(memory: dict, a: tuple[int, str], b: tuple[int, str]) -> float:
    return memory[a] / memory[b] if a in memory and b in memory else math.nan


def findings(results: list[Result]) -> Iterator[str]:
    """The crossover lengths: from where on sparse attention is faster than dense."""
    for name in ("crossover, attention", "crossover, whole layer"):
        points = sorted(
            (r.case.params["S"], r.ratio(DENSE))
            for r in results
            if r.case.name == name and not math.isnan(r.ratio(DENSE))
        )
        if points:
            yield f"{name}: {crossover(points)}"


def crossover(points: list[tuple[int, float]]) -> str:
    """Where the ratio dense / sparse passes 1, on a straight line between logarithms."""
    measured = ", ".join(f"S {S}: {ratio:.2f}" for S, ratio in points)
    measured = f"(dense time / sparse time: {measured})"
    if all(ratio >= 1 for _, ratio in points):
        return f"sparse is faster at every length measured, from S {points[0][0]} on {measured}"
    for (s0, r0), (s1, r1) in itertools.pairwise(points):
        if r0 < 1 <= r1:
            share = math.log(1 / r0) / math.log(r1 / r0)
            length = s0 * (s1 / s0) ** share
            return f"sparse is faster than dense from about S {length:.0f} on {measured}"
    return f"dense is faster at every length measured, up to S {points[-1][0]} {measured}"

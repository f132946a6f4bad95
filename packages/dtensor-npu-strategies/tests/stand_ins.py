"""Operators that the strategies are for, where the packages that have them are not installed.

`npu_dsa` has the operators of npu-dsa-kernels, with the same schemas, computed as plainly as can
be. `aten.matmul` and its backward are made the operators of their own that they are on an NPU.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor

# B batch, S queries, T keys, H heads, D key dim, V value dim, K selected keys, G index heads,
# E index head dim or experts, N rows or tokens, M permuted rows, I and O features, k slots

_npu_dsa = torch.library.Library("npu_dsa", "DEF")
_aten = torch.library.Library("aten", "IMPL")

# Arguments, tensors unless it says what else, and the number of outputs.
_INDEXER = "q_index k_index weights"
_SIGNATURES = {
    "attention_target": ("q kv indices lse float:scale", 1),
    "dense_attention": ("q k v bounds? float:scale", 2),
    "dense_attention_backward": ("d_out d_lse? q k v bounds? out lse float:scale", 3),
    "dense_indexer_kl_loss": (f"{_INDEXER} q kv bounds? float:scale", 1),
    "dense_indexer_kl_loss_backward": (f"d_loss {_INDEXER} q kv bounds? float:scale", 3),
    "fused_dense_kl_loss": (f"{_INDEXER} q k bounds? float:scale", 4),
    "fused_kl_loss": (f"q kv {_INDEXER} indices lse bounds? float:scale", 4),
    "fused_kl_loss_backward": ("d_loss dq dk dw", 3),
    "grouped_matmul": ("x weight ends", 1),
    "grouped_matmul_backward": ("d_y x weight ends", 2),
    "hadamard": ("x float:scale", 1),
    "indexer_kl_loss": (f"{_INDEXER} indices target scores?", 1),
    "indexer_kl_loss_backward": (f"d_loss {_INDEXER} indices target", 3),
    "lightning_indexer": (f"{_INDEXER} bounds? SymInt:topk", 2),
    "moe_permute": ("tokens experts probs? SymInt:num_experts SymInt:num_out_tokens", 4),
    "moe_permute_backward": ("d_tokens d_probs? rows", 2),
    "moe_unpermute": ("x rows probs?", 1),
    "moe_unpermute_backward": ("d_y x? rows probs? SymInt:num_rows", 2),
    "rms_norm": ("x weight? float:eps", 2),
    "rms_norm_backward": ("d_y x weight? rstd", 2),
    "rotary_mul": ("x cos sin bool:interleaved", 1),
    "rotary_mul_backward": ("d_y cos sin bool:interleaved", 1),
    "sparse_attention": ("q kv indices float:scale SymInt:v_dim", 2),
    "sparse_attention_backward": ("d_out d_lse? q kv indices out lse float:scale", 2),
    "sparse_attention_with_target": ("q kv indices float:scale SymInt:v_dim", 3),
    "swiglu": ("x SymInt:dim", 1),
    "swiglu_backward": ("d_y x SymInt:dim", 1),
}


def _schema(name: str) -> str:
    arguments, outputs = _SIGNATURES[name]
    items = []
    for item in arguments.split():
        kind, _, argument = item.rpartition(":")
        kind = kind or ("Tensor?" if item.endswith("?") else "Tensor")
        items.append(f"{kind} {argument.rstrip('?')}")
    if name != "fused_kl_loss_backward":
        items.append("str backend")
    returns = "Tensor" if outputs == 1 else f"({', '.join(['Tensor'] * outputs)})"
    return f"({', '.join(items)}) -> {returns}"


SCHEMAS = {name: _schema(name) for name in _SIGNATURES}


# --- formulas, differentiable --------------------------------------------------------------------


def _visible(bounds, S, T):
    if bounds is None:
        assert S == T, "causal by row number: a shard of the queries must have bounds"
        return torch.ones(S, T, dtype=torch.bool).tril()[None]
    key_T = torch.arange(T)
    return (key_T >= bounds[..., :1]) & (key_T < bounds[..., 1:])


def _scores(q_index, k_index, weights):
    return torch.einsum("bsg,bsgt->bst", weights, (q_index @ k_index.mT.unsqueeze(1)).relu())


def _masked_softmax(x, seen):
    """Softmax and log-sum-exp over what is seen; zeros and -inf for rows that see nothing."""
    lse = x.masked_fill(~seen, -torch.inf).logsumexp(-1, keepdim=True)
    p = torch.where(seen, (x - lse.masked_fill(lse.isinf(), 0)).exp(), 0)
    return p, lse.squeeze(-1)


def _select(x_BTD, indices):
    batch = torch.arange(x_BTD.shape[0])[:, None, None]
    return x_BTD[batch, indices.clamp(min=0).long()], indices >= 0


def lightning_indexer(q_index, k_index, weights, bounds, topk, backend):
    scores = _scores(q_index, k_index, weights)
    seen = _visible(bounds, *scores.shape[1:])
    scores, indices = scores.masked_fill(~seen, -torch.inf).topk(topk, -1)
    return indices.int().masked_fill(scores.isinf(), -1), scores


def sparse_attention(q, kv, indices, scale, v_dim, backend):
    return sparse_attention_with_target(q, kv, indices, scale, v_dim, backend)[:2]


def sparse_attention_with_target(q, kv, indices, scale, v_dim, backend):
    keys, seen = _select(kv, indices)
    p, lse = _masked_softmax(scale * q @ keys.mT, seen.unsqueeze(2))
    return p @ keys[..., :v_dim], lse, p.sum(2)


def attention_target(q, kv, indices, lse, scale, backend):
    keys, seen = _select(kv, indices)
    return ((scale * q @ keys.mT - lse.unsqueeze(-1)).exp() * seen.unsqueeze(2)).sum(2)


def dense_attention(q, k, v, bounds, scale, backend):
    seen = _visible(bounds, q.shape[1], k.shape[1]).unsqueeze(2)
    p, lse = _masked_softmax(scale * torch.einsum("bshd,bthd->bsht", q, k), seen)
    return torch.einsum("bsht,bthv->bshv", p, v), lse


def _kl(target, scores, seen):
    p = target / target.sum(-1, keepdim=True)
    log_y = scores.masked_fill(~seen, -torch.inf).log_softmax(-1).masked_fill(~seen, 0)
    return (torch.xlogy(p, p) - p * log_y).sum(-1)


def indexer_kl_loss(q_index, k_index, weights, indices, target, scores, backend):
    keys, seen = _select(k_index, indices)
    scores = torch.einsum("bsg,bsgk->bsk", weights, (q_index @ keys.mT).relu())
    return _kl(target, scores, seen)


def dense_indexer_kl_loss(q_index, k_index, weights, q, kv, bounds, scale, backend):
    keys = kv if kv.dim() == 4 else kv.unsqueeze(2).expand(-1, -1, q.shape[2], -1)
    seen = _visible(bounds, q.shape[1], kv.shape[1])
    logits = scale * torch.einsum("bshd,bthd->bsht", q, keys)
    target = _masked_softmax(logits, seen.unsqueeze(2))[0].sum(2)
    return _kl(target, _scores(q_index, k_index, weights), seen)


def rms_norm(x, weight, eps, backend):
    rstd = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * rstd * (1 if weight is None else weight), rstd


def rotary_mul(x, cos, sin, interleaved, backend):
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    if interleaved:
        rotated = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    else:
        rotated = torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)
    return x * cos + rotated * sin


def swiglu(x, dim, backend):
    a, b = x.chunk(2, dim)
    return F.silu(a) * b


def hadamard(x, scale, backend):
    H = torch.ones(1, 1, dtype=x.dtype)
    while H.shape[0] < x.shape[-1]:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    return scale * x @ H


def grouped_matmul(x, weight, ends, backend):
    row = torch.arange(x.shape[0])
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    mine = (row >= begins[:, None]) & (row < ends[:, None])
    return torch.einsum("en,ni,eio->no", mine.to(x.dtype), x, weight)


def _slots(experts, E, M):
    """Row of each slot by a stable sort, -1 for slots of no expert here or beyond row M."""
    flat = experts.flatten().long()
    flat = torch.where((flat >= 0) & (flat < E), flat, E)
    row = flat.argsort(stable=True).argsort()
    counts = F.one_hot(flat, E + 1)[:, :E].sum(0)
    ends = counts.cumsum(0).clamp(max=M)
    row = row.masked_fill((flat == E) | (row >= M), -1).int().view(experts.shape)
    return row, ends.diff(prepend=ends.new_zeros(1))


def _put(x_slots, row, M):
    keep = row.flatten() >= 0
    return x_slots.new_zeros(M, *x_slots.shape[1:]).index_put(
        (row.flatten()[keep].long(),), x_slots[keep]
    )


def moe_permute(tokens, experts, probs, num_experts, num_out_tokens, backend):
    row, counts = _slots(experts, num_experts, num_out_tokens)
    permuted = _put(tokens.repeat_interleave(experts.shape[1], 0), row, num_out_tokens)
    p = tokens.new_empty(0) if probs is None else _put(probs.flatten(), row, num_out_tokens)
    return permuted, p, row, counts


def moe_unpermute(x, rows, probs, backend):
    parts, seen = _select(x[None], rows[None])
    scale = seen[0].to(x.dtype) if probs is None else torch.where(seen[0], probs, 0)
    return (parts[0] * scale.unsqueeze(-1)).sum(1)


# --- backwards, by autograd of the formulas ------------------------------------------------------


_thread = ThreadPoolExecutor(1)


def _gradients(function, inputs, d_outputs):
    """Gradients of `inputs`, an empty tensor for None.

    Kernels run with autograd switched off in many ways; another thread has none of them.
    """

    def run():
        leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [(y, d) for y, d in zip(outputs, d_outputs, strict=False) if d is not None]
        given = [x for x in leaves if x is not None]
        return torch.autograd.grad([y for y, _ in pairs], given, [d for _, d in pairs])

    found = iter(_thread.submit(run).result())
    first = next(x for x in inputs if x is not None)
    return tuple(first.new_empty(0) if x is None else next(found) for x in inputs)


def sparse_attention_backward(d_out, d_lse, q, kv, indices, out, lse, scale, backend):
    def forward(q, kv):
        return sparse_attention(q, kv, indices, scale, out.shape[-1], backend)

    return _gradients(forward, (q, kv), (d_out, d_lse))


def dense_attention_backward(d_out, d_lse, q, k, v, bounds, out, lse, scale, backend):
    def forward(q, k, v):
        return dense_attention(q, k, v, bounds, scale, backend)

    return _gradients(forward, (q, k, v), (d_out, d_lse))


def indexer_kl_loss_backward(d_loss, q_index, k_index, weights, indices, target, backend):
    def forward(*indexer):
        return indexer_kl_loss(*indexer, indices, target, None, backend)

    return _gradients(forward, (q_index, k_index, weights), (d_loss,))


def dense_indexer_kl_loss_backward(
    d_loss, q_index, k_index, weights, q, kv, bounds, scale, backend
):
    def forward(*indexer):
        return dense_indexer_kl_loss(*indexer, q, kv, bounds, scale, backend)

    return _gradients(forward, (q_index, k_index, weights), (d_loss,))


def fused_kl_loss(q, kv, q_index, k_index, weights, indices, lse, bounds, scale, backend):
    target = attention_target(q, kv, indices, lse, scale, backend)

    def forward(*indexer):
        return indexer_kl_loss(*indexer, indices, target, None, backend).sum()

    indexer = (q_index, k_index, weights)
    return forward(*indexer), *_gradients(forward, indexer, (torch.ones((), dtype=q.dtype),))


def fused_dense_kl_loss(q_index, k_index, weights, q, k, bounds, scale, backend):
    def forward(*indexer):
        return dense_indexer_kl_loss(*indexer, q, k, bounds, scale, backend).sum()

    indexer = (q_index, k_index, weights)
    return forward(*indexer), *_gradients(forward, indexer, (torch.ones((), dtype=q.dtype),))


def fused_kl_loss_backward(d_loss, dq, dk, dw):
    return dq * d_loss, dk * d_loss, dw * d_loss


def rms_norm_backward(d_y, x, weight, rstd, backend):
    eps = (rstd[..., :1] ** -2 - x.square().mean(-1, keepdim=True)).detach()
    return _gradients(lambda x, w: rms_norm(x, w, eps, backend), (x, weight), (d_y,))


def rotary_mul_backward(d_y, cos, sin, interleaved, backend):
    def forward(x):
        return rotary_mul(x, cos, sin, interleaved, backend)

    return _gradients(forward, (d_y,), (d_y,))[0]


def swiglu_backward(d_y, x, dim, backend):
    return _gradients(lambda x: swiglu(x, dim, backend), (x,), (d_y,))[0]


def grouped_matmul_backward(d_y, x, weight, ends, backend):
    return _gradients(lambda x, w: grouped_matmul(x, w, ends, backend), (x, weight), (d_y,))


def moe_permute_backward(d_tokens, d_probs, rows, backend):
    parts, seen = _select(d_tokens[None], rows[None])
    d_in = (parts[0] * seen[0].unsqueeze(-1)).sum(1)
    if d_probs is None:
        return d_in, d_tokens.new_empty(0)
    return d_in, torch.where(seen[0], d_probs[rows.clamp(min=0).long()], 0)


def moe_unpermute_backward(d_y, x, rows, probs, num_rows, backend):
    if x is None:
        x = d_y.new_zeros(num_rows, d_y.shape[1])
    assert x.shape[0] == num_rows
    return _gradients(lambda x, p: moe_unpermute(x, rows, p, backend), (x, probs), (d_y,))


# --- as operators --------------------------------------------------------------------------------

# Which arguments and outputs go to the backward operator: by name, or by the output's number.
_BACKWARDS = {
    "rms_norm": (["x", "weight", 1], ["backend"], ["x", "weight"]),
    "swiglu": (["x"], ["dim", "backend"], ["x"]),
    "rotary_mul": (["cos", "sin"], ["interleaved", "backend"], ["x"]),
    "sparse_attention": (["q", "kv", "indices", 0, 1], ["scale", "backend"], ["q", "kv"]),
    "sparse_attention_with_target": (
        ["q", "kv", "indices", 0, 1], ["scale", "backend"], ["q", "kv"],
    ),
    "dense_attention": (
        ["q", "k", "v", "bounds", 0, 1], ["scale", "backend"], ["q", "k", "v"],
    ),
    "indexer_kl_loss": (
        ["q_index", "k_index", "weights", "indices", "target"], ["backend"],
        ["q_index", "k_index", "weights"],
    ),
    "dense_indexer_kl_loss": (
        ["q_index", "k_index", "weights", "q", "kv", "bounds"], ["scale", "backend"],
        ["q_index", "k_index", "weights"],
    ),
    "grouped_matmul": (["x", "weight", "ends"], ["backend"], ["x", "weight"]),
}  # fmt: skip


def _register() -> None:
    for name, schema in SCHEMAS.items():
        _npu_dsa.define(name + schema)
        _npu_dsa.impl(name, globals()[name], "CPU")
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"npu_dsa::{name}", fake, lib=_npu_dsa)
    for name, parts in _BACKWARDS.items():
        _differentiate(name, *parts)
    _differentiate_moe()


def _call(name, *args):
    return getattr(torch.ops.npu_dsa, name).default(*args)


def _differentiate(name, tensors, values, inputs) -> None:
    names = [a.name for a in getattr(torch.ops.npu_dsa, name).default._schema.arguments]
    backward_name = {"sparse_attention_with_target": "sparse_attention"}.get(name, name)
    has_d_lse = "attention" in name

    def setup_context(ctx, inputs, output):
        given = dict(zip(names, inputs, strict=True))
        outputs = output if isinstance(output, tuple) else (output,)
        saved = [outputs[t] if isinstance(t, int) else given[t] for t in tensors]
        ctx.save_for_backward(*saved)
        ctx.values = [given[v] for v in values]
        ctx.set_materialize_grads(False)

    def backward(ctx, *d_outputs):
        d = d_outputs[:2] if has_d_lse else d_outputs[:1]
        found = _call(f"{backward_name}_backward", *d, *ctx.saved_tensors, *ctx.values)
        found = dict(zip(inputs, found if isinstance(found, tuple) else (found,), strict=True))
        if "weight" in inputs and ctx.saved_tensors[1] is None:
            found["weight"] = None
        return tuple(found.get(n) for n in names)

    torch.library.register_autograd(
        f"npu_dsa::{name}", backward, setup_context=setup_context, lib=_npu_dsa
    )


def _differentiate_moe() -> None:
    def permute_context(ctx, inputs, output):
        ctx.has_probs = inputs[2] is not None
        ctx.save_for_backward(output[2])

    def permute_backward(ctx, d_tokens, d_probs, d_rows, d_counts):
        (rows,) = ctx.saved_tensors
        d_probs = d_probs if ctx.has_probs else None
        d_in, d_probs_in = _call("moe_permute_backward", d_tokens, d_probs, rows, "torch")
        return d_in, None, d_probs_in if ctx.has_probs else None, None, None, None

    def unpermute_context(ctx, inputs, output):
        x, rows, probs, _ = inputs
        ctx.num_rows = x.shape[0]
        ctx.save_for_backward(None if probs is None else x, rows, probs)

    def unpermute_backward(ctx, d_y):
        x, rows, probs = ctx.saved_tensors
        found = _call("moe_unpermute_backward", d_y, x, rows, probs, ctx.num_rows, "torch")
        return found[0], None, None if probs is None else found[1], None

    for name, backward, context in (
        ("moe_permute", permute_backward, permute_context),
        ("moe_unpermute", unpermute_backward, unpermute_context),
    ):
        torch.library.register_autograd(
            f"npu_dsa::{name}", backward, setup_context=context, lib=_npu_dsa
        )


def _like(*tensors):
    """A shape function of outputs with the shapes of inputs."""
    return tuple(x.new_empty(x.shape) for x in tensors)


def _or_empty(x, like):
    return like.new_empty(0) if x is None else x.new_empty(x.shape)


_FAKES = {
    "attention_target": lambda q, kv, i, lse, s, b: q.new_empty(i.shape),
    "dense_attention": lambda q, k, v, *_: (
        q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3]),
    ),
    "dense_attention_backward": lambda d, dl, q, k, v, *_: _like(q, k, v),
    "dense_indexer_kl_loss": lambda qi, *_: qi.new_empty(qi.shape[:2]),
    "dense_indexer_kl_loss_backward": lambda d, qi, ki, w, *_: _like(qi, ki, w),
    "fused_dense_kl_loss": lambda qi, ki, w, *_: (qi.new_empty(()), *_like(qi, ki, w)),
    "fused_kl_loss": lambda q, kv, qi, ki, w, *_: (q.new_empty(()), *_like(qi, ki, w)),
    "fused_kl_loss_backward": lambda d, *tensors: _like(*tensors),
    "grouped_matmul": lambda x, w, *_: x.new_empty(x.shape[0], w.shape[2]),
    "grouped_matmul_backward": lambda d, x, w, *_: _like(x, w),
    "hadamard": lambda x, *_: x.new_empty(x.shape),
    "indexer_kl_loss": lambda qi, *_: qi.new_empty(qi.shape[:2]),
    "indexer_kl_loss_backward": lambda d, qi, ki, w, *_: _like(qi, ki, w),
    "lightning_indexer": lambda qi, ki, w, bounds, topk, b: (
        qi.new_empty(*qi.shape[:2], topk, dtype=torch.int32), qi.new_empty(*qi.shape[:2], topk),
    ),
    "moe_permute": lambda t, e, p, E, M, b: (
        t.new_empty(M, t.shape[1]), t.new_empty(0) if p is None else p.new_empty(M),
        e.new_empty(e.shape, dtype=torch.int32), e.new_empty(E, dtype=torch.int64),
    ),
    "moe_permute_backward": lambda d, dp, rows, b: (
        d.new_empty(rows.shape[0], d.shape[1]),
        d.new_empty(0) if dp is None else dp.new_empty(rows.shape),
    ),
    "moe_unpermute": lambda x, rows, *_: x.new_empty(rows.shape[0], x.shape[1]),
    "moe_unpermute_backward": lambda d, x, rows, p, M, b: (
        d.new_empty(M, d.shape[1]), _or_empty(p, d),
    ),
    "rms_norm": lambda x, *_: (x.new_empty(x.shape), x.new_empty(*x.shape[:-1], 1)),
    "rms_norm_backward": lambda d, x, w, *_: (x.new_empty(x.shape), _or_empty(w, x)),
    "rotary_mul": lambda x, *_: x.new_empty(x.shape),
    "rotary_mul_backward": lambda d, *_: d.new_empty(d.shape),
    "sparse_attention": lambda q, kv, i, s, v, b: (
        q.new_empty(*q.shape[:3], v), q.new_empty(q.shape[:3]),
    ),
    "sparse_attention_backward": lambda d, dl, q, kv, *_: _like(q, kv),
    "sparse_attention_with_target": lambda q, kv, i, s, v, b: (
        q.new_empty(*q.shape[:3], v), q.new_empty(q.shape[:3]), q.new_empty(i.shape),
    ),
    "swiglu": lambda x, dim, b: x.new_empty(
        [n // 2 if d == dim % x.dim() else n for d, n in enumerate(x.shape)]
    ),
    "swiglu_backward": lambda d, x, *_: x.new_empty(x.shape),
}  # fmt: skip


# --- one of torch_npu's, with tensors by keyword -------------------------------------------------

_npu = torch.library.Library("npu", "DEF")
_npu.define(
    "npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *, "
    "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, "
    'Tensor? block_table=None, str layout_query="BSND", str layout_key="BSND", '
    "int sparse_count=2048, int sparse_mode=3, int pre_tokens=9223372036854775807, "
    "int next_tokens=9223372036854775807, bool return_value=False) -> (Tensor, Tensor)"
)


def npu_lightning_indexer(
    query, key, weights, *, actual_seq_lengths_key, sparse_count, sparse_mode, **others
):
    S, T = query.shape[1], key.shape[1]
    lengths = torch.full((query.shape[0],), T) if actual_seq_lengths_key is None else None
    lengths = actual_seq_lengths_key if lengths is None else lengths
    high = lengths[:, None].expand(-1, S)
    if sparse_mode == 3:  # the last query sees all keys
        high = high - torch.arange(S).flip(0)
    bounds = torch.stack([torch.zeros_like(high), high], -1)
    indices, _ = lightning_indexer(query, key.squeeze(2), weights, bounds, sparse_count, "")
    return indices.unsqueeze(2), query.new_empty(0)


_npu.impl("npu_lightning_indexer", npu_lightning_indexer, "CPU")
torch.library.register_fake(
    "npu::npu_lightning_indexer",
    lambda q, k, w, *, sparse_count, **_: (
        q.new_empty(*q.shape[:2], 1, sparse_count, dtype=torch.int32), q.new_empty(0),
    ),
    lib=_npu,
)  # fmt: skip


# --- matmul, as on an NPU ------------------------------------------------------------------------


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.aten.matmul.default(x, w)

    @staticmethod
    def backward(ctx, d_y: Tensor):
        x, w = ctx.saved_tensors
        return torch.ops.aten.matmul_backward.default(d_y, x, w, list(ctx.needs_input_grad))


def matmul_backward(grad, x, w, mask):
    """By the definition: a product of matrices and sums over what was repeated."""
    one = x.dim() == 1, w.dim() == 1
    X, W = (x[None] if one[0] else x), (w[:, None] if one[1] else w)
    G = grad.unsqueeze(-1) if one[1] else grad
    G = G.unsqueeze(-2) if one[0] else G
    return (
        (G @ W.mT).sum_to_size(X.shape).view(x.shape) if mask[0] else None,
        (X.mT @ G).sum_to_size(W.shape).view(w.shape) if mask[1] else None,
    )


def matmul_as_on_an_npu() -> None:
    """From here on in this process; there is no way back, so only ranks call it."""
    _aten.impl("matmul", _Matmul.apply, "AutogradCPU")
    for key in ("CPU", "Meta"):
        _aten.impl("matmul_backward", matmul_backward, key)


_register()

"""torch_npu's operators on CPU, written from their documentation, one query and one key at a time.

Where the documentation leaves something open, the emulation does what hurts: selected keys come in
no order, values of empty slots and gradients of empty groups are garbage, a query without keys is
an error. Each call is checked against the stated limits first.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch

import npu_operators
from npu_dsa_kernels.backends.npu import availability, limits
from npu_operators import SCHEMAS, bind, check

stated = SimpleNamespace(**vars(npu_operators.STATED))
"""The limits that the emulation checks; a test with small shapes changes them."""

SMALL = {
    "latent": 6,
    "rope": 4,
    "heads": range(1, 9),
    "loss_heads": range(1, 9),
    "dense_heads": range(1, 9),
    "dense_head_dim": 6,
    "index_heads": range(1, 9),
    "index_dim": 8,
    "slots": 64,
    "topk": range(1, 65),
}

calls: list[str] = []
"""Names of the operators, in the order they ran."""

_GARBAGE = 12345.0
_library: torch.library.Library | None = None


def install() -> None:
    """Define the operators in namespace "npu", once for the process."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("npu", "FRAGMENT")
    for name, schema in SCHEMAS.items():
        _library.define(f"{name}{schema}")
        _library.impl(name, _checked(name, globals()[f"_{name}"]), "CompositeExplicitAutograd")


@contextmanager
def emulated(*, batch: int = 3, **sizes: object) -> Iterator[list[str]]:
    """Backend "npu" on CPU tensors of any floating dtype, with limits as small as `SMALL`.

    Yields the names of the operators that are called.
    """
    install()
    sizes = SMALL | sizes
    before = dict(vars(stated))
    vars(stated).update(sizes, half=npu_operators.FLOATS, sequences=batch)
    calls.clear()
    found, availability._found = availability._found, availability.AVAILABLE
    try:
        with limits.override(device="cpu", dtypes=npu_operators.FLOATS, batch=batch, **sizes):
            yield calls
    finally:
        availability._found = found
        vars(stated).clear()
        vars(stated).update(before)


def _checked(name, fn):
    def run(*args, **kwargs):
        calls.append(name)
        check(name, args, kwargs, stated)
        return fn(bind(name, args, kwargs))

    return run


def _sequences(a, layout, query_ends, key_ends, query, key) -> Iterator[tuple]:
    """(index of a query, index prefix of its sequence's keys, number of keys, keys it sees)."""
    if layout == "BSND":
        (B, S), T = query.shape[:2], key.shape[1]
        for b in range(B):
            for s in range(S):
                yield (b, s), (b,), slice(0, T), T - S + s + 1
        return
    q_start = k_start = 0
    for q_end, k_end in zip(list(query_ends), list(key_ends), strict=True):
        q_end, k_end = int(q_end), int(k_end)
        for i in range(q_start, q_end):
            visible = (k_end - k_start) - (q_end - q_start) + (i - q_start) + 1
            yield (i,), (), slice(k_start, k_end), visible
        q_start, k_start = q_end, k_end


def _npu_lightning_indexer(a):
    K = a.sparse_count
    index = torch.full((*a.query.shape[:-2], 1, K), -1, dtype=torch.int32)
    value = torch.full(index.shape, _GARBAGE, dtype=a.query.dtype)
    g = torch.Generator().manual_seed(0)
    for row, prefix, keys, visible in _sequences(
        a, a.layout_query, a.actual_seq_lengths_query, a.actual_seq_lengths_key, a.query, a.key
    ):
        k = a.key[prefix][keys].squeeze(1).float()
        score = (a.weights[row].float()[:, None] * (a.query[row].float() @ k.T).relu()).sum(0)
        score = score[: visible if a.sparse_mode == 3 else None]
        best = score.topk(min(K, len(score))).indices
        best = best[torch.randperm(len(best), generator=g)]
        index[row][0, : len(best)] = best.int()
        value[row][0, : len(best)] = score[best].to(value.dtype)
    return index, value


def _npu_sparse_flash_attention(a):
    B, S, H, _ = a.query.shape
    out = torch.empty_like(a.query)
    peak, total = torch.empty(2, B, 1, S, H)
    for b in range(B):
        for s in range(S):
            x, _, v, _ = _logits(a, (b, s), a.key[b], a.key_rope[b], a.value[b])
            peak[b, 0, s] = x.amax(-1)
            e = (x - peak[b, 0, s, :, None]).exp()
            total[b, 0, s] = e.sum(-1)
            out[b, s] = (e / total[b, 0, s, :, None]) @ v
    return out, peak, total


def _logits(a, row, key, key_rope, value=None):
    """Logits [H, n] of a query's keys, the keys' rows, values and the query, in float32."""
    index = a.sparse_indices[row][0]
    index = index[index >= 0].long()
    if len(index) == 0:
        raise AssertionError("a query without keys: nothing is said about it")
    assert index.max() < len(key)
    q = torch.cat([a.query[row], a.query_rope[row]], -1).float()
    k = torch.cat([key, key_rope], -1).squeeze(1)[index].float()
    v = None if value is None else value.squeeze(1)[index].float()
    return a.scale_value * q @ k.T, index, v, (q, k)


def _npu_sparse_flash_attention_grad(a):
    B, S, _, L = a.query.shape
    dq = torch.zeros(B, S, a.query.shape[2], L + a.query_rope.shape[3])
    dk = torch.zeros(B, a.key.shape[1], 1, dq.shape[3])
    dv = torch.zeros(a.value.shape)
    for b in range(B):
        for s in range(S):
            x, index, v, (q, k) = _logits(a, (b, s), a.key[b], a.key_rope[b], a.value[b])
            peak, total = a.softmax_max[b, 0, s], a.softmax_sum[b, 0, s]
            p = (x - peak[:, None]).exp() / total[:, None]
            d_out, out = a.d_out[b, s].float(), a.out[b, s].float()
            ds = p * (d_out @ v.T - (d_out * out).sum(-1, keepdim=True))
            dq[b, s] = a.scale_value * ds @ k
            dk[b, :, 0].index_add_(0, index, a.scale_value * ds.T @ q)
            dv[b, :, 0].index_add_(0, index, p.T @ d_out)
    return tuple(
        x.to(a.query.dtype) for x in (dq[..., :L], dk[..., :L], dv, dq[..., L:], dk[..., L:])
    )


def _npu_sparse_lightning_indexer_grad_kl_loss(a):
    dq, dk, dw = (torch.zeros(x.shape) for x in (a.query_index, a.key_index, a.weights))
    loss = torch.zeros(1)
    for row, prefix, keys, visible in _sequences(
        a, a.layout, a.actual_seq_qlen, a.actual_seq_klen, a.query, a.key
    ):
        x, index, _, _ = _logits(a, row, a.key[prefix][keys], a.key_rope[prefix][keys])
        assert index.max() < visible
        statistic = (row[0], 0, row[1]) if len(row) == 2 else (0, row[0])
        p = (x - a.softmax_max[statistic][:, None]).exp() / a.softmax_sum[statistic][:, None]
        p = p.sum(0) / p.sum()
        k = a.key_index[prefix][keys].squeeze(1)[index].float()
        q, w = a.query_index[row].float(), a.weights[row].float()
        dots = q @ k.T
        score = (w[:, None] * dots.relu()).sum(0)
        log_y = score.log_softmax(0)
        loss += torch.where(p > 0, p * (p.log() - log_y), 0.0).sum()
        d_score = log_y.exp() - p
        dw[row] = dots.relu() @ d_score
        d_dots = d_score * w[:, None] * (dots > 0)
        dq[row] = d_dots @ k
        dk[prefix][keys].squeeze(1).index_add_(0, index, d_dots.T @ q)
    half = a.query.dtype
    return dq.to(half), dk.to(half), dw.to(a.weights.dtype), loss


def _npu_fusion_attention(a):
    H, V = a.query.shape[-2], a.value.shape[-1]
    out = torch.empty(*a.query.shape[:-1], V, dtype=a.query.dtype)
    statistics = (*a.query.shape[:-1], 8)
    if a.input_layout == "BSND":
        statistics = (statistics[0], H, statistics[1], 8)
    peak, total = torch.empty(2, *statistics)
    for row, prefix, keys, visible in _sequences(
        a, a.input_layout, a.actual_seq_qlen, a.actual_seq_kvlen, a.query, a.key
    ):
        k, v = a.key[prefix][keys][:visible].float(), a.value[prefix][keys][:visible].float()
        x = a.scale * torch.einsum("hd,chd->hc", a.query[row].float(), k)
        e = (x - x.amax(-1, keepdim=True)).exp()
        place = (row[0], slice(None), row[1]) if len(row) == 2 else row
        peak[place], total[place] = x.amax(-1, keepdim=True), e.sum(-1, keepdim=True)
        out[row] = torch.einsum("hc,chv->hv", e / e.sum(-1, keepdim=True), v).to(out.dtype)
    return out, peak, total, torch.empty(0, dtype=out.dtype), 0, 0, 0


def _npu_fusion_attention_grad(a):
    dq, dk, dv = (torch.zeros(x.shape) for x in (a.query, a.key, a.value))
    for row, prefix, keys, visible in _sequences(
        a, a.input_layout, a.actual_seq_qlen, a.actual_seq_kvlen, a.query, a.key
    ):
        k, v = a.key[prefix][keys][:visible].float(), a.value[prefix][keys][:visible].float()
        q, d_out, out = (x[row].float() for x in (a.query, a.dy, a.attention_in))
        place = (row[0], slice(None), row[1]) if len(row) == 2 else row
        peak, total = a.softmax_max[place][:, :1], a.softmax_sum[place][:, :1]
        p = (a.scale_value * torch.einsum("hd,chd->hc", q, k) - peak).exp() / total
        d_p = torch.einsum("hv,chv->hc", d_out, v) - (d_out * out).sum(-1, keepdim=True)
        d_x = a.scale_value * p * d_p
        dq[row] = torch.einsum("hc,chd->hd", d_x, k)
        dk[prefix][keys][:visible] += torch.einsum("hc,hd->chd", d_x, q)
        dv[prefix][keys][:visible] += torch.einsum("hc,hv->chv", p, d_out)
    dq, dk, dv = (x.to(a.query.dtype) for x in (dq, dk, dv))
    return dq, dk, dv, None, torch.empty(0)


def _index_scores(a, row, prefix, keys, visible):
    k = a.key_index[prefix][keys][:visible].squeeze(1).float()
    dots = a.query_index[row].float() @ k.T
    return (a.weights[row].float()[:, None] * dots.relu()).sum(0), dots, k


def _npu_dense_lightning_indexer_softmax_lse(a):
    rows = a.query_index.shape[:-2]
    peak, total = torch.empty(2, *rows[:-1], 1, rows[-1])
    for row, *keys in _sequences(
        a, a.layout, a.actual_seq_qlen, a.actual_seq_klen, a.query_index, a.key_index
    ):
        score, _, _ = _index_scores(a, row, *keys)
        place = (*row[:-1], 0, row[-1])
        peak[place], total[place] = score.max(), (score - score.max()).exp().sum()
    return peak, total


def _npu_dense_lightning_indexer_grad_kl_loss(a):
    dq, dk, dw = (torch.zeros(x.shape) for x in (a.query_index, a.key_index, a.weights))
    loss = torch.zeros(1)
    for row, prefix, keys, visible in _sequences(
        a, a.layout, a.actual_seq_qlen, a.actual_seq_klen, a.query, a.key
    ):
        q = torch.cat([a.query[row], a.query_rope[row]], -1).float()
        k = torch.cat([a.key[prefix][keys], a.key_rope[prefix][keys]], -1)[:visible].float()
        x = a.scale_value * torch.einsum("hd,chd->hc", q, k)
        place = (*row[:-1], slice(None), row[-1])
        p = (x - a.softmax_max[place]).exp() / a.softmax_sum[place]
        p = p.sum(0) / p.sum()
        score, dots, k_index = _index_scores(a, row, prefix, keys, visible)
        place = (*row[:-1], 0, row[-1])
        log_y = score - a.softmax_max_index[place] - a.softmax_sum_index[place].log()
        loss += torch.where(p > 0, p * (p.log() - log_y), 0.0).sum()
        d_score = log_y.exp() - p
        dw[row] = dots.relu() @ d_score
        d_dots = d_score * a.weights[row].float()[:, None] * (dots > 0)
        dq[row] = d_dots @ k_index
        dk[prefix][keys][:visible] += (d_dots.T @ a.query_index[row].float())[:, None]
    half = a.query.dtype
    return dq.to(half), dk.to(half), dw.to(a.weights.dtype), loss


def _npu_rms_norm(a):
    rstd = 1 / (a.input.float().square().mean(-1, keepdim=True) + a.epsilon).sqrt()
    return (a.input.float() * rstd * a.gamma.float()).to(a.input.dtype), rstd


def _npu_rms_norm_backward(a):
    hat = a.input.float() * a.rstd
    g = a.dy.float() * a.gamma.float()
    dx = a.rstd * (g - hat * (g * hat).mean(-1, keepdim=True))
    dgamma = (a.dy.float() * hat).flatten(0, -2).sum(0)
    return dx.to(a.input.dtype), dgamma


def _npu_rotary_mul(a):
    x, cos, sin = a.input.float(), a.r1.float(), a.r2.float()
    D = x.shape[-1]
    y = torch.empty_like(x)
    for i in range(D):
        if a.rotary_mode == "half":
            other, sign = ((i + D // 2), -1) if i < D // 2 else (i - D // 2, 1)
        else:
            other, sign = (i + 1, -1) if i % 2 == 0 else (i - 1, 1)
        y[..., i] = x[..., i] * cos[..., i] + sign * x[..., other] * sin[..., i]
    return y.to(a.input.dtype)


def _npu_swiglu(a):
    left, right = a.input.float().chunk(2, a.dim)
    return (left / (1 + (-left).exp()) * right).to(a.input.dtype)


def _npu_swiglu_backward(a):
    left, right = a.input.float().chunk(2, a.dim)
    gate, g = 1 / (1 + (-left).exp()), a.grad_output.float()
    d_left = g * right * gate * (1 + left * (1 - gate))
    return torch.cat([d_left, g * left * gate], a.dim).to(a.input.dtype)


def _npu_grouped_matmul(a):
    (x,), (weight,) = a.x, a.weight
    ends = a.group_list.tolist()
    if a.group_type == 0:
        y = torch.full((x.shape[0], weight.shape[2]), _GARBAGE)
        for g, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            y[start:end] = x[start:end].float() @ weight[g].float()
    else:
        y = torch.full((len(ends), x.shape[0], weight.shape[1]), _GARBAGE)
        for g, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if end > start:
                y[g] = x[:, start:end].float() @ weight[start:end].float()
    return [y.to(x.dtype)]


def _npu_moe_token_permute(a):
    k = a.indices.shape[1]
    order = sorted(range(a.indices.numel()), key=lambda i: (int(a.indices.flatten()[i]), i))
    place = torch.empty(len(order), dtype=torch.int32)
    for row, slot in enumerate(order):
        place[slot] = row
    permuted = torch.stack([a.tokens[slot // k] for slot in order])
    return permuted[: a.num_out_tokens or None].clone(), place


def _npu_moe_token_permute_grad_v2(a):
    rows = a.grad_permuted_tokens.float()[a.sorted_indices.long()]
    return rows.view(a.tokens_size_0, a.num_topK, -1).sum(1).to(a.tokens_dtype)


def _npu_moe_token_unpermute(a):
    N, k = a.probs.shape
    rows = a.permuted_tokens.float()[a.sorted_indices.long()].view(N, k, -1)
    return (rows * a.probs.float()[..., None]).sum(1).to(a.permuted_tokens.dtype)


def _npu_moe_token_unpermute_grad_v2(a):
    N, k = a.probs.shape
    d_y = a.grad_unpermuted_tokens.float()[:, None]
    d_x = torch.full((a.permuted_tokens_size_0, d_y.shape[-1]), math.nan)
    d_x[a.sorted_indices.long()] = (d_y * a.probs.float()[..., None]).view(N * k, -1)
    rows = a.permuted_tokens.float()[a.sorted_indices.long()].view(N, k, -1)
    d_probs = (d_y * rows).sum(-1)
    return d_x.to(a.permuted_tokens_dtype), d_probs.to(a.probs.dtype)

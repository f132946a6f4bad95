"""Backend "npu" against the reference, on an emulation of the operators it calls.

The emulation is written from their documentation; it shows that our side of every call is right,
not what a device computes.
"""

import gc
import math

import pytest
import torch
from hypothesis import assume, given, settings
from torch.utils.checkpoint import checkpoint

from dsa_definitions import PACKED, assert_close, cases, leaves
from npu_dsa_kernels import (
    attention_target,
    causal_bounds,
    dense_attention,
    dense_indexer_kl_loss,
    dsa_attention,
    indexer_kl_loss,
    lightning_indexer,
    sparse_attention,
)
from npu_dsa_kernels.backends.npu import limits, sequences
from npu_emulation import SMALL, emulated

B, S, H, L, R, HI, DI, K = 2, 32, 3, 6, 4, 4, 8, 8
SETTINGS = {"topk": K, "scale": 0.4, "v_dim": L, "kl_reduction": "sum"}
NAMES = ("q", "kv", "q_index", "k_index", "weights")
OPS = torch.ops.npu_dsa


@pytest.fixture
def calls():
    with emulated() as names:
        yield names


def inputs(dtype=torch.float32, b=B, s=S, t=None):
    g = torch.Generator().manual_seed(0)
    t = s if t is None else t
    shapes = [(b, s, H, L + R), (b, t, L + R), (b, s, HI, DI), (b, t, DI), (b, s, HI)]
    tensors = [torch.randn(*x, generator=g, dtype=torch.float64) for x in shapes]
    # One head sees every key: scores of exactly 0 would tie, and which of them an operator keeps
    # at the last place is its own affair.
    tensors[2][:, :, 0, 0], tensors[3][..., 0] = 9.0, tensors[3][..., 0].abs() + 2.0
    return [x.to(dtype) for x in tensors]


def documents(*lengths):
    return torch.cat([torch.arange(n) for n in lengths]).expand(B, -1)


def masks() -> dict[str, torch.Tensor | None]:
    """Bounds by name; the names with "of" have fewer queries than keys."""
    packed = documents(13, 1, 18)
    hidden = packed.clone()
    hidden[0, 13:17] = -1
    hidden[1, :3] = -1
    hidden[1, -1] = -1
    rows = torch.arange(S).view(4, 8)
    two = torch.stack([documents(13, 19)[0], documents(32)[0]])
    return {
        "none": None,
        "causal": causal_bounds(documents(S)),
        "packed": causal_bounds(packed),
        "hidden": causal_bounds(hidden),
        "all hidden": causal_bounds(torch.full((B, S), -1)),
        "contiguous shard of 2": causal_bounds(two[:, 16:], index=torch.arange(16, 32)),
        "head-tail shard of 2": causal_bounds(
            two[:, torch.cat([rows[0], rows[3]])], index=torch.cat([rows[0], rows[3]])
        ),
        "inner head-tail shard of 2": causal_bounds(
            packed[:, torch.cat([rows[1], rows[2]])], index=torch.cat([rows[1], rows[2]])
        ),
    }


def layer_and_gradients(tensors, **arguments):
    q, kv, q_index, k_index, weights = tensors = leaves(*tensors)
    layer = dsa_attention(q, kv, q_index, k_index, weights, **SETTINGS | arguments)
    g = torch.Generator().manual_seed(1)
    d_out = torch.randn(layer.out.shape, generator=g).to(layer.out.dtype)
    return layer, torch.autograd.grad((layer.out, layer.kl), tensors, (d_out, torch.tensor(0.7)))


@pytest.mark.parametrize("topk", [8, 10, 18, 40], ids=["S/4", "document-3", "document", "K>T"])
@pytest.mark.parametrize("mask", list(masks()))
def test_whole_layer_equals_the_reference(calls, mask, topk):
    bounds = masks()[mask]
    tensors = inputs(s=S if bounds is None else bounds.shape[1], t=S)
    arguments = {"topk": topk, "bounds": bounds}
    layer, grads = layer_and_gradients(tensors, **arguments, backend="npu")
    expected, expected_grads = layer_and_gradients(tensors, **arguments, backend="reference")
    assert torch.equal(layer.indices, expected.indices)
    assert_close(layer.out, expected.out, 1e-5, "out")
    assert_close(layer.lse, expected.lse, 1e-5, "lse")
    assert_close(layer.kl, expected.kl, 1e-5, "kl")
    for name, a, b in zip(NAMES, grads, expected_grads, strict=True):
        assert_close(a, b, 1e-5, name)
    if mask != "all hidden":
        assert set(calls) == {
            "npu_lightning_indexer",
            "npu_sparse_flash_attention",
            "npu_sparse_flash_attention_grad",
            "npu_sparse_lightning_indexer_grad_kl_loss",
        }


@settings(max_examples=50)
@given(case=cases())
def test_any_bounds_equal_the_reference(case):
    assume(case.D > 1)
    q, kv = case.attention(torch.float32)
    indexer = case.indexer(torch.float32)
    select = {"topk": case.topk, "bounds": case.bounds}
    arguments = select | {"scale": 0.4, "v_dim": 1, "kl_reduction": "sum"}
    with emulated(latent=1, rope=case.D - 1, index_dim=case.D):
        try:
            _, scores = lightning_indexer(*indexer, **select, backend="npu")
        except ValueError as error:
            if "no sequences" not in str(error):
                raise
            assume(False)
        layer = dsa_attention(*leaves(q, kv, *indexer), **arguments, backend="npu")
    _, expected_scores = lightning_indexer(*indexer, **select, backend="reference")
    assert_close(scores, expected_scores, 1e-5, "scores")
    # From the selection on: scores of 0 tie, and either key may have the last place.
    out, lse = sparse_attention(q, kv, layer.indices, scale=0.4, v_dim=1, backend="reference")
    target = attention_target(q, kv, layer.indices, lse, scale=0.4, backend="reference")
    kl = indexer_kl_loss(*indexer, layer.indices, target, backend="reference").sum()
    assert_close(layer.out, out, 1e-5, "out")
    assert_close(layer.lse, lse, 1e-5, "lse")
    assert_close(layer.kl, kl, 1e-5, "kl")


def test_bf16_is_within_its_rounding(calls):
    tensors = inputs(torch.bfloat16)
    bounds = masks()["hidden"]
    layer, grads = layer_and_gradients(tensors, bounds=bounds, backend="npu")
    assert layer.out.dtype == torch.bfloat16
    assert layer.lse.dtype == layer.kl.dtype == torch.float32
    # From the selection on: scores of the operator are rounded to bf16 before they are compared.
    wide = leaves(*(x.float() for x in tensors))
    q, kv, *indexer = wide
    out, lse = sparse_attention(q, kv, layer.indices, scale=0.4, v_dim=L, backend="reference")
    target = attention_target(q, kv, layer.indices, lse, scale=0.4, backend="reference")
    kl = indexer_kl_loss(*indexer, layer.indices, target, backend="reference").sum()
    g = torch.Generator().manual_seed(1)
    d_out = torch.randn(out.shape, generator=g).bfloat16().float()
    expected = torch.autograd.grad((out, kl), wide, (d_out, torch.tensor(0.7)))
    eps = torch.finfo(torch.bfloat16).eps
    assert_close(layer.out, out, eps, "out")
    assert_close(layer.lse, lse, 1e-5, "lse")
    assert_close(layer.kl, kl, 1e-5, "kl")
    for name, a, b in zip(NAMES, grads, expected, strict=True):
        assert a.dtype == torch.bfloat16
        assert_close(a, b, 2 * eps, name)


def test_selection_is_put_into_order(calls):
    q_index, k_index, weights = (x.round() for x in inputs()[2:])  # ties abound
    indices, scores = lightning_indexer(
        q_index, k_index, weights, topk=S, bounds=masks()["packed"], backend="npu"
    )
    expected = lightning_indexer(
        q_index, k_index, weights, topk=S, bounds=masks()["packed"], backend="reference"
    )
    assert torch.equal(indices, expected[0])
    assert torch.equal(scores, expected[1])


def test_sequences_beyond_one_call_go_into_several(calls):
    tensors = inputs()
    bounds = causal_bounds(documents(5, 6, 7, 8, 6))
    layer, grads = layer_and_gradients(tensors, bounds=bounds, backend="npu")
    assert calls.count("npu_lightning_indexer") == 4  # 10 sequences, 3 in a call
    assert calls.count("npu_sparse_lightning_indexer_grad_kl_loss") == 4
    expected, expected_grads = layer_and_gradients(tensors, bounds=bounds, backend="reference")
    assert_close(layer.kl, expected.kl, 1e-5)
    for name, a, b in zip(NAMES, grads, expected_grads, strict=True):
        assert_close(a, b, 1e-5, name)


def test_plan_of_head_tail_shards():
    rows = torch.cat([torch.arange(0, 4), torch.arange(12, 16)])
    bounds = causal_bounds(torch.cat([torch.arange(6), torch.arange(10)])[rows][None], index=rows)
    plan = sequences.plan(bounds, 16)
    (part,) = plan.parts
    # The document that starts at 0 shows its first 4 rows, the one that starts at 6 its last 4.
    assert part.query_ends == [4, 8]
    assert part.key_ends == [4, 4 + 10]
    assert plan.query_n is None
    assert plan.key_m.tolist() == [*range(4), *range(6, 16)]
    assert plan.first_key_n1.flatten().tolist() == [0] * 4 + [6] * 4
    assert plan.visible_n1.flatten().tolist() == [1, 2, 3, 4, 7, 8, 9, 10]


def test_sequences_end_with_the_batch_row_and_run_over_hidden_rows(calls):
    # Row 1 of the batch goes on where row 0 stops; in it, a hidden row lies between neighbours.
    bounds = torch.tensor(
        [[[0, 1], [0, 2], [0, 3], [0, 4]], [[0, 5], [0, 0], [0, 6], [0, 7]]], dtype=torch.int32
    )
    plan = sequences.plan(bounds, 8)
    assert plan.parts[0].query_ends == [4, 7]
    assert plan.parts[0].key_ends == [4, 4 + 7]
    tensors = inputs(s=4, t=8)
    layer, grads = layer_and_gradients(tensors, bounds=bounds, topk=3, backend="npu")
    expected, expected_grads = layer_and_gradients(
        tensors, bounds=bounds, topk=3, backend="reference"
    )
    assert torch.equal(layer.indices, expected.indices)
    for name, a, b in zip(NAMES, grads, expected_grads, strict=True):
        assert_close(a, b, 1e-5, name)


def test_bounds_are_read_once(calls, monkeypatch):
    reads = []
    read = sequences.read
    monkeypatch.setattr(sequences, "read", lambda x: reads.append(1) or read(x))
    q, kv, *indexer = inputs()
    bounds = causal_bounds(documents(13, 19))
    for _ in range(2):
        dsa_attention(q, kv, *indexer, **SETTINGS, bounds=bounds, backend="npu")
    assert len(reads) == 1
    bounds[:, 3] = 0  # another version of the tensor: row 3 is hidden now
    layer = dsa_attention(q, kv, *indexer, **SETTINGS, bounds=bounds, backend="npu")
    assert len(reads) == 2
    longer = inputs(t=S + 3)
    more, _ = lightning_indexer(*longer[2:], topk=K, bounds=bounds, backend="npu")  # and more keys
    assert len(reads) == 3
    expected, _ = lightning_indexer(*longer[2:], topk=K, bounds=bounds, backend="reference")
    assert torch.equal(more, expected)
    assert (layer.indices[:, 3] == -1).all()
    known = len(sequences._plans)
    del bounds
    gc.collect()
    assert len(sequences._plans) == known - 1


def test_bounds_that_are_no_sequences_are_refused(calls):
    bounds = torch.tensor([0, S], dtype=torch.int32).expand(B, S, 2)  # not causal
    with pytest.raises(
        ValueError, match=r"bounds: got rows that make 64 sequences over 2048 keys, of"
    ):
        lightning_indexer(*inputs()[2:], topk=K, bounds=bounds, backend="npu")
    assert not calls


def test_attention_takes_indices_in_any_order(calls):
    case = PACKED
    q, kv = inputs(b=case.B, s=case.S)[:2]
    indices = case.indices()
    assert (indices.diff(dim=-1)[indices[..., 1:] >= 0] != 1).any()
    indices[0, 5] = -1
    wild = indices.clone()
    wild[indices == -1] = 2**31 - 1
    wild[1, :, 0][indices[1, :, 0] == -1] = -7
    results = []
    for name, index in (("reference", indices), ("npu", wild)):
        a, b = leaves(q, kv)
        out, lse = sparse_attention(a, b, index, scale=0.4, v_dim=L, backend=name)
        d_out = torch.linspace(-1, 1, out.numel()).view(out.shape)
        results.append((out, lse, *torch.autograd.grad(out, (a, b), d_out)))
    for x, y in zip(*results, strict=True):
        assert_close(y, x, 1e-5)
    assert (results[1][0][0, 5] == 0).all()
    assert (results[1][1][0, 5] == -math.inf).all()


def test_rows_without_keys_survive_infinite_gradients(calls):
    q, kv = leaves(*inputs()[:2])
    indices = torch.full((B, S, K), -1, dtype=torch.int32)
    indices[:, 1:, 0] = 2
    out, _ = sparse_attention(q * 1e3, kv, indices, scale=1.0, v_dim=L, backend="npu")
    d_out = torch.ones_like(out)
    d_out[:, 0] = math.inf
    d_q, d_kv = torch.autograd.grad(out, (q, kv), d_out)
    assert (d_q[:, 0] == 0).all()
    assert d_kv.isfinite().all()


def test_lse_has_no_gradient_and_says_so(calls):
    q, kv = leaves(*inputs()[:2])
    indices = torch.arange(K).int().expand(B, S, K)
    out, lse = sparse_attention(q, kv, indices, scale=0.4, v_dim=L, backend="npu")
    torch.autograd.grad(out.sum() + lse.detach().sum(), (q, kv), retain_graph=True)
    with pytest.raises(RuntimeError, match=r"no gradient of lse; detach lse .*backend='torch'"):
        torch.autograd.grad(out.sum() + lse.sum(), (q, kv))


def test_gradients_reach_what_they_should(calls):
    tensors = leaves(*inputs())
    layer = dsa_attention(*tensors, **SETTINGS, backend="npu")

    def trained(x):
        grads = torch.autograd.grad(x.sum(), tensors, allow_unused=True, retain_graph=True)
        return [n for n, g in zip(NAMES, grads, strict=True) if g is not None and g.any()]

    assert trained(layer.out) == ["q", "kv"]
    assert trained(layer.kl) == ["q_index", "k_index", "weights"]
    (grad,) = torch.autograd.grad(layer.kl, tensors[2], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not implemented"):
        torch.autograd.grad(grad.sum(), tensors[2])


def test_loss_on_another_backend(calls):
    tensors = inputs()
    seen = []
    arguments = {"kl_backend": "torch", "kl_reduction": "none", "bounds": masks()["packed"]}
    layer = dsa_attention(
        *tensors,
        **SETTINGS | arguments,
        backend="npu",
        reduce_target=lambda x: seen.append(x) or x,
    )
    fused = dsa_attention(*tensors, **SETTINGS, bounds=masks()["packed"], backend="npu")
    assert layer.kl.shape == (B, S)
    assert len(seen) == 1
    assert_close(layer.kl.sum(), fused.kl, 1e-5)
    # And the other way about: what other backends select, the fused loss takes.
    mixed = dsa_attention(
        *tensors, **SETTINGS, bounds=masks()["packed"], backend="torch", kl_backend="npu"
    )
    assert_close(mixed.kl, fused.kl, 1e-5)


def test_recomputation_gives_the_same_bits(calls):
    bounds = masks()["packed"]

    def fn(*x):
        return tuple(dsa_attention(*x, **SETTINGS, bounds=bounds, backend="npu"))

    grads = []
    for run in (fn, lambda *x: checkpoint(fn, *x, use_reentrant=False)):
        tensors = leaves(*inputs())
        out, _, _, kl = run(*tensors)
        (out.square().sum() + kl).backward()
        grads.append([x.grad for x in tensors])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_compiles_whole(calls):
    torch.compiler.reset()
    bounds = masks()["packed"]

    def fn(*x):
        layer = dsa_attention(*x, **SETTINGS, bounds=bounds, backend="npu")
        return layer.out, layer.kl

    def run(f):
        tensors = leaves(*inputs())
        out, kl = f(*tensors)
        return [out, kl, *torch.autograd.grad(out.square().sum() + kl, tensors)]

    for a, b in zip(
        run(fn), run(torch.compile(fn, fullgraph=True, backend="aot_eager")), strict=True
    ):
        torch.testing.assert_close(a, b)


def dense_and_gradients(tensors, **arguments):
    q, k, *indexer = tensors
    indexer = leaves(*indexer)
    loss = dense_indexer_kl_loss(*indexer, q, k, scale=0.4, reduction="sum", **arguments)
    return loss, *torch.autograd.grad(loss, indexer, torch.tensor(0.7))


def dense_inputs(s=S):
    q, kv, *indexer = inputs(s=s, t=S)
    g = torch.Generator().manual_seed(3)
    return q, torch.randn(B, S, H, kv.shape[2], generator=g), *indexer


@pytest.mark.parametrize("mask", list(masks()))
def test_dense_loss_equals_the_reference(calls, mask):
    bounds = masks()[mask]
    tensors = dense_inputs(S if bounds is None else bounds.shape[1])
    actual = dense_and_gradients(tensors, bounds=bounds, backend="npu")
    expected = dense_and_gradients(tensors, bounds=bounds, backend="reference")
    for name, a, b in zip(("loss", *NAMES[2:]), actual, expected, strict=True):
        assert_close(a, b, 1e-5, name)
    operators = [
        "npu_dense_lightning_indexer_softmax_lse",
        "npu_fusion_attention",
        "npu_dense_lightning_indexer_grad_kl_loss",
    ]
    assert set(calls) == (set() if mask == "all hidden" else set(operators))


def test_dense_loss_takes_what_the_operator_takes(calls):
    q, k, *indexer = dense_inputs()
    arguments = {"scale": 0.4, "backend": "npu"}
    with pytest.raises(ValueError, match=r"reduction: got 'none'; expected 'sum' .*'torch'"):
        dense_indexer_kl_loss(*indexer, q, k, **arguments)
    arguments["reduction"] = "sum"
    with pytest.raises(ValueError, match=r"kv: got shape .*takes keys \[B, T, H, D\] .*absorption"):
        dense_indexer_kl_loss(*indexer, q, k[:, :, 0], **arguments)
    with limits.override(dense_heads=(32,)), pytest.raises(ValueError, match=r"q: got H=3; .* 32;"):
        dense_indexer_kl_loss(*indexer, q, k, **arguments)
    with limits.override(rope=64), pytest.raises(ValueError, match=r"q: got D=10; .*D in 70"):
        dense_indexer_kl_loss(*indexer, q, k, **arguments)
    with limits.override(index_dim=128), pytest.raises(ValueError, match=r"q_index: got D=8"):
        dense_indexer_kl_loss(*indexer, q, k, **arguments)
    assert not calls


def own_inputs(s=S, dtype=torch.float32):
    g = torch.Generator().manual_seed(4)
    shapes = (B, s, H, L + R), (B, S, H, L + R), (B, S, H, L)
    return [torch.randn(*x, generator=g).to(dtype) for x in shapes]


def attention_and_gradients(tensors, **arguments):
    tensors = leaves(*tensors)
    out, lse = dense_attention(*tensors, scale=0.4, **arguments)
    g = torch.Generator().manual_seed(1)
    d_out = torch.randn(out.shape, generator=g).to(out.dtype)
    d_out[lse.isinf()] = math.nan  # 0 / 0 of a mean over no token
    return out, lse, *torch.autograd.grad(out, tensors, d_out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", list(masks()))
def test_dense_attention_equals_the_reference(calls, mask, dtype):
    bounds = masks()[mask]
    tensors = own_inputs(S if bounds is None else bounds.shape[1], dtype)
    actual = attention_and_gradients(tensors, bounds=bounds, backend="npu")
    expected = attention_and_gradients(tensors, bounds=bounds, backend="reference")
    # The operator takes its own output, as it is rounded, for the sum of P dP.
    eps = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert_close(a, b, 1e-5 if name == "lse" else eps, name)
    operators = {"npu_fusion_attention", "npu_fusion_attention_grad"}
    assert set(calls) == (set() if mask == "all hidden" else operators)


def test_dense_attention_beyond_one_call_goes_into_several(calls):
    bounds = causal_bounds(documents(5, 6, 7, 8, 6))
    actual = attention_and_gradients(own_inputs(), bounds=bounds, backend="npu")
    assert calls.count("npu_fusion_attention_grad") == 4  # 10 sequences, 3 in a call
    expected = attention_and_gradients(own_inputs(), bounds=bounds, backend="reference")
    for a, b in zip(actual, expected, strict=True):
        assert_close(a, b, 1e-5)


def test_dense_attention_of_no_rows_or_keys(calls):
    for b, s, t in ((0, 4, 4), (2, 0, 4), (2, 4, 0)):
        tensors = torch.ones(b, s, H, 3), torch.ones(b, t, H, 3), torch.ones(b, t, H, 2)
        bounds = torch.zeros(b, s, 2, dtype=torch.int32)
        out, lse, *grads = attention_and_gradients(tensors, bounds=bounds, backend="npu")
        assert out.shape == (b, s, H, 2)
        assert (out == 0).all()
        assert (lse == -math.inf).all()
        assert all((x == 0).all() for x in grads)
    assert not calls


def test_dense_attention_takes_what_the_operator_takes(calls):
    q, k, v = own_inputs()
    arguments = {"scale": 0.4, "bounds": masks()["packed"], "backend": "npu"}
    with pytest.raises(ValueError, match=r"v: got V=10; .*no wider than the keys, D=6; .*'torch'"):
        dense_attention(q[..., :L], k[..., :L], q, **arguments)
    with pytest.raises(ValueError, match=r"q: got torch.float64; .*bfloat16 or float16 or float32"):
        dense_attention(*(x.double() for x in (q, k, v)), **arguments)
    for change, message in (
        ({"fusion_heads": 2}, r"q: got H=3; .*at most 2 heads"),
        ({"fusion_dim": 9}, r"q: got D=10; .*at most D=9"),
        ({"fusion_rows": 31}, r"q: got 32 tokens; .*at most 31 in a call"),
    ):
        with limits.override(**change), pytest.raises(ValueError, match=message):
            dense_attention(q, k, v, **arguments)
    rows = torch.arange(28, 32).repeat(2)  # four sequences over all keys, three in a call
    again = causal_bounds(rows.expand(B, -1), index=rows)
    with limits.override(fusion_rows=95), pytest.raises(ValueError, match="k: got 96 tokens"):
        dense_attention(q[:, rows], k, v, scale=0.4, bounds=again, backend="npu")
    assert not calls
    tensors = leaves(q, k, v)
    _, lse = dense_attention(*tensors, **arguments)
    with pytest.raises(RuntimeError, match=r"dense_attention: .* no gradient of lse; detach lse"):
        torch.autograd.grad(lse.sum(), tensors[:2])


@pytest.mark.parametrize("mask", ["none", "hidden", "contiguous shard of 2"])
def test_opcheck(calls, mask):
    bounds = masks()[mask]
    q, kv, *indexer = leaves(*inputs(s=S if bounds is None else bounds.shape[1], t=S))
    plain = [x.detach() for x in (q, kv, *indexer)]
    indices, _ = lightning_indexer(*indexer, topk=K, bounds=bounds, backend="npu")
    out, lse = sparse_attention(*plain[:2], indices, scale=0.4, v_dim=L, backend="npu")
    loss = (*plain[:2], *indexer, indices, lse, bounds, 0.4, "npu")
    _, *grads = (x.detach() for x in OPS.fused_kl_loss(*loss))
    k = dense_inputs()[1]
    own = own_inputs(plain[0].shape[1])
    out_own, lse_own = dense_attention(*own, scale=0.4, bounds=bounds, backend="npu")
    samples = {
        "dense_attention": (*own, bounds, 0.4, "npu"),
        "dense_attention_backward": (*(out_own, None, *own, bounds, out_own, lse_own, 0.4, "npu"),),
        "fused_dense_kl_loss": (*indexer, plain[0], k, bounds, 0.4, "npu"),
        "lightning_indexer": (*plain[2:], bounds, K, "npu"),
        "sparse_attention_backward": (out, None, *plain[:2], indices, out, lse, 0.4, "npu"),
        "fused_kl_loss": loss,
        "fused_kl_loss_backward": (torch.tensor(0.7), *grads),
    }
    for name, arguments in samples.items():
        torch.library.opcheck(getattr(OPS, name).default, arguments)


@pytest.mark.parametrize(("b", "s", "t"), [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_empty_sizes(calls, b, s, t):
    bounds = torch.zeros(b, s, 2, dtype=torch.int32)
    layer, grads = layer_and_gradients(inputs(b=b, s=s, t=t), bounds=bounds, backend="npu")
    assert not calls or t
    assert layer.out.shape == (b, s, H, L)
    assert (layer.out == 0).all()
    assert (layer.lse == -math.inf).all()
    assert (layer.indices == -1).all()
    assert layer.kl == 0
    assert all((x == 0).all() for x in grads)


REAL = {
    "q": (1, 4, 16, 576),
    "kv": (1, 4, 576),
    "q_index": (1, 4, 64, 128),
    "k_index": (1, 4, 128),
    "weights": (1, 4, 64),
}


INDEXER = "npu_lightning_indexer"
ATTENTION = "npu_sparse_flash_attention"
LOSS = "npu_sparse_lightning_indexer_grad_kl_loss"


@pytest.mark.parametrize(
    ("change", "operator", "message"),
    [
        (
            {"q": (1, 4, 12, 576)},
            ATTENTION,
            r"q: got H=12; torch_npu's operator takes H in 1, 2, 4",
        ),
        ({"q": (1, 4, 4, 576)}, LOSS, r"q: got H=4; .* takes H in 8, 16, 32, 64, 128;"),
        ({"q": (1, 4, 16, 512), "kv": (1, 4, 512)}, ATTENTION, r"q: got D=512; .* takes D in 576"),
        ({"v_dim": 511}, ATTENTION, r"v_dim: got v_dim=511; .*v_dim in 512"),
        ({"topk": 3072}, ATTENTION, r"indices: got K=3072; .* takes at most 2048 keys of a query"),
        ({"topk": 2049}, INDEXER, r"topk: got 2049; .* topk in 1..2048, 3072, 4096, 5120, 6144, 7"),
        (
            {"q_index": (1, 4, 4, 128), "weights": (1, 4, 4)},
            INDEXER,
            r"q_index: got H=4; .*8, 16, 32, 64;",
        ),
        (
            {"q_index": (1, 4, 64, 64), "k_index": (1, 4, 64)},
            INDEXER,
            r"q_index: got D=64; .*D in 128",
        ),
        (
            {"weights": torch.float32},
            INDEXER,
            r"weights: got torch.float32; .*bfloat16, the dtype of q_index \(weights.to\(",
        ),
        (
            {"dtype": torch.float32},
            INDEXER,
            r"q_index: got torch.float32; .*takes bfloat16 or float16; backend='torch' runs it",
        ),
        (
            {"kl_reduction": "none"},
            INDEXER,
            r"kl_reduction: got 'none'; expected 'sum' .*kl_backend='torch'",
        ),
        (
            {"reduce_target": lambda x: x},
            INDEXER,
            r"reduce_target: got a function; .*pass query_split",
        ),
    ],
)
def test_limits_are_checked_before_the_call(change, operator, message):
    tensors = {}
    for name, shape in REAL.items():
        dtype, wanted = change.get("dtype", torch.bfloat16), change.get(name, shape)
        if isinstance(wanted, torch.dtype):
            dtype, wanted = wanted, shape
        tensors[name] = torch.zeros(wanted, dtype=dtype)
    arguments = {"topk": 2, "scale": 1.0, "v_dim": 512, "kl_reduction": "sum"}
    arguments |= {k: v for k, v in change.items() if k not in REAL and k != "dtype"}
    real = limits.Limits()
    sizes = {name: getattr(real, name) for name in SMALL}
    with emulated(**sizes) as calls, limits.override(dtypes=real.dtypes):
        with pytest.raises(ValueError, match=message):
            dsa_attention(**tensors, **arguments, backend="npu")
        assert operator not in calls


def test_operators_without_a_fused_one_say_what_has(calls):
    q, kv, *indexer = inputs()
    indices = torch.arange(K).int().expand(B, S, K)
    lse, target = torch.zeros(B, S, H), torch.ones(B, S, K)
    message = r"dsa_attention\(kl_reduction='sum'\).*backend='torch'"
    with pytest.raises(ValueError, match=rf"attention_target: .*{message}"):
        attention_target(q, kv, indices, lse, scale=0.4, backend="npu")
    with pytest.raises(ValueError, match=rf"indexer_kl_loss: .*{message}"):
        indexer_kl_loss(*indexer, indices, target, backend="npu")
    assert not calls

"""What torch.library operators promise: schemas, fakes, tracing, compiling, checkpointing."""

import os
import shutil

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from dsa_definitions import PACKED, leaves
from npu_dsa_kernels import (
    DSAOutput,
    attention_target,
    causal_bounds,
    dsa_attention,
    hadamard,
    indexer_kl_loss,
    lightning_indexer,
    sparse_attention,
)
from npu_dsa_kernels.backends import blocked

OPS = torch.ops.npu_dsa
B, S, H, D, V, HI, DI, K = 1, 24, 2, 8, 6, 3, 4, 6
SETTINGS = {"topk": K, "scale": 0.4, "v_dim": V}


def inputs(s: int = S, dtype: torch.dtype = torch.float32, device: str = "cpu"):
    torch.manual_seed(0)
    shapes = [(B, s, H, D), (B, s, D), (B, s, HI, DI), (B, s, DI), (B, s, HI)]
    return [torch.randn(*x).to(device, dtype).requires_grad_() for x in shapes]


def samples() -> dict[str, tuple]:
    """Arguments of each operator, backwards included, differentiable where it counts."""
    (q, kv), (qi, ki, w) = leaves(*PACKED.attention()), leaves(*PACKED.indexer())
    indices, target = PACKED.indices(), torch.rand(2, 16, 4, dtype=torch.float64)
    out, lse = (x.detach() for x in sparse_attention(q, kv, indices, scale=0.4, v_dim=3))
    d_lse = torch.zeros_like(lse)
    plain = [x.detach() for x in (q, kv, qi, ki, w)]
    return {
        "lightning_indexer": (*plain[2:], PACKED.bounds, 4, "torch"),
        "sparse_attention": (q, kv, indices, 0.4, 3, "torch"),
        "sparse_attention_backward": (*(out, d_lse, *plain[:2], indices, out, lse, 0.4, "torch"),),
        "attention_target": (*plain[:2], indices, lse, 0.4, "torch"),
        "indexer_kl_loss": (qi, ki, w, indices, target, "torch"),
        "indexer_kl_loss_backward": (lse[..., 0].exp(), *plain[2:], indices, target, "torch"),
        "hadamard": (torch.randn(3, 8, requires_grad=True), 0.5, "torch"),
    }


@pytest.mark.parametrize("name", list(samples()))
def test_opcheck(name):
    torch.library.opcheck(getattr(OPS, name).default, samples()[name])


def test_opcheck_covers_every_operator():
    names = torch._C._dispatch_get_all_op_names()
    registered = {n.removeprefix("npu_dsa::") for n in names if n.startswith("npu_dsa::")}
    of_npu_only = {"fused_kl_loss", "fused_kl_loss_backward"}  # in test_npu_dsa.py
    assert registered == set(samples()) | of_npu_only


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_meta_shapes_and_dtypes_are_the_real_ones(backend, dtype):
    def everything(device):
        q, kv, qi, ki, w = inputs(dtype=dtype, device=device)
        bounds = causal_bounds(torch.arange(S, device=device).expand(B, S))
        indices, scores = lightning_indexer(qi, ki, w, topk=K, bounds=bounds, backend=backend)
        out, lse = sparse_attention(q, kv, indices, scale=0.4, v_dim=V, backend=backend)
        target = attention_target(q, kv, indices, lse, scale=0.4, backend=backend)
        loss = indexer_kl_loss(qi, ki, w, indices, target, backend=backend)
        grads = torch.autograd.grad(
            out.sum().float() + lse.exp().sum() + loss.sum(), (q, kv, qi, ki, w)
        )
        return [bounds, indices, scores, out, lse, target, loss, hadamard(q), *grads]

    for real, meta in zip(everything("cpu"), everything("meta"), strict=True):
        assert (real.shape, real.dtype, real.stride()) == (meta.shape, meta.dtype, meta.stride())


def layer_and_gradients(fn, tensors):
    layer = fn(*tensors)
    loss = layer.out.square().sum() + layer.lse.sum() + layer.kl.sum()
    return [*layer, *torch.autograd.grad(loss, tensors)]


def test_compile_full_graph(backend):
    torch.compiler.reset()

    def fn(*x):
        bounds = causal_bounds(torch.arange(S).expand(B, S))
        return dsa_attention(*x, **SETTINGS, bounds=bounds, backend=backend)

    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    for a, b in zip(
        layer_and_gradients(fn, inputs()), layer_and_gradients(compiled, inputs()), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler"
)
def test_inductor_calls_the_operators():
    # Operators alone: nothing for inductor to generate, so nothing to wait for.
    torch.compiler.reset()

    def fn(q, kv, qi, ki, w):
        indices, _ = lightning_indexer(qi, ki, w, topk=K)
        out, lse = sparse_attention(q, kv, indices, scale=0.4, v_dim=V)
        target = attention_target(q, kv, indices, lse, scale=0.4)
        return DSAOutput(out, lse, indices, indexer_kl_loss(qi, ki, w, indices, target))

    compiled = torch.compile(fn, fullgraph=True)
    for a, b in zip(
        layer_and_gradients(fn, inputs()), layer_and_gradients(compiled, inputs()), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_compile_dynamic_shapes_without_recompiling():
    torch.compiler.reset()
    graphs = []

    def spy(graph, example_inputs):
        graphs.append(graph)
        return graph

    def fn(*x):
        return dsa_attention(*x, **SETTINGS)

    compiled = torch.compile(fn, fullgraph=True, backend=spy, dynamic=True)
    for s in (24, 31, 40):
        for a, b in zip(
            layer_and_gradients(fn, inputs(s)),
            layer_and_gradients(compiled, inputs(s)),
            strict=True,
        ):
            torch.testing.assert_close(a, b)
    assert len(graphs) == 1


def test_compile_reads_the_environment(monkeypatch):
    torch.compiler.reset()
    monkeypatch.setenv("NPU_DSA_BACKEND", "reference")
    graphs = []

    def spy(graph, example_inputs):
        graphs.append(graph)
        return graph

    torch.compile(lambda x: hadamard(x) + 1, fullgraph=True, backend=spy)(torch.randn(2, 4))
    assert "npu_dsa" not in graphs[0].code


def test_validate_cannot_be_traced():
    torch.compiler.reset()
    q, kv, *_ = inputs()
    indices = torch.arange(K).int().expand(B, S, K)

    def fn(q, kv):
        return sparse_attention(q, kv, indices, scale=1.0, v_dim=V, validate=True)

    # fullgraph=True turns the ValueError into dynamo's own error, with ours in it.
    with pytest.raises(Exception, match="cannot be traced; validate eagerly"):
        torch.compile(fn, fullgraph=True, backend="eager")(q, kv)


def save_selection(ctx, op, *args, **kwargs):
    if op in (OPS.lightning_indexer.default, OPS.sparse_attention.default):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def selective():
    return create_selective_checkpoint_contexts(save_selection)


@pytest.mark.parametrize("mode", ["full", "selective", "reentrant"])
def test_checkpointing_gives_the_same_bits(mode, monkeypatch):
    calls = []
    indexer = blocked.lightning_indexer
    monkeypatch.setattr(blocked, "lightning_indexer", lambda *a: calls.append(1) or indexer(*a))

    def fn(*x):
        return tuple(dsa_attention(*x, **SETTINGS))

    def run(tensors):
        return checkpoint(
            fn,
            *tensors,
            use_reentrant=mode == "reentrant",
            **({"context_fn": selective} if mode == "selective" else {}),
        )

    def finish(layer, tensors):
        (layer[0].square().sum() + layer[3].sum()).backward()
        return [x.grad for x in tensors]

    first, second = inputs(), inputs(dtype=torch.float32)
    second = leaves(*(x.flip(1) for x in second))
    plain = [finish(fn(*t), t) for t in (leaves(*first), leaves(*second))]
    # Two forwards before the first backward, as pipeline stages have them outstanding.
    calls.clear()
    layers = [run(first), run(second)]
    kept = [finish(x, t) for x, t in zip(layers, (first, second), strict=True)]
    assert len(calls) == (2 if mode == "selective" else 4)
    for a, b in zip(plain, kept, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y)


def test_checkpointing_under_compile():
    torch.compiler.reset()

    def fn(*x):
        return checkpoint(
            lambda *y: tuple(dsa_attention(*y, **SETTINGS)),
            *x,
            use_reentrant=False,
            context_fn=selective,
        )

    def run(f):
        tensors = inputs()
        layer = f(*tensors)
        return torch.autograd.grad(layer[0].square().sum() + layer[3].sum(), tensors)

    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    for a, b in zip(run(fn), run(compiled), strict=True):
        torch.testing.assert_close(a, b)

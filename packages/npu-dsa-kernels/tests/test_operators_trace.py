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
    dense_attention,
    dense_indexer_kl_loss,
    dsa_attention,
    grouped_matmul,
    hadamard,
    indexer_kl_loss,
    lightning_indexer,
    moe_permute,
    moe_unpermute,
    rms_norm,
    rotary_mul,
    sparse_attention,
    swiglu,
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
    own = leaves(*(PACKED.normal(2, 16, 3, d) for d in (5, 5, 4)))
    q_own, k_own, v_own = (x.detach() for x in own)
    out_own, lse_own = dense_attention(q_own, k_own, v_own, scale=0.4, bounds=PACKED.bounds)
    return {
        "lightning_indexer": (*plain[2:], PACKED.bounds, 4, "torch"),
        "sparse_attention": (q, kv, indices, 0.4, 3, "torch"),
        "sparse_attention_backward": (*(out, d_lse, *plain[:2], indices, out, lse, 0.4, "torch"),),
        "attention_target": (*plain[:2], indices, lse, 0.4, "torch"),
        "sparse_attention_with_target": (q, kv, indices, 0.4, 3, "torch"),
        "indexer_kl_loss": (qi, ki, w, indices, target, None, "torch"),
        "indexer_kl_loss_backward": (lse[..., 0].exp(), *plain[2:], indices, target, "torch"),
        "dense_indexer_kl_loss": (qi, ki, w, *plain[:2], PACKED.bounds, 0.4, "torch"),
        "dense_indexer_kl_loss_backward": (
            *(lse[..., 0].exp(), *plain[2:], *plain[:2], None, 0.4, "torch"),
        ),
        "dense_attention": (*own, PACKED.bounds, 0.4, "torch"),
        "dense_attention_backward": (
            *(out_own, None, q_own, k_own, v_own, PACKED.bounds, out_own, lse_own, 0.4, "torch"),
        ),
        "hadamard": (torch.randn(3, 8, requires_grad=True), 0.5, "torch"),
    } | base_samples()


def base_samples() -> dict[str, tuple]:
    g = torch.Generator().manual_seed(0)

    def normal(*shape, grad=True):
        return torch.randn(*shape, generator=g).requires_grad_(grad)

    x, table = normal(2, 3, 2, 4, grad=False), normal(3, 4, grad=False)
    rows = torch.tensor([[0, 3], [2, -1], [1, 4]], dtype=torch.int32)
    experts, ends = torch.tensor([[0, 1], [-1, 1], [1, 0]]), torch.tensor([2, 2, 5])
    weight, rstd = normal(4, grad=False), torch.rand(2, 3, 2, 1)
    rows_x, rows_d, probs = normal(7, 4, grad=False), normal(3, 4, grad=False), torch.rand(3, 2)
    return {
        "rms_norm": (normal(2, 3, 4), normal(4), 1e-6, "torch"),
        "rms_norm_backward": (x, x, weight, rstd, "torch"),
        "rotary_mul": (normal(2, 3, 2, 4), table, table, True, "torch"),
        "rotary_mul_backward": (normal(2, 3, 2, 4), table, table, False, "torch"),
        "swiglu": (normal(2, 6, 3), 1, "torch"),
        "swiglu_backward": (normal(2, 3, 3, grad=False), normal(2, 6, 3, grad=False), 1, "torch"),
        "grouped_matmul": (normal(7, 4), normal(3, 4, 5), ends, "torch"),
        "grouped_matmul_backward": (
            *(normal(7, 5, grad=False), rows_x, normal(3, 4, 5, grad=False), ends, "torch"),
        ),
        "moe_permute": (normal(3, 4), experts, torch.rand(3, 2).requires_grad_(), 2, 7, "torch"),
        "moe_permute_backward": (rows_x, torch.rand(7), rows, "torch"),
        "moe_unpermute": (normal(7, 4), rows, torch.rand(3, 2).requires_grad_(), "torch"),
        "moe_unpermute_backward": (rows_d, rows_x, rows, probs, 7, "torch"),
    }


def without_optionals() -> dict[str, tuple]:
    """Of operators with optional tensors, the other half of their cases."""
    x, rstd = torch.randn(3, 4, requires_grad=True), torch.rand(3, 1)
    rows = torch.tensor([[0, 3], [2, -1], [1, 4]], dtype=torch.int32)
    plain = torch.randn(7, 4)
    qi, ki, w = leaves(*PACKED.indexer())
    target = torch.rand(2, 16, 4, dtype=torch.float64)
    return {
        "indexer_kl_loss": (qi, ki, w, PACKED.indices(), target, target.log(), "torch"),
        "lightning_indexer": (*(t.detach() for t in inputs()[2:]), None, 4, "torch"),
        "rms_norm": (x, None, 1e-6, "torch"),
        "rms_norm_backward": (x.detach(), x.detach(), None, rstd, "torch"),
        "moe_permute": (x, rows, None, 4, 6, "torch"),
        "moe_permute_backward": (plain, None, rows, "torch"),
        "moe_unpermute": (plain.clone().requires_grad_(), rows, None, "torch"),
        "moe_unpermute_backward": (x.detach(), None, rows, None, 7, "torch"),
    }


@pytest.mark.parametrize("name", list(samples()))
def test_opcheck(name):
    torch.library.opcheck(getattr(OPS, name).default, samples()[name])


def test_opcheck_covers_every_operator():
    names = torch._C._dispatch_get_all_op_names()
    registered = {n.removeprefix("npu_dsa::") for n in names if n.startswith("npu_dsa::")}
    of_npu_only = {"fused_dense_kl_loss", "fused_kl_loss", "fused_kl_loss_backward"}
    assert registered == set(samples()) | of_npu_only


def layout(x):
    """Shape, dtype and strides; the stride of a dimension of size 1 says nothing."""
    steps = [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    return x.shape, x.dtype, steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_meta_shapes_and_dtypes_are_the_real_ones(backend, dtype):
    def everything(device):
        q, kv, qi, ki, w = inputs(dtype=dtype, device=device)
        bounds = causal_bounds(torch.arange(S, device=device).expand(B, S))
        indices, scores = lightning_indexer(qi, ki, w, topk=K, bounds=bounds, backend=backend)
        out, lse = sparse_attention(q, kv, indices, scale=0.4, v_dim=V, backend=backend)
        target = attention_target(q, kv, indices, lse, scale=0.4, backend=backend)
        loss = indexer_kl_loss(qi, ki, w, indices, target, backend=backend)
        dense = dense_indexer_kl_loss(qi, ki, w, q, kv, scale=0.4, bounds=bounds, backend=backend)
        k = kv.unsqueeze(2).expand_as(q)
        own, lse_own = dense_attention(q, k, k[..., :V], scale=0.4, bounds=bounds, backend=backend)
        grads = torch.autograd.grad(
            (out.sum() + own.sum()).float() + (lse + lse_own).exp().sum() + (loss + dense).sum(),
            (q, kv, qi, ki, w),
        )
        transformed = hadamard(q, backend=backend)
        losses = [loss, dense]
        attended = [out, lse, target, own, lse_own]
        return [bounds, indices, scores, *attended, *losses, transformed, *grads]

    for real, meta in zip(everything("cpu"), everything("meta"), strict=True):
        assert layout(real) == layout(meta)


def experts_inputs(n: int = 12, dtype: torch.dtype = torch.float32, device: str = "cpu"):
    torch.manual_seed(0)
    shapes = [(n, 16), (16,), (3, 16, 32), (3, 16, 16), (n, 2)]
    tensors = [torch.randn(*x).to(device, dtype).requires_grad_() for x in shapes]
    cos, sin = torch.randn(n, 8).cos().to(device), torch.randn(n, 8).sin().to(device)
    return tensors, (torch.randint(-1, 3, (n, 2)).to(device), cos, sin)


def experts_layer(x, gain, w1, w2, probs, experts, cos, sin, backend=None):
    """Every base operator in one go."""
    h = rms_norm(x, gain, backend=backend).view(1, -1, 2, 8)
    h = rotary_mul(h, cos, sin, interleaved=True, backend=backend).flatten(2)[0]
    p = moe_permute(h, experts, num_experts=3, probs=probs, backend=backend)
    h = swiglu(grouped_matmul(p.tokens, w1, counts=p.counts, backend=backend), backend=backend)
    h = grouped_matmul(h, w2, offsets=p.counts.cumsum(0), backend=backend)
    return moe_unpermute(h, p.rows, probs=probs, backend=backend), *p


def experts_and_gradients(fn, tensors, others, **kwargs):
    out = fn(*tensors, *others, **kwargs)
    loss = out[0].square().sum() + (out[2] * torch.arange(len(out[2]), device=out[2].device)).sum()
    return [*out, *torch.autograd.grad(loss, tensors)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_meta_shapes_of_the_base_operators(backend, dtype):
    real, meta = (
        experts_and_gradients(
            experts_layer, *experts_inputs(dtype=dtype, device=d), backend=backend
        )
        for d in ("cpu", "meta")
    )
    for a, b in zip(real, meta, strict=True):
        assert layout(a) == layout(b)


@pytest.mark.parametrize(
    ("backend", "dynamic"), [("reference", False), ("torch", False), ("torch", True)]
)
def test_compile_base_operators(backend, dynamic):
    torch.compiler.reset()
    graphs = []

    def spy(graph, example_inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(experts_layer, fullgraph=True, backend=spy, dynamic=dynamic)
    sizes = (12, 20, 9) if dynamic else (12,)
    for n in sizes:
        plain = experts_and_gradients(experts_layer, *experts_inputs(n), backend=backend)
        traced = experts_and_gradients(compiled, *experts_inputs(n), backend=backend)
        for a, b in zip(plain, traced, strict=True):
            torch.testing.assert_close(a, b)
    assert len(graphs) == 1


def test_compile_base_operators_with_their_backwards():
    torch.compiler.reset()
    compiled = torch.compile(experts_layer, fullgraph=True, backend="aot_eager")
    plain = experts_and_gradients(experts_layer, *experts_inputs())
    for a, b in zip(plain, experts_and_gradients(compiled, *experts_inputs()), strict=True):
        torch.testing.assert_close(a, b)


def test_compile_dense_loss(backend):
    torch.compiler.reset()

    def fn(q, kv, qi, ki, w):
        return dense_indexer_kl_loss(qi, ki, w, q, kv, scale=0.4, reduction="sum", backend=backend)

    def run(f):
        tensors = inputs()
        loss = f(*tensors)
        return [loss, *torch.autograd.grad(loss, tensors[2:])]

    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    for a, b in zip(run(fn), run(compiled), strict=True):
        torch.testing.assert_close(a, b)


def test_compile_dense_attention():
    torch.compiler.reset()

    def fn(q, k, v):
        return dense_attention(q, k, v, scale=0.4)

    def run(f):
        tensors = leaves(*(PACKED.normal(2, 16, 3, d) for d in (5, 5, 4)))
        out, lse = f(*tensors)
        return [out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), tensors)]

    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager", dynamic=True)
    for a, b in zip(run(fn), run(compiled), strict=True):
        torch.testing.assert_close(a, b)


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


def test_no_operator_reaches_beyond_int64():
    # B * S * K > 2^31: shapes alone, on meta tensors, through forward and backward.
    q = torch.empty(1, 2**20, 2, 4, device="meta", requires_grad=True)
    kv = torch.empty(1, 2**20, 4, device="meta", requires_grad=True)
    w = torch.empty(1, 2**20, 2, device="meta", requires_grad=True)
    indices, scores = lightning_indexer(q, kv, w, topk=4096)
    assert indices.numel() == scores.numel() == 2**32
    out, lse = sparse_attention(q, kv, indices, scale=1.0, v_dim=4)
    target = attention_target(q, kv, indices, lse, scale=1.0)
    loss = indexer_kl_loss(q, kv, w, indices, target).sum() + out.sum()
    assert [x.shape for x in torch.autograd.grad(loss, (q, kv, w))] == [q.shape, kv.shape, w.shape]


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


FORWARD_MODE = {
    "sparse_attention": lambda x: sparse_attention(
        x, x[:, :, 0], torch.zeros(1, 4, 2).int(), scale=1.0, v_dim=4, backend="torch"
    )[0],
    "dsa_attention": lambda x: dsa_attention(
        x, x[:, :, 0], *(torch.randn(*s) for s in ((1, 4, 2, 4), (1, 4, 4), (1, 4, 2))),
        topk=2, scale=1.0, v_dim=4, backend="torch",
    ).out,
    "indexer_kl_loss": lambda x: indexer_kl_loss(
        x, x[:, :, 0], x[..., 0], torch.zeros(1, 4, 2).int(), torch.ones(1, 4, 2), backend="torch"
    ),
    "dense_indexer_kl_loss": lambda x: dense_indexer_kl_loss(
        x, x[:, :, 0], x[..., 0], x, x[:, :, 0], scale=1.0, backend="torch"
    ),
    "dense_attention": lambda x: dense_attention(x, x, x, scale=1.0, backend="torch")[0],
    "hadamard": lambda x: hadamard(x, backend="torch"),
    "rms_norm": lambda x: rms_norm(x, None, backend="torch"),
    "rotary_mul": lambda x: rotary_mul(x, torch.ones(4, 4), torch.ones(4, 4), backend="torch"),
    "swiglu": lambda x: swiglu(x, backend="torch"),
    "grouped_matmul": lambda x: grouped_matmul(
        x[0, :, 0], torch.ones(1, 4, 3), counts=torch.tensor([4]), backend="torch"
    ),
    "moe_permute": lambda x: moe_permute(
        x[0, :, 0], torch.zeros(4, 1).int(), num_experts=1, backend="torch"
    ).tokens,
    "moe_unpermute": lambda x: moe_unpermute(
        x[0, :, 0], torch.arange(4).int()[:, None], backend="torch"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORWARD_MODE)
def test_forward_mode_is_refused_and_not_dropped(name):
    x, call = torch.randn(1, 4, 2, 4), FORWARD_MODE[name]
    with pytest.raises(RuntimeError, match=rf"{name}: forward-mode .* backend='reference'"):
        torch.func.jvp(call, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(RuntimeError, match=rf"{name}: forward-mode"):
            call(dual)
        call(x)  # without a tangent nothing is in the way

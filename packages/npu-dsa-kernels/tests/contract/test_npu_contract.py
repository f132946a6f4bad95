"""Backend "npu" and the real torch_npu: schemas, shapes, gradients and limits, without a device."""

import inspect
from types import SimpleNamespace

import pytest
import torch

import npu_emulation
import npu_operators
from harness import DEVICE, Mismatch, contract, fake_bounds, tensor
from npu_dsa_kernels import (
    attention_target,
    backends,
    causal_bounds,
    dense_attention,
    dense_indexer_kl_loss,
    dsa_attention,
    grouped_matmul,
    hadamard,
    lightning_indexer,
    moe_permute,
    moe_unpermute,
    rms_norm,
    rotary_mul,
    sparse_attention,
    swiglu,
)
from npu_dsa_kernels.backends import resolve
from npu_operators import NotStated

L, R, DI = 512, 64, 128
NAMES = ("q", "kv", "q_index", "k_index", "weights")
FORWARD = [
    "npu_lightning_indexer",
    "npu_sparse_flash_attention",
    "npu_sparse_lightning_indexer_grad_kl_loss",
]
BACKWARD = "npu_sparse_flash_attention_grad"


@pytest.fixture
def mode(monkeypatch):
    with contract(monkeypatch) as mode:
        yield mode


def positions(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths])


def shard(lengths: tuple[int, ...], rows: torch.Tensor, B: int) -> torch.Tensor:
    of_document = positions(*lengths)[rows]
    return causal_bounds(of_document.expand(B, -1), index=rows)


def masks(B: int, S: int, T: int) -> dict[str, torch.Tensor]:
    chunks = torch.arange(T).view(4, -1)
    head_tail = torch.cat([chunks[0], chunks[3]])[:S]
    lengths = (T // 4 - 1, 1, T - T // 4)
    hidden = shard(lengths, torch.arange(T - S, T), B)
    hidden[:, 1::3] = 0
    return {
        "packed": shard(lengths, torch.arange(T - S, T), B),
        "head-tail": shard((T,), head_tail, B),
        "hidden": hidden,
        "all hidden": torch.zeros(B, S, 2, dtype=torch.int32),
        "many": shard((1,) * T, torch.arange(T - S, T), B),
    }


def layer_inputs(B, S, T, H, HI, dtype=torch.bfloat16):
    return (
        tensor(B, S, H, L + R, dtype=dtype),
        tensor(B, T, L + R, dtype=dtype),
        tensor(B, S, HI, DI, dtype=dtype),
        tensor(B, T, DI, dtype=dtype),
        tensor(B, S, HI, dtype=dtype),
    )


def test_available_and_the_default():
    assert backends()["npu"] == "available"
    assert resolve(None, DEVICE) == "npu"
    with pytest.raises(ValueError, match="expected tensors on an NPU, these are on cpu"):
        resolve("npu", torch.device("cpu"))


@pytest.mark.parametrize("name", list(npu_operators.SCHEMAS))
def test_schema_is_the_one_we_write_against(name):
    ours = torch._C.parse_schema(f"npu::{name}{npu_operators.SCHEMAS[name]}")
    assert str(ours) == str(getattr(torch.ops.npu, name).default._schema)


TABLE = [
    # B, S, T, H, HI, topk, mask, dtype
    (1, 4096, 4096, 128, 64, 2048, None, torch.bfloat16),
    (2, 64, 64, 8, 8, 16, None, torch.float16),
    (2, 64, 64, 16, 16, 16, "packed", torch.bfloat16),
    (1, 64, 64, 32, 32, 2048, "packed", torch.bfloat16),
    (2, 64, 128, 64, 64, 32, "packed", torch.bfloat16),
    (1, 64, 128, 16, 64, 32, "head-tail", torch.bfloat16),
    (2, 64, 64, 16, 64, 16, "hidden", torch.bfloat16),
    (2, 64, 64, 16, 64, 16, "all hidden", torch.bfloat16),
    (2, 512, 512, 16, 64, 16, "many", torch.bfloat16),
]


@pytest.mark.parametrize(("B", "S", "T", "H", "HI", "topk", "mask", "dtype"), TABLE)
def test_layer(mode, B, S, T, H, HI, topk, mask, dtype):
    bounds = fake_bounds(lambda: masks(B, S, T)[mask]) if mask else None
    tensors = layer_inputs(B, S, T, H, HI, dtype)
    arguments = {"topk": topk, "scale": 0.1, "v_dim": L, "bounds": bounds}
    layer = dsa_attention(*tensors, **arguments, kl_reduction="sum")
    parts = {"all hidden": 0, "many": 4}.get(mask, 1)  # 2 * 512 sequences, 256 in a call
    expected = [name for name in FORWARD for _ in range(1 if "flash" in name else parts)]
    assert mode.calls == expected
    assert (layer.out.shape, layer.out.dtype) == ((B, S, H, L), dtype)
    assert (layer.lse.shape, layer.lse.dtype) == ((B, S, H), torch.float32)
    assert (layer.indices.shape, layer.indices.dtype) == ((B, S, topk), torch.int32)
    assert (layer.kl.shape, layer.kl.dtype) == ((), torch.float32)

    mode.calls.clear()
    grads = torch.autograd.grad((layer.out.sum(), layer.kl), tensors)
    assert mode.calls == [BACKWARD]
    for x, grad in zip(tensors, grads, strict=True):
        assert (grad.shape, grad.dtype, grad.device) == (x.shape, x.dtype, DEVICE)


def test_gradients_reach_exactly_what_they_should(mode):
    tensors = layer_inputs(1, 64, 64, 16, 64)
    layer = dsa_attention(*tensors, topk=16, scale=0.1, v_dim=L, kl_reduction="sum")

    def reached(x):
        grads = torch.autograd.grad(x, tensors, allow_unused=True, retain_graph=True)
        return [n for n, g in zip(NAMES, grads, strict=True) if g is not None]

    assert reached(layer.out.sum()) == ["q", "kv"]
    assert reached(layer.kl) == ["q_index", "k_index", "weights"]
    assert not layer.indices.requires_grad
    indices, scores = lightning_indexer(*tensors[2:], topk=16)
    assert not scores.requires_grad
    with pytest.raises(RuntimeError, match="no gradient of lse"):
        torch.autograd.grad(layer.lse.sum(), tensors[:2])
    with pytest.raises(ValueError, match="attention_target: torch_npu has no operator"):
        attention_target(*tensors[:2], indices, layer.lse, scale=0.1)


DENSE = [
    "npu_dense_lightning_indexer_softmax_lse",
    "npu_fusion_attention",
    "npu_dense_lightning_indexer_grad_kl_loss",
]


def dense_inputs(B, S, T, H, HI, dtype=torch.bfloat16):
    indexer = layer_inputs(B, S, T, H, HI, dtype)[2:]
    q, k = (tensor(B, n, H, 192, dtype=dtype, grad=False) for n in (S, T))
    return *indexer, q, k


@pytest.mark.parametrize(
    ("B", "S", "T", "H", "HI", "mask", "dtype"),
    [
        (1, 4096, 4096, 128, 64, None, torch.bfloat16),
        (2, 64, 64, 32, 8, None, torch.float16),
        (2, 64, 128, 64, 16, "packed", torch.bfloat16),
        (1, 64, 128, 128, 32, "head-tail", torch.bfloat16),
        (2, 64, 64, 64, 64, "hidden", torch.bfloat16),
        (2, 64, 64, 64, 64, "all hidden", torch.bfloat16),
    ],
)
def test_dense_loss(mode, B, S, T, H, HI, mask, dtype):
    bounds = fake_bounds(lambda: masks(B, S, T)[mask]) if mask else None
    tensors = dense_inputs(B, S, T, H, HI, dtype)
    loss = dense_indexer_kl_loss(*tensors, scale=0.1, bounds=bounds, reduction="sum")
    assert mode.calls == ([] if mask == "all hidden" else DENSE)
    grads = torch.autograd.grad(loss, tensors[:3])
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    for x, grad in zip(tensors, grads, strict=False):
        assert (grad.shape, grad.dtype, grad.device) == (x.shape, x.dtype, DEVICE)


def own_inputs(B, S, T, H, D=192, V=128, dtype=torch.bfloat16):
    shapes = (B, S, H, D), (B, T, H, D), (B, T, H, V)
    return tuple(tensor(*shape, dtype=dtype) for shape in shapes)


FUSION = ["npu_fusion_attention", "npu_fusion_attention_grad"]


@pytest.mark.parametrize(
    ("B", "S", "T", "H", "D", "V", "mask", "dtype"),
    [
        (1, 4096, 4096, 128, 192, 128, None, torch.bfloat16),
        (2, 64, 64, 1, 128, 128, None, torch.float16),
        (2, 64, 128, 6, 768, 64, "packed", torch.float32),
        (1, 64, 128, 256, 192, 128, "head-tail", torch.bfloat16),
        (2, 64, 64, 16, 192, 128, "hidden", torch.bfloat16),
        (2, 64, 64, 16, 192, 128, "all hidden", torch.bfloat16),
        (2, 512, 512, 16, 192, 128, "many", torch.bfloat16),
    ],
)
def test_dense_attention(mode, B, S, T, H, D, V, mask, dtype):
    bounds = fake_bounds(lambda: masks(B, S, T)[mask]) if mask else None
    tensors = own_inputs(B, S, T, H, D, V, dtype)
    out, lse = dense_attention(*tensors, scale=0.1, bounds=bounds)
    parts = {"all hidden": 0, "many": 4}.get(mask, 1)  # 2 * 512 sequences, 256 in a call
    assert mode.calls == FUSION[:1] * parts
    assert (out.shape, out.dtype) == ((B, S, H, V), dtype)
    assert (lse.shape, lse.dtype) == ((B, S, H), torch.float32)
    d_out = torch.ones((), dtype=dtype, device=DEVICE).expand(out.shape)
    grads = torch.autograd.grad(out, tensors, d_out, retain_graph=True)
    assert mode.calls == FUSION[:1] * parts + FUSION[1:] * parts
    for x, grad in zip(tensors, grads, strict=True):
        assert (grad.shape, grad.dtype, grad.device) == (x.shape, x.dtype, DEVICE)
    with pytest.raises(RuntimeError, match="no gradient of lse"):
        torch.autograd.grad(lse.sum(), tensors)


@pytest.mark.parametrize("topk", [1, 2047, 3072, 8192])
@pytest.mark.parametrize("H", [8, 16, 32, 64])
def test_lightning_indexer(mode, topk, H):
    indexer = layer_inputs(2, 64, 64, 16, H)[2:]
    indices, scores = lightning_indexer(*indexer, topk=topk)
    assert (indices.shape, scores.dtype) == ((2, 64, topk), torch.float32)
    assert mode.calls == ["npu_lightning_indexer"]


@pytest.mark.parametrize("H", [1, 2, 4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("strided", [False, True])
def test_sparse_attention(mode, H, strided):
    q, kv = layer_inputs(2, 64, 96, H, 8)[:2]
    indices = torch.zeros(2, 64, 100, dtype=torch.int32, device=DEVICE)
    if strided:  # what comes is made contiguous before the call
        q_s, kv_s = q.transpose(0, 1).contiguous().transpose(0, 1), kv.flip(1)
        indices = indices[..., ::2]
    else:
        q_s, kv_s = q, kv
    out, lse = sparse_attention(q_s, kv_s, indices, scale=0.1, v_dim=L)
    d_out = torch.ones((), dtype=out.dtype, device=DEVICE).expand(out.shape)
    grads = torch.autograd.grad(out, (q, kv), d_out)
    assert [x.shape for x in grads] == [q.shape, kv.shape]
    assert mode.calls == ["npu_sparse_flash_attention", BACKWARD]
    assert lse.shape == (2, 64, H)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_base_operators(mode, dtype):
    x, weight = tensor(2, 64, 96, dtype=dtype), tensor(96, dtype=dtype)
    q, angles = tensor(2, 64, 8, 64, dtype=dtype), tensor(64, 64, dtype=torch.float32, grad=False)
    calls = {
        "rms_norm": (lambda: rms_norm(x, weight), (x, weight)),
        "rms_norm without weight": (lambda: rms_norm(x, None), (x,)),
        "rotary_mul half": (lambda: rotary_mul(q, angles, angles), (q,)),
        "rotary_mul interleaved": (lambda: rotary_mul(q, angles, angles, interleaved=True), (q,)),
        "swiglu": (lambda: swiglu(x), (x,)),
        "swiglu of a middle dim": (lambda: swiglu(x, dim=1), (x,)),
        "hadamard": (lambda: hadamard(q), (q,)),
    }
    expected = {
        "rms_norm": ["npu_rms_norm", "npu_rms_norm_backward"],
        "rotary_mul": ["npu_rotary_mul", "npu_rotary_mul"],
        "swiglu": ["npu_swiglu", "npu_swiglu_backward"],
        "hadamard": [],
    }
    for name, (call, inputs) in calls.items():
        mode.calls.clear()
        y = call()
        grads = torch.autograd.grad(y.float().sum(), inputs)
        assert [(g.shape, g.dtype) for g in grads] == [(i.shape, i.dtype) for i in inputs]
        assert mode.calls == expected[name.split()[0]], name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("G", [1, 8])
@pytest.mark.parametrize("given", ["counts", "offsets"])
def test_grouped_matmul(mode, dtype, G, given):
    x, weight = tensor(128, 96, dtype=dtype), tensor(G, 96, 32, dtype=dtype)
    groups = torch.zeros(G, dtype=torch.int64, device=DEVICE)
    y = grouped_matmul(x, weight, **{given: groups})
    grads = torch.autograd.grad(y.sum(), (x, weight))
    assert y.shape == (128, 32)
    assert [g.shape for g in grads] == [x.shape, weight.shape]
    assert mode.calls == ["npu_grouped_matmul"] * 3  # y; dX and dW, which autograd does not have


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("M", [None, 64, 300])
@pytest.mark.parametrize("with_probs", [True, False])
def test_moe(mode, dtype, M, with_probs):
    tokens = tensor(32, 96, dtype=dtype)
    probs = tensor(32, 8, dtype=torch.float32) if with_probs else None
    experts = torch.zeros(32, 8, dtype=torch.int32, device=DEVICE)
    permuted = moe_permute(tokens, experts, num_experts=16, probs=probs, num_out_tokens=M)
    assert permuted.tokens.shape == (M or 256, 96)
    assert (permuted.rows.dtype, permuted.counts.dtype) == (torch.int32, torch.int64)
    y = moe_unpermute(permuted.tokens, permuted.rows, probs=probs)
    assert (y.shape, y.dtype) == (tokens.shape, dtype)
    inputs = (tokens, probs) if with_probs else (tokens,)
    loss = y.float().sum() + (permuted.probs.sum() if with_probs else 0.0)
    grads = torch.autograd.grad(loss, inputs)
    assert [(g.shape, g.dtype) for g in grads] == [(x.shape, x.dtype) for x in inputs]
    assert mode.calls == [
        "npu_moe_token_permute",
        "npu_moe_token_unpermute",
        "npu_moe_token_unpermute_grad_v2",
        "npu_moe_token_permute_grad_v2",
    ]


def test_every_operator_of_the_backend_was_followed(mode):
    """Names in the table above and the operators there are: none may be forgotten."""
    tensors = layer_inputs(1, 64, 64, 16, 64)
    layer = dsa_attention(*tensors, topk=16, scale=0.1, v_dim=L, kl_reduction="sum")
    torch.autograd.grad((layer.out.sum(), layer.kl), tensors)
    assert mode.operators == [
        "lightning_indexer",
        "sparse_attention",
        "fused_kl_loss",
        "sparse_attention_backward",
    ]


REFUSED = {
    "topk": (
        lambda: lightning_indexer(*layer_inputs(1, 64, 64, 16, 64)[2:], topk=2049),
        r"topk: got 2049; .*1..2048, 3072",
    ),
    "index heads": (
        lambda: lightning_indexer(*layer_inputs(1, 64, 64, 16, 4)[2:], topk=8),
        r"q_index: got H=4; .*8, 16, 32, 64",
    ),
    "dtype of the indexer": (
        lambda: lightning_indexer(*layer_inputs(1, 64, 64, 16, 8, torch.float32)[2:], topk=8),
        r"q_index: got torch.float32; .*bfloat16 or float16",
    ),
    "heads": (
        lambda: sparse_attention(*layer_inputs(1, 8, 8, 12, 8)[:2], some_indices(), **ATTENTION),
        r"q: got H=12; .*1, 2, 4, 8",
    ),
    "v_dim": (
        lambda: sparse_attention(
            *layer_inputs(1, 8, 8, 16, 8)[:2], some_indices(), scale=0.1, v_dim=256
        ),
        r"v_dim: got v_dim=256; .*512",
    ),
    "keys of a query": (
        lambda: sparse_attention(
            *layer_inputs(1, 8, 8, 16, 8)[:2], some_indices(3072), **ATTENTION
        ),
        r"indices: got K=3072; .*at most 2048",
    ),
    "loss per token": (
        lambda: dsa_attention(*layer_inputs(1, 8, 8, 16, 8), topk=4, **ATTENTION),
        r"kl_reduction: got 'none'; .*'sum'",
    ),
    "reduced target": (
        lambda: dsa_attention(
            *layer_inputs(1, 8, 8, 16, 8),
            topk=4,
            kl_reduction="sum",
            reduce_target=lambda x: x,
            **ATTENTION,
        ),
        r"reduce_target: got a function; .*query_split",
    ),
    "absorbed keys": (
        lambda: dense_indexer_kl_loss(
            *layer_inputs(1, 8, 8, 16, 8)[2:],
            *layer_inputs(1, 8, 8, 16, 8)[:2],
            scale=0.1,
            reduction="sum",
        ),
        r"kv: got shape \(1, 8, 576\); .*before absorption",
    ),
    "fusion heads": (
        lambda: dense_attention(*own_inputs(1, 8, 8, 257), scale=0.1),
        r"q: got H=257; .*at most 256 heads",
    ),
    "fusion dim": (
        lambda: dense_attention(*own_inputs(1, 8, 8, 2, 769), scale=0.1),
        r"q: got D=769; .*at most D=768",
    ),
    "wide values": (
        lambda: dense_attention(*own_inputs(1, 8, 8, 2, 128, 192), scale=0.1),
        r"v: got V=192; .*no wider than the keys, D=128",
    ),
    "long rows": (
        lambda: dense_attention(*own_inputs(1, 2**20 + 1, 2**20 + 1, 1), scale=0.1),
        r"q: got 1048577 tokens; .*at most 1048576 in a call",
    ),
    "groups": (
        lambda: grouped_matmul(
            tensor(8, 4), tensor(1024, 4, 4), counts=torch.zeros(1024, device=DEVICE).long()
        ),
        r"weight: got G=1024; .*at most 1023",
    ),
    "dtype of a weight": (
        lambda: rms_norm(tensor(8, 4), tensor(4, dtype=torch.float32)),
        r"weight: got torch.float32; .*bfloat16, the dtype of x",
    ),
    "float64": (lambda: swiglu(tensor(8, 4, dtype=torch.float64)), r"x: got torch.float64"),
}
ATTENTION = {"scale": 0.1, "v_dim": L}


def some_indices(K: int = 4):
    return torch.zeros(1, 8, K, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("what", list(REFUSED))
def test_limits_are_checked_before_any_call(mode, what):
    call, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        call()
    assert not mode.calls


def test_torch_operators_between_the_calls_have_npu_kernels(mode):
    """The glue around the calls: torch_npu would run what it lacks on the CPU, with a copy."""
    run_everything()
    assert len(mode.torch_operators) > 30
    assert {name for name in mode.torch_operators if not runs_on_npu(name)} == set()
    assert not runs_on_npu("aten::linalg_eig")  # there are such operators


def runs_on_npu(name: str) -> bool:
    """torch_npu has a kernel for it, or for what torch makes of it."""

    def has(name: str, key: str) -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)

    if has(name, "PrivateUse1") or has(name, "CompositeImplicitAutograd"):
        return True
    if has(name, "CompositeExplicitAutogradNonFunctional"):
        return has(name.split(".")[0].removesuffix("_") + ".out", "PrivateUse1")
    return has(name, "CompositeExplicitAutograd")


# --- the harness must notice ---------------------------------------------------------------------


def run_everything():
    bounds = fake_bounds(lambda: masks(1, 64, 64)["packed"])
    tensors = layer_inputs(1, 64, 64, 16, 64)
    for mask in (None, bounds):
        layer = dsa_attention(
            *tensors, topk=16, scale=0.1, v_dim=L, bounds=mask, kl_reduction="sum"
        )
        torch.autograd.grad((layer.out.sum(), layer.kl), tensors)
        dense_indexer_kl_loss(
            *dense_inputs(1, 64, 64, 32, 64), scale=0.1, bounds=mask, reduction="sum"
        )
        own = own_inputs(1, 64, 64, 16)
        out, _ = dense_attention(*own, scale=0.1, bounds=mask)
        torch.autograd.grad(out.sum(), own)
    x, weight = tensor(128, 96), tensor(8, 96, 32)
    y = grouped_matmul(x, weight, counts=torch.zeros(8, dtype=torch.int64, device=DEVICE))
    torch.autograd.grad(y.sum(), (x, weight))
    norm = rms_norm(x, tensor(96))
    torch.autograd.grad(norm.sum(), x)
    q, angles = tensor(2, 64, 8, 64), tensor(64, 64, grad=False)
    torch.autograd.grad(rotary_mul(q, angles, angles).sum(), q)
    torch.autograd.grad(swiglu(x).sum(), x)
    experts = torch.zeros(128, 8, dtype=torch.int32, device=DEVICE)
    permuted = moe_permute(x, experts, num_experts=16)
    y = moe_unpermute(permuted.tokens, permuted.rows, probs=tensor(128, 8))
    torch.autograd.grad(y.sum(), x)


def half(x):
    return x.half()


def transposed(x):
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def longer(x):
    return x.long()


def nothing(x):
    return None


WRONG = [
    ("npu_lightning_indexer", "layout_query", lambda x: "TND" if x == "BSND" else "BSND"),
    ("npu_lightning_indexer", "layout_key", lambda x: "PA_BSND"),
    ("npu_lightning_indexer", "key", half),
    ("npu_lightning_indexer", "key", lambda x: x.squeeze(-2)),
    ("npu_lightning_indexer", "query", transposed),
    ("npu_lightning_indexer", "weights", lambda x: x.float()),
    ("npu_lightning_indexer", "sparse_count", lambda x: 2050),
    ("npu_lightning_indexer", "sparse_mode", lambda x: 2),
    ("npu_lightning_indexer", "return_value", lambda x: False),
    ("npu_lightning_indexer", "actual_seq_lengths_query", lambda x: x if x is None else None),
    ("npu_lightning_indexer", "actual_seq_lengths_key", lambda x: x if x is None else x.long()),
    ("npu_sparse_flash_attention", "return_softmax_lse", lambda x: False),
    ("npu_sparse_flash_attention", "sparse_indices", longer),
    ("npu_sparse_flash_attention", "sparse_indices", lambda x: x[..., :100].contiguous()),
    ("npu_sparse_flash_attention", "sparse_mode", lambda x: 3),
    ("npu_sparse_flash_attention", "attention_mode", lambda x: 0),
    ("npu_sparse_flash_attention", "value", nothing),
    ("npu_sparse_flash_attention", "query_rope", nothing),
    ("npu_sparse_flash_attention", "key_rope", half),
    ("npu_sparse_flash_attention", "query", transposed),
    ("npu_sparse_flash_attention", "layout_kv", lambda x: "TND"),
    ("npu_sparse_flash_attention_grad", "softmax_max", lambda x: x.new_empty(0)),
    ("npu_sparse_flash_attention_grad", "softmax_sum", half),
    ("npu_sparse_flash_attention_grad", "softmax_max", lambda x: x.transpose(1, 2).contiguous()),
    ("npu_sparse_flash_attention_grad", "d_out", lambda x: x.float()),
    ("npu_sparse_flash_attention_grad", "layout", lambda x: "TND"),
    ("npu_sparse_flash_attention_grad", "attention_mode", lambda x: 0),
    ("npu_sparse_lightning_indexer_grad_kl_loss", "softmax_sum", lambda x: x.new_empty(0)),
    ("npu_sparse_lightning_indexer_grad_kl_loss", "layout", lambda x: "SBND"),
    ("npu_sparse_lightning_indexer_grad_kl_loss", "sparse_mode", lambda x: 0),
    ("npu_sparse_lightning_indexer_grad_kl_loss", "query_index", half),
    ("npu_sparse_lightning_indexer_grad_kl_loss", "sparse_indices", longer),
    (
        "npu_sparse_lightning_indexer_grad_kl_loss",
        "actual_seq_klen",
        lambda x: x if x is None else x[:-1],
    ),
    ("npu_fusion_attention", "softmax_layout", lambda x: ""),
    ("npu_fusion_attention", "input_layout", lambda x: "BNSD"),
    ("npu_fusion_attention", "atten_mask", nothing),
    ("npu_fusion_attention", "sparse_mode", lambda x: 0),
    ("npu_fusion_attention_grad", "softmax_layout", lambda x: ""),
    ("npu_fusion_attention_grad", "input_layout", lambda x: "BNSD"),
    ("npu_fusion_attention_grad", "sparse_mode", lambda x: 2),
    ("npu_fusion_attention_grad", "softmax_max", lambda x: x[..., :1].contiguous()),
    ("npu_fusion_attention_grad", "softmax_sum", nothing),
    ("npu_fusion_attention_grad", "attention_in", nothing),
    ("npu_fusion_attention_grad", "dy", lambda x: x.float()),
    (
        "npu_fusion_attention_grad",
        "actual_seq_kvlen",
        lambda x: x if x is None else x[:-1],
    ),
    ("npu_dense_lightning_indexer_softmax_lse", "key_index", half),
    ("npu_dense_lightning_indexer_softmax_lse", "layout", lambda x: "BNSD"),
    ("npu_dense_lightning_indexer_grad_kl_loss", "softmax_max", lambda x: x[..., 0]),
    ("npu_dense_lightning_indexer_grad_kl_loss", "softmax_sum_index", lambda x: x.new_empty(0)),
    ("npu_dense_lightning_indexer_grad_kl_loss", "key", lambda x: x[..., :1, :].contiguous()),
    ("npu_dense_lightning_indexer_grad_kl_loss", "query_rope", nothing),
    ("npu_grouped_matmul", "group_list", lambda x: x.int()),
    ("npu_grouped_matmul", "group_list", nothing),
    ("npu_grouped_matmul", "group_list_type", lambda x: 1),
    ("npu_grouped_matmul", "split_item", lambda x: 0),
    ("npu_grouped_matmul", "weight", lambda x: [x[0].half()]),
    ("npu_rms_norm", "gamma", lambda x: x.float()),
    ("npu_rms_norm_backward", "rstd", lambda x: x.squeeze(-1)),
    ("npu_rotary_mul", "rotary_mode", lambda x: "quarter"),
    ("npu_rotary_mul", "r1", lambda x: x.squeeze(0)),
    ("npu_swiglu_backward", "grad_output", lambda x: x.float()),
    ("npu_moe_token_permute", "num_out_tokens", lambda x: 0),
    ("npu_moe_token_permute_grad_v2", "sorted_indices", longer),
    ("npu_moe_token_unpermute", "probs", nothing),
    ("npu_moe_token_unpermute", "sorted_indices", longer),
    ("npu_moe_token_unpermute_grad_v2", "probs", half),
]


class Changed:
    """A real operator behind a change of its arguments or of its result."""

    def __init__(self, operator, *, argument: str | None = None, change) -> None:
        self.operator, self.argument, self.change = operator, argument, change

    def __getattr__(self, name):
        return getattr(self.operator, name)  # dispatching looks up overloads

    def __call__(self, *args, **kwargs):
        if self.argument is None:
            return self.change(self.operator(*args, **kwargs))
        arguments = self.operator.default._schema.arguments
        args, position = list(args), [x.name for x in arguments].index(self.argument)
        if position < len(args):
            args[position] = self.change(args[position])
        else:
            value = kwargs.get(self.argument, arguments[position].default_value)
            kwargs[self.argument] = self.change(value)
        return self.operator(*args, **kwargs)


def test_everything_is_right_as_it_is(mode):
    run_everything()
    assert set(mode.calls) == set(npu_operators.SCHEMAS)


@pytest.mark.parametrize(("name", "argument", "change"), WRONG)
def test_a_wrong_argument_is_noticed(monkeypatch, name, argument, change):
    with contract(monkeypatch):
        wrong = Changed(getattr(torch.ops.npu, name), argument=argument, change=change)
        monkeypatch.setattr(torch.ops.npu, name, wrong)
        with pytest.raises(NotStated, match=name):
            run_everything()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("npu_lightning_indexer", lambda y: (y[0].long(), y[1])),
        ("npu_sparse_flash_attention", lambda y: (y[0].float(), *y[1:])),
        ("npu_swiglu", transposed),
        ("npu_sparse_lightning_indexer_grad_kl_loss", lambda y: (*y[:3], y[3].double())),
        ("npu_rms_norm", lambda y: (y[0], y[1].half())),
    ],
)
def test_a_fake_kernel_that_disagrees_is_noticed(monkeypatch, name, change):
    with contract(monkeypatch):
        other = Changed(getattr(torch.ops.npu, name), change=change)
        monkeypatch.setattr(torch.ops.npu, name, other)
        with pytest.raises(Mismatch, match="promised"):
            run_everything()


def test_the_real_shape_functions_run(mode, monkeypatch):
    """What only the wheel refuses, at calls that the stated limits are not asked about."""
    monkeypatch.setattr(npu_operators, "check", lambda *a: None)
    x = tensor(2, 3, 4, grad=False)
    index = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(RuntimeError, match="the query dimension must be 4, but got 3"):
        torch.ops.npu.npu_sparse_flash_attention(x, x, x, index, 1.0, layout_query="BSND")
    with pytest.raises(RuntimeError, match="should be 2 dimensional, but got 3"):
        torch.ops.npu.npu_moe_token_permute(x, index)


# --- the emulation of the fast tests -------------------------------------------------------------


def emulated_arguments() -> dict[str, dict]:
    """Small arguments of each operator, real tensors on CPU."""
    f, i = torch.float32, torch.int32
    B, S, T, H, W, N, k, D, G = 2, 4, 6, 3, 5, 4, 2, 8, 3
    q, key = torch.ones(B, S, H, D), torch.ones(B, T, 1, D)
    rope = {"query_rope": torch.ones(B, S, H, 2), "key_rope": torch.ones(B, T, 1, 2)}
    sparse = torch.zeros(B, S, 1, W, dtype=i)
    sparse[..., 1:] = -1
    statistics = {"softmax_max": torch.ones(B, 1, S, H), "softmax_sum": torch.ones(B, 1, S, H)}
    attention = {"query": q, "key": key, "sparse_indices": sparse, "scale_value": 1.0, **rope}
    x = torch.ones(N, D)
    slots = torch.arange(N * k).int()
    index = {"query_index": q, "key_index": key, "weights": torch.ones(B, S, H)}
    mlp = {"input": x, "gamma": torch.ones(D)}
    return {
        "npu_lightning_indexer": {
            "query": q, "key": key, "weights": torch.ones(B, S, H), "sparse_count": W,
            "return_value": True,
        },
        "npu_sparse_flash_attention": {**attention, "value": key, "return_softmax_lse": True},
        "npu_sparse_flash_attention_grad": {
            **attention, "value": key, "d_out": q, "out": q, **statistics, "sparse_block_size": 1,
        },
        "npu_sparse_lightning_indexer_grad_kl_loss": {
            **attention, **statistics, **index,
        },
        "npu_fusion_attention": {
            "query": q, "key": key.expand(B, T, H, D), "value": torch.ones(B, T, H, 5),
            "head_num": H, "input_layout": "BSND", "sparse_mode": 3,
        },
        "npu_fusion_attention_grad": {
            "query": q, "key": key.expand(B, T, H, D), "value": torch.ones(B, T, H, 5),
            "dy": torch.ones(B, S, H, 5), "attention_in": torch.ones(B, S, H, 5), "head_num": H,
            "softmax_max": torch.ones(B, H, S, 8), "softmax_sum": torch.ones(B, H, S, 8),
            "input_layout": "BSND", "sparse_mode": 3,
        },
        "npu_dense_lightning_indexer_softmax_lse": index,
        "npu_dense_lightning_indexer_grad_kl_loss": {
            **index, **rope, "key_rope": torch.ones(B, T, H, 2), "query": q,
            "key": key.expand(B, T, H, D), "scale_value": 1.0,
            "softmax_max": torch.ones(B, H, S, 1), "softmax_sum": torch.ones(B, H, S, 1),
            "softmax_max_index": torch.ones(B, 1, S), "softmax_sum_index": torch.ones(B, 1, S),
        },
        "npu_rms_norm": mlp,
        "npu_rms_norm_backward": {**mlp, "dy": x, "rstd": torch.ones(N, 1)},
        "npu_rotary_mul": {"input": q, "r1": q[:1, :, :1], "r2": q[:1, :, :1]},
        "npu_swiglu": {"input": x},
        "npu_swiglu_backward": {"input": x, "grad_output": x[:, : D // 2]},
        "npu_grouped_matmul": {
            "x": [x.T.contiguous().T], "weight": [torch.ones(G, D, 2)], "split_item": 3,
            "group_type": 0, "group_list": torch.tensor([1, 1, N]),
        },
        "npu_moe_token_permute": {
            "tokens": x, "indices": torch.zeros(N, k, dtype=i), "num_out_tokens": 3,
        },
        "npu_moe_token_permute_grad_v2": {
            "grad_permuted_tokens": torch.ones(N * k, D), "sorted_indices": slots,
            "tokens_size_0": N, "tokens_dtype": f, "num_topK": k,
        },
        "npu_moe_token_unpermute": {
            "permuted_tokens": torch.ones(N * k, D), "sorted_indices": slots,
            "probs": torch.ones(N, k),
        },
        "npu_moe_token_unpermute_grad_v2": {
            "grad_unpermuted_tokens": x, "sorted_indices": slots, "permuted_tokens_size_0": N * k,
            "permuted_tokens_dtype": f, "probs": torch.ones(N, k),
            "permuted_tokens": torch.ones(N * k, D),
        },
    }  # fmt: skip


@pytest.mark.parametrize("name", list(npu_operators.SCHEMAS))
def test_emulation_has_the_shapes_of_the_real_operator(name):
    arguments = emulated_arguments()[name]
    emulate = getattr(npu_emulation, f"_{name}")
    assert inspect.isfunction(emulate)
    ours = emulate(SimpleNamespace(**vars(npu_operators.bind(name, (), arguments))))

    def fake(x):
        if isinstance(x, list):
            return [fake(item) for item in x]
        if not isinstance(x, torch.Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE)

    with torch._subclasses.FakeTensorMode():
        theirs = getattr(torch.ops.npu, name)(**{k: fake(v) for k, v in arguments.items()})
    ours, theirs = (x if isinstance(x, (tuple, list)) else (x,) for x in (ours, theirs))
    tensors = [[x for x in y if isinstance(x, torch.Tensor)] for y in (ours, theirs)]
    a, b = ([(x.shape, x.dtype) for x in y] for y in tensors)
    assert a == b

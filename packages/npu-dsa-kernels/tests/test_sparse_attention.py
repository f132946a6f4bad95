import math

import pytest
import torch
from hypothesis import given

import dsa_definitions as definition
from base_definitions import assert_rounds_less_than
from dsa_definitions import EVERY, PACKED, TOLERANCE, assert_close, cases, leaves
from npu_dsa_kernels import sparse_attention
from npu_dsa_kernels.backends import blocked


def run(attention, q, kv, indices, v_dim, grads=None, **kwargs):
    """Outputs and gradients of an attention; `grads` are those of out and lse."""
    q, kv = leaves(q, kv)
    out, lse = attention(q, kv, indices, scale=0.4, v_dim=v_dim, **kwargs)
    if grads is None:
        grads = upstream(out, lse)
    finite = lse.isfinite()
    loss = (out * grads[0].to(out.dtype)).sum() + (lse * grads[1].to(lse.dtype))[finite].sum()
    return {"out": out, "lse": lse} | dict(
        zip(("dq", "dkv"), torch.autograd.grad(loss, (q, kv)), strict=True)
    )


def upstream(out, lse):
    g = torch.Generator().manual_seed(5)
    return (
        torch.randn(out.shape, generator=g, dtype=torch.float64),
        torch.randn(lse.shape, generator=g, dtype=torch.float64),
    )


def assert_same(actual, expected, tolerance, what=""):
    for name in expected:
        assert_close(actual[name], expected[name], tolerance, f"{what} {name}")


@given(case=cases())
def test_values_and_gradients(case):
    q, kv = case.attention(torch.float32)
    v_dim = max(1, case.D - 2)
    if not (case.indices() >= 0).any():
        return  # nothing to differentiate in the definition; see the test of empty rows
    expected = run(definition.sparse_attention, q.double(), kv.double(), case.indices(), v_dim)
    for backend, dtype in EVERY:
        actual = run(
            sparse_attention, q.to(dtype), kv.to(dtype), case.indices(), v_dim, backend=backend
        )
        assert actual["lse"].dtype == dtype
        assert_same(actual, expected, TOLERANCE[dtype], f"{backend} {dtype}")


def test_many_blocks_and_repeated_keys(backend, monkeypatch):
    # Each key is in many rows of many blocks: the accumulation over blocks matters.
    monkeypatch.setattr(blocked, "_CPU_BLOCK_BYTES", 3000)
    q, kv = PACKED.attention()
    actual = run(sparse_attention, q, kv, PACKED.indices(), 3, backend=backend)
    assert_same(actual, run(definition.sparse_attention, q, kv, PACKED.indices(), 3), 1e-10)


def test_rows_without_keys(backend, dtype):
    q, kv = leaves(*PACKED.attention(dtype))
    indices = torch.full((2, 16, 4), -1, dtype=torch.int32)
    indices[1, 3:] = PACKED.indices()[1, 3:]
    out, lse = sparse_attention(q, kv, indices, scale=0.4, v_dim=3, backend=backend)
    empty = (indices < 0).all(-1)
    assert empty.sum() >= 19
    assert (out[empty] == 0).all()
    assert (lse[empty] == -math.inf).all()
    d_q, d_kv = torch.autograd.grad((out, lse), (q, kv), (torch.randn_like(out), lse.exp()))
    assert (d_q[empty] == 0).all()
    assert (d_kv[0] == 0).all()
    assert d_q.isfinite().all()
    assert d_kv.isfinite().all()


@pytest.mark.parametrize("wild", [-1, -2, 16, 17, -(2**31), 2**31 - 1])
def test_indices_outside_are_empty_slots_and_read_nothing(backend, wild):
    q, kv = PACKED.attention(torch.float32)
    indices = PACKED.indices()
    indices[indices == 0] = -1
    expected = run(sparse_attention, q, kv, indices, 3, backend=backend)
    # Keys 0 and, of the other row of the batch, everything a stray offset might hit.
    poisoned = kv.clone()
    poisoned[:, 0] = math.nan
    actual = run(
        sparse_attention, q, poisoned, indices.masked_fill(indices == -1, wild), 3, backend=backend
    )
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name
    assert (actual["dkv"][:, 0] == 0).all()


def test_non_contiguous_everything(backend):
    q, kv = PACKED.attention()
    indices = PACKED.indices()
    grads = upstream(torch.empty(2, 16, 3, 3), torch.empty(2, 16, 3))
    expected = run(sparse_attention, q, kv, indices, 3, grads, backend=backend)

    def strided(x):
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    q_s, kv_s = leaves(q, kv)
    out, lse = sparse_attention(
        strided(q_s), strided(kv_s), strided(indices), scale=0.4, v_dim=3, backend=backend
    )
    lse = lse.masked_fill(lse.isinf(), 0.0)
    d_q, d_kv = torch.autograd.grad((out, lse), (q_s, kv_s), [strided(g) for g in grads])
    assert_close(out, expected["out"], 1e-14)
    assert_close(d_q, expected["dq"], 1e-13)
    assert_close(d_kv, expected["dkv"], 1e-13)


def test_gradient_of_one_output_alone(backend):
    q, kv = leaves(*PACKED.attention())
    out, lse = sparse_attention(q, kv, PACKED.indices(), scale=0.4, v_dim=3, backend=backend)
    of_out = torch.autograd.grad(out.sum(), (q, kv), retain_graph=True)
    of_lse = torch.autograd.grad(lse[lse.isfinite()].sum(), (q, kv), retain_graph=True)
    both = torch.autograd.grad(out.sum() + lse[lse.isfinite()].sum(), (q, kv))
    for a, b, c in zip(of_out, of_lse, both, strict=True):
        assert_close(a + b, c, 1e-13)
    # An expanded scalar is the gradient of a sum: stride 0 must work, too.
    assert all(x.isfinite().all() for x in both)


def test_gradcheck(backend):
    q, kv = leaves(*PACKED.attention())
    indices = PACKED.indices()
    indices[:, :3] = -1

    def f(q, kv):
        out, lse = sparse_attention(q, kv, indices, scale=0.4, v_dim=3, backend=backend)
        return out, lse.masked_fill(lse.isinf(), 0.0)

    assert torch.autograd.gradcheck(f, (q, kv), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_accumulates_in_fp32(backend, dtype):
    q, kv = PACKED.attention(dtype)
    grads = upstream(torch.empty(2, 16, 3, 3), torch.empty(2, 16, 3))
    grads = tuple(g.to(dtype) for g in grads)
    actual = run(sparse_attention, q, kv, PACKED.indices(), 3, grads, backend=backend)
    expected = run(definition.sparse_attention, q.double(), kv.double(), PACKED.indices(), 3, grads)
    assert actual["out"].dtype == actual["dq"].dtype == actual["dkv"].dtype == dtype
    assert actual["lse"].dtype == torch.float32
    assert_close(actual["lse"], expected["lse"], 1e-5)
    # What is left is one rounding of each result.
    assert_same(actual, expected, torch.finfo(dtype).eps)


def test_half_precision_rounds_less_than_the_formula_in_it():
    indices = PACKED.indices()
    visible = indices[..., None] == torch.arange(16)  # [B, S, K, T]
    hidden = ~visible.any(2)[:, :, None]
    empty = (indices < 0).all(-1)[..., None]

    def eager(q, kv):
        logits = 0.4 * torch.einsum("bshd,btd->bsht", q, kv)
        logits = logits.masked_fill(hidden, -math.inf).masked_fill(empty[..., None], 0.0)
        p = logits.softmax(-1).masked_fill(empty[..., None], 0.0)
        lse = logits.logsumexp(-1).masked_fill(empty, 0.0)
        return torch.einsum("bsht,btv->bshv", p, kv[..., :3]), lse

    def op(attention):
        def f(q, kv, **kwargs):
            out, lse = attention(q, kv, indices, scale=0.4, v_dim=3, **kwargs)
            return out, lse.masked_fill(empty, 0.0)

        return f

    assert_rounds_less_than(
        eager, op(sparse_attention), op(definition.sparse_attention), PACKED.attention()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("H", "D", "v_dim", "K"), [(16, 576, 512, 64), (128, 192, 128, 40)])
def test_model_sized_heads(dtype, H, D, v_dim, K):
    # Tiles, tails and accumulators at the sizes they are made for.
    g = torch.Generator().manual_seed(0)
    q, kv = torch.randn(1, 6, H, D, generator=g), torch.randn(1, 80, D, generator=g)
    q, kv = (D**-0.25 * q).to(dtype), (D**-0.25 * kv).to(dtype)
    indices = torch.rand(6, 80, generator=g).argsort(-1)[None, :, :K].int()
    indices[0, 1, 5:] = -1
    indices[0, 2] = -1
    actual = run(sparse_attention, q, kv, indices, v_dim, backend="torch")
    grads = [x.to(dtype) for x in upstream(actual["out"], actual["lse"])]
    actual = run(sparse_attention, q, kv, indices, v_dim, grads, backend="torch")
    expected = run(
        sparse_attention, q.double(), kv.double(), indices, v_dim, grads, backend="reference"
    )
    assert_same(actual, expected, 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps)


def test_large_logits(backend, dtype):
    q, kv = PACKED.attention(dtype)
    actual = run(sparse_attention, q * 300, kv, PACKED.indices(), 3, backend=backend)
    expected = run(definition.sparse_attention, q.double() * 300, kv.double(), PACKED.indices(), 3)
    # The logits, near 1000, round to 1e-7 of themselves: the probabilities to 1e-4 in fp32.
    assert_same(actual, expected, {torch.float64: 1e-10, torch.float32: 1e-3}[dtype])


def test_same_bits_on_every_run(backend):
    # 4096 slots fall on 64 keys; the order of the additions shows in the last bits.
    torch.manual_seed(0)
    q, kv = torch.randn(1, 256, 4, 16), torch.randn(1, 64, 16)
    indices = torch.rand(1, 256, 64).argsort(-1)[..., :16].int()
    first = run(sparse_attention, q, kv, indices, 8, backend=backend)
    for _ in range(5):
        again = run(sparse_attention, q, kv, indices, 8, backend=backend)
        for name in first:
            assert torch.equal(again[name], first[name]), name


def test_autocast_does_not_lower_the_precision(backend):
    q, kv = PACKED.attention(torch.float32)
    expected = run(sparse_attention, q, kv, PACKED.indices(), 3, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=backend != "reference"):
        # The reference's backward is autograd's own, and belongs outside of autocast.
        actual = run(under_autocast, q, kv, PACKED.indices(), 3, backend=backend)
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


def under_autocast(*args, **kwargs):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return sparse_attention(*args, **kwargs)


def test_double_backward():
    q, kv = leaves(*PACKED.attention())
    for backend in ("reference", "torch"):
        out, _ = sparse_attention(q, kv, PACKED.indices(), scale=0.4, v_dim=3, backend=backend)
        (d_q,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        if backend == "reference":
            assert torch.autograd.grad(d_q.sum(), q)[0].isfinite().all()
        else:
            with pytest.raises(RuntimeError, match="double backward is not implemented"):
                torch.autograd.grad(d_q.sum(), q)


@pytest.mark.parametrize(("B", "S", "T"), [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_empty_sizes(backend, B, S, T):
    q, kv = leaves(torch.randn(B, S, 2, 5), torch.randn(B, T, 5))
    indices = torch.zeros(B, S, 3, dtype=torch.int32)
    out, lse = sparse_attention(q, kv, indices, scale=1.0, v_dim=4, backend=backend)
    assert out.shape == (B, S, 2, 4)
    assert lse.shape == (B, S, 2)
    assert (out == 0).all() or T
    d_q, d_kv = torch.autograd.grad(out.sum(), (q, kv))
    assert (d_q == 0).all() or T
    assert d_kv.shape == kv.shape


def test_gradients_hold_no_more_than_themselves():
    q, kv = leaves(*PACKED.attention())
    out, _ = sparse_attention(q, kv, PACKED.indices(), scale=0.4, v_dim=3, backend="torch")
    out.sum().backward()
    for x in (q, kv):
        assert x.grad.untyped_storage().nbytes() == x.numel() * x.element_size()


Q, KV, INDICES = torch.randn(2, 8, 3, 4), torch.randn(2, 6, 4), torch.zeros(2, 8, 2).int()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": Q[0]}, r"q: got shape \(8, 3, 4\); expected 4 dimensions \[B, S, H, D\]"),
        ({"q": Q.long()}, r"q: got torch.int64; expected float64"),
        ({"kv": KV[:, :, :3]}, r"kv: got shape \(2, 6, 3\); expected \[B=2, T=6, D=4\]"),
        ({"kv": KV[:1]}, r"kv: got shape \(1, 6, 4\); expected \[B=2, T=6, D=4\]"),
        ({"kv": KV.bfloat16()}, r"kv: got torch.bfloat16; expected float32, the dtype of q"),
        ({"kv": KV.to("meta")}, r"kv: got device meta; expected cpu, where q is"),
        ({"indices": INDICES.long()}, r"indices: got torch.int64; expected int32"),
        ({"indices": INDICES[:, :7]}, r"indices: got shape \(2, 7, 2\); expected \[B=2, S=8\]"),
        ({"indices": INDICES[..., :0]}, r"indices: got shape \(2, 8, 0\); expected K"),
        ({"indices": INDICES[0]}, r"indices: got shape \(8, 2\); expected 3 dimensions"),
        ({"indices": INDICES.to("meta")}, r"indices: got device meta"),
        ({"scale": math.nan}, r"scale: got nan; expected a finite float"),
        ({"scale": "1"}, r"scale: got '1'; expected a finite float"),
        ({"scale": True}, r"scale: got True; expected a finite float"),
        ({"q": Q[:, :, :0]}, r"q: got shape \(2, 8, 0, 4\); expected H"),
        ({"q": Q.to("meta")}, r"kv: got device cpu; expected meta, where q is"),
        ({"kv": KV[0]}, r"kv: got shape \(6, 4\); expected 3 dimensions \[B, T, D\]"),
        (
            {
                "q": torch.empty(1, 8, 3, 4, device="meta"),
                "kv": torch.empty(1, 2**31, 4, device="meta"),
                "indices": torch.empty(1, 8, 2, device="meta", dtype=torch.int32),
            },
            r"kv: got T=2147483648 keys; expected at most 2147483647, as indices are int32",
        ),
        ({"v_dim": 0}, r"v_dim: got 0; expected an int in \[1, D=4\]"),
        ({"v_dim": 5}, r"v_dim: got 5; expected an int in \[1, D=4\]"),
        ({"v_dim": 2.5}, r"v_dim: got 2.5; expected an int in \[1, D=4\]"),
        ({"backend": "cuda"}, r"backend: got 'cuda'; expected one of reference, torch, triton"),
        ({"validate": True}, r"indices: got key 0 more than once in row \[0, 0\]"),
        ({"validate": True, "indices": INDICES + 6}, r"indices: got values in \[6, 6\]; expected"),
    ],
)
def test_bad_input(change, message):
    arguments = {"q": Q, "kv": KV, "indices": INDICES, "scale": 1.0, "v_dim": 4}
    with pytest.raises(ValueError, match=message):
        sparse_attention(**arguments | change)


def test_validate_accepts_good_indices(backend):
    q, kv = PACKED.attention()
    sparse_attention(q, kv, PACKED.indices(), scale=1.0, v_dim=3, validate=True, backend=backend)

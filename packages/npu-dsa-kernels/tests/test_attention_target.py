import pytest
import torch
from hypothesis import given

import dsa_definitions as definition
from dsa_definitions import EVERY, PACKED, TOLERANCE, assert_close, cases
from npu_dsa_kernels import attention_target, sparse_attention


@given(case=cases())
def test_values(case):
    q, kv = case.attention(torch.float32)
    indices = case.indices()
    expected = definition.attention_target(q.double(), kv.double(), indices, 0.4)
    for backend, dtype in EVERY:
        q, kv = q.to(dtype), kv.to(dtype)
        _, lse = sparse_attention(q, kv, indices, scale=0.4, v_dim=1, backend=backend)
        target = attention_target(q, kv, indices, lse, scale=0.4, backend=backend)
        assert target.dtype == dtype
        assert_close(target, expected, TOLERANCE[dtype], f"{backend} {dtype}")
        # Not normalised: a row with keys sums to the number of heads.
        some = (indices >= 0).any(-1)
        assert_close(target.sum(-1), some.double() * case.H, TOLERANCE[dtype])


def test_half_precision_rounds_less_than_the_formula_in_it(backend):
    q, kv = PACKED.attention(torch.bfloat16)
    indices = PACKED.indices()
    empty = indices < 0
    batch = torch.arange(2)[:, None, None]
    rows = kv[batch, indices.clamp(min=0).long()]
    logits = (0.4 * torch.einsum("bshd,bskd->bshk", q, rows)).masked_fill(
        empty[:, :, None], -torch.inf
    )
    eager = logits.softmax(-1).nan_to_num(0.0).sum(2)
    _, lse = sparse_attention(q, kv, indices, scale=0.4, v_dim=1, backend=backend)
    target = attention_target(q, kv, indices, lse, scale=0.4, backend=backend)
    expected = definition.attention_target(q.double(), kv.double(), indices, 0.4)
    error, allowed = ((x.double() - expected).abs().max() for x in (target, eager))
    assert error <= 2 * allowed


def test_non_contiguous(backend):
    q, kv = PACKED.attention()
    indices = PACKED.indices()
    _, lse = sparse_attention(q, kv, indices, scale=0.4, v_dim=3, backend=backend)
    expected = attention_target(q, kv, indices, lse, scale=0.4, backend=backend)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, kv, indices, lse)]
    assert_close(attention_target(*strided, scale=0.4, backend=backend), expected, 1e-14)


@pytest.mark.parametrize(("B", "S", "T"), [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_empty_sizes(backend, B, S, T):
    q, kv = torch.randn(B, S, 2, 5), torch.randn(B, T, 5)
    indices = torch.full((B, S, 3), -1, dtype=torch.int32)
    lse = torch.full((B, S, 2), -torch.inf)
    target = attention_target(q, kv, indices, lse, scale=1.0, backend=backend)
    assert target.shape == (B, S, 3)
    assert not target.any()


def test_heads_add_up(backend):
    q, kv = PACKED.attention()
    indices = PACKED.indices()
    _, lse = sparse_attention(q, kv, indices, scale=0.4, v_dim=3, backend=backend)
    whole = attention_target(q, kv, indices, lse, scale=0.4, backend=backend)
    parts = [
        attention_target(q[:, :, h], kv, indices, lse[:, :, h], scale=0.4, backend=backend)
        for h in (slice(0, 1), slice(1, 3))
    ]
    assert_close(parts[0] + parts[1], whole, 1e-14)


def test_no_gradient(backend):
    q, kv = (x.requires_grad_() for x in PACKED.attention())
    indices = PACKED.indices()
    _, lse = sparse_attention(q, kv, indices, scale=0.4, v_dim=3, backend=backend)
    assert lse.requires_grad
    assert not attention_target(q, kv, indices, lse, scale=0.4, backend=backend).requires_grad


def test_empty_slots_are_zero_and_read_nothing(backend):
    q, kv = PACKED.attention(torch.bfloat16)
    indices = PACKED.indices()
    indices[indices == 0] = 99
    kv[:, 0] = float("nan")
    _, lse = sparse_attention(q, kv, indices, scale=0.4, v_dim=3, backend=backend)
    target = attention_target(q, kv, indices, lse, scale=0.4, backend=backend)
    assert target.dtype == torch.float32
    assert (target[(indices < 0) | (indices > 15)] == 0).all()
    assert target.isfinite().all()


@pytest.mark.parametrize(
    ("lse", "message"),
    [
        (torch.zeros(2, 8), r"lse: got shape \(2, 8\); expected 3 dimensions"),
        (torch.zeros(2, 8, 2), r"lse: got shape \(2, 8, 2\); expected \[B=2, S=8, H=3\]"),
        (torch.zeros(2, 8, 3).bfloat16(), r"lse: got torch.bfloat16; expected float32"),
        (torch.zeros(2, 8, 3, device="meta"), r"lse: got device meta; expected cpu"),
    ],
)
def test_bad_input(lse, message):
    q, kv, indices = torch.randn(2, 8, 3, 4), torch.randn(2, 8, 4), torch.zeros(2, 8, 2).int()
    with pytest.raises(ValueError, match=message):
        attention_target(q, kv, indices, lse, scale=1.0)
    with pytest.raises(ValueError, match=r"scale: got inf"):
        attention_target(q, kv, indices, torch.zeros(2, 8, 3), scale=float("inf"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.randn(8, 3, 4)}, r"q: got shape \(8, 3, 4\); expected 4 dimensions"),
        ({"kv": torch.randn(1, 8, 4)}, r"kv: got shape \(1, 8, 4\); expected \[B=2, T=8, D=4\]"),
        ({"kv": torch.randn(2, 8, 4).half()}, r"kv: got torch.float16; expected float32"),
        ({"kv": torch.randn(2, 8, 4, device="meta")}, r"kv: got device meta; expected cpu"),
        ({"indices": torch.zeros(2, 8, 2)}, r"indices: got torch.float32; expected int32"),
        ({"indices": torch.zeros(2, 8, 0).int()}, r"indices: got shape \(2, 8, 0\); expected K"),
        ({"validate": True}, r"indices: got key 0 more than once in row \[0, 0\]"),
        ({"backend": "fast"}, r"backend: got 'fast'; expected one of reference"),
    ],
)
def test_bad_input_of_the_attention(change, message):
    arguments = {
        "q": torch.randn(2, 8, 3, 4),
        "kv": torch.randn(2, 8, 4),
        "indices": torch.zeros(2, 8, 2).int(),
        "lse": torch.zeros(2, 8, 3),
        "scale": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        attention_target(**arguments | change)

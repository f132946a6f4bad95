import math

import pytest
import torch
from hypothesis import given

import dsa_definitions as definition
from dsa_definitions import EVERY, PACKED, TOLERANCE, assert_close, cases
from npu_dsa_kernels import lightning_indexer
from npu_dsa_kernels.backends import blocked


@given(case=cases())
def test_exact_integers_give_the_defined_indices(case):
    # Nothing rounds, so ties, order and empty slots must match to the last index.
    q = case.integers(case.B, case.S, case.H, case.D)
    k = case.integers(case.B, case.T, case.D)
    w = case.integers(case.B, case.S, case.H)
    expected_indices, expected_scores = definition.lightning_indexer(
        q, k, w, case.topk, case.bounds
    )
    for backend, dtype in EVERY:
        inputs = (x.to(dtype) for x in (q, k, w))
        indices, scores = lightning_indexer(
            *inputs, topk=case.topk, bounds=case.bounds, backend=backend
        )
        assert indices.dtype == torch.int32
        assert scores.dtype == dtype
        assert torch.equal(indices, expected_indices), (backend, dtype)
        assert torch.equal(scores.double(), expected_scores), (backend, dtype)


@given(case=cases())
def test_scores(case):
    inputs = case.indexer(torch.float32)
    expected = definition.lightning_indexer(*inputs, case.topk, case.bounds)[1]
    for backend, dtype in EVERY:
        cast = (x.to(dtype) for x in inputs)
        _, scores = lightning_indexer(*cast, topk=case.topk, bounds=case.bounds, backend=backend)
        assert_close(scores, expected, TOLERANCE[dtype], f"{backend} {dtype}")


def test_many_blocks(backend, monkeypatch):
    inputs = PACKED.indexer()
    whole = lightning_indexer(*inputs, topk=4, bounds=PACKED.bounds, backend=backend)
    monkeypatch.setattr(blocked, "_CPU_BLOCK_BYTES", 1)  # one query a block
    rows = lightning_indexer(*inputs, topk=4, bounds=PACKED.bounds, backend=backend)
    assert torch.equal(whole[0], rows[0])
    assert_close(rows[1], whole[1], 1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_scores_in_fp32(backend, dtype):
    q, k, w = PACKED.indexer(dtype)
    for weights in (w, w.float()):
        _, scores = lightning_indexer(q, k, weights, topk=4, bounds=PACKED.bounds, backend=backend)
        expected = definition.lightning_indexer(q, k, weights, 4, PACKED.bounds)[1]
        assert scores.dtype == torch.float32
        assert_close(scores, expected, 1e-5)


def test_half_precision_rounds_less_than_the_formula_in_it(backend):
    q, k, w = PACKED.indexer(torch.bfloat16)
    plain = (w[..., None] * torch.einsum("bshd,btd->bsht", q, k).relu()).sum(2)
    plain = plain.masked_fill(torch.ones(16, 16).triu(1).bool(), -math.inf)
    expected = definition.lightning_indexer(q, k, w, 16)[1]
    eager = plain.sort(-1, descending=True).values.double()
    _, scores = lightning_indexer(q, k, w, topk=16, backend=backend)
    seen = expected.isfinite()
    error, allowed = ((x.double() - expected)[seen].abs().max() for x in (scores, eager))
    assert error <= 2 * allowed


def test_non_contiguous(backend):
    q, k, w = PACKED.indexer()
    expected = lightning_indexer(q, k, w, topk=4, bounds=PACKED.bounds, backend=backend)

    def strided(x):
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    actual = lightning_indexer(
        *map(strided, (q, k, w)), topk=4, bounds=strided(PACKED.bounds), backend=backend
    )
    assert torch.equal(actual[0], expected[0])
    assert_close(actual[1], expected[1], 1e-14)


def test_all_scores_tied(backend, dtype):
    q, k = torch.zeros(1, 64, 2, 4, dtype=dtype), torch.randn(1, 64, 4, dtype=dtype)
    w = torch.randn(1, 64, 2, dtype=dtype)  # of both signs: some of the zeros are -0.0
    indices, _ = lightning_indexer(q, k, w, topk=16, backend=backend)
    first = torch.arange(16, dtype=torch.int32)
    for t in range(64):
        assert torch.equal(indices[0, t], torch.where(first <= t, first, -1))


def test_zeros_of_either_sign_are_tied(dtype):
    # A matmul happens to give +0.0 alone; the order must not hang on that.
    scores = torch.tensor([[-0.0, 0.0, -0.0, 1.0, 0.0, -1.0]], dtype=dtype)
    best, _ = blocked._ordered_topk(scores, torch.zeros(1, 6, dtype=torch.bool), 6)
    assert best.tolist() == [[3, 0, 1, 2, 4, 5]]


def test_nan_and_infinite_scores(backend, dtype):
    # One head, q = 1: the score of key s is w * relu(k[s]).
    k = torch.tensor([1.0, math.nan, 3.0, math.inf, -math.nan, 2.0], dtype=dtype)
    q, bounds = torch.ones(2, 1, 1, 1, dtype=dtype), torch.tensor([[[0, 6]]] * 2).int()
    w = torch.tensor([1.0, -1.0], dtype=dtype).view(2, 1, 1)
    indices, scores = lightning_indexer(
        q, k.view(1, 6, 1).expand(2, 6, 1), w, topk=8, bounds=bounds, backend=backend
    )
    assert indices[0, 0].tolist() == [1, 4, 3, 2, 5, 0, -1, -1]
    # A visible key with a score of -inf is still a key, ahead of the empty slots.
    assert indices[1, 0].tolist() == [1, 4, 0, 5, 2, 3, -1, -1]
    assert scores[0, 0, :2].isnan().all()
    assert scores[1, 0, 5:].tolist() == [-math.inf] * 3


def test_same_bits_whatever_the_grad_mode(backend):
    torch.manual_seed(0)
    inputs = [torch.randn(1, 96, 4, 8), torch.randn(1, 96, 8), torch.randn(1, 96, 4)]
    runs = [lightning_indexer(*inputs, topk=24, backend=backend)]
    with torch.no_grad():
        runs.append(lightning_indexer(*inputs, topk=24, backend=backend))
    with torch.inference_mode():
        runs.append(lightning_indexer(*inputs, topk=24, backend=backend))
    [x.requires_grad_() for x in inputs]
    runs += [lightning_indexer(*inputs, topk=24, backend=backend) for _ in range(8)]
    for indices, scores in runs[1:]:
        assert torch.equal(indices, runs[0][0])
        assert torch.equal(scores, runs[0][1])
        assert not scores.requires_grad


def test_autocast_does_not_lower_the_precision(backend):
    inputs = PACKED.indexer(torch.float32)
    expected = lightning_indexer(*inputs, topk=4, bounds=PACKED.bounds, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = lightning_indexer(*inputs, topk=4, bounds=PACKED.bounds, backend=backend)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


def test_bounds_beyond_the_keys_are_cut(backend):
    q, k, w = PACKED.indexer()
    wild = torch.tensor([-5, 99]).int().expand(2, 16, 2)
    whole = torch.tensor([0, 16]).int().expand(2, 16, 2)
    a = lightning_indexer(q, k, w, topk=20, bounds=wild, backend=backend)
    b = lightning_indexer(q, k, w, topk=20, bounds=whole, backend=backend)
    assert torch.equal(a[0], b[0])
    with pytest.raises(ValueError, match=r"bounds: got values in \[-5, 99\]; expected 0 <= lo"):
        lightning_indexer(q, k, w, topk=4, bounds=wild, validate=True, backend=backend)
    with pytest.raises(ValueError, match=r"bounds: got lo=16 > hi=0 at \[0, 0\]"):
        lightning_indexer(q, k, w, topk=4, bounds=whole.flip(-1), validate=True, backend=backend)


@pytest.mark.parametrize(("B", "S", "T"), [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_empty_sizes(backend, B, S, T):
    indices, scores = lightning_indexer(
        torch.randn(B, S, 2, 3),
        torch.randn(B, T, 3),
        torch.randn(B, S, 2),
        topk=5,
        bounds=torch.zeros(B, S, 2, dtype=torch.int32),
        backend=backend,
    )
    assert indices.shape == scores.shape == (B, S, 5)
    assert (indices == -1).all()


Q, K, W = torch.randn(2, 8, 3, 4), torch.randn(2, 8, 4), torch.randn(2, 8, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_index": Q[0]}, r"q_index: got shape \(8, 3, 4\); expected 4 dimensions \[B, S, H, D"),
        ({"q_index": Q.int()}, r"q_index: got torch.int32; expected float64, float32"),
        ({"q_index": Q[:, :, :0]}, r"q_index: got shape \(2, 8, 0, 4\); expected H"),
        ({"k_index": K[..., :3]}, r"k_index: got shape \(2, 8, 3\); expected \[B=2, T=8, D=4\]"),
        ({"k_index": K.double()}, r"k_index: got torch.float64; expected float32"),
        ({"k_index": K.to("meta")}, r"k_index: got device meta; expected cpu, where q_index is"),
        ({"weights": W[:, :, :2]}, r"weights: got shape \(2, 8, 2\); expected \[B=2, S=8, H=3\]"),
        ({"weights": W.double()}, r"weights: got torch.float64; expected float32"),
        ({"weights": W[0]}, r"weights: got shape \(8, 3\); expected 3 dimensions \[B, S, H\]"),
        ({"k_index": K[:1]}, r"k_index: got shape \(1, 8, 4\); expected \[B=2, T=8, D=4\]"),
        ({"k_index": K[0]}, r"k_index: got shape \(8, 4\); expected 3 dimensions \[B, T, D\]"),
        ({"weights": W.to("meta")}, r"weights: got device meta; expected cpu"),
        (
            {
                "q_index": torch.empty(1, 8, 3, 4, device="meta"),
                "k_index": torch.empty(1, 2**31, 4, device="meta"),
                "weights": torch.empty(1, 8, 3, device="meta"),
            },
            r"k_index: got T=2147483648 keys; expected at most 2147483647",
        ),
        ({"topk": 0}, r"topk: got 0; expected an int >= 1"),
        ({"topk": 2.0}, r"topk: got 2.0; expected an int >= 1"),
        ({"topk": True}, r"topk: got True; expected an int >= 1"),
        ({"topk": 2**40}, r"topk: got 1099511627776; expected B \* S \* topk"),
        ({"k_index": K[:, :7]}, r"bounds: got None with S=8 queries and T=7 keys"),
        ({"bounds": torch.zeros(2, 8, 2)}, r"bounds: got torch.float32; expected int32"),
        ({"bounds": torch.zeros(2, 7, 2).int()}, r"bounds: got shape \(2, 7, 2\)"),
        ({"bounds": torch.zeros(2, 8).int()}, r"bounds: got shape \(2, 8\)"),
        ({"bounds": torch.zeros(2, 8, 2, device="meta").int()}, r"bounds: got device meta"),
        ({"backend": "cuda"}, r"backend: got 'cuda'; expected one of reference, torch"),
        ({"backend": "npu"}, r"backend: got 'npu'; it is not usable here"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        lightning_indexer(**{"q_index": Q, "k_index": K, "weights": W, "topk": 2} | change)


def test_not_a_tensor():
    with pytest.raises(TypeError, match=r"k_index: got list; expected a torch.Tensor"):
        lightning_indexer(Q, [1.0], W, topk=2)

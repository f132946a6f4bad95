"""The Triton kernels: on a CUDA device if there is one, else in Triton's interpreter, in fp32.

On Ascend the same kernels are tested as the code they are lowered to: tests/ascend.
"""

import itertools
import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings

import dsa_definitions as definition
from dsa_definitions import PACKED, Case, assert_close, cases, leaves
from npu_dsa_kernels import (
    attention_target,
    backends,
    causal_bounds,
    dsa_attention,
    indexer_kl_loss,
    lightning_indexer,
    sparse_attention,
    swiglu,
)

pytest.importorskip("triton", reason="triton is not installed: it has no wheel for this platform")

from npu_dsa_kernels.backends.triton import dsa, launch, tiles

# Empty rows take the logarithm of zero: numpy says so, devices do not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-5
FEW = settings(max_examples=4)  # the interpreter takes a second for each


def on_device(*tensors):
    return [None if x is None else x.to(DEVICE) for x in tensors]


def gradients(outputs, upstream, inputs):
    """Gradients of the finite part of the outputs."""
    total = sum(
        (x.masked_fill(x.isinf(), 0.0) * g.to(x)).sum()
        for x, g in zip(outputs, upstream, strict=True)
    )
    return torch.autograd.grad(total, inputs)


def normal(*shape, seed=5):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention(function, q, kv, indices, v_dim, **kwargs):
    inputs = leaves(q, kv)
    out, lse = function(*inputs, indices, scale=0.4, v_dim=v_dim, **kwargs)
    if not out.requires_grad:  # the definition of a case without a single key
        return {"out": out, "lse": lse, "dq": torch.zeros_like(q), "dkv": torch.zeros_like(kv)}
    grads = gradients((out, lse), (normal(*out.shape), normal(*lse.shape)), inputs)
    return dict(zip(("out", "lse", "dq", "dkv"), (out, lse, *grads), strict=True))


def loss(function, inputs, indices, target, **kwargs):
    inputs = leaves(*inputs)
    loss_BS = function(*inputs, indices, target, **kwargs)
    if not loss_BS.requires_grad:
        return {"loss": loss_BS} | {f"d{i}": torch.zeros_like(x) for i, x in enumerate(inputs)}
    grads = gradients((loss_BS,), (normal(*loss_BS.shape),), inputs)
    return {"loss": loss_BS} | {f"d{i}": g for i, g in enumerate(grads)}


def assert_same(actual, expected, tolerance=TOLERANCE, **kwargs):
    for name in expected:
        assert_close(actual[name].cpu(), expected[name].cpu(), tolerance, name, **kwargs)


# --- against the definitions ---------------------------------------------------------------------


@FEW
@given(case=cases())
def test_indexer_is_exact(case):
    q = case.integers(case.B, case.S, case.H, case.D)
    k = case.integers(case.B, case.T, case.D)
    w = case.integers(case.B, case.S, case.H)
    expected = definition.lightning_indexer(q, k, w, case.topk, case.bounds)
    inputs = on_device(q.float(), k.float(), w.float())
    (bounds,) = on_device(case.bounds)
    indices, scores = lightning_indexer(*inputs, topk=case.topk, bounds=bounds, backend="triton")
    assert torch.equal(indices.cpu(), expected[0])
    assert torch.equal(scores.cpu().double(), expected[1])


@FEW
@given(case=cases())
def test_attention_and_target(case):
    q, kv = case.attention(torch.float32)
    indices, v_dim = case.indices(), max(1, case.D - 2)
    expected = attention(definition.sparse_attention, q.double(), kv.double(), indices, v_dim)
    q, kv, indices = on_device(q, kv, indices)
    actual = attention(sparse_attention, q, kv, indices, v_dim, backend="triton")
    assert_same(actual, expected)
    target = attention_target(q, kv, indices, actual["lse"], scale=0.4, backend="triton")
    by_definition = definition.attention_target(q.cpu().double(), kv.cpu().double(), indices, 0.4)
    assert_close(target.cpu(), by_definition, TOLERANCE)


@FEW
@given(case=cases())
def test_indexer_loss(case):
    inputs, indices = case.indexer(torch.float32), case.indices()
    target = case.normal(case.B, case.S, case.topk).exp()
    target = target.masked_fill(target < 0.7, 0.0)
    expected = loss(definition.indexer_kl_loss, [x.double() for x in inputs], indices, target)
    *inputs, indices, target = on_device(*inputs, indices, target.float())
    actual = loss(indexer_kl_loss, inputs, indices, target, backend="triton")
    assert_same(actual, expected, floor=0.1)
    bounds = on_device(case.bounds)[0]
    # The indexer's own scores, where these are the keys it chose.
    best, scores = lightning_indexer(*inputs, topk=case.topk, bounds=bounds, backend="triton")
    known = loss(indexer_kl_loss, inputs, best, target, scores=scores, backend="triton")
    assert_same(known, loss(indexer_kl_loss, inputs, best, target, backend="triton"), floor=0.1)


# --- edges ---------------------------------------------------------------------------------------


def test_more_keys_wanted_than_there_are():
    case = Case(B=1, S=6, T=6, H=2, D=5, topk=40, bounds=None, seed=0)
    inputs = case.indexer(torch.float32)
    expected = definition.lightning_indexer(*inputs, 40)
    indices, scores = lightning_indexer(*on_device(*inputs), topk=40, backend="triton")
    assert torch.equal(indices.cpu(), expected[0])
    assert_close(scores.cpu(), expected[1], TOLERANCE)


def test_all_scores_tie():
    T, K = 70, 20  # ties over several blocks
    q, k, w = on_device(torch.zeros(1, 3, 2, 4), torch.zeros(1, T, 4), torch.ones(1, 3, 2))
    bounds = torch.tensor([[[0, T], [9, 60], [50, 60]]], dtype=torch.int32)
    indices, _ = lightning_indexer(q, k, w, topk=K, bounds=bounds.to(DEVICE), backend="triton")
    assert indices[0].tolist() == [
        list(range(20)), list(range(9, 29)), [*range(50, 60), *[-1] * 10]
    ]  # fmt: skip


def test_nan_is_the_best_score_and_hidden_keys_stay_hidden():
    q = torch.ones(1, 3, 1, 4, device=DEVICE)
    k = torch.arange(48.0, device=DEVICE).view(1, 12, 4)
    k[0, 2], k[0, 5, 0], k[0, 11] = math.nan, math.inf, math.nan
    w = torch.ones(1, 3, 1, device=DEVICE)
    bounds = torch.tensor([[[0, 8], [3, 11], [4, 2]]], dtype=torch.int32, device=DEVICE)
    indices, scores = lightning_indexer(q, k, w, topk=3, bounds=bounds, backend="triton")
    assert indices[0].tolist() == [[2, 5, 7], [5, 10, 9], [-1, -1, -1]]
    assert scores[0, 0, 0].isnan()
    assert scores[0, 0, 1] == math.inf
    assert (scores[0, 2] == -math.inf).all()


def test_bounds_beyond_the_keys():
    T = 6
    case = Case(B=1, S=9, T=T, H=2, D=5, topk=3, bounds=None, seed=0)
    inputs = on_device(*case.indexer(torch.float32))
    ends = itertools.product([-(2**31), -1, 2**31 - 1], [-(2**31), T + 1, 2**31 - 1])
    wild = torch.tensor([list(ends)], dtype=torch.int32)
    indices, _ = lightning_indexer(*inputs, topk=3, bounds=wild.to(DEVICE), backend="triton")
    expected = definition.lightning_indexer(*case.indexer(torch.float32), 3, wild.clamp(0, T))[0]
    assert torch.equal(indices.cpu(), expected)
    assert (expected >= 0).any()


def test_queries_in_several_blocks(monkeypatch):
    inputs, bounds = on_device(*PACKED.indexer(torch.float32)), PACKED.bounds.to(DEVICE)
    whole = lightning_indexer(*inputs, topk=4, bounds=bounds, backend="triton")
    monkeypatch.setattr(dsa, "_WORKSPACE_BYTES", 5 * 16 * 4)  # five queries at a time
    parts = lightning_indexer(*inputs, topk=4, bounds=bounds, backend="triton")
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])


@pytest.mark.skipif(DEVICE != "cpu", reason="a device gathers first or it does not")
def test_keys_gathered_before_in_several_blocks(monkeypatch):
    q, kv = PACKED.attention(torch.float32)
    indices = PACKED.indices()
    expected = attention(sparse_attention, q, kv, indices, 3, backend="triton")
    inputs = (q, kv, indices, expected["lse"])
    target = attention_target(*inputs, scale=0.4, backend="triton")
    monkeypatch.setattr(dsa, "_WORKSPACE_BYTES", 5 * 128 * 5 * 8)  # a few queries at a time
    launcher = _Tiles("ascend")
    with launch.use(launcher):
        actual = attention(sparse_attention, q, kv, indices, 3, backend="triton")
        gathered = attention_target(*inputs, scale=0.4, backend="triton")
    assert launcher.launched.count("scatter_slots") == 7  # of 32 queries
    assert_same(actual, expected)
    assert_close(gathered, target, TOLERANCE)


@pytest.mark.parametrize("wild", [-1, -(2**31), 16, 2**31 - 1])
def test_indices_outside_read_nothing(wild):
    q, kv = on_device(*PACKED.attention(torch.float32))
    indices = PACKED.indices()
    indices[(indices == 0) | (indices == 6) | (indices == 15)] = -1
    expected = attention(sparse_attention, q, kv, indices.to(DEVICE), 3, backend="triton")
    poisoned = kv.clone()
    poisoned[:, [0, 6, 15]] = math.nan  # the first, the last and one between
    indices = indices.masked_fill(indices == -1, wild).to(DEVICE)
    actual = attention(sparse_attention, q, poisoned, indices, 3, backend="triton")
    assert_same(actual, expected, 0.0 if DEVICE == "cpu" else TOLERANCE)
    assert (actual["dkv"][:, [0, 6, 15]] == 0).all()
    target = attention_target(q, poisoned, indices, actual["lse"], scale=0.4, backend="triton")
    assert target.isfinite().all()


def test_rows_without_keys():
    q, kv = on_device(*PACKED.attention(torch.float32))
    indices = torch.full((2, 16, 4), -1, dtype=torch.int32)
    indices[1, 3:] = PACKED.indices()[1, 3:]
    empty = (indices < 0).all(-1)
    q[empty] = math.nan  # what such a row holds does not matter
    actual = attention(sparse_attention, q, kv, indices.to(DEVICE), 3, backend="triton")
    assert (actual["out"][empty] == 0).all()
    assert (actual["lse"][empty] == -math.inf).all()
    assert (actual["dq"][empty] == 0).all()
    assert (actual["dkv"][0] == 0).all()
    assert actual["dkv"].isfinite().all()
    inputs = on_device(*PACKED.indexer(torch.float32))
    inputs[0][empty] = math.nan
    target = torch.ones(2, 16, 4, device=DEVICE)
    result = loss(indexer_kl_loss, inputs, indices.to(DEVICE), target, backend="triton")
    for name in ("loss", "d0", "d2"):
        assert (result[name][empty] == 0).all(), name
    assert result["d1"].isfinite().all()


@pytest.mark.parametrize("spread", [0.7, 5.7, 29.0])
def test_loss_gradients_at_any_spread_of_the_scores(spread):
    S, K, H, D = 24, 6, 4, 16
    q, k, w = (normal(1, S, *shape).float() for shape in ((H, D), (D,), (H,)))
    indices = normal(S, S).tril().argsort(-1, descending=True)[:, :K].int()
    indices = indices.masked_fill(indices > torch.arange(S)[:, None], -1)[None]
    w = w * (spread / torch.einsum("bshd,btd->bsht", q, k).relu().mul(w[..., None]).sum(2).std())
    target = (spread * normal(1, S, K)).softmax(-1)
    expected = loss(
        indexer_kl_loss, [x.double() for x in (q, k, w)], indices, target, backend="reference"
    )
    q, k, w, indices, target = on_device(q, k, w, indices, target.float())
    assert_same(
        loss(indexer_kl_loss, (q, k, w), indices, target, backend="triton"), expected, floor=0.1
    )


def test_heads_that_fill_no_tile():
    """Powers of two in every width but the heads, and keys that only heads not there would mind."""
    q, kv = normal(1, 6, 3, 32).float(), normal(1, 12, 32).float()
    indices = normal(1, 6, 12).argsort(-1)[..., :3].int()
    expected = attention(
        sparse_attention, q.double(), kv.double(), indices, 16, backend="reference"
    )
    q, kv, indices = on_device(q, kv, indices)
    actual = attention(sparse_attention, q, kv, indices, 16, backend="triton")
    assert_same(actual, expected)
    q[..., 4], kv[0, indices[0, 2, 0], 4] = -q[..., 4].abs(), math.inf
    results = []
    for backend in ("reference", "triton"):
        _, lse = sparse_attention(q, kv, indices, scale=0.4, v_dim=16, backend=backend)
        results.append(attention_target(q, kv, indices, lse, scale=0.4, backend=backend))
    assert_close(results[1].cpu(), results[0].cpu(), TOLERANCE)
    assert (results[1][0, 2, 0] == 0).all()


def test_targets_of_any_size():
    inputs, indices = on_device(*PACKED.indexer(torch.float32)), PACKED.indices().to(DEVICE)
    target = on_device(PACKED.normal(2, 16, 4).exp().float())[0]
    expected = loss(indexer_kl_loss, inputs, indices, target, backend="triton")
    for factor in (1e-36, 1e30):
        actual = loss(indexer_kl_loss, inputs, indices, target * factor, backend="triton")
        assert_same(actual, expected, floor=0.1)


def test_non_contiguous():
    q, kv = on_device(*PACKED.attention(torch.float32))
    indices = PACKED.indices().to(DEVICE)
    expected = attention(sparse_attention, q, kv, indices, 3, backend="triton")

    def strided(x):
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    actual = attention(
        lambda q, kv, *rest, **kwargs: sparse_attention(strided(q), strided(kv), *rest, **kwargs),
        q, kv, strided(indices), 3, backend="triton",
    )  # fmt: skip
    assert_same(actual, expected, 0.0 if DEVICE == "cpu" else TOLERANCE)


@pytest.mark.parametrize(("B", "S", "T"), [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_empty_sizes(B, S, T):
    q, kv = leaves(*on_device(torch.randn(B, S, 2, 5), torch.randn(B, T, 5)))
    bounds = torch.tensor([0, T], dtype=torch.int32, device=DEVICE).expand(B, S, 2)
    weights = torch.randn(B, S, 2, device=DEVICE, requires_grad=True)
    result = dsa_attention(
        q, kv, q, kv, weights, topk=3, scale=1.0, v_dim=4, bounds=bounds, backend="triton"
    )
    assert (result.indices == -1).all() or T
    assert (result.out == 0).all() or T
    grads = torch.autograd.grad((result.out.sum() + result.kl.sum()), (q, kv, weights))
    assert all((g == 0).all() or T for g in grads)


# --- the tiles of the devices --------------------------------------------------------------------


class _Tiles:
    """Runs kernels as ever, with the tiles of another target."""

    programs = 3

    def __init__(self, target):
        self.target = target
        self.launched = []

    def __call__(self, kernel, programs, arguments, constants, tiles):
        self.launched.append(kernel.__name__)
        kernel[(programs,)](*arguments, **constants)


ATTENTION_KERNELS = {"sparse_attention", "sparse_attention_backward", "attention_target"}
GATHERING_KERNELS = {"gather_slots", "scatter_slots"}
INDEXER_KERNELS = {
    "index_scores", "select_topk", "order_topk", "indexer_kl_loss", "indexer_kl_loss_backward",
}  # fmt: skip

elsewhere = pytest.mark.skipif(DEVICE != "cpu", reason="the tiles of one device fit no other")


@elsewhere
@pytest.mark.parametrize(
    ("target", "heads"),
    [("ascend", 128), ("ascend", 64), ("ascend", 32), ("ascend", 16), ("cuda", 64)],
)
def test_attention_of_model_size(target, heads):
    """DeepSeek-V3.2's widths, and its heads under TP 1 to 8: D 576 of 512, K 2048 of T 8192."""
    T, K, D, V = 8192, 2048, 576, 512
    q, kv = D**-0.25 * normal(1, 1, heads, D), D**-0.25 * normal(1, T, D)
    indices = torch.rand(1, 1, T, generator=torch.Generator().manual_seed(0)).argsort(-1)
    indices = indices[..., :K].int()
    indices[..., 100:103] = -1
    expected = attention(sparse_attention, q, kv, indices, V, backend="reference")
    target_BSK = attention_target(q, kv, indices, expected["lse"], scale=0.4, backend="reference")
    launcher = _Tiles(target)
    with launch.use(launcher):
        actual = attention(sparse_attention, q.float(), kv.float(), indices, V, backend="triton")
        summed = attention_target(
            q.float(), kv.float(), indices, actual["lse"], scale=0.4, backend="triton"
        )
    first = GATHERING_KERNELS if target == "ascend" else set()
    assert set(launcher.launched) == ATTENTION_KERNELS | first
    assert_same(actual, expected)
    assert_close(summed, target_BSK, TOLERANCE)


@elsewhere
@pytest.mark.parametrize("target", ["ascend", "cuda"])
def test_indexer_of_model_size(target):
    """DeepSeek-V3.2's 64 heads of 128, K 2048 of T 8192."""
    T, K, H, D = 8192, 2048, 64, 128
    launcher = _Tiles(target)
    bounds = torch.tensor([[[1, T - 2]]], dtype=torch.int32)
    whole = Case(B=1, S=1, T=T, H=H, D=D, topk=K, bounds=bounds, seed=0)
    inputs = [whole.integers(1, 1, H, D), whole.integers(1, T, D), whole.integers(1, 1, H)]
    expected_indices, _ = lightning_indexer(*inputs, topk=K, bounds=bounds, backend="reference")
    with launch.use(launcher):
        indices, _ = lightning_indexer(
            *(x.float() for x in inputs), topk=K, bounds=bounds, backend="triton"
        )
    assert torch.equal(indices, expected_indices)  # nothing rounds

    inputs = [D**-0.5 * normal(1, 1, H, D), normal(1, T, D), normal(1, 1, H)]
    indices = torch.rand(1, 1, T, generator=torch.Generator().manual_seed(0)).argsort(-1)
    indices, mass = indices[..., :K].int(), normal(1, 1, K).exp()
    expected = loss(indexer_kl_loss, inputs, indices, mass, backend="reference")
    k = inputs[1][0, indices[0, 0]]
    scores = (inputs[2][0].T * (inputs[0][0, 0] @ k.T).relu()).sum(0)[None, None].float()
    inputs = [x.float() for x in inputs]
    with launch.use(launcher):
        actual = loss(indexer_kl_loss, inputs, indices, mass.float(), backend="triton")
        known = indexer_kl_loss(*inputs, indices, mass.float(), scores=scores, backend="triton")
    assert set(launcher.launched) == INDEXER_KERNELS
    assert_same(actual, expected, floor=1e-2)
    assert_close(known, expected["loss"], TOLERANCE)


@elsewhere
def test_topk_of_the_longest_row():
    T, K = 32768, 2048
    q = torch.ones(1, 1, 1, 16)
    k = normal(1, T, 16).mul(50).round().float()  # many ties
    w = torch.ones(1, 1, 1)
    bounds = torch.tensor([[[7, T - 5]]], dtype=torch.int32)
    with launch.use(_Tiles("ascend")):
        indices, scores = lightning_indexer(q, k, w, topk=K, bounds=bounds, backend="triton")
    expected = lightning_indexer(q, k, w, topk=K, bounds=bounds, backend="reference")
    assert torch.equal(indices, expected[0])
    assert torch.equal(scores, expected[1])
    assert scores.unique().numel() < K / 2


def test_every_kernel_has_tiles_for_every_target():
    names = {target: {kernel for kernel, _, _ in tiles.entries(target)} for target in
             ("ascend", "cuda", "interpreter")}  # fmt: skip
    assert names["cuda"] == names["interpreter"] >= ATTENTION_KERNELS | INDEXER_KERNELS
    assert names["ascend"] == names["cuda"] | GATHERING_KERNELS


# --- what it does not take -----------------------------------------------------------------------


def test_status():
    assert backends()["triton"] == "available"


def said(code: str, **environment: str) -> str:
    """What another process prints, in which nothing is set and imported yet."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    code = f"import torch, npu_dsa_kernels as n\nX = torch.randn(2, 4)\n{code}"
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


TRY = "try: n.hadamard(X, backend='triton')\nexcept ValueError as error: print(error)"


@pytest.mark.skipif(DEVICE != "cpu", reason="there is a device")
def test_status_without_a_device():
    reason = "not usable here: there is no CUDA device and no NPU (TRITON_INTERPRET=1 runs the"
    status, error = said(f"print(n.backends()['triton'])\n{TRY}").splitlines()
    assert status.startswith(reason)
    assert error.startswith(f"backend: got 'triton'; it is {reason}")


def test_it_traces():
    q, kv = on_device(*PACKED.attention(torch.float32))
    indices = PACKED.indices().to(DEVICE)

    def f(q, kv):
        return sparse_attention(q, kv, indices, scale=0.4, v_dim=3, backend="triton")[0]

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, kv), f(q, kv))


def test_status_where_the_interpreter_comes_too_late():
    late = "import triton, os; os.environ['TRITON_INTERPRET'] = '1'\n"
    reason = "TRITON_INTERPRET=1 was changed after triton was imported: set it before Python starts"
    assert reason in said(late + TRY)


def test_status_without_triton():
    hidden = "import sys; sys.modules['triton'] = None\n"
    message = said(hidden + TRY)
    assert message.startswith("backend: got 'triton'; it is not usable here: ")
    assert 'pip install "npu-dsa-kernels[triton]"' in message


def test_triton_is_imported_at_first_use():
    quiet = "import sys\nn.hadamard(X)\nprint('triton' in sys.modules, n.backends()['torch'])"
    assert said(quiet, NPU_DSA_BACKEND="reference") == "False available\n"


@pytest.mark.skipif(DEVICE != "cpu", reason="devices compute bf16 as it is meant")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_interpreter_takes_fp32_alone(dtype):
    q, kv = PACKED.attention(dtype)
    message = rf"q: got {dtype}; backend 'triton' takes float32 on interpreter; backend='torch'"
    with pytest.raises(ValueError, match=message):
        sparse_attention(q, kv, PACKED.indices(), scale=1.0, v_dim=3, backend="triton")
    with pytest.raises(ValueError, match="q_index: got torch"):
        lightning_indexer(*PACKED.indexer(dtype), topk=3, backend="triton")


@pytest.mark.parametrize("target", ["ascend", "cuda"])
def test_widths_that_do_not_fit(target):
    q, kv = torch.zeros(1, 1, 1, 576, device=DEVICE), torch.zeros(1, 1, 576, device=DEVICE)
    indices, weights = (
        torch.zeros(1, 1, 1, device=DEVICE).int(),
        torch.zeros(1, 1, 1, device=DEVICE),
    )
    with launch.use(_Tiles(target)):
        with pytest.raises(
            ValueError, match=rf"v_dim: got a value of 576; .* at most 512 on {target}"
        ):
            sparse_attention(q, kv, indices, scale=1.0, v_dim=576, backend="triton")
        with pytest.raises(ValueError, match=r"kv: got columns after the value: 65; .* at most 64"):
            sparse_attention(q, kv, indices, scale=1.0, v_dim=511, backend="triton")
        with pytest.raises(ValueError, match=r"q_index: got a head of 576; .* at most 128"):
            lightning_indexer(q, kv, weights, topk=1, backend="triton")
        q, weights = q.expand(1, 1, 65, 576)[..., :8], weights.expand(1, 1, 65)
        with pytest.raises(ValueError, match=r"q_index: got heads: 65; .* at most 64"):
            lightning_indexer(q, kv[..., :8], weights, topk=1, backend="triton")


def test_operators_without_a_kernel():
    message = "backend: got 'triton'; it has no kernel for swiglu; backend='torch' runs on"
    with pytest.raises(ValueError, match=message):
        swiglu(torch.randn(3, 8, device=DEVICE), backend="triton")


def test_more_keys_than_32_bits_count():
    T, D = 2**22, 576
    kv = torch.zeros(1, device=DEVICE).expand(1, T, D)
    q, indices = torch.zeros(1, 1, 1, D, device=DEVICE), torch.zeros(1, 1, 1, device=DEVICE).int()
    message = rf"kv: got T={T}, D={D}; backend 'triton' takes T \* D <= 2147483647; backend='torch'"
    with pytest.raises(ValueError, match=message):
        sparse_attention(q, kv, indices, scale=1.0, v_dim=512, backend="triton")
    with pytest.raises(ValueError, match=f"k_index: got T={T}, D={D}; backend 'triton' takes"):
        lightning_indexer(
            q, kv, q[..., 0], topk=1, bounds=indices.expand(1, 1, 2), backend="triton"
        )


def test_deterministic_algorithms_are_heeded():
    on_a_device = torch.empty(0, device="meta")
    dsa._sums_in_no_order("sparse_attention", on_a_device)
    torch.use_deterministic_algorithms(True)
    try:
        dsa._sums_in_no_order("sparse_attention", torch.empty(0))  # the interpreter has one order
        with pytest.raises(RuntimeError, match=r"^sparse_attention: .* use backend='torch'$"):
            dsa._sums_in_no_order("sparse_attention", on_a_device)
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match="in no fixed order"):
            dsa._sums_in_no_order("sparse_attention", on_a_device)
    finally:
        torch.use_deterministic_algorithms(False)


def test_bounds_of_packed_documents():
    position = torch.cat([torch.arange(5), torch.arange(11)]).expand(2, 16)
    inputs = PACKED.indexer(torch.float32)
    bounds = causal_bounds(position)
    actual = lightning_indexer(
        *on_device(*inputs), topk=4, bounds=bounds.to(DEVICE), backend="triton"
    )
    expected = definition.lightning_indexer(*inputs, 4, bounds)
    assert torch.equal(actual[0].cpu(), expected[0])

"""The compiled CPU kernels, in every instruction set of this machine and switched off.

Wider shapes than the other tests have: several tiles of heads and rows, dims that need padding,
and more queries than a block holds. Expected values come from the fp64 reference, which has its own
tests against the definitions.
"""

import ctypes
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from dsa_definitions import assert_close, leaves
from npu_dsa_kernels import (
    attention_target,
    backends,
    hadamard,
    indexer_kl_loss,
    lightning_indexer,
    sparse_attention,
)
from npu_dsa_kernels.backends import compiled
from npu_dsa_kernels.backends.reference import sorted_topk

SETS = compiled.instruction_sets()
BF16 = 2**-8  # half a unit in the last place of 1, relative

pytestmark = pytest.mark.skipif(not SETS, reason=compiled.status())


@pytest.fixture(params=["0", *SETS])
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("NPU_DSA_COMPILED", request.param)
    return request.param


@dataclass(frozen=True)
class Inputs:
    """One indexer and attention layer's worth of inputs, from a seed."""

    seed: int
    B: int = 1
    S: int = 64
    T: int = 64
    H: int = 5
    D: int = 40
    V: int = 24
    Hi: int = 3
    Di: int = 20
    K: int = 16
    dtype: torch.dtype = torch.float32
    spread: float = 1.0

    def normal(self, *shape: int, salt: int = 0) -> Tensor:
        g = torch.Generator().manual_seed(self.seed + 31 * salt)
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def build(self) -> dict[str, Tensor]:
        """Inputs and upstream gradients, as float64 numbers that self.dtype can hold."""
        B, S, T = self.B, self.S, self.T
        tensors = {
            "q": self.normal(B, S, self.H, self.D, salt=1) * self.spread,
            "kv": self.normal(B, T, self.D, salt=2),
            "q_index": self.normal(B, S, self.Hi, self.Di, salt=3) * self.spread,
            "k_index": self.normal(B, T, self.Di, salt=4),
            "weights": self.normal(B, S, self.Hi, salt=5),
            "d_out": self.normal(B, S, self.H, self.V, salt=6),
            "d_lse": self.normal(B, S, self.H, salt=7),
            "d_kl": self.normal(B, S, salt=8),
            "target": self.normal(B, S, self.K, salt=9).abs(),
        }
        tensors = {name: x.to(self.dtype).double() for name, x in tensors.items()}
        order = self.normal(B, S, T, salt=10).argsort(-1)[..., : self.K].int()
        indices = torch.nn.functional.pad(order, (0, self.K - order.shape[-1]), value=-1)
        hole = self.normal(B, S, self.K, salt=11) > 1
        tensors["indices"] = indices.masked_fill(hole, -1).masked_fill(hole.roll(1, -1), T + 7)
        return tensors


def results(x: dict[str, Tensor], dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
    """Every operator of the layer, and all gradients."""
    indices, v_dim, scale = x["indices"], x["d_out"].shape[-1], 0.3
    q, kv, q_index, k_index = leaves(x["q"], x["kv"], x["q_index"], x["k_index"], dtype=dtype)
    wide = dtype if dtype == torch.float64 else torch.float32
    (weights,) = leaves(x["weights"], dtype=wide)
    out, lse = sparse_attention(q, kv, indices, scale=scale, v_dim=v_dim, backend=backend)
    seen = lse.isfinite()
    dq, dkv = torch.autograd.grad(
        (out * x["d_out"].to(dtype)).sum() + (lse * x["d_lse"].to(wide))[seen].sum(), (q, kv)
    )
    target = attention_target(q, kv, indices, lse.detach(), scale=scale, backend=backend)
    kl = indexer_kl_loss(q_index, k_index, weights, indices, x["target"].to(wide), backend=backend)
    grads = torch.autograd.grad((kl * x["d_kl"].to(wide)).sum(), (q_index, k_index, weights))
    names = ("dq_index", "dk_index", "d_weights")
    return {
        "out": out, "lse": lse, "dq": dq, "dkv": dkv, "target": target, "kl": kl,
        **dict(zip(names, grads, strict=True)),
    }  # fmt: skip


def tolerance(name: str, dtype: torch.dtype) -> float:
    """fp32 sums everywhere; bf16 rounds what is stored, and P and dS before their products."""
    if dtype == torch.float32 or name in ("lse", "target", "kl"):
        return 1e-5
    return 4 * BF16


def check(inputs: Inputs, backend: str = "torch") -> None:
    x = inputs.build()
    expected = results(x, torch.float64, "reference")
    actual = results(x, inputs.dtype, backend)
    for name, value in expected.items():
        assert_close(actual[name], value, tolerance(name, inputs.dtype), name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"H": 16, "D": 96, "V": 64, "Hi": 8, "Di": 32, "K": 33},
        {"H": 1, "D": 1, "V": 1, "Hi": 1, "Di": 1, "K": 1},
        {"H": 9, "K": 80, "S": 33, "T": 70, "B": 2},
        {"H": 40, "K": 7, "S": 200, "T": 90},
    ],
    ids=str,
)
def test_values_and_gradients(instruction_set, dtype, sizes):
    check(Inputs(seed=1, dtype=dtype, **sizes))


@settings(max_examples=200)
@given(
    st.builds(
        Inputs,
        seed=st.integers(0, 2**20),
        B=st.integers(1, 2),
        S=st.integers(1, 40),
        T=st.integers(1, 60),
        H=st.integers(1, 20),
        D=st.integers(24, 70),
        V=st.integers(1, 24),
        Hi=st.integers(1, 9),
        Di=st.integers(1, 40),
        K=st.integers(1, 70),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        spread=st.sampled_from([0.1, 1.0, 5.0]),
    ),
    st.sampled_from(["0", *SETS]),
)
def test_random_shapes(inputs, name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPU_DSA_COMPILED", name)
        check(inputs)


@pytest.mark.parametrize("spread", [0.7, 5.7, 29.0])
def test_kl_gradient_at_any_spread_of_the_scores(instruction_set, spread):
    x = Inputs(seed=2, Hi=4, Di=32).build()
    _, scores = lightning_indexer(x["q_index"], x["k_index"], x["weights"], topk=64)
    x["weights"] *= spread / scores[scores.isfinite()].std()
    expected, actual = results(x, torch.float64, "reference"), results(x, torch.float32, "torch")
    for name in ("kl", "dq_index", "dk_index", "d_weights"):
        assert_close(actual[name], expected[name], 1e-5, name)


def test_loss_of_many_keys(instruction_set):
    """Sums over thousands of slots lose nothing that fp32 could keep."""
    x = Inputs(seed=8, S=3, T=5000, K=4096, H=1, D=32, V=32, Hi=2, Di=32).build()
    expected, actual = results(x, torch.float64, "reference"), results(x, torch.float32, "torch")
    assert_close(actual["kl"], expected["kl"], 1e-6, "kl")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_threads_or_on_the_run(instruction_set, dtype):
    x = Inputs(seed=3, S=150, H=10, K=20, B=2, dtype=dtype).build()
    indexer = (x["q_index"], x["k_index"][:, :1].expand(2, 150, -1), x["weights"])
    before = torch.get_num_threads()
    try:
        runs = []
        # Without the compiled kernels, torch's own matmuls may split their sums by the threads.
        for threads in (2, 2) if instruction_set == "0" else (1, 2, 3, 8, 8):
            torch.set_num_threads(threads)
            assert compiled._shape(x["q"], x["kv"], 1).threads == threads
            selected = lightning_indexer(*(t.to(dtype) for t in indexer), topk=16, backend="torch")
            runs.append(
                results(x, dtype, "torch") | dict(zip(("indices", "scores"), selected, strict=True))
            )
    finally:
        torch.set_num_threads(before)
    for run in runs[1:]:
        for name, value in runs[0].items():
            assert torch.equal(run[name], value), name
    if instruction_set != "0":  # equal keys have equal scores: the lowest ones are taken
        assert (runs[0]["indices"][:, 16:] == torch.arange(16)).all()


@pytest.mark.parametrize("K", [1, 5, 64, 96, 100])
def test_topk_order(instruction_set, K):
    """Scores with ties, both zeros, infinities and NaN; every key's score is its own number."""
    T = 96
    g = torch.Generator().manual_seed(K)
    scores_T = torch.randint(0, 6, (T,), generator=g).float()
    scores_T[::9] = float("inf")
    scores_T[4::17] = float("nan")
    # q = (1, 1) and k = (x, -x) have relu(q . k) = 0 at any finite x; k = (x, 0) scores x.
    k = torch.stack([scores_T, torch.zeros(T)], -1)[None]
    q = torch.tensor([1.0, 1.0]).expand(1, T, 1, 2)
    sign = torch.where(torch.arange(T) % 2 == 0, 1.0, -1.0).view(1, T, 1)
    indices, scores = lightning_indexer(q, k, sign.contiguous(), topk=K, backend="torch")
    visible = torch.arange(T) <= torch.arange(T)[:, None]
    expected = sorted_topk(sign.view(T, 1) * scores_T.expand(T, T), visible, K)
    assert torch.equal(indices[0], expected[0])
    assert torch.equal(scores[0].nan_to_num(nan=7e7), expected[1].nan_to_num(nan=7e7))


def test_topk_of_many_nearly_equal_scores(instruction_set):
    """Scores that differ in the last bits only: every digit of the selection counts."""
    T, K = 512, 128
    g = torch.Generator().manual_seed(0)
    bits = 0x3F800000 + torch.randint(0, 5000, (T,), generator=g, dtype=torch.int32)
    scores_T = bits.view(torch.float32)
    bounds = torch.tensor([[0, T], [3, 300], [17, 145], [17, 144], [9, 9]], dtype=torch.int32)
    q, weights = torch.ones(1, len(bounds), 1, 1), torch.ones(1, len(bounds), 1)
    indices, scores = lightning_indexer(
        q, scores_T.view(1, T, 1), weights, topk=K, bounds=bounds[None], backend="torch"
    )
    key = torch.arange(T)
    visible = (key >= bounds[:, :1]) & (key < bounds[:, 1:])
    expected = sorted_topk(scores_T.expand(len(bounds), T), visible, K)
    assert torch.equal(indices[0], expected[0])
    assert torch.equal(scores[0], expected[1])


@pytest.mark.parametrize("scale", [-3.0, 0.0, 1e4, 1e-30])
def test_extreme_logits(instruction_set, scale):
    x = Inputs(seed=4).build()
    q, kv = x["q"], x["kv"]
    call = {"scale": scale, "v_dim": 24}
    expected = sparse_attention(q, kv, x["indices"], backend="reference", **call)
    actual = sparse_attention(q.float(), kv.float(), x["indices"], backend="torch", **call)
    # Logits near 1e5 carry an absolute error of 1e-2: compare what it leaves.
    assert_close(actual[1], expected[1], 1e-6, "lse")
    if scale < 1e4:
        assert_close(actual[0], expected[0], 1e-5, "out")
    assert actual[0].isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_numbers_show_and_stay_in_their_rows(instruction_set, bad):
    x = Inputs(seed=5).build()
    x["q"][0, 3] = bad
    x["kv"][0, 9] = bad
    actual = results(x, torch.float32, "torch")
    touched = (x["indices"][0] == 9).any(-1)
    touched[3] = True
    assert 5 < touched.sum() < 60
    for name in ("out", "lse", "dq"):
        bad_rows = ~actual[name][0].isfinite().flatten(1).all(1)
        empty = (x["indices"][0] < 0).all(-1)
        assert torch.equal(bad_rows & ~empty, touched & ~empty), name


def test_status_and_switch(monkeypatch):
    def compiled_status() -> str:
        return backends()["compiled"]

    assert compiled_status() == f"part of 'torch' on CPU: {SETS[0]}"
    monkeypatch.setenv("NPU_DSA_COMPILED", SETS[-1])
    assert compiled_status().endswith(SETS[-1])
    monkeypatch.setenv("NPU_DSA_COMPILED", "0")
    assert "switched off by NPU_DSA_COMPILED=0" in compiled_status()
    assert not compiled.takes(torch.ones(1), torch.ones(1))
    monkeypatch.setenv("NPU_DSA_COMPILED", "mmx")
    with pytest.raises(ValueError, match=r"NPU_DSA_COMPILED: got 'mmx'; expected 0 .* baseline"):
        compiled_status()
    monkeypatch.delenv("NPU_DSA_COMPILED")
    with pytest.raises(ValueError, match="backend: got 'compiled'; it is part of 'torch'"):
        hadamard(torch.ones(2), backend="compiled")


def test_an_installation_without_the_library_says_so(monkeypatch, tmp_path):
    x = Inputs(seed=6).build()
    expected = results(x, torch.float64, "reference")
    (tmp_path / "libdsa.so").write_text("not a library")
    for path, interface, message in (
        (tmp_path / "nothing.so", 1, "built without a C++ compiler"),
        (tmp_path / "libdsa.so", 1, "cannot be loaded"),
        (compiled.PATH, 10**6, "left over from another version"),
    ):
        monkeypatch.setattr(compiled, "PATH", path)
        monkeypatch.setattr(compiled, "_INTERFACE_VERSION", interface)
        compiled._load.cache_clear()
        try:
            assert message in backends()["compiled"]
            for name, value in results(x, torch.float32, "torch").items():
                assert_close(value, expected[name], 1e-5, name)
        finally:
            compiled._load.cache_clear()


def test_what_the_library_refuses_is_an_error():
    library, _ = compiled._load()
    x = torch.ones(1, 1, 1, 32)
    shape = compiled._shape(x, x[0], 1)
    shape.dtype = 9
    assert library.dsa_indexer_kl_loss(ctypes.byref(shape), *[None] * 6) == 2
    shape.dtype, shape.instruction_set = 0, 99
    assert library.dsa_indexer_kl_loss(ctypes.byref(shape), *[None] * 6) == 2
    shape.instruction_set, shape.K = 0, 2**50
    with pytest.raises(MemoryError, match="no memory for the buffers"):
        compiled._call("dsa_indexer_kl_loss", shape, *[x] * 6)

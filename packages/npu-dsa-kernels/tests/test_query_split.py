"""Tensor-parallel ranks that share out the indexer's queries compute what one rank computes."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from npu_dsa_kernels import QuerySplit, causal_bounds, dsa_attention
from npu_emulation import emulated
from split_ranks import run_ranks

B, S, H, L, R, HI, DI, K = 2, 48, 4, 6, 4, 4, 8, 8
SETTINGS = {"topk": K, "scale": 0.4, "v_dim": L}


def inputs(dtype=torch.float64, tied=False):
    g = torch.Generator().manual_seed(0)
    shapes = [(B, S, H, L + R), (B, S, L + R), (B, S, HI, DI), (B, S, DI), (B, S, HI)]
    tensors = [torch.randn(*x, generator=g, dtype=torch.float64) for x in shapes]
    # One head sees every key: scores of exactly 0 would tie.
    tensors[2][:, :, 0, 0], tensors[3][..., 0] = 9.0, tensors[3][..., 0].abs() + 2.0
    if tied:
        tensors[3][:] = tensors[3][:, :1]
    return [x.to(dtype).requires_grad_() for x in tensors]


def mask(name):
    """Bounds and kl_mask."""
    if name == "causal":
        return None, None
    positions = torch.cat([torch.arange(13), torch.arange(5), torch.arange(S - 18)]).expand(B, S)
    positions = positions.clone()
    positions[0, 30:32] = -1
    counts = torch.ones(B, S, dtype=torch.bool)
    counts[1, 40:] = counts[0, 3] = False
    return causal_bounds(positions), counts


def train(tensors, split, case, backend, kl_backend):
    bounds, kl_mask = mask(case)
    q, kv, q_index, k_index, weights = tensors
    if split is not None:
        h = H // split.group.size()
        q = q[:, :, split.group.rank() * h :][:, :, :h]
        q_index, weights = split.take(q_index), split.take(weights)
    layer = dsa_attention(
        *(q, kv, q_index, k_index, weights),
        **SETTINGS,
        bounds=bounds,
        query_split=split,
        kl_mask=kl_mask,
        kl_reduction="sum",
        kl_backend=kl_backend,
        backend=backend,
    )
    (layer.out.square().sum() + 0.3 * layer.kl).backward()
    return layer


def rank(rank, case, backend, kl_backend, dtype):
    split = QuerySplit(dist.group.WORLD)
    with emulated():
        tensors = inputs(dtype)
        layer = train(tensors, split, case, backend, kl_backend)
    kl, grads = layer.kl.detach(), [x.grad for x in tensors]
    for x in (kl, *grads):
        dist.all_reduce(x)
    return [x.numpy() for x in (layer.indices, kl, *grads)]


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["causal", "packed"])
@pytest.mark.parametrize(
    ("backend", "kl_backend", "dtype"),
    [
        ("reference", None, torch.float64),
        ("torch", None, torch.float64),
        ("npu", None, torch.float32),
        ("npu", "torch", torch.float32),
    ],
)
def test_ranks_equal_one(case, backend, kl_backend, dtype):
    with emulated():
        tensors = inputs(dtype)
        layer = train(tensors, None, case, backend, kl_backend)
    expected = [layer.indices, layer.kl.detach(), *(x.grad for x in tensors)]
    for world in (2, 4):
        for got in run_ranks(rank, world, case, backend, kl_backend, dtype):
            assert torch.equal(torch.from_numpy(got[0]), expected[0])
            for name, ours, wanted in zip(
                ("kl", "q", "kv", "q_index", "k_index", "weights"),
                got[1:],
                expected[1:],
                strict=True,
            ):
                error = (torch.as_tensor(ours) - wanted).norm() / wanted.norm()
                assert error < (1e-12 if dtype == torch.float64 else 3e-6), f"{world}: {name}"


def tied_rank(rank):
    layer = train(inputs(tied=True), QuerySplit(dist.group.WORLD), "packed", "torch", None)
    return layer.indices.numpy()


@pytest.mark.distributed
def test_tied_scores_select_the_same_keys_on_all_ranks():
    expected = train(inputs(tied=True), None, "packed", "torch", None).indices
    for got in run_ranks(tied_rank, 4):
        assert torch.equal(torch.from_numpy(got), expected)


class Bytes(TorchDispatchMode):
    """Adds up the larger side of each collective: what is gathered, or what is reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            tensors = [x for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor)]
            self.calls += 1
            self.total += max(x.numel() * x.element_size() for x in tensors)
        return result


def moved(rank):
    """Collectives of the indexer's part and their bytes, and those of gathering all queries."""
    S, K, heads, D = 256, 2048, 128, 576
    split = QuerySplit(dist.group.WORLD)
    with Bytes() as indexer:
        split.gather(torch.zeros(1, S // 2, K, dtype=torch.int32))
        split.sum_rows(torch.zeros(1, S, K))
    queries_SHD = torch.zeros(S, heads // 2, D, dtype=torch.bfloat16)
    with Bytes() as queries:
        dist.all_gather_single(queries_SHD.new_empty(2 * S, heads // 2, D), queries_SHD)
    return indexer.calls, indexer.total, queries.total


@pytest.mark.distributed
def test_two_collectives_an_eighth_of_the_bytes_of_gathering_queries():
    for calls, ours, queries in run_ranks(moved, 2):
        assert calls == 2
        assert ours * 8 <= queries


def refuse(rank):
    split = QuerySplit(dist.group.WORLD)
    x = inputs()
    with pytest.raises(ValueError, match=r"S=46; expected a multiple of 4"):
        dsa_attention(*(t[:, :46] for t in x), **SETTINGS, query_split=split)
    with pytest.raises(ValueError, match=r"q_index.*expected \[B, L\] = \(2, 24\)"):
        dsa_attention(*x, **SETTINGS, query_split=split)
    rows = [x[0], x[1], split.take(x[2]), x[3], split.take(x[4])]
    with pytest.raises(ValueError, match=r"reduce_target.*query_split"):
        dsa_attention(*rows, **SETTINGS, query_split=split, reduce_target=lambda t: t)


@pytest.mark.distributed
def test_what_does_not_fit_is_refused_before_anything_is_sent():
    run_ranks(refuse, 2)


def test_masked_queries_count_nothing(backend):
    bounds, counts = mask("packed")
    x = inputs()
    layer = dsa_attention(*x, **SETTINGS, bounds=bounds, kl_mask=counts, backend=backend)
    assert not layer.kl[~counts].any()
    whole = dsa_attention(*inputs(), **SETTINGS, bounds=bounds, backend=backend)
    assert torch.equal(layer.kl[counts], whole.kl[counts])
    layer.kl.sum().backward()
    masked = [t.grad for t in x[2:]]
    y = inputs()
    whole = dsa_attention(*y, **SETTINGS, bounds=bounds, backend=backend)
    whole.kl[counts].sum().backward()
    for ours, wanted in zip(masked, y[2:], strict=True):
        torch.testing.assert_close(ours, wanted.grad, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"kl_mask.*expected torch.bool|kl_mask.*expected bool"):
        dsa_attention(*x, **SETTINGS, kl_mask=counts.float(), backend=backend)

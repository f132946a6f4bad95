"""Real Gloo ranks against the plain definition of a mixture of experts in one process."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.spmd_types import set_current_spmd_mesh, set_spmd_meshes
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher

from titan_npu_train.expert_dispatch import ExpertDispatcher, expert_dispatcher
from titan_ranks import run_ranks

E, K, D = 8, 2, 4


def _routing(kind, t, generator):
    """Experts [t, K] of each token: distinct, as a router chooses them."""
    scores = torch.rand(t, E, generator=generator)
    if kind == "empty experts":
        scores[:, 1::2] = -1  # every second expert gets nothing
    if kind == "empty ranks":
        scores[:, : E - K] = -1  # the last ranks' experts get all
    return scores.topk(K, dim=-1).indices


def _tokens(rank, kind):
    """x [t, D], scores [t, K] and experts [t, K] of one rank; ranks have different numbers."""
    generator = torch.Generator().manual_seed(rank)
    t = 5 + 3 * rank
    x = torch.randn(t, D, generator=generator)
    return x, torch.rand(t, K, generator=generator), _routing(kind, t, generator)


def _weights():
    return torch.randn(E, D, D, generator=torch.Generator().manual_seed(100))


def _leaf(tensor):
    return tensor.clone().requires_grad_()


def _moe(dispatcher, x_TD, scores_TK, experts_TK, w_eDD):
    counts_E = torch.bincount(experts_TK.flatten(), minlength=E)
    x_RD, counts_e, metadata = dispatcher.dispatch(x_TD, scores_TK, experts_TK, counts_E)
    rows = x_RD.split(counts_e.tolist())
    y_RD = torch.cat([torch.tanh(row @ w) for row, w in zip(rows, w_eDD, strict=True)])
    return dispatcher.combine(y_RD, metadata, x_TD)


def _definition(x_TD, scores_TK, experts_TK, w_EDD):
    y_TKD = torch.tanh(torch.einsum("td,tkde->tke", x_TD, w_EDD[experts_TK]))
    return (y_TKD * scores_TK[..., None]).sum(1)


def _loss(y_TD):
    return (y_TD * torch.linspace(-1, 1, D)).sum()


def _meshes(backend, world):
    """Sets the SPMD backend up as the trainer does; returns the mesh that experts spread over."""
    dist_utils.set_spmd_backend(backend)
    sparse = dist.init_device_mesh(
        "cpu", (1, 1, world), mesh_dim_names=("dp_replicate", "efsdp", "ep")
    )
    dense = dist.init_device_mesh("cpu", (world, 1, 1), mesh_dim_names=("dp", "cp", "tp"))
    set_spmd_meshes(dense_mesh=dense, sparse_mesh=sparse)
    return dense, sparse["ep"]


def _expert_parallel(rank, kinds, backends):
    world = dist.get_world_size()
    errors = {}
    for backend in backends:
        dense, ep = _meshes(backend, world)
        current_mesh = set_current_spmd_mesh if backend == "spmd_types" else contextlib.nullcontext
        dispatcher = ExpertDispatcher.Config(num_experts=E, top_k=K).build()
        dispatcher.wire_meshes(ep_mesh=ep)
        mine = slice(rank * E // world, (rank + 1) * E // world)
        for kind in kinds:
            every = [_tokens(r, kind) for r in range(world)]
            want = [_leaf(torch.cat(parts)) for parts in list(zip(*every, strict=True))[:2]]
            want_w = _leaf(_weights())
            ids_TK = torch.cat([ids for _, _, ids in every])
            want_y = _definition(*want, ids_TK, want_w)
            _loss(want_y).backward()

            start = sum(len(x) for x, _, _ in every[:rank])
            own = slice(start, start + len(every[rank][0]))
            for recompute in (False, True):
                x, scores, ids = every[rank]
                x, scores, w = _leaf(x), _leaf(scores), _leaf(_weights()[mine])
                with current_mesh(dense):
                    if recompute:
                        y = checkpoint(_moe, dispatcher, x, scores, ids, w, use_reentrant=False)
                    else:
                        y = _moe(dispatcher, x, scores, ids, w)
                    _loss(y).backward()
                pairs = {
                    "y": (y, want_y[own].detach()),
                    "x": (x.grad, want[0].grad[own]),
                    "scores": (scores.grad, want[1].grad[own]),
                    "w": (w.grad, want_w.grad[mine]),
                }
                for name, (got, wanted) in pairs.items():
                    errors[backend, kind, recompute, name] = float(
                        (got - wanted).detach().abs().max()
                    )
    return errors


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_spread_over_ranks_equal_the_definition(ranks):
    kinds = ("random", "empty experts", "empty ranks")
    for errors in run_ranks(_expert_parallel, ranks, kinds, ("spmd_types", "partial_dtensor")):
        assert max(errors.values()) < 2e-6, errors


def _stock(rank):
    dense, ep = _meshes("spmd_types", 2)
    dispatcher = AllToAllTokenDispatcher.Config(num_experts=E, top_k=K).build()
    dispatcher.wire_meshes(ep_mesh=ep)
    try:
        with set_current_spmd_mesh(dense):
            _moe(dispatcher, *_tokens(rank, "random"), _weights()[rank * 4 : rank * 4 + 4])
    except RuntimeError as error:
        return str(error)
    return "accepted"


@pytest.mark.distributed
def test_the_stock_dispatcher_still_needs_replacing_on_gloo():
    for outcome in run_ranks(_stock, 2):
        assert "invalid tensor size" in outcome, outcome


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_expert_parallelism_it_is_the_stock_dispatcher(dtype):
    x, scores, ids = _tokens(3, "random")
    w = _weights().to(dtype)
    results = []
    for kind in (ExpertDispatcher, LocalTokenDispatcher):
        dispatcher = kind.Config(num_experts=E, top_k=K).build()
        leaves = _leaf(x.to(dtype)), _leaf(scores)
        y = _moe(dispatcher, *leaves, ids, w)
        _loss(y.float()).backward()
        results.append([y, *(leaf.grad for leaf in leaves)])
    for ours, stock in zip(*results, strict=True):
        # With two experts a token, even the sum of gradients has only one order.
        assert torch.equal(ours, stock)


def test_gradients_are_the_same_bits_every_time():
    t, d = 2048, 32
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(t, d, generator=generator)
    scores = torch.rand(t, E, generator=generator)
    ids = torch.rand(t, E, generator=generator).argsort(-1)
    grad = torch.randn(t * E, d, generator=generator)
    dispatcher = ExpertDispatcher.Config(num_experts=E, top_k=E).build()
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        seen = []
        for _ in range(20):
            leaf = _leaf(x)
            rows, _, _ = dispatcher._local_reorder(leaf, scores, ids)
            rows.backward(grad)
            seen.append(leaf.grad)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(g, seen[0]) for g in seen)


def test_override_keeps_the_configuration():
    stock = AllToAllTokenDispatcher.Config(num_experts=16, top_k=3)
    ours = expert_dispatcher(stock)
    assert type(ours) is ExpertDispatcher.Config
    assert (ours.num_experts, ours.top_k) == (16, 3)

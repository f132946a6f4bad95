"""Operators of npu_dsa as DTensors on real ranks, forward and backward, against one process."""

import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.debug import CommDebugMode

import cases
from cases import all_cases
from distribute import P, R, choices, close, distribute, mesh, moved
from dtensor_npu_strategies import redistributions, register
from dtensor_npu_strategies.rules import OPERATORS
from strategy_ranks import run_ranks

pytestmark = pytest.mark.distributed

S = Shard
DIFFERENTIABLE = {
    "rms_norm": ("x", "weight"),
    "rotary_mul": ("x",),
    "swiglu": ("x",),
    "sparse_attention": ("q", "kv"),
    "dense_attention": ("q", "k", "v"),
    "indexer_kl_loss": ("q_index", "k_index", "weights"),
    "dense_indexer_kl_loss": ("q_index", "k_index", "weights"),
    "moe_permute": ("tokens", "probs"),
    "moe_unpermute": ("x", "probs"),
    "grouped_matmul": ("x", "weight"),
}


def tuple_of(x):
    return x if isinstance(x, tuple) else (x,)


def weights_of(outputs):
    """The gradient that arrives at each floating output: of another value everywhere."""
    found = []
    for i, y in enumerate(outputs):
        if y.dtype.is_floating_point and y.numel() and y.requires_grad:
            g = torch.Generator().manual_seed(i)
            found.append((y, torch.randn(y.shape, generator=g, dtype=torch.float64)))
    return found


def run(name, call, place=None):
    """Outputs and gradients of a call; `place` makes DTensors of its tensors."""
    place = place or (lambda n, x: x)
    op = name.partition("::")[2]
    given = {n: place(n, x.clone() if isinstance(x, Tensor) else x) for n, x in call.items()}
    leaves = [given[n] for n in DIFFERENTIABLE.get(op, ()) if given[n] is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    outputs = tuple_of(getattr(torch.ops.npu_dsa, op).default(*given.values()))
    if leaves:
        pairs = weights_of(outputs)
        d = [place(f"d{i}", d_y) for i, (_, d_y) in enumerate(pairs)]
        torch.autograd.backward([y for y, _ in pairs], d)
    return [*outputs, *(leaf.grad for leaf in leaves)]


def _anything(rank, seed, times):
    """Random placements of everything, incoming gradients included."""
    grid, choose = mesh(2, 2), random.Random(seed)
    count = 0
    with register():
        for name, call in all_cases():
            if name.startswith("aten::"):
                continue
            expected = run(name, call)
            pinned = OPERATORS[name].pinned
            for _ in range(times):
                placed = {}

                def place(n, x, placed=placed, pinned=pinned):
                    if not isinstance(x, Tensor):
                        return x
                    kinds = choices(x, 2)
                    if pinned or "experts" in call:  # noqa: B023 - rows of one process: not sharded
                        kinds = [k for k in kinds if S(0) not in k]
                        kinds = [k for k in kinds if not (n == "ends" and P in k)]
                    placed[n] = choose.choice(kinds)
                    return distribute(x, grid, placed[n])

                for i, (a, b) in enumerate(zip(run(name, call, place), expected, strict=True)):
                    if b.numel():
                        close(a, b, (name, i, placed))
                        count += 1
    return count


def test_values_with_any_placements(four):
    assert min(result["anything"] for result in four) > 300


# --- a layer of sparse attention -----------------------------------------------------------------


def _layer(q, kv, q_index, k_index, weights, bounds, asked):
    """Select, attend, and compare the indexer with what the attention did.

    `asked`: placements of indices and target, to be had before they are used.
    """
    ops = torch.ops.npu_dsa
    indexer = (q_index, k_index, weights)
    indices, _ = ops.lightning_indexer(*(x.detach() for x in indexer), bounds, cases.K, "torch")
    if asked:
        indices = indices.redistribute(placements=[asked["indices"]] * indices.device_mesh.ndim)
    out, _, target = ops.sparse_attention_with_target(q, kv, indices, 0.4, cases.V, "torch")
    target = target.detach()
    if asked:
        target = target.redistribute(placements=[asked["target"]] * target.device_mesh.ndim)
    kl = ops.indexer_kl_loss(*indexer, indices, target, None, "torch")
    return out, kl


def _layer_inputs():
    (call,) = [c for n, c in all_cases() if n.endswith("fused_kl_loss") and c["bounds"] is not None]
    names = ("q", "kv", "q_index", "k_index", "weights", "bounds")
    torch.manual_seed(4)
    d_out = torch.randn(cases.B, cases.S, cases.H, cases.V, dtype=torch.float64)
    return [call[n].clone() for n in names], d_out


def _train(tensors, d_out, place, asked=None):
    tensors = [place(i, x) for i, x in enumerate(tensors)]
    for x in tensors[:5]:
        x.requires_grad_()
    out, kl = _layer(*tensors, asked)
    (out * place(6, d_out)).sum().backward()
    kl.sum().backward()
    return [out, kl, *(x.grad for x in tensors[:5])]


# Along a mesh dimension: q, kv, q_index, k_index, weights, bounds, and the output's gradient.
WHOLE = (R,) * 7
BATCH = (S(0),) * 7
SEQUENCE = (S(1), R, S(1), R, S(1), S(1), S(1))
HEADS = (S(2), R, R, R, R, R, S(2))
# Heads of the attention split, queries of the indexer split: tensor parallel without repeated work.
TENSOR = (S(2), R, S(1), R, S(1), R, S(2))


def _dsa(rank, *along, **asked):
    shape = {1: (dist.get_world_size(),), 2: (2, 2)}[len(along)]
    grid = mesh(*shape)
    inputs, d_out = _layer_inputs()
    expected = _train(inputs, d_out, lambda i, x: x.clone())

    def place(i, x):
        return distribute(x, grid, tuple(kinds[i] for kinds in along))

    got = []
    with register("dsa"):
        found = redistributions(lambda: got.extend(_train(inputs, d_out, place, asked)))
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        close(a, b, (along, i))
    # The gradient of a sum is whole, and each rank takes its own of it: that moves nothing.
    ours = [m for m in found if m.argument and m.bytes]
    ours = [m for m in ours if m.operator.startswith("npu_dsa") or m.operator == "redistribute"]
    names = ("out", "kl", "dq", "dkv", "dq_index", "dk_index")
    placements = {n: y.placements for n, y in zip(names, got, strict=False)}
    return [(m.operator, m.argument, m.collective, m.phase) for m in ours], placements


LAYERS = {
    "whole": ((WHOLE,), {"out": (R,), "dkv": (R,)}),
    "batch": ((BATCH,), {"out": (S(0),), "kl": (S(0),), "dkv": (S(0),), "dk_index": (S(0),)}),
    "sequence": ((SEQUENCE,), {"out": (S(1),), "kl": (S(1),), "dkv": (P,), "dk_index": (P,)}),
    "batch and sequence": (
        (BATCH, SEQUENCE), {"out": (S(0), S(1)), "dkv": (S(0), P), "dk_index": (S(0), P)},
    ),
    "sequence and batch": ((SEQUENCE, BATCH), {"dq": (S(1), S(0)), "dkv": (P, S(0))}),
}  # fmt: skip


@pytest.mark.parametrize("name", list(LAYERS))
def test_a_layer_moves_nothing(four, name):
    placed = LAYERS[name][1]
    for result in four:
        found, placements = result[name]
        assert found == []
        assert {n: placements[n] for n in placed} == placed


def test_heads_move_the_target_alone(four):
    """K numbers a query, and not the queries' heads; again in the backward, which uses it again.

    Reduced by scattering: the ranks of the heads then share the loss's queries.
    """
    for result in four:
        found, placements = result["sequence and heads"]
        assert found == [
            ("npu_dsa::indexer_kl_loss", "target", "reduce_scatter", "forward"),
            ("npu_dsa::indexer_kl_loss_backward", "target", "reduce_scatter", "backward"),
        ]
        assert placements["dkv"] == (P, P) and placements["dq"] == (S(1), S(2))


def test_tensor_parallel_without_repeated_work(four):
    """The indexer's queries by sequence, the attention's by heads: what is asked for moves once."""
    for result in four:
        found, placements = result["tensor"]
        assert found == [
            ("redistribute", "input", "all_gather", "forward"),
            ("redistribute", "input", "reduce_scatter", "forward"),
        ]
        assert placements["kl"] == (S(1),) and placements["dk_index"] == (P,)


# --- tokens to experts and back ------------------------------------------------------------------


def _moe(tokens, experts, probs, weight, ends_of):
    ops = torch.ops.npu_dsa
    slots = experts.shape[0] * experts.shape[1]
    permuted, _, rows, counts = ops.moe_permute(tokens, experts, None, cases.E, slots, "torch")
    if isinstance(permuted, DTensor):  # as many rows as the rank's tokens have slots
        assert permuted.to_local().shape[0] == experts.to_local().numel()
    y = ops.grouped_matmul(permuted, weight, ends_of(counts), "torch")
    return ops.moe_unpermute(y, rows, probs, "torch"), counts


def _moe_inputs(N):
    torch.manual_seed(0)
    experts = torch.rand(N, cases.E).argsort(-1)[:, :2].int()
    experts[1, 0] = -1  # of another rank
    shapes = ((N, 8), (N, 2), (cases.E, 8, 6), (N, 6))
    tokens, probs, weight, d_y = (torch.randn(s, dtype=torch.float64) for s in shapes)
    return tokens, experts, probs, weight, d_y


def _tokens(rank, N, shape, along):
    grid = mesh(*shape)
    tokens, experts, probs, weight, d_y = _moe_inputs(N)

    def ends_of(counts):
        if isinstance(counts, DTensor):  # a sum over ranks, so its running sum is one, too
            ends = counts.to_local().cumsum(0)
            return DTensor.from_local(ends, grid, counts.placements)
        return counts.cumsum(0)

    def train(place):
        given = {"tokens": tokens, "experts": experts, "probs": probs, "weight": weight}
        given = {n: place(n, x) for n, x in given.items()}
        leaves = [given[n].requires_grad_() for n in ("tokens", "probs", "weight")]
        y, counts = _moe(*given.values(), ends_of)
        y.backward(place("d_y", d_y))
        return [y, counts, *(x.grad for x in leaves)]

    expected = train(lambda n, x: x.clone())
    got = []
    with register("moe"), CommDebugMode() as comm:
        found = redistributions(
            lambda: got.extend(
                train(lambda n, x: distribute(x, grid, tuple(kinds.get(n, R) for kinds in along)))
            )
        )
        count = moved(comm)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        close(a, b, i)
    distributing = sum(m.operator != "redistribute" and not m.argument for m in found)
    return count - distributing, [m for m in found if m.argument], [x.placements for x in got]


TOKENS = {"tokens": S(0), "experts": S(0), "probs": S(0), "d_y": S(0)}
OUTPUTS = {"weight": S(2), "d_y": S(1)}


def test_sharded_tokens_stay(four):
    for result in four:
        count, found, placed = result["tokens"]
        assert (count, found) == (0, [])
        assert placed == [(S(0),), (P,), (S(0),), (S(0),), (P,)]


def test_tokens_and_features_of_experts(four):
    for result in four:
        count, found, placed = result["tokens and features"]
        assert (count, found) == (0, [])
        assert placed[0] == (S(0), S(1)) and placed[4] == (P, S(2))


def test_tokens_that_do_not_divide(two):
    for result in two:
        count, found, placed = result["tokens"]
        assert (count, found) == (0, [])
        assert placed == [(S(0),), (P,), (S(0),), (S(0),), (P,)]


def _experts(rank):
    """Each rank has two of four experts, and rows for them, as many on each rank."""
    line = mesh(2)
    torch.manual_seed(0)
    capacity, counts = 6, torch.tensor([[2, 3], [1, 4]])
    x = torch.randn(2 * capacity, 5, dtype=torch.float64)
    weight = torch.randn(4, 5, 3, dtype=torch.float64)
    d_y = torch.randn(2 * capacity, 3, dtype=torch.float64)
    op = torch.ops.npu_dsa.grouped_matmul.default
    halves = [
        (x.chunk(2)[r], weight.chunk(2)[r], counts[r].cumsum(0), d_y.chunk(2)[r]) for r in range(2)
    ]
    expected = []
    for rows, w, ends, d in halves:
        rows, w = rows.clone().requires_grad_(), w.clone().requires_grad_()
        y = op(rows, w, ends, "torch")
        y.backward(d)
        expected.append((y, rows.grad, w.grad))
    ends = torch.cat([h[2] for h in halves])
    with register("moe"):
        placed = [distribute(t, line, (S(0),)) for t in (x, weight, ends, d_y)]
        leaves = [t.requires_grad_() for t in placed[:2]]
        got = []

        def train():
            y = op(placed[0], placed[1], placed[2], "torch")
            y.backward(placed[3])
            got.extend((y, *(t.grad for t in leaves)))

        found = redistributions(train)
        for i, y in enumerate(got):
            close(y, torch.cat([e[i] for e in expected]))
        # The same rows, and group sizes of all: which expert a row is for cannot be known.
        errors = []
        for wrong in ((S(0),), (R,), (R,)), ((S(0),), (S(0),), (R,)), ((R,), (S(0),), (R,)):
            arguments = zip((x, weight, ends), wrong, strict=True)
            arguments = [distribute(t, line, p) for t, p in arguments]
            try:
                op(*arguments, "torch")
            except RuntimeError as error:
                errors.append(str(error))
    return len(found), [y.placements for y in got], errors


def test_sharded_experts_stay(two):
    for result in two:
        moved_, placed, errors = result["experts"]
        assert moved_ == 0 and placed == [(S(0),)] * 3
        assert len(errors) == 3
        for error in errors:
            assert "no strategy for x" in error and "group sizes of the rank's own rows" in error
            assert "x S(0), weight R, ends P" in error


def _norms(rank):
    """What is moved of a block of norm, rotary and activation under sequence and heads: nothing."""
    grid = mesh(2, 2)
    ops = torch.ops.npu_dsa
    torch.manual_seed(0)
    x, weight = torch.randn(2, 6, 4, 8, dtype=torch.float64), torch.rand(8, dtype=torch.float64)
    cos, sin = (torch.randn(6, 8, dtype=torch.float64) for _ in range(2))

    def train(x, weight, cos, sin):
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y, _ = ops.rms_norm(x, weight, 1e-6, "torch")
        y = ops.swiglu(ops.rotary_mul(y, cos, sin, True, "torch"), -1, "torch")
        y.sum().backward()
        return y, x.grad, weight.grad

    got = []
    places = ((S(1), S(2)), (R, R), (S(0), R), (S(0), R))
    given = [distribute(t, grid, p) for t, p in zip((x, weight, cos, sin), places, strict=True)]
    with register("norm_rope"):
        found = redistributions(lambda: got.extend(train(*given)))
    for a, b in zip(got, train(x, weight, cos, sin), strict=True):
        close(a, b)
    # The gradient of a sum is whole, and is cut where it is used.
    moved_ = [m for m in found if m.bytes]
    return len(moved_), [y.placements for y in got]


def test_norms_rotary_and_activation(four):
    for result in four:
        moved_, placed = result["norms"]
        assert moved_ == 0
        assert placed == [(S(1), S(2)), (S(1), S(2)), (Partial(), Partial())]


# --- one start of the ranks for all of it --------------------------------------------------------


def _on_four(rank):
    return {
        "anything": _anything(rank, 11, 4),
        **{name: _dsa(rank, *along) for name, (along, _) in LAYERS.items()},
        "sequence and heads": _dsa(rank, SEQUENCE, HEADS),
        "tensor": _dsa(rank, TENSOR, indices=R, target=S(1)),
        "tokens": _tokens(rank, 8, (4,), [TOKENS]),
        "tokens and features": _tokens(rank, 8, (2, 2), [TOKENS, OUTPUTS]),
        "norms": _norms(rank),
    }


def _on_two(rank):
    return {"tokens": _tokens(rank, 7, (2,), [TOKENS]), "experts": _experts(rank)}


@pytest.fixture(scope="module")
def four():
    return run_ranks(_on_four, 4)


@pytest.fixture(scope="module")
def two():
    return run_ranks(_on_two, 2)

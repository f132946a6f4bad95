"""torch_npu's real operators as DTensors: placements, shapes of shards, and what is moved."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Partial, Shard

from dtensor_npu_strategies import redistributions, register
from dtensor_npu_strategies.rules import OPERATORS, Arguments
from npu_calls import calls, complete, invoke
from npu_dtensors import GRID, LINE, P, R, empty, placed, shard_shape

S = Shard
NAMES = [name for name in OPERATORS if name.startswith("npu::")]


@pytest.fixture(autouse=True)
def fake():
    with FakeTensorMode():
        yield


@pytest.fixture
def ours():
    with register() as registration:
        yield registration


def test_all_operators_are_there(ours):
    assert set(NAMES) <= set(ours.operators)
    assert {name for name in ours.absent if not name.startswith("npu_dsa::")} == set()
    assert {"aten::matmul", "aten::matmul_backward"} <= set(ours.operators)


# --- matmul --------------------------------------------------------------------------------------

MATMULS = {
    # mesh, placements of x, weight and the gradient, shapes: what happened without ours
    "N = 6 over the second of (4, 2)": (
        GRID, (R, R), (R, S(1)), (R, S(2)), (2, 5, 8), 6, [(R, S(2)), (R, P), (R, S(1))],
    ),
    "a sequence of 100 on 8 ranks": (
        LINE, (S(1),), (R,), (S(1),), (2, 100, 8), 8, [(S(1),), (S(1),), (P,)],
    ),
    "lm_head": (LINE, (R,), (S(1),), (S(2),), (2, 96, 64), 128, [(S(2),), (P,), (S(1),)]),
    "q_lora": (LINE, (R,), (R,), (R,), (2, 96, 64), 128, [(R,), (R,), (R,)]),
    "a sum over the first of (4, 2)": (
        GRID, (P, R), (R, R), (R, R), (2, 96, 64), 128, [(P, R), (R, R), (P, R)],
    ),
    "tensor and data parallel": (
        GRID, (S(0), R), (R, S(1)), (S(0), S(2)), (4, 100, 8), 6,
        [(S(0), S(2)), (S(0), P), (P, S(1))],
    ),
}  # fmt: skip


def _matmul(mesh, x, w, d, shape, columns, _):
    x = placed(empty(*shape), mesh, x, grad=True)
    w = placed(empty(shape[-1], columns), mesh, w, grad=True)
    got = []

    def train():
        y = torch.matmul(x, w)
        y.backward(placed(empty(*y.shape), mesh, d))
        got.extend((y.placements, x.grad.placements, w.grad.placements))

    return redistributions(train), got


@pytest.mark.parametrize("name", list(MATMULS))
def test_matmul_moves_nothing(ours, name):
    found, placements = _matmul(*MATMULS[name])
    assert not found, found
    assert placements == MATMULS[name][-1]


@pytest.mark.parametrize("name", list(MATMULS))
def test_without_our_strategies_the_same_moves_something(name):
    found, _ = _matmul(*MATMULS[name])
    if name in ("q_lora", "lm_head", "tensor and data parallel"):
        return  # of torch_npu's strategies: they differ from version to version
    assert {m.operator for m in found if m.bytes} == {"aten::matmul", "aten::matmul_backward"}


# --- every rule of every operator ----------------------------------------------------------------


def _rules():
    with FakeTensorMode():
        for name, given in calls().items():
            for i, call in enumerate(given):
                arguments = Arguments(complete(name, call))
                for rule in OPERATORS[name].rules(arguments):
                    used = {n: p for n, p in rule.inputs.items() if p != R}
                    yield pytest.param(name, i, rule, id=f"{name[5:]}-{i}-{used}")


RULES = list(_rules())


def _place(x, mesh, placements):
    if isinstance(x, Tensor):
        return placed(x, mesh, placements)
    if isinstance(x, list) and x and isinstance(x[0], Tensor):
        return [placed(y, mesh, placements) for y in x]
    return x


def _distributed(call, rule, mesh, places):
    return {n: _place(x, mesh, places(rule.inputs.get(n, R))) for n, x in call.items()}


def _tensors(outputs):
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    return [y for y in outputs if isinstance(y, Tensor)]


MESHES = [(LINE, lambda p: (p,)), (GRID, lambda p: (R, p)), (GRID, lambda p: (p, R))]


@pytest.mark.parametrize(("name", "i", "rule"), RULES)
def test_a_rule_moves_nothing_and_its_shards_fit(ours, name, i, rule):
    """Each rank's outputs, by the operator's own shape function, are shards of the whole ones."""
    call = complete(name, calls()[name][i])
    whole = _tensors(invoke(name, complete(name, calls()[name][i])))
    for mesh, places in MESHES:
        given, got = _distributed(call, rule, mesh, places), []

        def run(given=given, got=got):
            got.extend(_tensors(invoke(name, given)))

        found = redistributions(run)
        assert not found, found
        assert len(got) == len(rule.outputs) == len(whole)
        for y, full, placement in zip(got, whole, rule.outputs, strict=True):
            assert isinstance(y, DTensor) and y.shape == full.shape and y.dtype == full.dtype
            assert y.placements == places(placement)
            assert y.to_local().shape == shard_shape(full.shape, mesh, y.placements)


@pytest.mark.parametrize("name", NAMES)
def test_every_operator_has_rules(name):
    assert any(OPERATORS[name].rules(Arguments(complete(name, c))) for c in calls()[name])
    assert name in {parameters.values[0] for parameters in RULES}


def test_a_wrong_rule_does_not_fit():
    """What the shapes show: heads are in another place of the statistics than of the output."""
    name = "npu::npu_sparse_flash_attention"
    call = complete(name, calls()[name][0])
    right = next(r for r in OPERATORS[name].rules(Arguments(call)) if r.inputs["query"] == S(2))
    assert right.outputs == (S(2), S(3), S(3))
    with register():
        given = _distributed(call, right, LINE, lambda p: (p,))
        statistics = invoke(name, given)[1]
    whole = invoke(name, complete(name, calls()[name][0]))[1]
    assert statistics.to_local().shape != shard_shape(whole.shape, LINE, (S(2),))


# --- what torch_npu does by itself ---------------------------------------------------------------

WITHOUT = [
    ("npu::npu_lightning_indexer", 0, "query", S(0), "strategy registered"),
    ("npu::npu_sparse_flash_attention", 0, "query", S(2), "strategy registered"),
    ("npu::npu_sparse_flash_attention_grad", 0, "query", S(0), "strategy registered"),
    ("npu::npu_sparse_lightning_indexer_grad_kl_loss", 0, "query", S(0), "strategy registered"),
    ("npu::npu_moe_token_permute", 0, "tokens", S(0), "tokens"),
    ("npu::npu_moe_token_unpermute", 0, "permuted_tokens", S(0), "permuted_tokens"),
    ("npu::npu_grouped_matmul", 0, "weight", S(0), "weight"),
    ("npu::npu_grouped_matmul", 1, "x", S(0), "group_type=2"),
]


@pytest.mark.parametrize(("name", "i", "argument", "placement", "what"), WITHOUT)
def test_without_our_strategies(name, i, argument, placement, what):
    """The same calls gather, or are refused."""
    call = complete(name, calls()[name][i])
    rule = next(
        r for r in OPERATORS[name].rules(Arguments(call)) if r.inputs.get(argument) == placement
    )
    given = _distributed(call, rule, LINE, lambda p: (p,))
    if what in call:
        found = redistributions(lambda: invoke(name, given))
        assert any(m.bytes and what in m.argument for m in found), found
    else:
        with pytest.raises((NotImplementedError, RuntimeError), match=what):
            invoke(name, given)


# --- autograd: torch_npu's own nodes call the backward operators ---------------------------------


def _train(forward, tensors, mesh, places, d_places):
    """Placements of output and gradients, and what was moved."""
    given = {
        n: placed(x, mesh, places[n], grad=x.dtype.is_floating_point) for n, x in tensors.items()
    }
    got = []

    def train():
        y = forward(**given)
        y.backward(placed(empty(*y.shape), mesh, d_places))
        got.append(y)

    found = redistributions(train)
    return found, got[0], {n: x.grad for n, x in given.items()}


def _fits(x: DTensor) -> None:
    assert x.to_local().shape == shard_shape(x.shape, x.device_mesh, x.placements)


def test_sparse_flash_attention_by_heads_and_batch(ours):
    call = calls()["npu::npu_sparse_flash_attention"][0]
    tensors = {n: call[n] for n in ("query", "key", "sparse_indices", "query_rope", "key_rope")}

    def forward(query, key, sparse_indices, query_rope, key_rope):
        return torch.ops.npu.npu_sparse_flash_attention(
            query, key, key, sparse_indices, 0.1, query_rope=query_rope, key_rope=key_rope,
            attention_mode=2, return_softmax_lse=True, sparse_mode=0,
        )[0]  # fmt: skip

    q, keys = (S(0), S(2)), (S(0), R)
    places = {"query": q, "query_rope": q, "key": keys, "key_rope": keys, "sparse_indices": keys}
    found, out, grads = _train(forward, tensors, GRID, places, q)
    assert not found, found
    assert out.placements == grads["query"].placements == grads["query_rope"].placements == q
    assert grads["key"].placements == grads["key_rope"].placements == (S(0), P)
    for x in (out, grads["query"], grads["key"]):
        _fits(x)


def test_sparse_flash_attention_by_sequence(ours):
    call = calls()["npu::npu_sparse_flash_attention"][0]
    tensors = {n: call[n] for n in ("query", "key", "sparse_indices", "query_rope", "key_rope")}

    def forward(query, key, sparse_indices, query_rope, key_rope):
        return torch.ops.npu.npu_sparse_flash_attention(
            query, key, key, sparse_indices, 0.1, query_rope=query_rope, key_rope=key_rope,
            attention_mode=2, return_softmax_lse=True, sparse_mode=0,
        )[0]  # fmt: skip

    rows = (S(1),)  # 100 on 8 ranks
    places = dict.fromkeys(tensors, rows) | {"key": (R,), "key_rope": (R,)}
    found, out, grads = _train(forward, tensors, LINE, places, rows)
    assert not found, found
    assert out.placements == rows and grads["key"].placements == (P,)


def test_queries_are_not_cut_under_a_causal_mask(ours):
    """Mode 3 aligns the mask to the last query that a rank has: DTensor gathers the rows."""
    name = "npu::npu_lightning_indexer"
    call = complete(name, calls()[name][0])
    rows = ("query", "weights")
    given = {n: _place(x, LINE, (S(1),) if n in rows else (R,)) for n, x in call.items()}
    got = []
    found = redistributions(lambda: got.extend(invoke(name, given)))
    assert got[0].placements != (S(1),)
    assert {m.argument for m in found if m.bytes} == {"query", "weights"}


def test_tokens_to_experts_and_back(ours):
    """Sharded tokens stay, with a rank's own numbers of rows in both directions."""
    given = calls()
    tensors = {**given["npu::npu_moe_token_permute"][0],
               "probs": given["npu::npu_moe_token_unpermute"][0]["probs"]}  # fmt: skip

    def forward(tokens, indices, probs):
        permuted, rows = torch.ops.npu.npu_moe_token_permute(tokens, indices)
        return torch.ops.npu.npu_moe_token_unpermute(permuted, rows, probs)

    rows = (S(0),)
    found, out, grads = _train(forward, tensors, LINE, dict.fromkeys(tensors, rows), rows)
    assert not found, found
    for x in (out, grads["tokens"], grads["probs"]):
        assert x.placements == rows
        _fits(x)


def test_norm_rotary_activation(ours):
    given = calls()
    rope = given["npu::npu_rotary_mul"][0]
    tensors = {"x": rope["input"], "gamma": given["npu::npu_rms_norm"][0]["gamma"]}
    angles = placed(rope["r1"], GRID, (S(1), R))

    def forward(x, gamma):
        y = torch.ops.npu.npu_rms_norm(x, gamma)[0]
        return torch.ops.npu.npu_swiglu(torch.ops.npu.npu_rotary_mul(y, angles, angles))

    places = {"x": (S(1), S(2)), "gamma": (R, R)}
    found, out, grads = _train(forward, tensors, GRID, places, (S(1), S(2)))
    assert not found, found
    assert out.placements == grads["x"].placements == (S(1), S(2))
    assert grads["gamma"].placements == (Partial(), Partial())


# --- bad input -----------------------------------------------------------------------------------


def test_keyword_tensors_that_do_not_fit(ours):
    name = "npu::npu_sparse_flash_attention"
    call = complete(name, calls()[name][0])
    rule = next(iter(OPERATORS[name].rules(Arguments(call))))
    given = _distributed(call, rule, LINE, lambda p: (p,))
    given["query_rope"] = placed(call["query_rope"], LINE, (S(3),))
    with pytest.raises(RuntimeError, match="redistributes no keyword arguments: query_rope, key"):
        invoke(name, given)


def test_expert_weights_are_never_gathered(ours):
    name = "npu::npu_grouped_matmul"
    call = complete(name, calls()[name][0])
    given = {n: _place(x, LINE, (S(0),) if n == "weight" else (R,)) for n, x in call.items()}
    with pytest.raises(RuntimeError, match="group sizes of the rank's own rows"):
        invoke(name, given)


def test_what_is_written_to_stays(ours):
    name = "npu::npu_grouped_matmul_add_"
    call = complete(name, calls()[name][0])
    given = {n: _place(x, LINE, (R,)) for n, x in call.items()}
    given["group_list"] = placed(call["group_list"], LINE, (P,))
    given["x"] = placed(call["x"], LINE, (S(0),))
    given["weight"] = placed(call["weight"], LINE, (S(0),))
    with pytest.raises(RuntimeError, match="input P, x S"):  # the sum needs a place
        invoke(name, given)

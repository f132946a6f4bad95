"""What is registered is there, and gone afterwards: tables, caches and the results."""

import itertools
import os
import subprocess
import sys
import threading

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import _get_python_sharding_prop_cache_info
from torch.distributed.tensor.experimental import register_sharding

import stand_ins  # noqa: F401 - the operators
from distribute import distribute
from dtensor_npu_strategies import redistributions, register
from dtensor_npu_strategies.rules import OPERATORS

TABLES = (
    "op_strategy_funcs",
    "op_single_dim_strategy_funcs",
    "op_to_rules",
    "op_to_schema_info",
    "op_to_schema_info_for_single_dim_strategy",
    "op_to_scalar_shape_adjuster",
    "op_to_shape_and_stride_idx",
)
HADAMARD, RMS = torch.ops.npu_dsa.hadamard.default, torch.ops.npu_dsa.rms_norm.default
R, S = Replicate(), Shard


def tables():
    dispatcher = DTensor._op_dispatcher
    found = {name: dict(getattr(dispatcher.sharding_propagator, name)) for name in TABLES}
    return {**found, "handlers": dict(dispatcher._custom_op_handlers)}


@pytest.fixture(autouse=True)
def as_before():
    before = tables()
    yield
    assert tables() == before


def use(mesh):
    return HADAMARD(distribute(torch.ones(16, 4), mesh, (S(0),)), 1.0, "torch")


def unknown(mesh):
    with pytest.raises((NotImplementedError, RuntimeError), match="sharding strategy"):
        use(mesh)


def test_removed(line):
    unknown(line)
    registration = register()
    assert tables() != {}
    assert "npu_dsa::hadamard" in registration.operators
    assert "npu::npu_rms_norm" in registration.absent
    assert use(line).placements == (S(0),)
    registration.remove()
    unknown(line)
    registration.remove()  # nothing more
    unknown(line)


def test_with_and_an_error_inside(line):
    def fail():
        with register("norm_rope"):
            assert use(line).placements == (S(0),)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    unknown(line)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_nested_in_any_order(line, order):
    registrations = [register(), register("norm_rope"), register("npu_dsa::hadamard")]
    for i, which in enumerate(order):
        assert use(line).placements == (S(0),)
        registrations[which].remove()
        left = [r for r in registrations if registrations.index(r) not in order[: i + 1]]
        if left:
            assert use(line).placements == (S(0),)
        else:
            unknown(line)


def test_what_others_have_registered_comes_back(line):
    def theirs(x, scale, backend):
        return [([Replicate()], [Replicate(), None, None])]

    before = tables()
    try:
        register_sharding(HADAMARD)(theirs)
        kept = tables()
        assert use(line).placements == (R,)
        with register():
            assert use(line).placements == (S(0),)
            with register("hadamard"):
                assert use(line).placements == (S(0),)
        assert tables() == kept
        assert use(line).placements == (R,)
    finally:
        restore(before)


def test_what_others_register_later_stays(line):
    def later(x, scale, backend):
        return [([Replicate()], [Replicate(), None, None])]

    before = tables()
    try:
        registration = register()
        register_sharding(HADAMARD)(later)
        mine = tables()["op_strategy_funcs"][HADAMARD]
        registration.remove()
        assert tables()["op_strategy_funcs"][HADAMARD] is mine
        assert RMS not in tables()["op_strategy_funcs"]
    finally:
        restore(before)


def restore(before):
    propagator = DTensor._op_dispatcher.sharding_propagator
    for name in TABLES:
        table = getattr(propagator, name)
        table.clear()
        table.update(before[name])
    register().remove()  # empties the caches


def test_caches_are_emptied(line):
    with register():
        for _ in range(3):
            use(line)
        assert torch._C._get_DTensor_sharding_propagator_cache_stats()[0] > 0
    assert torch._C._get_DTensor_sharding_propagator_cache_stats() == (0, 0)
    assert _get_python_sharding_prop_cache_info().currsize == 0


def test_a_thread_that_used_it_before(line):
    """Torch's caches are one a thread; backward runs in threads of its own on some devices."""
    go, results = [threading.Event() for _ in range(3)], []

    def work():
        for event in go:
            event.wait(30)
            try:
                results.append(use(line).placements)
            except (NotImplementedError, RuntimeError):
                results.append(None)
            done.set()

    thread, done = threading.Thread(target=work, daemon=True), threading.Event()
    thread.start()

    def step(event):
        done.clear()
        event.set()
        assert done.wait(30)

    with register():
        step(go[0])
    step(go[1])
    with register():
        step(go[2])
    thread.join()
    assert results == [(S(0),), None, (S(0),)]


@pytest.mark.parametrize("table", ["op_strategy_funcs", "op_to_scalar_shape_adjuster"])
def test_another_torch(line, monkeypatch, table):
    monkeypatch.delattr(DTensor._op_dispatcher.sharding_propagator, table)
    with pytest.raises(RuntimeError, match=r"torch 2\..* keeps DTensor's strategies elsewhere"):
        register("npu_dsa::hadamard")
    monkeypatch.undo()
    unknown(line)


def test_groups_and_names():
    groups = {operator.group for operator in OPERATORS.values()}
    assert groups == {"matmul", "moe", "dsa", "norm_rope"}
    with register(["matmul", "rms_norm"]) as found:
        assert found.operators == (
            "aten::matmul", "aten::matmul_backward", "npu_dsa::rms_norm",
        ) and found.absent == ()  # fmt: skip
    with register("dsa") as found:
        assert {*found.operators, *found.absent} == {
            operator.name for operator in OPERATORS.values() if operator.group == "dsa"
        }


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ("attention", r"ops: got 'attention'; expected groups, .*matmul \(aten::matmul, .*_norm"),
        (["dsa", "npu_dsa::nothing"], "ops: got 'npu_dsa::nothing'"),
        ([None], "ops: got None"),
        ("npu_rms_norm", "operator npu::npu_rms_norm is not there; import torch_npu, which"),
    ],
)
def test_what_is_unknown(ops, message):
    with pytest.raises(ValueError, match=message):
        register(ops)


def test_importing_changes_nothing():
    code = """
import torch
from torch.distributed.tensor import DTensor
propagator = DTensor._op_dispatcher.sharding_propagator
before = {k: dict(v) for k, v in vars(propagator).items() if isinstance(v, dict)}
import dtensor_npu_strategies
after = {k: dict(v) for k, v in vars(propagator).items() if isinstance(v, dict)}
import sys
print(before == after, any(m.startswith(("torch_npu", "npu_dsa_kernels")) for m in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.split() == ["True", "False"]


# --- why torch's public way is not enough: these fail when it becomes so -------------------------


def test_public_registration_still_gives_up_shards_of_few_rows(line):
    before = tables()
    try:
        register_sharding(HADAMARD)(
            lambda x, scale, backend: [
                ([Replicate()], [Replicate(), None, None]), ([Shard(0)], [Shard(0), None, None]),
            ]
        )  # fmt: skip
        x = distribute(torch.ones(3, 4), line, (S(0),))
        assert redistributions(lambda: HADAMARD(x, 1.0, "torch"))
    finally:
        restore(before)
    with register():
        assert not redistributions(lambda: HADAMARD(x, 1.0, "torch"))


def test_public_registration_still_cannot_be_undone():
    def nothing():
        return []

    returned = register_sharding([])(nothing)
    assert returned is nothing and not hasattr(returned, "remove")
    assert not [n for n in vars(torch.distributed.tensor.experimental) if "unregister" in n]


def test_keyword_tensors_are_still_not_redistributed(line):
    """DTensor would run on what it should have redistributed first: ours refuses."""
    op = torch.ops.npu.npu_lightning_indexer.default
    call = indexer_call()
    given = {n: distribute(x, line, (R,)) for n, x in call.items()}
    lengths = given["actual_seq_lengths_key"]
    before = tables()
    try:
        register_sharding(op)(
            lambda *args, **kwargs: [([S(0), S(0)], [S(0), S(0), S(0), None, S(0), *[None] * 9])]
        )
        # Queries of one of four batches with the lengths of all: each rank gives four.
        indices, _ = op(**given, sparse_mode=0, sparse_count=2)
        assert indices.placements == (S(0),) and indices.to_local().shape[0] == 4
    finally:
        restore(before)
    message = "keyword arguments: actual_seq_lengths_key"
    given |= {n: distribute(call[n], line, (S(0),)) for n in ("query", "key", "weights")}
    with register():
        # Whole lengths go with whole queries alone.
        found = redistributions(lambda: op(**given, sparse_mode=0, sparse_count=2))
        assert [item.argument for item in found] == ["query", "key", "weights"]
        given["actual_seq_lengths_key"] = distribute(lengths.to_local().float(), line, (Partial(),))
        with pytest.raises(RuntimeError, match=message):
            op(**given, sparse_mode=0, sparse_count=2)
        given["actual_seq_lengths_key"] = distribute(lengths.to_local(), line, (S(0),))
        assert not redistributions(lambda: op(**given, sparse_mode=0, sparse_count=2))


def indexer_call():
    return {
        "query": torch.rand(4, 6, 2, 3), "key": torch.rand(4, 8, 1, 3),
        "weights": torch.rand(4, 6, 2), "actual_seq_lengths_key": torch.tensor([8, 7, 6, 5]).int(),
    }  # fmt: skip

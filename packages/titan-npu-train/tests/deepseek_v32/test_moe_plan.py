"""The MoE plan on real Gloo ranks: results of one process, and no TP collective for routed tokens.

Also the counts for load balancing, which must be those of one process exactly.
"""

from dataclasses import replace

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torchtitan.config import ParallelismConfig
from torchtitan.models.common.moe import MoE as TitanMoE

from moe_ranks import Case, Model, Report, build, checkpointing, data, moe_config, on_ranks
from titan_npu_train.deepseek_v32 import parallelize
from titan_npu_train.deepseek_v32.moe import SequenceShard
from titan_npu_train.deepseek_v32.moe_sharding import check_moe_parallelism
from titan_ranks import run_ranks

ON_2 = [
    *(Case(tp=2, ep=ep, sp=sp) for ep in (1, 2) for sp in (True, False)),
    Case(tp=2, ep=1, backend="full_dtensor"),
    Case(tp=2, ep=2, backend="full_dtensor", sp=False),
    Case(tp=2, ep=1, backend="partial_dtensor", sp=False),
    Case(tp=2, ep=2, backend="partial_dtensor"),
    Case(tp=2, ep=1, typecheck=True),
    Case(tp=2, ep=2, typecheck=True, sp=False, ac="full"),
    Case(tp=2, ep=1, shared=False),
    Case(tp=2, ep=2, shared=False),
    Case(tp=2, ep=1, ac="full", microbatches=2),
    Case(tp=2, ep=2, ac="selective", microbatches=2),
    Case(shard=2, ep=2),
]
ON_4 = [
    Case(tp=4, ep=2),
    Case(tp=4, ep=4, sp=False),
    Case(replicate=2, tp=2, ep=1),
    Case(cp=2, tp=2, ep=4),
    Case(shard=2, tp=2, ep=2, typecheck=True),
    Case(shard=2, tp=2, ep=4, backend="partial_dtensor"),
    Case(cp=2, tp=2, ep=1, backend="full_dtensor", microbatches=4),
]
STOCK = [
    Case(tp=2, ep=1, stock=True),
    Case(tp=2, ep=2, stock=True),
    Case(tp=2, ep=2, stock=True, sp=False),
]


@pytest.fixture(scope="module")
def reports() -> dict[Case, list[Report]]:
    """Every case, run once: the cases of as many ranks share their processes."""
    found = {}
    for cases, ranks in ((ON_2 + STOCK, 2), (ON_4, 4)):
        by_rank = run_ranks(on_ranks, ranks, cases, timeout=300)
        found.update(zip(cases, zip(*by_rank, strict=True), strict=True))
    return found


def _name(case: Case) -> str:
    default = Case()
    fields = {name: getattr(case, name) for name in Case.__dataclass_fields__}
    return " ".join(f"{k}={v}" for k, v in fields.items() if v != getattr(default, k))


def _planned(case: Case) -> tuple[dict, dict]:
    """Collectives of the layer, forward and backward, as the plan has them."""
    forward, backward = {}, {}
    if case.tp > 1 and case.sp and case.shared:
        forward = {("tp", "all_gather"): 1, ("tp", "reduce_scatter"): 1}
        backward = dict(forward)
    if case.tp > 1 and not case.sp:
        forward, backward = {("tp", "all_reduce"): 1}, {("tp", "all_reduce"): 1}
    if case.ep > 1:
        # Counts, tokens, results; backward the gradients of the latter two.
        forward["ep", "all_to_all"], backward["ep", "all_to_all"] = 3, 2
    return forward, backward


def _without_fsdp(collectives: dict) -> dict:
    return {key: n for key, n in collectives.items() if key[0] != "fsdp"}


@pytest.mark.distributed
@pytest.mark.parametrize("case", ON_2 + ON_4, ids=_name)
def test_results_and_counts_are_those_of_one_process(reports, case):
    for report in reports[case]:
        assert not report.error, report.error
        assert len(report.errors) == (9 if case.shared else 6)
        assert max(report.errors.values()) < 1e-5, report.errors
        assert report.tokens_differ == 0
        assert report.bias_differs == 0


@pytest.mark.distributed
@pytest.mark.parametrize("case", [c for c in ON_2 + ON_4 if c.ac is None], ids=_name)
def test_only_the_shared_expert_communicates_over_tp(reports, case):
    for report in reports[case]:
        assert not report.error, report.error
        assert (_without_fsdp(report.forward), _without_fsdp(report.backward)) == _planned(case)


@pytest.mark.distributed
def test_the_stock_plan_moves_more(reports):
    """Fails when torchtitan's own plan has become as good."""
    no_ep, ep, no_sp = STOCK
    for report in reports[no_ep]:
        assert _without_fsdp(report.forward) == {
            ("tp", "all_gather"): 1,
            ("tp", "reduce_scatter"): 2,
        }
        assert _without_fsdp(report.backward) == {
            ("tp", "all_gather"): 2,
            ("tp", "reduce_scatter"): 1,
        }
    for report in reports[no_sp]:
        assert report.backward["tp", "all_gather"] == 2
    for report in reports[ep]:
        assert (_without_fsdp(report.forward), _without_fsdp(report.backward)) == _planned(ep)
    for case, more in ((no_ep, 1.5), (ep, 1.0), (no_sp, 1.5)):
        ours = reports[replace(case, stock=False)][0].tp_bytes
        assert reports[case][0].tp_bytes == more * ours > 0


def _counted(model: Model) -> torch.Tensor:
    return model.get_buffer(next(n for n, _ in model.named_buffers() if "tokens_per_expert" in n))


def _routed(model: Model, x_BLD: torch.Tensor) -> torch.Tensor:
    """Tokens of each expert, by the router itself."""
    moe = model.layers["0"].moe
    with torch.no_grad():
        ids = moe.router(x_BLD, moe.expert_bias_E)[1]
    return torch.bincount(ids.flatten(), minlength=moe.router.num_experts)


@pytest.mark.parametrize("ac", [None, "full", "selective"])
def test_a_forward_counts_once_and_only_if_trained_on(ac):
    model = build(moe_config())
    x, y_grad = data()
    a, b = x.chunk(2)
    routed_a, routed_b = _routed(model, a), _routed(model, b)
    assert not torch.equal(routed_a, routed_b)
    if ac is not None:
        parallelize.apply_activation_checkpointing(model, checkpointing(ac))

    model(a)  # as a pipeline's first step, which asks for shapes
    with torch.no_grad():
        model(a)
    assert _counted(model).sum() == 0
    first = model(a)
    second = model(b)  # two microbatches in flight
    first.backward(y_grad[:2])
    assert torch.equal(_counted(model), routed_a.float())
    second.backward(y_grad[2:])
    assert torch.equal(_counted(model), (routed_a + routed_b).float())


def test_a_backward_in_two_parts_counts_once():
    """As zero-bubble pipelines run it: gradients of inputs first, those of weights later."""
    model = build(moe_config())
    x, y_grad = data()
    x.requires_grad_()
    routed = _routed(model, x)
    _, groups = stage_backward_input([model(x) * 1], [y_grad], [x], model.parameters())
    stage_backward_weight(model.parameters(), groups)
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert torch.equal(_counted(model), routed.float())


def test_a_model_that_is_evaluated_or_whose_router_is_frozen_counts_nothing():
    x, y_grad = data()
    for change in (Model.eval, lambda model: model.layers["0"].moe.router.requires_grad_(False)):
        model = build(moe_config())
        change(model)
        model(x).backward(y_grad)
        assert _counted(model).sum() == 0


def test_the_stock_layer_still_counts_twice():
    config = moe_config()
    names = ("num_experts", "routed_experts", "router", "load_balance_coeff", "shared_experts")
    model = build(moe_config())
    model.layers["0"].moe = TitanMoE.Config(**{n: getattr(config, n) for n in names}).build()
    model.init_states()
    x, y_grad = data()
    routed = _routed(model, x)
    parallelize.apply_activation_checkpointing(model, checkpointing("full"))
    model(x).backward(y_grad)
    assert torch.equal(_counted(model), 2 * routed.float())


def _parallelism(**degrees) -> ParallelismConfig:
    return ParallelismConfig(
        **{
            name if "_" in name else f"{name}_parallel_degree": value
            for name, value in degrees.items()
        }
    )


@pytest.mark.parametrize(
    ("parallelism", "arguments", "message"),
    [
        ({"expert": 16}, {}, r"expert_parallel_degree is 16, .* 8 experts; use one of 1, 2, 4, 8$"),
        ({"expert": 3}, {}, r"expert_parallel_degree is 3, .* 8 experts"),
        (
            {"expert": 4, "tensor": 2, "data_parallel_shard_degree": 1},
            {},
            r"expert_parallel_degree is 4, .* 2 ranks .* use one of 1, 2$",
        ),
        ({"tensor": 4}, {"seq_len": 30}, r"seq_len is 30, .* multiple of 4 such as 32"),
        ({"tensor": 4}, {"seq_len": 2}, r"seq_len is 2, .* multiple of 4 such as 4"),
        (
            {"tensor": 4, "enable_sequence_parallel": False},
            {"seq_len": 2},
            r"seq_len is 2, .* multiple of 4 such as 4",
        ),
        ({"tensor": 2, "context": 3}, {"seq_len": 32}, r"seq_len is 32, .* multiple of 6 such as"),
        (
            {"tensor": 2, "context": 2, "spmd_backend": "full_dtensor"},
            {"rows": 4},
            r"full_dtensor .* got 4: set training.local_batch_size .* to 1",
        ),
    ],
)
def test_what_cannot_run_is_refused(parallelism, arguments, message):
    with pytest.raises(ValueError, match=message):
        check_moe_parallelism(_parallelism(**parallelism), num_experts=8, **arguments)


def test_what_can_run_is_not_refused():
    check_moe_parallelism(
        _parallelism(tensor=4, expert=8, context=2), num_experts=8, seq_len=32, rows=4
    )
    check_moe_parallelism(_parallelism(spmd_backend="full_dtensor", tensor=2), num_experts=8)


@pytest.mark.parametrize("tokens", [2, 6])
def test_a_sequence_that_does_not_split_is_refused(tokens):
    shard = SequenceShard.Config().build()
    shard.rank, shard.size = 1, 4
    with pytest.raises(ValueError, match=rf"{tokens} tokens .* 4 tensor-parallel ranks"):
        shard(torch.zeros(1, tokens, 8))

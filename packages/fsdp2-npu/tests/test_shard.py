"""Real Gloo ranks against one process. Starting ranks costs more than what they do here, so the
ranks of a size start once and run all cases; each test looks at one."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp2_npu import Prefetch, shard_model
from fsdp2_ranks import run_ranks
from toy import DIM, LENGTH, batch, build, loss_of

pytestmark = pytest.mark.distributed

STEPS = 2


def _run_cases(rank, cases):
    return {name: globals()[function](rank, **options) for name, function, options in cases}


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(_run_cases, 2, TWO_RANKS)


@pytest.fixture(scope="module")
def four_ranks():
    return run_ranks(_run_cases, 4, FOUR_RANKS)


TWO_RANKS = [
    ("default", "_data_parallel", {}),
    ("recompute", "_data_parallel", {"reshard_after_forward": True, "recompute": True}),
    ("kept", "_data_parallel", {"reshard_after_forward": False, "prefetch": Prefetch(2, 2)}),
    ("no prefetch", "_data_parallel", {"prefetch": Prefetch(0, 0)}),
    ("mean", "_mean", {}),
    ("precision", "_precision", {}),
    ("kept None", "_kept", {"reshard": None}),
    ("kept True", "_kept", {"reshard": True}),
    ("kept False", "_kept", {"reshard": False}),
    ("groups", "_groups", {}),
    ("averaging", "_averaging", {}),  # ends in an error inside backward, so it comes last
]
FOUR_RANKS = [
    ("replicated", "_data_parallel", {"shape": (2, 2), "names": ("replicate", "shard")}),
    ("part", "_data_parallel", {"shape": (4,), "reshard_after_forward": 2}),
    # Two experts a rank are sharded over two ranks. One expert is not: its rows are.
    ("four experts", "_expert_parallel", {"experts": 4}),
    ("two experts", "_expert_parallel", {"experts": 2}),
    ("storage mesh", "_storage_mesh", {}),
]


def _train(model, tokens_T, total_tokens):
    """Losses, first step's gradients and final parameters, all as full tensors by name."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    losses, first = [], None
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, tokens_T, total_tokens)
        loss.backward()
        losses.append(loss.detach())
        if first is None:
            first = {n: _full(p.grad) for n, p in model.named_parameters()}
        optimizer.step()
    return losses, first, {n: _full(p.detach()) for n, p in model.named_parameters()}


def _full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def _errors(got, want):
    """Largest difference of each tensor relative to the wanted one's norm."""
    assert got.keys() == want.keys()
    return {n: float((got[n] - want[n]).norm() / want[n].norm().clamp(min=1e-12)) for n in want}


def _compare(rank, model, want, slice_of=lambda name, tensor: tensor):
    """Train the sharded model and, on the same global batch, an unsharded one in this process."""
    tokens_T = batch(dist.get_world_size())
    losses, grads, params = _train(
        model, tokens_T[rank * LENGTH : (rank + 1) * LENGTH], tokens_T.numel()
    )
    total = torch.stack(losses)
    dist.all_reduce(total)
    want_losses, want_grads, want_params = _train(want, tokens_T, tokens_T.numel())
    return {
        "loss": float((total - torch.stack(want_losses)).abs().max()),
        "grads": _errors(grads, {n: slice_of(n, t) for n, t in want_grads.items()}),
        "params": _errors(params, {n: slice_of(n, t) for n, t in want_params.items()}),
    }


def _assert_equal(results):
    for result in results:
        assert result["loss"] < 1e-6
        assert max(result["grads"].values()) < 1e-6, result["grads"]
        # Adam divides by gradients of rounding size, so parameters differ by more than gradients.
        assert max(result["params"].values()) < 1e-5, result["params"]


def _data_parallel(rank, shape=(2,), names=None, recompute=False, **options):
    model = build()
    for layer in model.layers:
        layer.recompute = recompute
    shard_model(
        model,
        dist.init_device_mesh("cpu", shape, mesh_dim_names=names),
        blocks=model.blocks(),
        experts=lambda block: getattr(block, "experts", None),
        full_precision=[layer.scorer for layer in model.layers],
        gradient_divide_factor=1.0,
        **options,
    )
    return _compare(rank, model, build())


@pytest.mark.parametrize("case", ["default", "recompute", "kept", "no prefetch"])
def test_two_ranks_equal_one_process(two_ranks, case):
    _assert_equal([result[case] for result in two_ranks])


@pytest.mark.parametrize("case", ["replicated", "part"])
def test_four_ranks_equal_one_process(four_ranks, case):
    _assert_equal([result[case] for result in four_ranks])


def _mean(rank):
    """Without a divide factor gradients are averaged, though Gloo can only sum."""
    model, want = build(), build()
    shard_model(model, dist.init_device_mesh("cpu", (2,)), blocks=model.layers)
    tokens_T = batch(2)
    loss_of(model, tokens_T[rank * LENGTH : (rank + 1) * LENGTH], LENGTH).backward()
    loss_of(want, tokens_T, 2 * LENGTH).backward()
    grads = {n: _full(p.grad) for n, p in model.named_parameters()}
    return _errors(grads, {n: p.grad for n, p in want.named_parameters()})


def test_gradients_are_averaged_by_default(two_ranks):
    for result in two_ranks:
        assert max(result["mean"].values()) < 1e-6, result["mean"]


def _expert_parallel(rank, experts):
    dense = dist.init_device_mesh("cpu", (4,))
    sparse = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    model = build(experts=experts)
    first = sparse.get_local_rank("ep") * experts // 2
    mine = slice(first, first + experts // 2)
    for layer in model.layers:
        layer.experts.w_EDD = nn.Parameter(layer.experts.w_EDD.detach()[mine].clone())
        layer.experts.group = sparse.get_group("ep")
    shard_model(
        model,
        dense,
        blocks=model.blocks(),
        experts={layer: layer.experts for layer in model.layers},
        expert_mesh=sparse["efsdp"],
        full_precision=[layer.scorer for layer in model.layers],
        gradient_divide_factor=1.0,
    )
    weight = model.layers[0].experts.w_EDD

    def slice_of(name, tensor):
        return tensor[mine] if "w_EDD" in name else tensor

    errors = _compare(rank, model, build(experts=experts), slice_of)
    return (weight.placements, weight.device_mesh.size()), errors


@pytest.mark.parametrize(("case", "shard"), [("four experts", 0), ("two experts", 1)])
def test_experts_are_sharded_and_reduced_over_their_own_mesh(four_ranks, case, shard):
    for result in four_ranks:
        placement, errors = result[case]
        assert placement == ((Shard(shard),), 2)
        _assert_equal([errors])


def _storage_mesh(rank):
    """Parameters that are DTensors on an SPMD mesh, as torchtitan stores them."""
    names = ("dp_replicate", "dp_shard", "cp", "tp")
    mesh = dist.init_device_mesh("cpu", (1, 2, 1, 2), mesh_dim_names=names)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.Tanh(), nn.Linear(2 * DIM, DIM))
    want = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.Tanh(), nn.Linear(2 * DIM, DIM))
    want.load_state_dict(model.state_dict())
    # Column-parallel, then row-parallel over tp; replicated elsewhere.
    tp = {"0.weight": Shard(0), "0.bias": Shard(0), "2.weight": Shard(1), "2.bias": Replicate()}
    for name, placement in tp.items():
        module, leaf = model.get_submodule(name[0]), name[2:]
        placements = [Replicate(), Replicate(), Replicate(), placement]
        local = distribute_tensor(getattr(module, leaf).detach(), mesh, placements)
        setattr(module, leaf, nn.Parameter(local))
    shard_model(
        model,
        mesh,
        mesh_dims=DataParallelMeshDims(shard=("dp_shard", "cp")),
        blocks=[model[0], model[2]],
        gradient_divide_factor=1.0,
    )
    x_BD = torch.randn(4, DIM, generator=torch.Generator().manual_seed(1))
    mine = x_BD.chunk(2)[mesh.get_local_rank("dp_shard")]
    placements = [Replicate(), Shard(0), Replicate(), Replicate()]
    y_BD = model(DTensor.from_local(mine, mesh, placements))
    y_BD.full_tensor().square().sum().backward()
    want(x_BD).square().sum().backward()
    grads = {n: _full(p.grad) for n, p in model.named_parameters()}
    return _errors(grads, {n: p.grad for n, p in want.named_parameters()})


def test_storage_mesh_with_named_data_parallel_dims(four_ranks):
    for result in four_ranks:
        assert max(result["storage mesh"].values()) < 1e-6, result["storage mesh"]


def _precision(rank):
    model = build()
    for layer in model.layers:
        nn.init.constant_(layer.scorer.weight, 1 + 2**-12)  # bf16 would round it to 1
    shard_model(
        model,
        dist.init_device_mesh("cpu", (2,)),
        blocks=model.layers,
        full_precision=[layer.scorer for layer in model.layers],
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False),
    )
    seen = []

    def look(module, args):
        seen.append((str(module.weight.dtype), float(module.weight.flatten()[0].float())))

    model.layers[1].scorer.register_forward_pre_hook(look)
    model.layers[1].dense.register_forward_pre_hook(look)
    loss_of(model, batch(1), LENGTH).backward()
    scorer = model.layers[1].scorer.weight
    # Equal data on both ranks: the mean over ranks is each rank's own fp32 gradient, unrounded.
    grad = scorer.grad.full_tensor()
    rounded = float((grad.bfloat16().float() - grad).abs().max())
    return seen, str(scorer.dtype), str(grad.dtype), rounded, float(grad.abs().max())


def test_full_precision_modules_are_exempt_from_the_parameter_cast(two_ranks):
    for result in two_ranks:
        seen, parameter, grad, rounded, size = result["precision"]
        (dense, _), (scorer, value) = seen
        assert dense == "torch.bfloat16"
        assert (scorer, value) == ("torch.float32", 1 + 2**-12)
        assert parameter == grad == "torch.float32"
        assert size > 0 and rounded > 0


def _kept(rank, reshard):
    model = build()
    shard_model(
        model,
        dist.init_device_mesh("cpu", (2,)),
        blocks=model.layers,
        full_precision=[model.layers[0].scorer],
        reshard_after_forward=reshard,
    )
    model(batch(1))
    parameters = [model.layers[0].scorer, *(layer.dense for layer in model.layers), model.head]
    return [not isinstance(module.weight, DTensor) for module in parameters]


@pytest.mark.parametrize(
    ("reshard", "layers"),
    [
        (None, [False, False, True]),
        (True, [False, False, False]),
        (False, [True, True, True]),
    ],
)
def test_what_is_kept_after_forward(two_ranks, reshard, layers):
    for result in two_ranks:
        assert result[f"kept {reshard}"] == [True, *layers, True]


def _groups(rank):
    model = build()
    sharded = shard_model(
        model,
        dist.init_device_mesh("cpu", (2,)),
        blocks=model.blocks(),
        full_precision=[model.layers[2].scorer],
    )
    names = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    return sharded is model, names


def test_what_becomes_a_group(two_ranks):
    for result in two_ranks:
        same, names = result["groups"]
        assert same
        assert names == [
            *("", "embedding", "layers.0", "layers.1", "layers.2", "layers.2.scorer"),
            *("norm", "head"),
        ]


def _averaging(rank):
    model = build()
    # A group of its own: a Gloo barrier raises again what earlier work of its group raised, and the
    # ranks end with a barrier of the default group.
    group = dist.new_group([0, 1])
    shard_model(
        model,
        DeviceMesh.from_group(group, "cpu"),
        blocks=model.layers,
        sum_reduction=False,
        gradient_divide_factor=1.0,
    )
    try:
        loss_of(model, batch(1), LENGTH).backward()
    except RuntimeError as error:
        return str(error)
    return "accepted"


def test_gloo_needs_sum_reduction(two_ranks):
    # Were it accepted, Gloo would have learnt it, and could be one of the averaging backends.
    for result in two_ranks:
        assert "Cannot use ReduceOp.PREMUL_SUM with Gloo" in result["averaging"]

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import DataParallelMeshDims
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp2_npu import Prefetch, needs_sum_reduction, shard_model
from toy import build


@pytest.fixture(autouse=True)
def fake_ranks():
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def model():
    return build()


@pytest.fixture
def mesh():
    return dist.init_device_mesh("cpu", (8,))


def refused(message, model, mesh, **options):
    with pytest.raises(ValueError, match=message):
        shard_model(model, mesh, **({"blocks": model.layers} | options))
    assert all("FSDP" not in type(m).__name__ for m in model.modules()), "half applied"


def test_blocks(model, mesh):
    first = model.layers[0]
    refused(r"blocks\[0\] must be a module .* got str .* \.values\(\)", model, mesh, blocks=["0"])
    refused(r"blocks\[1\] is empty", model, mesh, blocks=[first, []])
    refused(r"blocks\[0\] \(Toy\) is not a submodule", model, mesh, blocks=[model])
    refused(r"blocks\[0\] \(Block\) is not a submodule", model, mesh, blocks=[build().layers[0]])
    refused(r"blocks\[1\] and blocks\[0\] both contain", model, mesh, blocks=[first, first])
    refused(r"blocks\[1\] and blocks\[0\] both contain", model, mesh, blocks=[first, first.dense])
    refused(r"blocks\[1\] and blocks\[0\] both contain", model, mesh, blocks=[first.dense, first])


def test_meshes(model, mesh):
    cube = dist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    unnamed = dist.init_device_mesh("cpu", (2, 4))
    refused("mesh must be a DeviceMesh, got NoneType", model, None)
    refused("mesh without mesh_dims must be 1-d", model, cube)
    refused("mesh without mesh_dims must be 1-d", model, unnamed)
    refused(
        r"mesh_dims names \['x'\], but .*'a', 'b', 'c'",
        model,
        cube,
        mesh_dims=DataParallelMeshDims(shard="x"),
    )
    refused("mesh_dims must be a DataParallelMeshDims, got str", model, cube, mesh_dims="a")
    refused(
        "expert_mesh without expert_mesh_dims must be 1-d",
        model,
        mesh,
        experts=lambda block: block.experts,
        expert_mesh=cube,
    )
    refused(
        "expert_mesh_dims must name a dimension to shard experts over",
        model,
        mesh,
        experts=lambda block: block.experts,
        expert_mesh=cube,
        expert_mesh_dims=DataParallelMeshDims(replicate="a"),
    )


def test_experts(model, mesh):
    refused("expert_mesh is given, but not experts", model, mesh, expert_mesh=mesh)
    refused(
        "expert_mesh_dims is given without",
        model,
        mesh,
        expert_mesh_dims=DataParallelMeshDims(shard="a"),
    )
    refused("experts must be a function .* got str", model, mesh, experts="experts")
    refused(
        "experts gives Linear for Block, which is not a submodule of it",
        model,
        mesh,
        experts=lambda block: model.head,
    )


def test_full_precision(model, mesh):
    first = model.layers[0]

    def experts(block):
        return block.experts

    refused("contains a block", model, mesh, full_precision=[model.layers])
    refused("is not a submodule", model, mesh, full_precision=[build().head])
    refused("is not a submodule", model, mesh, full_precision=["head"])
    refused("overlaps with Linear", model, mesh, full_precision=[first.scorer, first.scorer])
    refused("overlaps with experts", model, mesh, experts=experts, full_precision=[first.experts])


@pytest.mark.parametrize("value", [0, 1, 1.5, "always"])
def test_reshard_after_forward(model, mesh, value):
    refused(
        "reshard_after_forward must be True, False, None", model, mesh, reshard_after_forward=value
    )


@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_gradient_divide_factor(model, mesh, value):
    refused(
        "gradient_divide_factor must be a positive number",
        model,
        mesh,
        gradient_divide_factor=value,
    )


@pytest.mark.parametrize("value", [-1, 1.5, True, None])
def test_prefetch(value):
    with pytest.raises(ValueError, match=r"Prefetch\.backward is a number of blocks"):
        Prefetch(backward=value)


def test_microbatch_reduction(model, mesh):
    refused(
        "microbatch_reduction must be 'last' or 'each', got 'never'",
        model,
        mesh,
        microbatch_reduction="never",
    )


def test_sharding_twice(model, mesh):
    shard_model(model, mesh, blocks=model.layers)
    with pytest.raises(ValueError, match="is sharded already"):
        shard_model(model, mesh, blocks=model.layers)


def test_a_backend_that_averages_is_left_to_it(mesh):
    assert needs_sum_reduction(mesh) is False


def test_one_backend_that_cannot_average_decides(monkeypatch):
    names = ("replicate", "shard")
    mesh = dist.init_device_mesh("cpu", (2, 4), mesh_dim_names=names)
    backends = {mesh.get_group("replicate"): "cpu:hccl", mesh.get_group("shard"): "cpu:nccl"}
    monkeypatch.setattr(dist, "get_backend_config", backends.__getitem__)
    assert needs_sum_reduction(mesh)
    assert needs_sum_reduction(mesh, ["replicate"])
    assert not needs_sum_reduction(mesh, ["shard"])

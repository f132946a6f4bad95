"""DTensor parameters: FSDP2 on Gloo ranks, the swapped optimizer against the plain one."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from swap_ranks import run_ranks
from training import OPTIMIZERS, Training, assert_same_bits, swapped

pytestmark = pytest.mark.distributed

NAMES = ["AdamW", "AdamW foreach", "AdamW fused", "Adam amsgrad", "SGD momentum", "Adagrad"]


def shard(model) -> None:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    if isinstance(model.scale, torch.nn.Parameter):
        model.scale = torch.nn.Parameter(model.scale.detach().reshape(1))  # FSDP2 wants dimensions
    fully_shard(model, mesh=mesh)
    model.set_force_sum_reduction_for_comms(True)  # Gloo has no average


def _twenty_steps(rank, folder, names, backward):
    for name in names:
        plain = Training(OPTIMIZERS[name], shard=shard, backward=backward)
        losses = [plain.step(i) for i in range(20)]
        for storage, options in (("host", {}), ("disk", {"path": folder})):
            wrap = swapped(storage, **options)
            swap = Training(OPTIMIZERS[name], wrap, shard, backward=backward)
            assert isinstance(swap.model.layers[0].weight, DTensor)
            assert [swap.step(i) for i in range(20)] == losses, (name, storage)
            assert_same_bits(plain, swap)
            for state in swap.optimizer.state_dict()["state"].values():
                tensors = [v for v in state.values() if isinstance(v, torch.Tensor) and v.dim()]
                assert all(isinstance(v, DTensor) for v in tensors)
            swap.optimizer.close()


def _all_twenty_steps(rank, folder, fsdp):
    few = dist.get_world_size() > 2  # the others are the same there, and it takes long
    _twenty_steps(rank, folder, NAMES[1::2] if few else NAMES, False)
    _twenty_steps(rank, folder, [fsdp], True)


@pytest.mark.parametrize(("ranks", "fsdp"), [(4, "AdamW fused"), (2, "Muon")])
def test_twenty_steps(ranks, fsdp, tmp_path):
    """And with FSDP2's own gradients, clipped; and an optimizer that communicates in its step."""
    run_ranks(_all_twenty_steps, ranks, str(tmp_path), fsdp)
    assert not list(tmp_path.iterdir())


OPTIONS = {
    "nested": StateDictOptions(),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
}


def _resume(rank, folder, flat):
    """Through DCP, in all four directions."""
    options = OPTIONS["flat" if flat else "nested"]
    kinds = {"plain": lambda optimizer: optimizer, "swap": swapped("host" if flat else "disk")}
    name = "AdamW fused" if flat else "Adam amsgrad"
    make = partial(Training, OPTIMIZERS[name], shard=shard, backward=False)
    whole = make().run(range(20))
    for before, wrap in kinds.items():
        first = make(wrap).run(range(10))
        states = {
            "model": first.model.state_dict(),
            "optimizer": get_optimizer_state_dict(first.model, first.optimizer, options=options),
        }
        dcp.save(states, checkpoint_id=f"{folder}/{before}")
        for wrap_again in kinds.values():
            for steps in (0, 3):  # a new optimizer, and one that has states already
                resumed = make(wrap_again).run(range(steps))
                states = {
                    "model": resumed.model.state_dict(),
                    "optimizer": get_optimizer_state_dict(
                        resumed.model, resumed.optimizer, options=options
                    ),
                }
                dcp.load(states, checkpoint_id=f"{folder}/{before}")
                resumed.model.load_state_dict(states["model"])
                set_optimizer_state_dict(
                    resumed.model, resumed.optimizer, states["optimizer"], options=options
                )
                resumed.scheduler.load_state_dict(first.scheduler.state_dict())
                assert_same_bits(first, resumed)
                assert_same_bits(whole, resumed.run(range(10, 20)))


@pytest.mark.parametrize(("ranks", "flat"), [(2, False), (4, True)], ids=["2-nested", "4-flat"])
def test_resume_at_step_ten_through_dcp(ranks, flat, tmp_path):
    run_ranks(_resume, ranks, str(tmp_path), flat)

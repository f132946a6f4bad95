"""Ranks of 128 that are not there: how presets lay out their parameters, a line of JSON each.

python preset_rank.py CONFIG RANK [CONFIG RANK ...]
"""

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_npu_train import platform

platform.select("cpu")

from torchtitan.config import TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1]))
from collectives import Collectives  # noqa: E402
from tiny import TINY  # noqa: E402
from titan_custom_cp import DSAContextParallelContext  # noqa: E402
from titan_npu_train.deepseek_v32 import config_registry, model_config  # noqa: E402
from titan_npu_train.deepseek_v32.indexer_loss import DSAMasks  # noqa: E402

WORLD = 128


def layout(name: str, rank: int) -> dict[str, dict]:
    dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
    config = getattr(config_registry, name)()
    parameters = {}
    for part in parallelized(config):
        for parameter_name, parameter in part.named_parameters():
            assert isinstance(parameter, DTensor)
            mesh = parameter.device_mesh
            parameters[parameter_name.replace("_checkpoint_wrapped_module.", "")] = {
                "shape": list(parameter.shape),
                "local": list(parameter.to_local().shape),
                "bytes": math.prod(parameter.to_local().shape) * parameter.element_size(),
                "placements": {
                    axis: None if placement.is_replicate() else placement.dim
                    for axis, placement in zip(
                        mesh.mesh_dim_names, parameter.placements, strict=True
                    )
                },
            }
    dist.destroy_process_group()
    _clear_sharding_prop_cache()
    return parameters


def parallelized(config) -> list[torch.nn.Module]:
    """What the trainer does with a model on the meta device, up to the weights."""
    dims = ParallelDims.from_config(config.parallelism, WORLD)
    dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
    dims.build_mesh()
    spec = config.model_spec
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    settings = {
        "parallel_dims": dims,
        "training": config.training,
        "parallelism": config.parallelism,
        "compile_config": config.compile,
        "ac_config": config.activation_checkpoint,
        "dump_folder": "",
    }
    if not dims.pp_enabled:
        return [spec.parallelize_fn(model, **settings)]
    return spec.pipelining_fn(
        model,
        **settings,
        device=torch.device("cpu"),
        model_config=spec.model,
        parallelize_fn=spec.parallelize_fn,
        loss_fn=lambda *_, **__: (None, {}),
    )[1]


NARROW = replace(TINY, n_layers=2, n_dense_layers=1, num_experts=64, max_seq_len=4096)


def collectives(name: str, rank: int) -> dict[str, dict[str, int]]:
    config = getattr(config_registry, name)()
    parallelism = config.parallelism
    world = WORLD // parallelism.pipeline_parallel_degree
    parallelism.pipeline_parallel_degree = 1
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    dims = ParallelDims.from_config(parallelism, world)
    dist_utils.set_spmd_backend(parallelism.spmd_backend)
    dims.build_mesh()
    # Every expert gets one of a rank's tokens: known, too, of the ranks that are not there.
    config.debug.moe_force_load_balance = True
    seq_len = NARROW.num_experts // NARROW.experts_per_token * dims.tp * dims.cp
    config.training = TrainingConfig(seq_len=seq_len, mixed_precision_param="float32")
    spec = model_config(NARROW)
    spec.update_from_config(config=config)
    model = spec.build()
    torch.manual_seed(0)
    model.init_states()
    config.model_spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=parallelism,
        compile_config=config.compile,
        ac_config=None,
        dump_folder="",
    )
    tokens = torch.arange(seq_len).remainder(NARROW.vocab_size).unsqueeze(0)
    positions = torch.arange(seq_len).unsqueeze(0)
    buffers = [tokens, positions]
    mesh = dims.get_optional_mesh("cp")
    if mesh is not None:
        cp = DSAContextParallelContext(mesh, buffers=buffers, buffer_seq_dims=[1, 1])
        cp.__enter__()
    counts = torch.ones_like(positions, dtype=torch.bool)
    masks = DSAMasks.from_positions(
        positions, index_S=None if mesh is None else cp.index, kl_mask_BS=counts
    )
    log = Collectives(dims)
    with dist_utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)():
        with log:
            logits = model(tokens, positions, masks)
        seen = {"forward": log.seen.copy()}
        log.seen.clear()
        with log:
            logits.backward(torch.ones_like(logits))
        seen["backward"] = log.seen
    if mesh is not None:
        cp.__exit__(None, None, None)
    dist.destroy_process_group()
    _clear_sharding_prop_cache()
    return {
        phase: {f"{axis} {kind}": n for (axis, kind), n in counts.items() if axis != "fsdp"}
        for phase, counts in seen.items()
    }


if __name__ == "__main__":
    measure = {"layout": layout, "collectives": collectives}[sys.argv[1]]
    for name, rank in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
        print(json.dumps(measure(name, int(rank))))
    sys.stdout.flush()
    os._exit(0)

"""Ranks of 128 that are not there: how presets lay out their parameters, a line of JSON each.

python preset_rank.py CONFIG RANK [CONFIG RANK ...]
"""

import json
import math
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_npu_train import platform

platform.select("cpu")

from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402

from titan_npu_train.deepseek_v32 import config_registry  # noqa: E402

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


if __name__ == "__main__":
    for name, rank in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        print(json.dumps(layout(name, int(rank))))
    sys.stdout.flush()
    os._exit(0)

"""What cannot run is refused by name when the model reads its configuration: no rank has talked."""

from typing import Any

import pytest
from torchtitan.components.validate import Validator
from torchtitan.config import CompileConfig
from torchtitan.distributed.activation_checkpoint import FullAC

from titan_npu_train import preflight
from titan_npu_train.deepseek_v32 import config_registry
from titan_npu_train.failures import UserError

ENABLED = CompileConfig(enable=True)
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "sequence over TP": (
        {"tensor_parallel_degree": 4, "seq_len": 508},
        r"seq_len 508 is not divisible by 8 .*tensor_parallel_degree 4.* --training.seq_len 504",
    ),
    "shorter than TP": (
        {"tensor_parallel_degree": 4, "seq_len": 4},
        r"training.seq_len 4 is not divisible by 8 .*--training.seq_len 8",
    ),
    "sequence over TP and CP": (
        {"tensor_parallel_degree": 2, "context_parallel_degree": 4, "seq_len": 520},
        r"seq_len 520 is not divisible by 16 .*context_parallel_degree 4",
    ),
    "sequence over CP": (
        {"context_parallel_degree": 4, "seq_len": 508},
        r"training.seq_len 508 cannot be shared out to parallelism.context_parallel_degree 4 ranks",
    ),
    "heads": (
        {"tensor_parallel_degree": 8},
        r"parallelism.tensor_parallel_degree 8 .* 4 attention heads; use one of 1, 2, 4",
    ),
    "experts": (
        {"expert_parallel_degree": 16, "data_parallel_shard_degree": 16},
        r"expert_parallel_degree is 16, .* 8 experts; use one of 1, 2, 4, 8",
    ),
    "expert ranks": (
        {"expert_parallel_degree": 8, "data_parallel_shard_degree": 4},
        r"expert_parallel_degree is 8, .*4 ranks .*use one of 1, 2, 4",
    ),
    "balancer": (
        {"context_parallel_degree": 2, "context_parallel_load_balancer": "ptrr"},
        r"^parallelism.context_parallel_load_balancer must be 'headtail' or .*got 'ptrr'",
    ),
    "unknown context": (
        {"context_parallel_degree": 2, "context": "titan_custom_cp.NoSuchContext"},
        r"context_parallel.context: .*titan_custom_cp has no 'NoSuchContext'",
    ),
    "no context": (
        {"context_parallel_degree": 2, "context": "json.JSONDecoder"},
        r"context_parallel.context: .*no context manager",
    ),
    "context of dense attention": (
        {"context_parallel_degree": 2, "context": "titan_custom_cp.UlyssesContextParallelContext"},
        r"gathers no keys: .*DSAContextParallelContext",
    ),
    "split backward with checkpointing": (
        {
            "pipeline_parallel_degree": 2,
            "pipeline_parallel_schedule": "ZBVZeroBubble",
            "activation_checkpoint": FullAC.Config(),
        },
        r"schedule ZBVZeroBubble .*activation_checkpoint:none, or 1F1B",
    ),
    "split backward with parameters freed": (
        {
            "pipeline_parallel_degree": 2,
            "pipeline_parallel_schedule": "ZBVZeroBubble",
            "activation_checkpoint": None,
            "pipeline_reduction": "each",
        },
        r"schedule ZBVZeroBubble .*fsdp.pipeline_reduction 'each' .*use 'last', or 1F1B",
    ),
    "unknown schedule": (
        {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "2F2B"},
        r"parallelism.pipeline_parallel_schedule: .*2F2B",
    ),
    "MTP in a pipeline": (
        {"name": "deepseek_v32_debugmodel_mtp", "pipeline_parallel_degree": 2},
        r"pipeline_parallel_degree is 2, .*without MTP",
    ),
    "a context that nothing uses": (
        {"context": "nowhere.Context"},
        r"context_parallel.context: .*no module 'nowhere'",
    ),
    "validation of split sequences": (
        {"context_parallel_degree": 2, "validator": Validator.Config(enable=True)},
        r"validator.enable with context_parallel_degree 2",
    ),
    "validation of MTP": (
        {"name": "deepseek_v32_debugmodel_mtp", "validator": Validator.Config(enable=True)},
        r"validator.enable with multi-token prediction",
    ),
    "compiled DTensors": (
        {"tensor_parallel_degree": 2, "spmd_backend": "full_dtensor", "compile": ENABLED},
        r"compile.enable needs parallelism.spmd_backend spmd_types",
    ),
    "backend of the loss alone": (
        {"kl_backend": "torch", "form": "unabsorbed"},
        r"dsa.kl_backend is 'torch', .*'unabsorbed'",
    ),
}


def config_with(name: str = "deepseek_v32_debugmodel", **settings: Any):
    config = getattr(config_registry, name)()
    options = (config.dsa, config.context_parallel, config.fsdp)
    sections = (config.parallelism, config.training, *options, config)
    for section in sections:
        for key in [k for k in settings if hasattr(section, k)]:
            setattr(section, key, settings.pop(key))
    assert not settings
    return config


@pytest.mark.parametrize("case", CASES)
def test_refused_by_name(case):
    settings, message = CASES[case]
    config = config_with(**settings)
    with pytest.raises(ValueError, match=message):
        config.model_spec.model.update_from_config(config=config)


def test_the_layout_is_checked_against_the_number_of_ranks():
    config = config_with(tensor_parallel_degree=2, seq_len=510)
    with pytest.raises(UserError, match=r"training.seq_len 510 is not divisible by 4"):
        preflight.check_layout(config, 2)
    with pytest.raises(UserError, match=r"3 processes .*Use --nproc"):
        preflight.check_layout(config, 3)

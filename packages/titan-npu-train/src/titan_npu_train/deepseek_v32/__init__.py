"""DeepSeek-V3.2 for torchtitan."""

from dataclasses import replace
from typing import Literal

from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.protocols.model_spec import ModelSpec

from titan_npu_train.deepseek_v32.flavors import FLAVORS, Flavor, model_config
from titan_npu_train.deepseek_v32.load_balance import register_moe_load_balancing
from titan_npu_train.deepseek_v32.model import DeepSeekV32Model
from titan_npu_train.deepseek_v32.parallelize import parallelize_deepseek_v32
from titan_npu_train.deepseek_v32.state_dict import DeepSeekV32StateDictAdapter

__all__ = [
    "FLAVORS",
    "DeepSeekV32Model",
    "DeepSeekV32StateDictAdapter",
    "Flavor",
    "model_config",
    "model_registry",
    "parallelize_deepseek_v32",
]


def model_registry(
    flavor: str,
    *,
    form: Literal["absorbed", "unabsorbed"] = "absorbed",
    dsa_backend: str | None = None,
    n_mtp_layers: int | None = None,
) -> ModelSpec:
    """The torchtitan model spec of a flavor.

    Args:
        flavor: a key of :data:`FLAVORS`.
        form: "absorbed", or "unabsorbed" for the published small-operator baseline.
        dsa_backend: backend of npu_dsa_kernels; None takes the best for the device.
        n_mtp_layers: multi-token-prediction layers; None takes the flavor's own number.

    Raises:
        ValueError: an unknown flavor.
    """
    if flavor not in FLAVORS:
        raise ValueError(f"flavor must be one of {', '.join(FLAVORS)}, got {flavor!r}")
    dimensions = FLAVORS[flavor]
    if n_mtp_layers is not None:
        dimensions = replace(dimensions, n_mtp_layers=n_mtp_layers)
    return ModelSpec(
        name="deepseek_v32",
        flavor=flavor,
        model=model_config(dimensions, form=form, dsa_backend=dsa_backend),
        parallelize_fn=parallelize_deepseek_v32,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=register_moe_load_balancing,
        state_dict_adapter=DeepSeekV32StateDictAdapter,
    )

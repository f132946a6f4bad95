"""Configurations of the tests of plans, and ranks as they really are."""

from typing import Any

from torch.distributed.tensor import DTensor

from titan_npu_train import preflight
from titan_npu_train.plan.layout import as_trained, build, fake_world, parallelized


def options(**degrees: int) -> list[str]:
    """Of parallelism, e.g. ``tensor=2``."""
    return [
        word
        for name, degree in degrees.items()
        for word in (f"--parallelism.{name}_parallel_degree", str(degree))
    ]


def configured(name: str, *words: str) -> Any:
    return preflight.load_config(preflight.DEFAULT_MODULE, f"deepseek_v32_{name}", list(words))


def held(config: Any, world: int, rank: int) -> dict[str, tuple[tuple[int, ...], int]]:
    """Local shape and stored bytes of each parameter of a rank that is really parallelized."""
    config = as_trained(config)
    with fake_world(config, world, rank) as dims:
        _, parts = parallelized(config, dims, build(config))
        found = {}
        for part in parts:
            part.to_empty(device="cpu" if _small(part) else "meta")
            # FSDP pads what it was given in its first forward.
            part._get_fsdp_state()._lazy_init() if _small(part) else None
            for name, parameter in part.named_parameters():
                assert isinstance(parameter, DTensor)
                local = parameter.to_local()
                name = name.replace("_checkpoint_wrapped_module.", "")
                found[name] = (tuple(local.shape), local.untyped_storage().nbytes())
        return found


def _small(part: Any) -> bool:
    return sum(p.numel() for p in part.parameters()) < 1e8

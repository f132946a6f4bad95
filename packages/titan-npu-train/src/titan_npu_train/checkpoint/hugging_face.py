"""Starting from Hugging Face weights, also from those of a model with fewer parts."""

from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.tools.logging import logger

from titan_npu_train.checkpoint.errors import CheckpointError, root_cause
from titan_npu_train.checkpoint.planner import MatchingLoadPlanner

__all__ = ["load_hugging_face"]


def load_hugging_face(
    path: str,
    state_dict: dict[str, Any],
    adapter: BaseStateDictAdapter,
    *,
    quantized: bool,
    process_group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """Read the safetensors in ``path`` into the tensors of a model's state dict.

    Parameters the checkpoint lacks keep their initial values if the adapter says that training
    may initialise them (``initialised_if_absent``: an older architecture without them), and the
    log says so; any other absence is an error.

    Returns:
        The state dict in the model's own names, without what the checkpoint lacks.

    Raises:
        CheckpointError: no safetensors, parameters missing, or other shapes than the model's.
    """
    hf_state = adapter.to_hf(state_dict)
    reader = adapter.get_hf_storage_reader(path, quantized)
    stored = set(reader.read_metadata().state_dict_metadata)
    _check_format(path, stored, quantized)
    absent = set(hf_state) - stored
    initialised: set[str] = set()
    if hasattr(adapter, "initialised_if_absent"):
        initialised = adapter.initialised_if_absent(absent)
    if missing := sorted(absent - initialised):
        raise CheckpointError(
            f"{path}: does not hold {len(missing)} of this model's parameters, "
            f"{missing[0]} among them. Use the config these weights belong to."
        )
    for key in initialised:
        del hf_state[key]
    if initialised and (process_group is None or dist.get_rank(process_group) == 0):
        logger.warning(
            f"{path} lacks {len(initialised)} parameters that this model may start without, "
            f"{min(initialised)} among them: they keep their random initialisation."
        )
    planner = None if quantized else MatchingLoadPlanner(path, [], strict=False)
    try:
        dcp.load(hf_state, storage_reader=reader, planner=planner, process_group=process_group)
    except CheckpointException as error:
        raise CheckpointError(root_cause(error)) from None
    return adapter.from_hf(hf_state)


def _check_format(path: str, stored: set[str], quantized: bool) -> None:
    """Refuse a folder without weights, and FP8 weights that would be read without their scales."""
    if not stored:
        raise CheckpointError(
            f"{path}: no .safetensors files. Give a folder of Hugging Face weights in "
            "--checkpoint.initial_load_path or --hf_assets_path."
        )
    scales = [name for name in stored if name.endswith("_scale_inv")]
    if scales and not quantized:
        raise CheckpointError(
            f"{path}: holds FP8 weights with block scales ({min(scales)}); read without them, they "
            "would be wrong by orders of magnitude. Add --checkpoint.initial_load_in_hf_quantized."
        )
    if quantized and not scales:
        raise CheckpointError(
            f"{path}: holds no block scales (*_scale_inv), so its weights are not quantized. Leave "
            "out --checkpoint.initial_load_in_hf_quantized."
        )

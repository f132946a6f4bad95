"""Which stage of training a checkpoint belongs to: a run is not resumed in another one."""

from torch import nn

from titan_npu_train.checkpoint.folder import Checkpoint

__all__ = ["stage_problem", "training_stage"]

_FIRST = "sparse"
"""The stage of checkpoints that name none; there was no other when they were written."""


def training_stage(model: nn.Module) -> str:
    """The stage a model, or a pipeline stage of it, is configured for."""
    return getattr(getattr(model, "config", None), "stage", _FIRST)


def stage_problem(checkpoint: Checkpoint, stage: str) -> str | None:
    """Why a run of ``stage`` must not be resumed from ``checkpoint``; None if it may."""
    written = checkpoint.stage or _FIRST
    if written == stage:
        return None
    return (
        f"{checkpoint.path}: was written in dsa.stage '{written}', this run has '{stage}', which "
        "trains other parameters. To go on with that run, use "
        f"--dsa.stage {written}. To begin stage '{stage}' with its weights, use another "
        f"--dump_folder with --checkpoint.initial_load_path {checkpoint.path.absolute()}"
    )

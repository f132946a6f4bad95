"""The DCP load planner that compares checkpoint and run before the first byte is read."""

from collections.abc import Collection

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torchtitan.components.checkpointer import DATALOADER, OPTIMIZER, TRAIN_STATE
from torchtitan.tools.logging import logger

from titan_npu_train.checkpoint.errors import CheckpointError
from titan_npu_train.checkpoint.rng import RNG

_LISTED = 5
# torchtitan's flat optimizer keys: optimizer.state.<parameter>.<name>
_STATE = f"{OPTIMIZER}.state."
_GROUPS = f"{OPTIMIZER}.param_groups."


def _listing(lines: list[str]) -> str:
    more = [f"... and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return "".join(f"\n  {line}" for line in lines[:_LISTED] + more)


class MatchingLoadPlanner(DefaultLoadPlanner):
    """Refuses a checkpoint whose parameters are not the run's, naming each that differs.

    DCP by itself stops at the first difference, without a cure, and passes over parameters that
    only the checkpoint has (fewer layers in the run): that would load a model in part.

    Args:
        path: the checkpoint, for messages.
        states: top-level names that are not parameters (``optimizer``, ``dataloader``, ...).
        strict: whether parameters only the checkpoint has are an error; else they are logged.
    """

    def __init__(self, path: str, states: Collection[str], *, strict: bool) -> None:
        super().__init__()
        self._path = path
        self._states = tuple(f"{name}." for name in states)
        self._strict = strict

    @property
    def _saved(self) -> dict[str, STORAGE_TYPES]:
        assert self.metadata is not None
        return self.metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        self._leave_unstarted_state()
        absent = [key for key in self.state_dict if key not in self._saved]
        if generators := [key for key in absent if key.startswith(f"{RNG}.")]:
            logger.warning(
                f"Checkpoint {self._path} has no random generator state for this rank "
                f"({', '.join(generators)}); it keeps the state of its seed."
            )
            for key in generators:
                del self.state_dict[key]
        self._refuse_absent([key for key in absent if key not in generators])
        self._refuse_reshaped()
        return super().create_local_plan()

    def _leave_unstarted_state(self) -> None:
        """Leave optimizer state uncreated where it was when the checkpoint was written.

        An optimizer creates a parameter's state at its first gradient, but torchtitan creates
        all of it before loading. A parameter the checkpoint lists in a param group without any
        state had had no gradient yet (an indexer without its loss); it starts like that again.
        """

        def parameters(prefix: str) -> set[str]:
            keys = [key for key in self._saved if key.startswith(prefix)]
            return {key.removeprefix(prefix).rsplit(".", 1)[0] for key in keys}

        unstarted = parameters(_GROUPS) - parameters(_STATE)
        for key in [key for key in self.state_dict if key.startswith(_STATE)]:
            if key.removeprefix(_STATE).rsplit(".", 1)[0] in unstarted:
                del self.state_dict[key]
                del self.original_state_dict[OPTIMIZER][key.removeprefix(f"{OPTIMIZER}.")]

    def _refuse_absent(self, absent: list[str]) -> None:
        if not absent:
            return
        if any(key.startswith(f"{TRAIN_STATE}.") for key in absent):
            raise CheckpointError(
                f"{self._path}: holds the model only, no training state. Load it with "
                "--checkpoint.initial_load_model_only."
            )
        if data := [key for key in absent if key.startswith(f"{DATALOADER}.")]:
            cure = (
                "The data position is kept per data-parallel rank: resume with the data-parallel "
                "degree it was saved with, or restart the data with "
                "--checkpoint.exclude_from_loading dataloader."
            )
            absent = data
        elif all(key.startswith(f"{OPTIMIZER}.") for key in absent):
            cure = (
                "The run trains other parameters, or with another optimizer. To take over the "
                "weights alone, name the checkpoint in --checkpoint.initial_load_path and use an "
                "empty --checkpoint.folder."
            )
        else:
            cure = (
                "Resume with the model config the checkpoint was made with, or use another "
                "--checkpoint.folder."
            )
        raise CheckpointError(
            f"{self._path}: does not hold what this run needs:{_listing(absent)}\n{cure}"
        )

    def _refuse_reshaped(self) -> None:
        reshaped, recast = [], []
        for key, value in self.state_dict.items():
            stored = self._saved.get(key)
            if not isinstance(value, torch.Tensor) or not isinstance(stored, TensorStorageMetadata):
                continue
            if value.shape != stored.size:
                reshaped.append(
                    f"{key}: checkpoint {list(stored.size)}, this run {list(value.shape)}"
                )
            elif value.dtype != stored.properties.dtype and not key.startswith(self._states):
                recast.append(f"{key}: {stored.properties.dtype} to {value.dtype}")
        if reshaped:
            parameters = [line for line in reshaped if not line.startswith(self._states)]
            lines = parameters or reshaped
            if all(line.startswith(("tok_embeddings.", "lm_head.")) for line in lines):
                cure = (
                    "The vocabulary differs: use the tokenizer and model config the checkpoint "
                    "was made with, or another --checkpoint.folder."
                )
            else:
                cure = (
                    "Use the model config the checkpoint was made with, or another "
                    "--checkpoint.folder."
                )
            raise CheckpointError(f"{self._path}: shapes differ:{_listing(lines)}\n{cure}")
        if recast and self.is_coordinator:
            logger.warning(f"Checkpoint {self._path} is converted:{_listing(recast)}")

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        # over all ranks, as a pipeline stage asks for its own parameters only
        wanted = {item.dest_index.fqn for plan in global_plan for item in plan.items}
        unread = [
            key
            for key, stored in self._saved.items()
            if key not in wanted
            and not key.startswith(self._states)
            and not (isinstance(stored, TensorStorageMetadata) and stored.size.numel() == 0)
        ]
        if unread and self._strict:
            raise CheckpointError(
                f"{self._path}: holds parameters this run's model does not have:"
                f"{_listing(unread)}\nResume with the model config the checkpoint was made with, "
                "or use another --checkpoint.folder."
            )
        if unread:
            logger.warning(
                f"Not loaded from {self._path}, the model has no such:{_listing(unread)}"
            )
        return super().create_global_plan(global_plan)

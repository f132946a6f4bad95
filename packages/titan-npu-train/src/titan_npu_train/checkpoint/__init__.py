"""Checkpoints that are complete or refused.

:class:`VerifiedCheckpointManager` is torchtitan's checkpoint manager with three promises added:
a checkpoint appears under its name only when every byte of every rank is on disk; it is checked
before anything is loaded from it; and a resumed run continues with the same numbers.
"""

from titan_npu_train.checkpoint.errors import CheckpointError
from titan_npu_train.checkpoint.folder import MANIFEST, Checkpoint
from titan_npu_train.checkpoint.manager import VerifiedCheckpointManager

__all__ = ["MANIFEST", "Checkpoint", "CheckpointError", "VerifiedCheckpointManager"]

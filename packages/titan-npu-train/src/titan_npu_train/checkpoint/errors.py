"""The one error a user sees from checkpointing."""

from torch.distributed.checkpoint.api import CheckpointException


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or must not be loaded. The message is for the user:
    which path, what is wrong with it, and what would help. Every rank raises the same one."""


def root_cause(error: BaseException) -> str:
    """One line for ``error``; of a :class:`CheckpointException` the first failing rank's cause."""
    if isinstance(error, CheckpointException) and error.failures:
        rank = min(error.failures)
        cause = error.failures[rank][0]
        if isinstance(cause, CheckpointError):
            return str(cause)
        return f"rank {rank}: {root_cause(cause)}"
    return f"{type(error).__name__}: {error}"

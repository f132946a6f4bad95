"""One rank of a training run: ``torchrun ... -m titan_npu_train.train --module M --config C ...``.

torchtitan's own entry point, on the platform that was found, with failures in words (see
``failures``). ``titan-npu train`` starts this; so may any launcher that sets what torchrun sets.
"""

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_npu_train import failures
from titan_npu_train.run_folder import RunInfo

__all__ = ["LAUNCHER_VARIABLE", "main"]

LAUNCHER_VARIABLE = "TITAN_NPU_LAUNCHER_PID"

_STARTED = time.time()
_CLOSE_SECONDS = 20.0  # to close a trainer that failed; torchrun itself waits 30 s
_PEER_SECONDS = 5.0  # for the launcher to stop a rank that only lost its neighbour
_REQUIRED_ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main(argv: Sequence[str] | None = None) -> int:
    """Train; returns the exit code: 0, 1 for a failure, 2 for bad input, 130 if interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--debug-traceback" in arguments:
        arguments.remove("--debug-traceback")
        os.environ["TITAN_NPU_TRACEBACK"] = "1"
    rank = int(os.environ.get("RANK", "0"))
    _die_with_launcher()

    try:
        config, run = _configure(arguments)
    except Exception as error:
        # Every rank reads the same command line, so every rank fails alike: one speaks.
        failure = failures.describe(error)
        if rank == 0:
            unexpected = failure.unexpected
            path = failures.write_error_file(error, failure, None, rank) if unexpected else None
            failures.print_failure(failure, path)
            _print_traceback(error)
        return 2

    dump_folder = Path(config.dump_folder)
    if rank == 0:
        failures.clear_error_files(dump_folder, before=_STARTED)
    try:
        if rank == 0:
            run.write(dump_folder)
        _train(config)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        failure = failures.describe(error)
        path = failures.write_error_file(error, failure, dump_folder, rank)
        if failure.secondary:
            time.sleep(_PEER_SECONDS)
        if failures.claim_console(dump_folder):
            failures.print_failure(failure, path)
        _print_traceback(error)
        return 1
    return 0


def _configure(arguments: list[str]) -> tuple[Any, RunInfo]:
    """Choose the platform, then read the configuration: torchtitan copies the device at import."""
    if missing := [name for name in _REQUIRED_ENVIRONMENT if name not in os.environ]:
        raise failures.UserError(
            f"{', '.join(missing)} not set: this is one rank of a run, not the run. Start it with "
            "'titan-npu train CONFIG', or with "
            "'torchrun --nproc-per-node N -m titan_npu_train.train --module M --config C'."
        )
    from titan_npu_train import platform, preflight

    chosen = platform.select()
    from torchtitan.tools.logging import init_logger

    init_logger()
    module, name, options = preflight.split_arguments(arguments)
    config = preflight.load_config(module, name, options)
    preflight.check_layout(config, int(os.environ["WORLD_SIZE"]))
    return config, RunInfo.of_this_process(module, name, options, chosen.name)


def _train(config: Any) -> None:
    import torch
    from torchtitan.observability import structured_logger
    from torchtitan.tools.logging import logger

    # source="training" is what torchtitan's own tools look for.
    structured_logger.init_structured_logger(
        source="training",
        output_dir=config.dump_folder,
        enable=config.debug.enable_structured_logging,
    )
    structured_logger.log_trace_instant("structured_logger_started")

    trainer = None
    try:
        trainer = config.build()
        if config.checkpoint.create_seed_checkpoint:
            if int(os.environ["WORLD_SIZE"]) != 1:
                raise failures.UserError(
                    "checkpoint.create_seed_checkpoint needs one process, got "
                    f"{os.environ['WORLD_SIZE']}: a seed checkpoint holds the unsharded weights."
                )
            if not config.checkpoint.enable:
                raise failures.UserError(
                    "checkpoint.create_seed_checkpoint needs --checkpoint.enable."
                )
            trainer.checkpointer.save(curr_step=0, last_step=True)
            logger.info("Created seed checkpoint")
        else:
            trainer.train()
    except BaseException:
        if trainer is not None:
            _close_or_give_up(trainer)
        raise
    trainer.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _close_or_give_up(trainer: Any) -> None:
    """Close a trainer that failed, without waiting for ever.

    An asynchronous checkpoint may be waiting for a rank that is gone; the error must still get out.
    """
    closing = threading.Thread(target=_close_quietly, args=(trainer,), daemon=True)
    closing.start()
    closing.join(_CLOSE_SECONDS)


def _close_quietly(trainer: Any) -> None:
    try:
        trainer.close()
    except Exception as error:
        print(f"closing the trainer failed too: {error}", file=sys.stderr, flush=True)


def _print_traceback(error: BaseException) -> None:
    if failures.tracebacks_wanted():
        sys.excepthook(type(error), error, error.__traceback__)


def _die_with_launcher() -> None:
    """On Linux, end this rank when the launcher is killed.

    An orphaned rank would go on writing into a run folder that the restarted run also writes to.
    """
    if os.environ.get(LAUNCHER_VARIABLE) != str(os.getppid()) or sys.platform != "linux":
        return
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.environ[LAUNCHER_VARIABLE] != str(os.getppid()):  # it died just before
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: everything is closed, and tearing down what is left may block (process groups
    # whose peers are gone) or abort (accelerator runtimes).
    os._exit(code)

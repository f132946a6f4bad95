"""Run a function on several Gloo ranks of this machine, with a deadline instead of a hang."""

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

# Children are forked from a server that has imported torch once, but started no threads: a fraction
# of spawn's start-up time, and safe where forking the test process is not.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "swap_optimizer"]
)


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 180
) -> list[Any]:
    """Call ``function(rank, *args)`` on each rank of a Gloo group; returns every rank's result.

    The function must be importable (module level) and its arguments and result picklable. The
    first failing rank fails the test with its traceback; the others are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = _context.Queue()
        store = str(Path(folder) / "store")
        ranks = [
            _context.Process(
                target=_run_rank,
                args=(function, rank, world_size, store, timeout, results, args),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        try:
            return _collect(results, ranks, time.monotonic() + timeout)
        finally:
            for rank in ranks:
                if rank.is_alive():
                    rank.kill()
                rank.join()


def _collect(results: Any, ranks: list[Any], deadline: float) -> list[Any]:
    values: dict[int, Any] = {}
    while len(values) < len(ranks):
        try:
            rank, error, value = results.get(timeout=0.2)
        except multiprocessing.queues.Empty:
            silent = [i for i, p in enumerate(ranks) if not p.is_alive() and i not in values]
            if silent and results.empty():
                codes = {i: ranks[i].exitcode for i in silent}
                pytest.fail(f"ranks ended without a result, exit codes {codes}")
            if time.monotonic() > deadline:
                missing = sorted(set(range(len(ranks))) - set(values))
                pytest.fail(f"ranks {missing} gave no result in time")
            continue
        if error is not None:
            pytest.fail(f"rank {rank}:\n{error}")
        values[rank] = value
    return [values[rank] for rank in range(len(ranks))]


def _run_rank(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    timeout: float,
    results: Any,
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        value = function(rank, *args)
        # No rank leaves while another still talks to it.
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
    else:
        results.put((rank, None, value))
    results.close()
    results.join_thread()

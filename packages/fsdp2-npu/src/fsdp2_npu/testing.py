"""A network that is slower than the one at hand, to see what hides and what does not."""

import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function


@contextmanager
def delayed_all_gathers(model: nn.Module, seconds: float) -> Generator[None]:
    """Make every all-gather of a sharded model complete ``seconds`` after its issue, no earlier.

    The time passes in another thread, so computation goes on meanwhile, as beside a real network.
    For tests and benchmarks on CPU. Profiles show it as "delayed:all_gather".

    Args:
        model: a model sharded with :func:`shard_model`.
        seconds: least time of an all-gather.

    Raises:
        ValueError: ``seconds`` is negative.
    """
    if not seconds >= 0:
        raise ValueError(f"seconds must not be negative, got {seconds!r}")
    groups: set[Any] = {
        group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    }
    with ExitStack() as undo:
        # Kept, because starting one for each all-gather would hold up the thread that computes.
        threads = undo.enter_context(ThreadPoolExecutor(4, "delayed_all_gather"))
        for group in groups:
            # set_custom_all_gather, the public way, refuses modules with two groups.
            comm = group._all_gather_comm
            group._all_gather_comm = _DelayedAllGather(comm, seconds, threads)
            undo.callback(setattr, group, "_all_gather_comm", comm)
        yield


class _DelayedAllGather:
    """torch's ``AllGather`` interface."""

    def __init__(self, comm: Any, seconds: float, threads: ThreadPoolExecutor) -> None:
        self.comm, self.seconds, self.threads = comm, seconds, threads

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.comm.allocate(*args, **kwargs)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        end = time.monotonic() + self.seconds
        mark = record_function("delayed:all_gather")
        mark.__enter__()
        inner = self.comm(output_tensor, input_tensor, group, async_op=True)
        done: torch.futures.Future = torch.futures.Future()
        # The mark ends when the future is done, in whichever thread; there is no public way.
        marked = mark._call_end_callbacks_on_future(done)

        def complete() -> None:
            try:
                time.sleep(max(0.0, end - time.monotonic()))
                inner.wait()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self.threads.submit(complete)
        work = _Work(marked)
        if async_op:
            return work
        work.wait()
        return None


class _Work(dist.Work):
    def __init__(self, future: torch.futures.Future) -> None:
        super().__init__()
        self.future = future

    def wait(self, timeout: Any = None) -> bool:
        self.future.wait()
        return True

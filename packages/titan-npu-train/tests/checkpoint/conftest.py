"""One process group for tests in this process, as the trainer always has one."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store: Path = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    gc.freeze()  # the manager collects around each save, and pytest's heap is large
    yield
    gc.unfreeze()
    dist.destroy_process_group()

"""Fixtures: meshes without other ranks. Collectives of the fake backend return at once."""

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS = 4


def pytest_configure(config: pytest.Config) -> None:
    # Also declared by the workspace; here for a package's tests run by themselves.
    config.addinivalue_line("markers", "distributed: starts ranks of its own")


@pytest.fixture(scope="session")
def _group():
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def line(_group):
    return dist.init_device_mesh("cpu", (RANKS,))


@pytest.fixture(scope="session")
def grid(_group):
    return dist.init_device_mesh("cpu", (2, 2))

"""Runs only in `nox -s contract`: elsewhere there is no torch_npu, or a real device under it."""

import os
import sys

import pytest

STAND_INS = "NPU_DSA_STAND_INS"

collect_ignore_glob = [] if os.environ.get(STAND_INS) else ["test_*.py"]

_status = pytest.StashKey[int]()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_status] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    # torch_npu's own exit calls into CANN, which is not there, and sometimes aborts.
    if os.environ.get(STAND_INS):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash.get(_status, 1))

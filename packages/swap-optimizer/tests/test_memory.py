"""Resident memory with the states on disk, at every moment: two slices of sixteen."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PARAMETERS, SLICES = 48 * 2**20, 16


def peaks(folder, kind):
    script = Path(__file__).with_name("resident.py")
    command = [sys.executable, str(script), str(PARAMETERS), str(SLICES), str(folder), kind]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    options = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, env=env, check=False, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_fifteen_percent_of_the_plain_optimizer(tmp_path):
    found = peaks(tmp_path, "disk")
    plain = 8 * PARAMETERS
    too_much = {phase: peak / plain for phase, peak in found.items() if peak > 0.15 * plain}
    assert not too_much, found
    assert len(found) == 10
    for phase in ("between steps", "at the end", "construction"):
        assert found[phase] < 0.03 * plain, phase
    # Two slices, no less: the next one comes in while one is updated.
    assert found["step"] > 0.08 * plain

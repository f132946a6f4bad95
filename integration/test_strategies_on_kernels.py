"""The strategies of dtensor-npu-strategies and the operators of npu-dsa-kernels fit each other."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import npu_dsa_kernels  # noqa: F401 - the operators
from dtensor_npu_strategies.rules import OPERATORS


def test_every_operator_has_strategies():
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("npu_dsa::")}
    assert names == {name for name in OPERATORS if name.startswith("npu_dsa::")}


@pytest.mark.distributed
def test_a_layer_of_dtensors_equals_one_process():
    script = Path(__file__).with_name("strategies_run.py")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["absent"] == []
    loss = "npu_dsa::indexer_kl_loss"
    target = [[loss, "target"], [f"{loss}_backward", "target"]]
    for name, moved in (("batch", []), ("sequence", []), ("heads", target)):
        worst, operators = found[name]
        assert worst < 1e-12 and operators == moved, (name, worst, operators)

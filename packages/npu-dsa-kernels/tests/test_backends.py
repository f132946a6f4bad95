import subprocess
import sys

import pytest
import torch

import npu_dsa_kernels
from npu_dsa_kernels import backends, hadamard

X = torch.randn(2, 4)


def ran(call) -> set[str]:
    """Names of the npu_dsa operators that `call` reaches; the reference reaches none."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {e.name for e in profile.events() if e.name.startswith("npu_dsa::")}


def test_status_says_available_or_why_not():
    status = backends()
    assert set(status) == {"reference", "torch", "triton", "npu", "compiled"}
    assert status["reference"] == status["torch"] == "available"
    with pytest.raises(ValueError, match="backend: got 'npu'; it is not usable here: torch_npu is"):
        hadamard(X, backend="npu")
    status["torch"] = "changed"
    assert backends()["torch"] == "available"


def test_environment_overrides_the_default_and_the_argument_overrides_it(monkeypatch):
    assert ran(lambda: hadamard(X)) == {"npu_dsa::hadamard"}
    monkeypatch.setenv("NPU_DSA_BACKEND", "reference")
    assert ran(lambda: hadamard(X)) == set()
    assert ran(lambda: hadamard(X, backend="torch")) == {"npu_dsa::hadamard"}
    monkeypatch.setenv("NPU_DSA_BACKEND", "")
    assert ran(lambda: hadamard(X)) == {"npu_dsa::hadamard"}


def test_bad_environment_is_named(monkeypatch):
    monkeypatch.setenv("NPU_DSA_BACKEND", "fast")
    with pytest.raises(ValueError, match="NPU_DSA_BACKEND: got 'fast'; expected one of reference"):
        hadamard(X)
    monkeypatch.setenv("NPU_DSA_BACKEND", "npu")
    with pytest.raises(ValueError, match=r"NPU_DSA_BACKEND: got 'npu'; .*available: reference"):
        hadamard(X)


def test_public_names_exist():
    for name in npu_dsa_kernels.__all__:
        assert getattr(npu_dsa_kernels, name) is not None


def test_import_is_quick():
    """torch._dynamo takes seconds to import; the first call of an operator is early enough."""
    code = "import sys, npu_dsa_kernels; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_naming_a_missing_backend_says_so_under_compile_too():
    compiled = torch.compile(lambda x: hadamard(x, backend="npu"), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="torch_npu is not installed"):
        compiled(X)

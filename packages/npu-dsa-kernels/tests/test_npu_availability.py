"""What backend "npu" says it needs, with a torch_npu that is put together for the test."""

import ctypes
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import npu_emulation
from npu_dsa_kernels import backends, hadamard
from npu_dsa_kernels.backends import resolve
from npu_dsa_kernels.backends.npu import availability

TORCH = ".".join(torch.__version__.split(".")[:2])
# torch knows the device type only once torch_npu has been imported.
NPU, CPU = SimpleNamespace(type="npu"), torch.device("cpu")


@pytest.fixture
def torch_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a torch_npu of a version, with a body, in front of the path."""
    monkeypatch.setattr(availability, "_found", None)
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(version: str = f"{TORCH}.0", body: str = "") -> None:
        monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
        (tmp_path / "torch_npu.py").write_text(body)
        information = tmp_path / f"torch_npu-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Name: torch-npu\nVersion: {version}\n")

    yield install
    sys.modules.pop("torch_npu", None)


@pytest.fixture
def cann(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "npu", SimpleNamespace(is_available=lambda: True), raising=False)


def reason() -> str:
    status = backends()["npu"]
    with pytest.raises(ValueError, match=re.escape(f"backend: got 'npu'; it is {status}")):
        hadamard(torch.randn(2, 4), backend="npu")
    return status


def test_not_installed(monkeypatch):
    monkeypatch.setattr(availability, "_found", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert reason() == (
        'not usable here: torch_npu is not installed: pip install "npu-dsa-kernels[npu]"'
    )


@pytest.mark.parametrize("version", ["2.12.0.post1", "2.15.0", "3.0"])
def test_version_out_of_range(torch_npu, version):
    torch_npu(version, "raise SystemExit('imported')")
    assert f"torch-npu {version} is installed, >=2.13,<2.15 is needed: pip inst" in reason()


def test_version_of_another_torch(torch_npu):
    other = "2.13.0" if TORCH == "2.14" else "2.14.0"
    torch_npu(other, "raise SystemExit('imported')")
    assert f"torch-npu {other} does not go with torch {torch.__version__}" in reason()


def test_without_cann_torch_npu_is_not_even_imported(torch_npu):
    torch_npu(body="raise SystemExit('imported')")
    assert "CANN's libraries are not on the library path" in reason()
    assert "libascendcl.so" in reason()
    assert "torch_npu" not in sys.modules


def test_import_that_fails(torch_npu, cann):
    torch_npu(body="raise ImportError('libhccl.so: cannot open shared object file')")
    assert "torch_npu cannot be imported: ImportError: libhccl.so: cannot open" in reason()


def test_no_device(torch_npu, cann, monkeypatch):
    torch_npu()
    monkeypatch.delattr(torch, "npu", raising=False)
    assert "torch_npu sees no NPU" in reason()
    monkeypatch.setattr(torch, "npu", SimpleNamespace(is_available=lambda: False), raising=False)
    monkeypatch.setattr(availability, "_found", None)
    assert "torch_npu sees no NPU" in reason()


def test_missing_operators(torch_npu, cann, device, monkeypatch):
    torch_npu()
    monkeypatch.setattr(availability, "OPERATORS", ("npu_of_tomorrow", "npu_of_another_day"))
    assert "lacks npu_of_tomorrow, npu_of_another_day: a newer torch-npu" in reason()


def test_everything_there(torch_npu, cann, device):
    npu_emulation.install()
    torch_npu()
    assert backends()["npu"] == "available"
    assert resolve(None, NPU) == "npu"
    assert resolve("torch", NPU) == "torch"
    assert resolve(None, CPU) == "torch"
    with pytest.raises(ValueError, match=r"backend: got 'npu'; expected tensors on an NPU, .* cpu"):
        hadamard(torch.randn(2, 4), backend="npu")


def test_default_on_a_device_is_never_quietly_another_backend(torch_npu):
    torch_npu("2.15.0")
    with pytest.raises(ValueError, match=r"backend \(the default for npu\): got 'npu'; .*2\.15\.0"):
        resolve(None, NPU)
    assert resolve("torch", NPU) == "torch"


def test_found_out_once(torch_npu, monkeypatch):
    torch_npu("2.15.0")
    first = backends()["npu"]
    monkeypatch.setattr("importlib.metadata.version", lambda name: pytest.fail("asked again"))
    assert backends()["npu"] == first


def test_every_operator_that_is_called_is_asked_for():
    assert set(availability.OPERATORS) == set(npu_emulation.SCHEMAS)

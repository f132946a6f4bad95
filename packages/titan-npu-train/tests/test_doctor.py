from importlib.metadata import PackageNotFoundError, version

import pytest
from rich.console import Console

import npu_dsa_kernels
from titan_npu_train import cli, doctor
from titan_npu_train.preflight import DEFAULT_MODULE


def examine(**options) -> dict[str, doctor.Check]:
    return {c.what: c for c in doctor.checks(**{"module": DEFAULT_MODULE} | options)}


def test_a_machine_that_can_train(capfd):
    assert cli.run(["doctor"]) == 0
    text = " ".join(capfd.readouterr().out.split())
    assert f"torch {version('torch')}" in text and "cpu: 1 x" in text
    for name, state in npu_dsa_kernels.backends().items():
        what = "CPU kernels" if name == "compiled" else f"backend {name}"
        assert f"{what} {state}" in text
    assert "Everything that training needs is here." in text


def test_a_missing_or_wrong_package_is_broken(monkeypatch):
    def found(name: str) -> str:
        if name == "torchtitan":
            raise PackageNotFoundError(name)
        return "1.13.0" if name == "torch" else version(name)

    monkeypatch.setattr(doctor, "version", found)
    checks = examine()
    assert checks["torchtitan"].state == checks["torch"].state == "broken"
    assert "pip install 'torchtitan<0.4,>=0.3.0'" in checks["torchtitan"].found
    assert "1.13.0" in checks["torch"].found
    assert checks["torch-npu"].state == "note"  # only NPUs need it
    console = Console(record=True, width=120)
    assert doctor.run(console, config=None, nproc=None, module=DEFAULT_MODULE) == 1
    assert "2 broken" in console.export_text()


def test_a_check_that_fails_does_not_hide_the_others(monkeypatch):
    def broken() -> dict[str, str]:
        raise OSError("libfoo.so: cannot open shared object file")

    monkeypatch.setattr(npu_dsa_kernels, "backends", broken)
    checks = examine()
    assert checks["kernels"].state == "broken" and "libfoo.so" in checks["kernels"].found
    assert checks["memory"].state == "ok"


@pytest.mark.parametrize(
    ("config", "nproc", "state", "text"),
    [
        ("deepseek_v32_debugmodel", 2, "ok", "2 = FSDP 2, experts over 1"),
        ("deepseek_v32_671b_4k_128die", 64, "broken", "need 128"),
    ],
)
def test_layout(config, nproc, state, text):
    check = examine(config=config, nproc=nproc)["layout"]
    assert check.state == state and text in check.found


def test_unknown_configuration():
    assert examine(config="nope")["configuration"].state == "broken"

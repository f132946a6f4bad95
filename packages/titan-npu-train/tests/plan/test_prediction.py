"""What a run is told before it starts, and what it is compared with when it has ended."""

import json
from pathlib import Path

import pytest

from titan_npu_train import launch
from titan_npu_train.deepseek_v32 import config_registry
from titan_npu_train.plan import prediction
from titan_npu_train.plan.memory import PARTS, Estimate, RankEstimate
from titan_npu_train.plan.prediction import Prediction, predict

GIB = 2**30


def predicted(device: str, capacity: int = 64 * GIB, **parts: int) -> Prediction:
    of_rank = RankEstimate(0, 0, dict.fromkeys(PARTS, 0) | parts)
    return Prediction(1, device, capacity, Estimate(1, (of_rank,), ()))


@pytest.fixture
def result(tmp_path: Path) -> launch.RunResult:
    """A run of steps 3 and 4 in a folder that has earlier ones, of more memory."""
    peaks = {1: 9 * GIB, 2: 9 * GIB, 3: 3 * GIB, 4: 4 * GIB}
    lines = [json.dumps({"step": s, "peak_memory_bytes": p}) for s, p in peaks.items()]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return launch.RunResult(tmp_path, 3, 4, 1.0)


def test_on_a_cpu_the_process_counts(result):
    said = predicted("cpu", parameters=3 * GIB, runtime=2 * GIB).comparison(result)
    assert said == "peak memory of rank 0: 4.00 GiB measured, 5.00 GiB planned (+25%)"


def test_on_a_device_the_allocator_has_neither_context_nor_communicators(result):
    parts = {"runtime": GIB, "communication": 2 * GIB, "moe_imbalance": GIB // 2}
    said = predicted("npu", parameters=4 * GIB, **parts).comparison(result)
    assert "4.00 GiB measured, 4.00 GiB planned (+0%)" in said
    assert "0.50 for experts at their worst" in said


def test_a_run_that_may_not_fit_is_told(result):
    small = predicted("npu", capacity=2 * GIB, parameters=3 * GIB, gradients=GIB)
    warning = small.warning()
    assert warning is not None
    assert "4.00 GiB planned of 2.00" in warning and "parameters 3.0" in warning
    assert predicted("npu", parameters=3 * GIB).warning() is None


def test_a_plan_that_fails_does_not_keep_a_run_from_starting(monkeypatch, result):
    class Platform:
        name, device_type = "cpu", "cpu"

        class device_module:
            @staticmethod
            def get_device_properties(index):
                return type("Properties", (), {"total_memory": 8 * GIB})

    def fails(*_, **__):
        raise ValueError("memory is planned for DeepSeek-V3.2 models only")

    monkeypatch.setattr(prediction, "estimate", fails)
    made = predict(config_registry.deepseek_v32_debugmodel(), 2, Platform)
    assert made.capacity == 4 * GIB and made.warning() is None
    assert made.comparison(result).endswith(
        "not planned (ValueError: memory is planned for DeepSeek-V3.2 models only)"
    )

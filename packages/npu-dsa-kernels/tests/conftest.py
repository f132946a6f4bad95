import os

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    # Triton kernels on CPU. Read when triton is imported, which nothing has done yet.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Shapes here are small; parallelism comes from running test files side by side.
torch.set_num_threads(1)

hypothesis.settings.register_profile(
    "kernels",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=200,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("kernels")


@pytest.fixture(params=["reference", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[torch.float64, torch.float32], ids=["fp64", "fp32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param

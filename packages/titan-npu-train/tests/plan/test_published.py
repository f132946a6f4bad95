"""The published table of the 64-card run, from the model's configuration."""

import pytest

from titan_npu_train.deepseek_v32 import config_registry
from titan_npu_train.plan.published import published_row, published_rows

GIB = 2**30
# PP, TP, CP, DP, EP; params in 2^30, and GiB: param, grad, act, MoE imbalance, total.
PUBLISHED = {
    (1, 8, 1, 16, 128): (5.06293, 20.2517, 20.2517, 0.42383, 6.75, 50.4772),
    (2, 4, 1, 16, 64): (5.00732, 20.0293, 20.0293, 0.84766, 13.5, 57.2062),
    (4, 2, 1, 16, 32): (4.97952, 19.9181, 19.9181, 1.69531, 27.0, 71.3315),
}


@pytest.fixture(scope="module")
def model():
    return config_registry.deepseek_v32_671b_4k_128die().model_spec.model


def figures(row):
    return (
        row.parameters / GIB,
        row.parameter_bytes / GIB,
        row.gradient_bytes / GIB,
        row.activation_bytes / GIB,
        row.moe_imbalance_bytes / GIB,
        row.total_bytes / GIB,
    )


@pytest.mark.parametrize("degrees", PUBLISHED, ids=str)
def test_every_column_is_the_published_one(model, degrees):
    names = ("pipeline", "tensor", "context", "data", "expert")
    row = published_row(model, **dict(zip(names, degrees, strict=True)), tokens=4096)
    # To the last digit that was printed, not only within 1 %.
    assert figures(row) == pytest.approx(PUBLISHED[degrees], rel=1e-5)


def test_the_published_rows_are_among_those_of_128_devices(model):
    rows = {
        (r.pipeline, r.tensor, r.context, r.data, r.expert): r
        for r in published_rows(model, 128, tokens=4096)
    }
    assert rows.keys() >= PUBLISHED.keys()
    for pipeline, tensor, context, data, expert in rows:
        assert pipeline * tensor * context * data == 128
        assert expert == 128 // pipeline
    # Only PP 4 is too large for 64 GiB.
    assert [rows[d].total_bytes < 64 * GIB for d in PUBLISHED] == [True, True, False]


def test_the_model_s_own_numbers_are_counted():
    """Of another model, by hand: the debugmodel on two devices, EP 2."""
    model = config_registry.deepseek_v32_debugmodel().model_spec.model
    row = published_row(model, pipeline=1, tensor=1, context=1, data=2, expert=2, tokens=512)
    D, H = 192, 4
    whole = D * 96 + D * (64 + 16) + 96 * 4 * 32 + D * 32 + D * 4
    heads = 96 * H * 48 + 64 * H * 64 + H * 32 * D
    dense = 4 * (whole + heads) + 3 * D * 512 + 2048 * D + 3 * (D * 8 + 3 * D * 128)
    assert row.parameters == dense / 2 + 3 * 8 * 3 * D * 128 / 2
    assert row.activation_bytes == 4 * 512 * D * 2
    assert row.moe_imbalance_bytes == 2 * 512 * 4 * (3 * D + 3 * 128) * 2

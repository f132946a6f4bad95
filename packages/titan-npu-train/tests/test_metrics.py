"""What a run writes about itself."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from titan_npu_train import platform


@pytest.fixture
def processor(tmp_path):
    platform.select("cpu")
    from titan_npu_train.metrics import MetricsProcessor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_dims = SimpleNamespace(non_data_parallel_size=1, pp_enabled=False)
    made = MetricsProcessor.Config().build(parallel_dims=parallel_dims, dump_folder=str(tmp_path))
    made.num_flops_per_token = 10**9
    yield made
    dist.destroy_process_group()


def log(processor, step: int, **extra) -> None:
    processor.ntokens_since_last_log = 1000
    processor.data_loading_times.append(0.001)
    processor.log(step, 2.5, 2.6, 0.7, extra_metrics={"n_tokens_seen": 1000, **extra})


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_holds_what_is_promised(processor, tmp_path):
    processor.start_clock(1)
    layers = [0.5, 0.1]
    log(processor, 1, indexer_loss=0.3, indexer_loss_layers=layers, **{"lr/AdamW": 1e-3})
    (line,) = lines(tmp_path)
    assert line["step"] == 1
    assert (line["loss"], line["indexer_loss"], line["grad_norm"]) == (2.5, 0.3, 0.7)
    assert line["indexer_loss_layers"] == layers
    assert line["lr"] == 1e-3
    assert line["tokens_per_second"] == pytest.approx(1000 / line["step_seconds"])
    assert line["tflops"] == pytest.approx(1e9 * line["tokens_per_second_per_device"] / 1e12)
    assert 0 < line["mfu"] == pytest.approx(line["tflops"] * 1e12 / processor.gpu_peak_flops)
    assert line["peak_memory_bytes"] > 50 * 2**20  # a Python with torch in it


def test_step_seconds_are_a_step_s_share(processor, tmp_path):
    """Also for the first line of a resumed run, and when only every tenth step is logged."""
    processor.start_clock(21)
    processor.time_last_log -= 100.0
    log(processor, 30)
    (line,) = lines(tmp_path)
    assert line["step_seconds"] == pytest.approx(10.0, rel=0.01)
    assert line["indexer_loss"] is None


def test_an_unknown_peak_is_null_not_a_number(processor, tmp_path):
    processor.gpu_peak_flops = float("nan")
    processor.start_clock(1)
    log(processor, 1)
    assert lines(tmp_path)[0]["mfu"] is None


def test_a_resumed_run_appends(processor, tmp_path):
    processor.start_clock(1)
    log(processor, 1)
    log(processor, 2)
    processor.start_clock(2)
    log(processor, 2)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 2]


def test_grad_norm_is_accurate_and_clips():
    """torch's own fp32 norm of these is off in the fourth digit on CPU."""
    from titan_npu_train.gradients import clip_grad_norm

    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(2048, 256)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    parameters.append(torch.nn.Parameter(torch.zeros(3)))  # has no gradient
    exact = torch.cat([p.grad.double().flatten() for p in parameters[:3]]).norm().item()
    assert clip_grad_norm(parameters, 1.0).item() == pytest.approx(exact, rel=1e-12)
    clipped = torch.cat([p.grad.double().flatten() for p in parameters[:3]]).norm().item()
    assert clipped == pytest.approx(1.0, rel=1e-5)
    assert clip_grad_norm(parameters, 2.0).item() == pytest.approx(clipped, rel=1e-12)


def test_a_model_without_gradients_is_an_error():
    from titan_npu_train.gradients import global_grad_norm

    with pytest.raises(ValueError, match="no parameter has a gradient"):
        global_grad_norm([torch.nn.Parameter(torch.zeros(3))])

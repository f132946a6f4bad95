"""Shares from traces written by hand, in the formats of the profilers, and from real ones."""

import gzip
import json
import sys

import pytest
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from fsdp2_npu import overlap_report, shard_model
from fsdp2_npu.testing import delayed_all_gathers
from fsdp2_ranks import run_ranks
from toy import LENGTH, batch, build, loss_of

LAYERS = ["layers.0", "layers.1", "layers.2"]


class Trace:
    """A trace as kineto exports it, in microseconds."""

    def __init__(self):
        self.events = []
        self.correlation = 0

    def span(self, category, name, start, end, tid=1, pid=10, **args):
        times = {"ts": float(start), "dur": float(end - start)}
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": pid,
                "tid": tid,
                **times,
                "args": args,
            }
        )

    def gather(self, layer, at, inside):
        """FSDP2's mark of an all-gather, in the mark of the pass that issues it."""
        self.span("user_annotation", f"FSDP::{inside}", at - 1, at + 6)
        self.span("user_annotation", f"FSDP::all_gather{layer and f' ({layer})'}", at, at + 4)

    def kernel(self, name, launched, start, end, stream):
        self.correlation += 1
        link = {"correlation": self.correlation}
        self.span("cuda_runtime", "cudaLaunchKernel", launched, launched + 1, **link)
        self.span("kernel", name, start, end, tid=stream, pid=0, stream=stream, device=0, **link)

    def write(self, path):
        path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": self.events}))
        return path


NCCL = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@pytest.fixture
def nccl(tmp_path):
    trace = Trace()
    trace.gather("layers.0", 100, "pre_forward (layers.0)")
    trace.kernel(NCCL, 102, 120, 220, stream=20)  # nothing else runs
    trace.gather("layers.1 ", 130, "forward_prefetch for layers.1")
    trace.events[-1]["name"] = "FSDP::all_gather (layers.1) [pg=8]"
    trace.kernel(NCCL, 132, 230, 330, stream=20)
    trace.gather("layers.1", 140, "forward_prefetch for layers.1")
    trace.events[-1]["name"] = "FSDP::all_gather (layers.1) [pg=2]"
    trace.kernel(NCCL, 142, 340, 400, stream=24)
    trace.kernel("sm90_xmma_gemm_bf16bf16", 150, 240, 300, stream=7)  # 60 of 100
    trace.kernel("vectorized_elementwise_kernel", 151, 300, 360, stream=7)  # 30 of 100, 20 of 60
    trace.kernel("flash_fwd_kernel", 152, 355, 390, stream=8)  # and 30 more
    # Neither communication of others nor FSDP2's own copies hide anything.
    trace.kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 160, 120, 220, stream=21)
    trace.kernel("split_with_sizes_copy_kernel", 133, 120, 220, stream=7)
    trace.kernel(NCCL, 170, 500, 900, stream=30)  # of tensor parallelism
    trace.gather("", 1000, "pre_backward (layers.0)")
    trace.kernel(NCCL, 1002, 1020, 1070, stream=20)
    trace.kernel("sm90_xmma_gemm_bf16bf16", 1010, 1015, 1100, stream=7)
    return trace.write(tmp_path / "trace.json")


def test_kernels_of_nccl(nccl):
    rows = [(r.layer, r.phase, r.gathers) for r in overlap_report(nccl).layers]
    assert rows == [
        ("layers.0", "forward", 1),
        ("layers.1", "forward", 2),
        ("", "backward", 1),
    ]
    first, second, root = overlap_report(nccl).layers
    assert (first.seconds, first.hidden) == pytest.approx((100e-6, 0))
    assert (second.seconds, second.hidden) == pytest.approx((160e-6, 140e-6))
    assert (root.seconds, root.hidden) == pytest.approx((50e-6, 50e-6))


def test_sums_and_forms(nccl, tmp_path):
    report = overlap_report(nccl)
    assert report.share == pytest.approx(190 / 310)
    assert report.total("forward").share == pytest.approx(140 / 260)
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["hidden_share"] == pytest.approx(190 / 310)
    assert plain["phases"]["backward"]["hidden_share"] == pytest.approx(1)
    assert plain["layers"][1] == {
        "layer": "layers.1",
        "phase": "forward",
        "gathers": 2,
        "seconds": pytest.approx(160e-6),
        "hidden_seconds": pytest.approx(140e-6),
        "hidden_share": pytest.approx(140 / 160),
    }
    lines = str(report).splitlines()
    assert lines[0].split() == ["layer", "phase", "gathers", "time", "hidden", "share"]
    assert lines[2].split() == ["layers.1", "forward", "2", "0.16", "ms", "0.14", "ms", "88%"]
    assert lines[3].split()[0] == "(root)"
    assert lines[-1].split() == ["all", "layers", "all", "4", "0.31", "ms", "0.19", "ms", "61%"]
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(nccl.read_bytes()))
    assert overlap_report(str(packed)) == report


def test_without_links_works_are_taken_in_order(nccl):
    document = json.loads(nccl.read_text())
    for event in document["traceEvents"]:
        event["args"].pop("correlation", None)
    document["traceEvents"] = [e for e in document["traceEvents"] if e.get("tid") != 30]
    nccl.write_text(json.dumps(document))
    seconds = [row.seconds for row in overlap_report(nccl).layers]
    assert seconds == pytest.approx([100e-6, 160e-6, 50e-6])


@pytest.mark.parametrize("analysed", [False, True])
@pytest.mark.parametrize("row", ["HCCL", "Communication"])
def test_operations_of_hccl(tmp_path, row, analysed):
    """torch_npu's trace_view.json: a list, with times as strings and a process a row."""
    trace = Trace()
    names = {10: "Python", 20: "Ascend Hardware", 30: row, 40: "Overlap Analysis"}
    for pid, name in names.items():
        trace.events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
    trace.gather("layers.0", 100, "pre_forward (layers.0)")
    trace.gather("layers.1", 130, "forward_prefetch for layers.1")
    trace.span("", "hcom_allGather__491_0_1", 120, 220, tid=3, pid=30)
    trace.span("", "Memcpy", 121, 200, tid=4, pid=30)
    trace.span("", "hcom_allGather__491_1_1", 230, 330, tid=3, pid=30)
    trace.span("", "hcom_reduceScatter__491_2_1", 120, 330, tid=3, pid=30)
    trace.span("", "aclnnMatmul_MatMulV2", 200, 300, tid=5, pid=20, **{"Task Type": "AI_CORE"})
    trace.span("", "Notify", 120, 330, tid=5, pid=20, **{"Task Type": "NOTIFY_WAIT_SQE"})
    trace.span("", "hcom_allGather_AicpuKernel", 120, 330, tid=6, pid=20)
    if analysed:
        trace.span("", "Computing", 200, 300, tid=0, pid=40)
        trace.span("", "Communication", 120, 330, tid=1, pid=40)
    # One from another group, which only its flow tells apart.
    trace.span("", "hcom_allGather__700_0_1", 110, 119, tid=9, pid=30)
    flow = {"cat": "async_npu", "name": "async_npu", "id": "7"}
    trace.events.append({"ph": "s", "ts": "50.0", "pid": 10, "tid": 1, **flow})
    trace.events.append({"ph": "f", "ts": "110.0", "pid": 30, "tid": 9, "bp": "e", **flow})
    for event in trace.events:
        if event["ph"] == "X":
            event["ts"] = str(event["ts"])
    path = tmp_path / "trace_view.json"
    path.write_text(json.dumps(trace.events))
    first, second = overlap_report(path).layers
    assert (first.layer, second.layer) == ("layers.0", "layers.1")
    assert (first.seconds, first.hidden) == pytest.approx((100e-6, 20e-6))
    assert (second.seconds, second.hidden) == pytest.approx((100e-6, 70e-6))


def test_gloo_beside_operators(tmp_path):
    trace = Trace()
    trace.gather("layers.0", 100, "pre_forward (layers.0)")
    trace.gather("layers.1", 200, "forward_prefetch for layers.1")
    trace.span("user_annotation", "gloo:all_gather", 90, 95, tid=2)  # of others, before
    trace.span("user_annotation", "gloo:all_gather", 103, 150, tid=2)
    trace.span("user_annotation", "gloo:all_gather", 206, 306, tid=3)
    trace.span("cpu_op", "aten::linear", 220, 280)
    trace.span("cpu_op", "aten::addmm", 225, 275)  # within
    # Backward's operators go around FSDP2's hooks, which wait.
    trace.span("cpu_op", "autograd::engine::evaluate_function: MulBackward0", 285, 310)
    trace.span("user_annotation", "FSDP::all_gather_copy_out (layers.1)", 290, 305)
    trace.span("cpu_op", "c10d::_allgather_base_", 205, 210)
    first, second = overlap_report(trace.write(tmp_path / "t.json")).layers
    assert (first.seconds, first.hidden) == pytest.approx((47e-6, 0))
    # linear 60, evaluate_function 5 before and 1 after the wait
    assert (second.seconds, second.hidden) == pytest.approx((100e-6, 66e-6))


def test_nothing_to_report(tmp_path):
    trace = Trace()
    trace.span("cpu_op", "aten::linear", 220, 280)
    with pytest.raises(
        ValueError, match="no all-gather of FSDP2: profile a forward and a backward"
    ):
        overlap_report(trace.write(tmp_path / "t.json"))
    trace.gather("layers.0", 100, "pre_forward (layers.0)")
    with pytest.raises(ValueError, match=r"not the communication itself: .*ProfilerActivity"):
        overlap_report(trace.write(tmp_path / "t.json"))
    trace.span("user_annotation", "gloo:all_gather", 10, 20, tid=2)
    with pytest.raises(ValueError, match="none of the trace's all-gathers was issued by FSDP2"):
        overlap_report(trace.write(tmp_path / "t.json"))


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"traceEvents": 3}', '"text"'])
def test_what_is_no_trace(tmp_path, text):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"t\.json is no trace"):
        overlap_report(path)


def test_other_arguments(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the trace .*missing\.json: No such file"):
        overlap_report(tmp_path / "missing.json")
    with pytest.raises(ValueError, match=r"profile must be a .* got int"):
        overlap_report(3)


def test_picture(nccl, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    overlap_report(nccl).picture(tmp_path / "overlap.png")
    assert (tmp_path / "overlap.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'fsdp2-npu\[picture\]'"):
        overlap_report(nccl).picture(tmp_path / "other.png")


def _profiled(rank, folder):
    model = build()
    mesh = dist.init_device_mesh("cpu", (2,))
    options = {"blocks": model.layers, "reshard_after_forward": True}
    shard_model(model, mesh, **options, full_precision=[model.layers[1].scorer])
    loss_of(model, batch(1), LENGTH).backward()
    reports = {}
    for name, seconds in (("plain", None), ("delayed", 0.02)):
        with profile(activities=[ProfilerActivity.CPU]) as result:
            if seconds is None:
                loss_of(model, batch(1), LENGTH).backward()
            else:
                with delayed_all_gathers(model, seconds):
                    loss_of(model, batch(1), LENGTH).backward()
        dist.barrier()
        reports[name] = overlap_report(result)
        path = f"{folder}/{rank}.json"
        result.export_chrome_trace(path)  # what the report read is still there
        reports[f"{name}, exported"] = overlap_report(path)
    return reports


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    return run_ranks(_profiled, 2, str(tmp_path_factory.mktemp("traces")))


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["plain", "delayed"])
def test_real_profiles(profiled, name):
    for reports in profiled:
        report, exported = reports[name], reports[f"{name}, exported"]
        found = {(row.layer, row.phase): row.gathers for row in report.layers}
        wanted = {(layer, phase): 1 for phase in ("forward", "backward") for layer in LAYERS}
        assert found == wanted | {("layers.1.scorer", "forward"): 1, ("", "forward"): 1}
        for row, other in zip(report.layers, exported.layers, strict=True):
            assert 0 <= row.hidden <= row.seconds
            assert (other.layer, other.phase) == (row.layer, row.phase)
            # The profiler's events are in whole microseconds in some versions.
            assert other.seconds == pytest.approx(row.seconds, abs=3e-6)
            assert other.hidden == pytest.approx(row.hidden, abs=1e-4)


@pytest.mark.distributed
def test_a_delayed_gather_takes_its_time(profiled):
    for reports in profiled:
        assert all(row.seconds >= 0.0199 for row in reports["delayed"].layers)


def test_delay_must_not_be_negative():
    with (
        pytest.raises(ValueError, match="seconds must not be negative, got -1"),
        delayed_all_gathers(build(), -1),
    ):
        pass

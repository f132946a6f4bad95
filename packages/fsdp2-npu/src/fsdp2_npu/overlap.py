"""How much of FSDP2's all-gather time is hidden behind computation, read from a profile.

FSDP2 marks where it issues an all-gather ("FSDP::all_gather (layer)"). What is measured is the
communication itself: a kernel of NCCL or HCCL on the device, or Gloo's work in a thread of its own.
Its hidden part is when other kernels run on the device, or on CPU operators in the host's threads.
"""

import gzip
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from fsdp2_npu.trace import Phase

_MARK = re.compile(r"FSDP::all_gather(?: \((?P<layer>.*)\))?(?: \[pg=\d+\])?$")
_BY_HOST = re.compile(r"^(?P<backend>\w+):_?all_?gather")  # "gloo:all_gather"
_COLLECTIVE = re.compile(r"nccl|hccl|hcom_|rccl", re.IGNORECASE)
_ALL_GATHER = re.compile(r"all_?gather", re.IGNORECASE)
_HOST_COMMUNICATION = ("c10d::", "_c10d_functional::", "c10d_functional::", "fsdp::")
# Rows of torch_npu's trace_view.json. Names of the communication row by version.
_NPU_KERNELS, _NPU_OVERLAP = "Ascend Hardware", "Overlap Analysis"
_NPU_COMMUNICATION = ("HCCL", "Communication")
_NPU_WAITS = re.compile(r"WAIT|RECORD|PLACE_HOLDER|NOTIFY", re.IGNORECASE)

_WHAT_TO_PROFILE = (
    "profile a forward and a backward of a sharded model on two ranks or more with "
    "torch.profiler.profile(activities=[ProfilerActivity.CPU]), and ProfilerActivity.CUDA (or "
    "torch_npu's ProfilerActivity.NPU) where there is a device"
)

Interval = tuple[float, float]


@dataclass(frozen=True)
class LayerOverlap:
    """All-gathers of one layer in one phase.

    Attributes:
        layer: name of the module as FSDP2 marks it; "" is the root.
        phase: "forward", "backward", or "outside" of both (a pipeline schedule's own).
        gathers: how many there were.
        seconds: how long they took together.
        hidden: seconds of these in which something was computed.
    """

    layer: str
    phase: Phase
    gathers: int
    seconds: float
    hidden: float

    @property
    def share(self) -> float:
        """Hidden part of the time, 0 to 1."""
        return self.hidden / self.seconds if self.seconds else 1.0


@dataclass(frozen=True)
class OverlapReport:
    """What :func:`overlap_report` found; ``print`` shows it as a table."""

    layers: tuple[LayerOverlap, ...]

    def total(self, phase: Phase | None = None) -> LayerOverlap:
        """All layers together, in one phase or in all."""
        chosen = [row for row in self.layers if phase in (None, row.phase)]
        return LayerOverlap(
            "all layers",
            phase or "outside",
            sum(row.gathers for row in chosen),
            sum(row.seconds for row in chosen),
            sum(row.hidden for row in chosen),
        )

    @property
    def share(self) -> float:
        """Hidden part of all all-gather time, 0 to 1."""
        return self.total().share

    def phases(self) -> list[Phase]:
        return list(dict.fromkeys(row.phase for row in self.layers))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for JSON."""

        def plain(row: LayerOverlap) -> dict[str, Any]:
            sums = {"gathers": row.gathers, "seconds": row.seconds, "hidden_seconds": row.hidden}
            return {**sums, "hidden_share": row.share}

        return {
            **plain(self.total()),
            "phases": {phase: plain(self.total(phase)) for phase in self.phases()},
            "layers": [
                {"layer": row.layer, "phase": row.phase, **plain(row)} for row in self.layers
            ],
        }

    def __str__(self) -> str:
        rows = [("layer", "phase", "gathers", "time", "hidden", "share")]
        rows += [(row.layer or "(root)", row.phase, *_cells(row)) for row in self.layers]
        rows += [("all layers", phase, *_cells(self.total(phase))) for phase in self.phases()]
        if len(self.phases()) > 1:
            rows.append(("all layers", "all", *_cells(self.total())))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )

    def picture(self, path: str | PathLike[str]) -> None:
        """Draw hidden and exposed time by layer.

        Args:
            path: where to write it; the suffix says the format, e.g. ".png" or ".svg".

        Raises:
            ImportError: matplotlib is missing.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "a picture needs matplotlib: pip install 'fsdp2-npu[picture]'"
            ) from error
        phases = self.phases()
        names = list(dict.fromkeys(row.layer for row in self.layers))
        figure = Figure(
            figsize=(1.5 + 4 * len(phases), 1.4 + 0.26 * len(names)), layout="constrained"
        )
        axes = figure.subplots(1, len(phases), sharey=True, squeeze=False)[0]
        for axis, phase in zip(axes, phases, strict=True):
            rows = {row.layer: row for row in self.layers if row.phase == phase}
            places = [names.index(name) for name in rows]
            hidden = [row.hidden * 1e3 for row in rows.values()]
            exposed = [(row.seconds - row.hidden) * 1e3 for row in rows.values()]
            axis.barh(places, hidden, color="#4c9a6a", label="behind computation")
            axis.barh(places, exposed, left=hidden, color="#d1603d", label="exposed")
            axis.set_title(f"{phase}: {self.total(phase).share:.0%} hidden", fontsize=10)
            axis.set_xlabel("all-gather time (ms)")
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_yticks(range(len(names)), [name or "(root)" for name in names], fontsize=8)
        axes[0].invert_yaxis()
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(path, dpi=130)


def _cells(row: LayerOverlap) -> tuple[str, str, str, str]:
    times = (f"{row.seconds * 1e3:.2f} ms", f"{row.hidden * 1e3:.2f} ms")
    return (str(row.gathers), *times, f"{row.share:.0%}")


def overlap_report(profile: Any) -> OverlapReport:
    """The share of all-gather time that is hidden behind computation, by layer and in all.

    Args:
        profile: a finished ``torch.profiler.profile``, or the path of an exported trace: what
            ``export_chrome_trace`` wrote (.json or .json.gz), or torch_npu's trace_view.json.

    Raises:
        ValueError: a file that is no trace, or a trace without FSDP2's all-gathers.
    """
    if isinstance(profile, str | PathLike):
        trace = _read(Path(fspath(profile)))
    elif hasattr(profile, "events"):
        trace = _from_profile(profile)
    else:
        raise ValueError(
            "profile must be a torch.profiler.profile or the path of an exported trace, got "
            f"{type(profile).__name__}"
        )
    if not trace.gathers:
        raise ValueError(f"the trace has no all-gather of FSDP2: {_WHAT_TO_PROFILE}")
    if not trace.communication:
        raise ValueError(
            "the trace has marks of FSDP2's all-gathers, but not the communication itself: "
            f"{_WHAT_TO_PROFILE}"
        )
    computing = _subtract(_union(trace.computing), _union(trace.not_computing))
    rows: dict[tuple[str, Phase], list[float]] = {}
    for mark, (start, end) in _matched(trace):
        row = rows.setdefault((mark.layer, mark.phase(trace.passes)), [0, 0.0, 0.0])
        row[0] += 1
        row[1] += (end - start) * 1e-6
        row[2] += _overlap((start, end), computing) * 1e-6
    if not rows:
        raise ValueError(
            "none of the trace's all-gathers was issued by FSDP2, though it marks some: the trace "
            f"may have been cut; {_WHAT_TO_PROFILE}"
        )
    return OverlapReport(
        tuple(
            LayerOverlap(layer, phase, int(gathers), seconds, hidden)
            for (layer, phase), (gathers, seconds, hidden) in rows.items()
        )
    )


@dataclass(frozen=True)
class _Mark:
    """FSDP2's mark of an all-gather that it issues."""

    layer: str
    start: float
    end: float
    thread: Any

    def phase(self, passes: "Sequence[_Pass]") -> Phase:
        around = [p for p in passes if p.start <= self.start <= p.end and p.thread == self.thread]
        if not around:
            return "outside"
        return "backward" if "backward" in max(around, key=lambda p: p.start).name else "forward"


@dataclass(frozen=True)
class _Pass:
    """A mark of FSDP2 in which it issues all-gathers."""

    name: str
    start: float
    end: float
    thread: Any


@dataclass
class _Communication:
    """An all-gather at work, and when the host launched it, where the trace says so."""

    start: float
    end: float
    launched: float | None = None


@dataclass
class _Trace:
    """What matters of a profile. Times in microseconds."""

    gathers: list[_Mark] = field(default_factory=list)
    passes: list[_Pass] = field(default_factory=list)
    communication: list[_Communication] = field(default_factory=list)
    computing: list[Interval] = field(default_factory=list)
    not_computing: list[Interval] = field(default_factory=list)

    def add_mark(self, name: str, start: float, end: float, thread: Any) -> None:
        if found := _MARK.match(name):
            self.gathers.append(_Mark(found["layer"] or "", start, end, thread))
        elif re.search(r"prefetch for|pre_forward|pre_backward", name):
            self.passes.append(_Pass(name, start, end, thread))


def _matched(trace: _Trace) -> list[tuple[_Mark, Interval]]:
    """Each mark with the communication it started.

    By the time of launch where that is known, else in order: a backend works first in, first out.
    """
    marks = sorted(trace.gathers, key=lambda mark: mark.start)
    pairs: dict[int, _Communication] = {}
    starts = [mark.start for mark in marks]
    waiting = []
    for work in sorted(trace.communication, key=lambda work: work.start):
        if work.launched is None:
            waiting.append(work)
            continue
        i = bisect_right(starts, work.launched) - 1
        if i >= 0 and work.launched <= marks[i].end:
            pairs[i] = work  # else it is not FSDP2's
    for i, mark in enumerate(marks):
        if i not in pairs:
            k = next((k for k, work in enumerate(waiting) if work.start >= mark.start), None)
            if k is not None:
                pairs[i] = waiting.pop(k)
    return [(marks[i], (work.start, work.end)) for i, work in sorted(pairs.items())]


def _from_profile(profile: Any) -> _Trace:
    """From the profiler's events: exporting could be done once only, and is the user's."""
    trace = _Trace()
    launches: dict[int, float] = {}
    host: list[Any] = []
    device: list[Any] = []
    for event in profile.events() or ():
        if event.device_type.name != "CPU":
            device.append(event)
            continue
        host.append(event)
        if "launch" in event.name.lower():
            launches[event.id] = event.time_range.start
    by_host: list[tuple[str, Interval]] = []
    for event in host:
        span = (event.time_range.start, event.time_range.end)
        if event.name.startswith("FSDP::"):
            trace.add_mark(event.name, *span, event.thread)
            trace.not_computing.append(span)
        elif found := _BY_HOST.match(event.name):
            by_host.append((found["backend"], span))
        elif event.name.startswith(_HOST_COMMUNICATION):
            trace.not_computing.append(span)
        elif not (device or event.is_async or event.is_user_annotation):
            trace.computing.append(span)
    if not device:
        trace.communication = _host_communication(by_host)
        return trace
    by_fsdp, trace.not_computing = _union(trace.not_computing), []
    for event in device:
        if event.is_user_annotation:
            continue
        span = (event.time_range.start, event.time_range.end)
        _add_device(trace, event.name, span, launches.get(event.id), by_fsdp)
    return trace


def _read(path: Path) -> _Trace:
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        document = json.loads(data)
        events = document["traceEvents"] if isinstance(document, dict) else document
        events = [event for event in events if event.get("ph") in ("X", "M", "s", "f")]
    except OSError as error:
        raise ValueError(f"cannot read the trace {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is no trace: it must be the JSON that export_chrome_trace or torch_npu's "
            f"profiler writes ({type(error).__name__}: {error})"
        ) from error
    rows = {
        event["pid"]: event["args"].get("name", "")
        for event in events
        if event["ph"] == "M" and event.get("name") == "process_name"
    }
    spans = [event for event in events if event["ph"] == "X"]
    if any(row == _NPU_KERNELS or row in _NPU_COMMUNICATION for row in rows.values()):
        return _from_npu(events, spans, rows)
    return _from_kineto(spans)


def _from_kineto(spans: list[dict[str, Any]]) -> _Trace:
    trace = _Trace()
    launches = {
        event["args"]["correlation"]: float(event["ts"])
        for event in spans
        if event.get("cat") in ("cuda_runtime", "cuda_driver", "privateuse1_runtime")
        and "correlation" in event.get("args", {})
    }
    by_host: list[tuple[str, Interval]] = []
    kernels = [event for event in spans if event.get("cat") == "kernel"]
    for event in spans:
        name, category, span = event["name"], event.get("cat"), _span(event)
        if category not in ("cpu_op", "user_annotation"):
            continue
        if name.startswith("FSDP::"):
            trace.add_mark(name, *span, (event["pid"], event["tid"]))
            trace.not_computing.append(span)
        elif found := _BY_HOST.match(name):
            by_host.append((found["backend"], span))
        elif name.startswith(_HOST_COMMUNICATION):
            trace.not_computing.append(span)
        elif category == "cpu_op" and not kernels:
            trace.computing.append(span)
    if not kernels:
        trace.communication = _host_communication(by_host)
        return trace
    by_fsdp, trace.not_computing = _union(trace.not_computing), []
    for event in kernels:
        launched = launches.get(event.get("args", {}).get("correlation"))
        _add_device(trace, event["name"], _span(event), launched, by_fsdp)
    return trace


def _from_npu(
    events: list[dict[str, Any]], spans: list[dict[str, Any]], rows: dict[Any, str]
) -> _Trace:
    trace = _Trace()
    flows = _flows(events)
    analysed: list[Interval] = []
    for event in spans:
        name, row, span = event["name"], rows.get(event["pid"], ""), _span(event)
        if name.startswith("FSDP::"):
            trace.add_mark(name, *span, (event["pid"], event["tid"]))
        elif row in _NPU_COMMUNICATION:
            # Below each operation there are its parts (Memcpy, Notify_Wait).
            if name.startswith("hcom_") and _ALL_GATHER.search(name):
                launched = flows.get((event["pid"], event["tid"], float(event["ts"])))
                trace.communication.append(_Communication(*span, launched))
        elif row == _NPU_OVERLAP and name == "Computing":
            analysed.append(span)
        elif row == _NPU_KERNELS and not _COLLECTIVE.search(name):
            kind = str(event.get("args", {}).get("Task Type", name))
            if not _NPU_WAITS.search(kind):
                trace.computing.append(span)
    if analysed:  # the profiler's own account of when the device computed
        trace.computing = analysed
    return trace


def _flows(events: list[dict[str, Any]]) -> dict[tuple[Any, Any, float], float]:
    """When torch issued what begins on a row at a time: pid, tid, microseconds."""
    flows = [e for e in events if e["ph"] in ("s", "f") and e.get("cat") == "async_npu"]
    starts = {e["id"]: float(e["ts"]) for e in flows if e["ph"] == "s"}
    return {
        (e["pid"], e["tid"], float(e["ts"])): starts[e["id"]]
        for e in flows
        if e["ph"] == "f" and e["id"] in starts
    }


def _add_device(
    trace: _Trace, name: str, span: Interval, launched: float | None, by_fsdp: list[Interval]
) -> None:
    if _COLLECTIVE.search(name):
        if _ALL_GATHER.search(name):
            trace.communication.append(_Communication(*span, launched))
        return
    copies = name.lower().startswith(("memcpy", "memset"))
    if not copies and (launched is None or not _inside(launched, by_fsdp)):
        trace.computing.append(span)


def _host_communication(found: list[tuple[str, Interval]]) -> list[_Communication]:
    # Inside of a delayed all-gather (see testing.py) there is the real one.
    delayed = any(backend == "delayed" for backend, _ in found)
    return [_Communication(*span) for backend, span in found if not delayed or backend == "delayed"]


def _span(event: dict[str, Any]) -> Interval:
    # torch_npu writes times as strings, so that none of their digits is lost.
    start = float(event["ts"])
    return start, start + float(event.get("dur", 0))


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted and disjoint."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _subtract(intervals: list[Interval], others: list[Interval]) -> list[Interval]:
    """What is left of sorted, disjoint intervals outside of others."""
    left: list[Interval] = []
    for start, end in intervals:
        first = max(0, bisect_right(others, (start,)) - 1)
        for a, b in others[first:]:
            if a >= end:
                break
            if b > start:
                if a > start:
                    left.append((start, a))
                start = b
        if start < end:
            left.append((start, end))
    return left


def _inside(moment: float, intervals: list[Interval]) -> bool:
    i = bisect_right(intervals, (moment, float("inf"))) - 1
    return i >= 0 and moment <= intervals[i][1]


def _overlap(interval: Interval, others: list[Interval]) -> float:
    """How much of an interval lies in sorted, disjoint others."""
    start, end = interval
    total = 0.0
    for a, b in others[max(0, bisect_right(others, (start,)) - 1) :]:
        if a >= end:
            break
        total += max(0.0, min(b, end) - max(a, start))
    return total

from fsdp2_npu.__about__ import __version__
from fsdp2_npu.overlap import LayerOverlap, OverlapReport, overlap_report
from fsdp2_npu.prefetch import Prefetch
from fsdp2_npu.reduction import needs_sum_reduction
from fsdp2_npu.shard import shard_model
from fsdp2_npu.trace import Event, trace_collectives

__all__ = [
    "Event",
    "LayerOverlap",
    "OverlapReport",
    "Prefetch",
    "__version__",
    "needs_sum_reduction",
    "overlap_report",
    "shard_model",
    "trace_collectives",
]

from fsdp2_npu.__about__ import __version__
from fsdp2_npu.prefetch import Prefetch
from fsdp2_npu.reduction import needs_sum_reduction
from fsdp2_npu.shard import shard_model

__all__ = ["Prefetch", "__version__", "needs_sum_reduction", "shard_model"]

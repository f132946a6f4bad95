from titan_custom_cp.__about__ import __version__
from titan_custom_cp.balancers import Contiguous, HeadTail, LoadBalancer
from titan_custom_cp.collectives import gather_sequence, gather_sequences
from titan_custom_cp.context import (
    CustomContextParallelContext,
    DSAContextParallelContext,
    UlyssesContextParallelContext,
    current_context,
    load_context,
)

__all__ = [
    "Contiguous",
    "CustomContextParallelContext",
    "DSAContextParallelContext",
    "HeadTail",
    "LoadBalancer",
    "UlyssesContextParallelContext",
    "__version__",
    "current_context",
    "gather_sequence",
    "gather_sequences",
    "load_context",
]

from swap_optimizer.__about__ import __version__
from swap_optimizer.errors import StepError, SwapFileError
from swap_optimizer.layout import peak_bytes
from swap_optimizer.optimizer import Stats, SwapOptimizer

__all__ = [
    "Stats",
    "StepError",
    "SwapFileError",
    "SwapOptimizer",
    "__version__",
    "peak_bytes",
]

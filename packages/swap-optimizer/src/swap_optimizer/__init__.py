from swap_optimizer.__about__ import __version__
from swap_optimizer.optimizer import Stats, StepError, SwapOptimizer
from swap_optimizer.swapfile import SwapFileError

__all__ = ["Stats", "StepError", "SwapFileError", "SwapOptimizer", "__version__"]

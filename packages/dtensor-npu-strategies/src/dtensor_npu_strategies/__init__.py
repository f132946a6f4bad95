from dtensor_npu_strategies.__about__ import __version__
from dtensor_npu_strategies.registration import Registration, register
from dtensor_npu_strategies.report import Redistribution, Redistributions, redistributions

__all__ = [
    "Redistribution",
    "Redistributions",
    "Registration",
    "__version__",
    "redistributions",
    "register",
]

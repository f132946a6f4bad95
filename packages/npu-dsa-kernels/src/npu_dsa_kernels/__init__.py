from npu_dsa_kernels.__about__ import __version__

__all__ = ["__version__"]

"""The tests run on the CPU: chosen here, before any of them imports torchtitan's models."""

from titan_npu_train import platform

platform.select("cpu")

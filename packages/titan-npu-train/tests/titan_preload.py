"""What every test rank needs, imported once in the server that ranks are forked from."""

import torch._dynamo
import torch.distributed.fsdp  # noqa: F401

from titan_npu_train import platform

platform.select("cpu")

import torchtitan.models.common.token_dispatcher  # noqa: E402, F401

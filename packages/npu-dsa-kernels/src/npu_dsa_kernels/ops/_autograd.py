"""What the operators' autograd registrations share."""

import torch
from torch import Tensor
from torch.autograd import forward_ad


def no_forward_mode(name: str, *tensors: Tensor | None) -> None:
    """A custom operator would drop the tangents of forward-mode AD without a word."""
    if torch.compiler.is_compiling():
        return
    for x in tensors:
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise RuntimeError(
                f"{name}: forward-mode differentiation (jvp) is not implemented by this backend; "
                "use backend='reference'"
            )


def once_differentiable(backward_op: torch.library.CustomOpDef, name: str) -> None:
    """Make a second differentiation, through `backward_op`, fail and say what works."""

    def refuse(ctx: object, *grads: object) -> None:
        raise RuntimeError(
            f"{name}: double backward is not implemented by this backend; "
            "use backend='reference' for higher derivatives"
        )

    backward_op.register_autograd(refuse)

"""What the operators' autograd registrations share."""

import torch


def once_differentiable(backward_op: torch.library.CustomOpDef) -> None:
    """Make a second differentiation of `backward_op` fail with a message that says what works."""
    name = str(backward_op._qualname)

    def refuse(ctx: object, *grads: object) -> None:
        raise RuntimeError(
            f"{name} cannot be differentiated: double backward is not implemented by this "
            "backend; use backend='reference' for higher derivatives"
        )

    backward_op.register_autograd(refuse)

"""What the operators' autograd registrations share."""

import torch


def once_differentiable(backward_op: torch.library.CustomOpDef, name: str) -> None:
    """Make a second differentiation, through `backward_op`, fail and say what works."""

    def refuse(ctx: object, *grads: object) -> None:
        raise RuntimeError(
            f"{name}: double backward is not implemented by this backend; "
            "use backend='reference' for higher derivatives"
        )

    backward_op.register_autograd(refuse)

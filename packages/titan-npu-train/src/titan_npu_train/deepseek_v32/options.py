"""What a user may set about sparse attention from the command line (``--dsa.*``)."""

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["DENSE_WARMUP", "SPARSE", "DSAOptions", "Stage"]

Stage = Literal["dense_warmup", "sparse"]
DENSE_WARMUP: Stage = "dense_warmup"
SPARSE: Stage = "sparse"


@dataclass(kw_only=True, slots=True)
class DSAOptions:
    stage: Stage = SPARSE
    """
    "dense_warmup" trains the indexers alone: attention over every visible key, everything else
    frozen, and a loss over every visible key. "sparse" trains the model on the keys its indexers
    choose.
    """

    form: Literal["absorbed", "unabsorbed"] | None = None
    """
    How attention is computed: "absorbed" over the shared latent, or "unabsorbed" with per-head keys
    and values and S x S scores (the published small-operator baseline). None keeps the model's own.
    """

    backend: str | None = None
    """Backend of npu_dsa_kernels ("reference", "torch", ...). None keeps the model's own."""

    kl_backend: str | None = None
    """
    Backend of the indexers' loss alone. None takes the attention's: on Ascend NPU the fused
    operator, which needs all heads of a token ("torch" runs blocks on the same device instead).
    """

    topk: int | None = None
    """Keys a query attends to. None keeps the model's own."""

    indexer_loss_coefficient: float = 1.0
    """
    Factor on the indexers' KL loss. 0 leaves the indexers untrained and keeps nothing of them for
    the backward pass.
    """

    def __post_init__(self) -> None:
        if self.stage not in (DENSE_WARMUP, SPARSE):
            raise ValueError(f"dsa.stage must be 'dense_warmup' or 'sparse', got {self.stage!r}")
        if self.stage == DENSE_WARMUP and self.form is not None:
            raise ValueError(
                f"dsa.form is {self.form!r}, but attention in dsa.stage 'dense_warmup' is dense, "
                "with keys of each head: leave dsa.form out"
            )
        if self.topk is not None and self.topk < 1:
            raise ValueError(f"dsa.topk must be at least 1, got {self.topk}")
        _check_backend("dsa.backend", self.backend)
        _check_backend("dsa.kl_backend", self.kl_backend)
        coefficient = self.indexer_loss_coefficient
        if not (math.isfinite(coefficient) and coefficient >= 0):
            raise ValueError(
                f"dsa.indexer_loss_coefficient must be finite and not negative, got {coefficient}"
            )
        if self.stage == DENSE_WARMUP and coefficient == 0:
            raise ValueError(
                "dsa.indexer_loss_coefficient is 0, but in dsa.stage 'dense_warmup' the indexers' "
                "loss is all there is to train on: use a positive one"
            )


def _check_backend(option: str, name: str | None) -> None:
    if name is None:
        return
    from npu_dsa_kernels import backends

    states = backends()
    if name not in states:
        raise ValueError(f"{option} must be one of {', '.join(states)}, got {name!r}")
    if states[name] != "available":
        raise ValueError(f"{option} {name!r} is not available: {states[name]}")

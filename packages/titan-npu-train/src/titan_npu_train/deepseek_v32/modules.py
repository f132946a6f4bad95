"""Small modules whose arithmetic dtype is fixed, whatever the parameters are cast to.

Shape letters: E experts, F expert hidden, D model dim, R routed rows.
"""

from dataclasses import dataclass

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial
from torchtitan.models.common import Linear
from torchtitan.models.common.moe import GroupedExperts as TitanGroupedExperts
from torchtitan.models.common.nn_modules import LayerNorm

__all__ = ["Float32LayerNorm", "Float32Linear", "GroupedExperts"]


class Float32Linear(Linear):
    """A linear layer computed in fp32, with an fp32 result.

    Used for the router gate and the indexer's ``weights_proj``. Autocast cannot do this on CPU: it
    only lowers precision there.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(input.float(), self.weight.float(), bias)


class Float32LayerNorm(LayerNorm):
    """Layer norm computed in fp32; the result has the input's dtype."""

    @dataclass(kw_only=True, slots=True)
    class Config(LayerNorm.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = None if self.weight is None else self.weight.float()
        bias = None if self.bias is None else self.bias.float()
        out = F.layer_norm(input.float(), self.normalized_shape, weight, bias, self.eps)
        return out.to(input.dtype)


class GroupedExperts(TitanGroupedExperts):
    """SwiGLU experts computed in the activation dtype.

    torchtitan's own class always computes in bfloat16, which makes an fp32 run an approximate one.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TitanGroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        w1_EFD, w2_EDF, w3_EFD = (
            _local(w).to(x_RD.dtype) for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        offsets_E = _row_ends(num_tokens_per_expert_E, x_RD)
        gate_RF = self._grouped_mm(A=x_RD, B_t=w1_EFD.mT, offs=offsets_E)
        up_RF = self._grouped_mm(A=x_RD, B_t=w3_EFD.mT, offs=offsets_E)
        return self._grouped_mm(A=F.silu(gate_RF) * up_RF, B_t=w2_EDF.mT, offs=offsets_E)

    def _grouped_mm(
        self, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor
    ) -> torch.Tensor:
        # The grouped kernel takes bf16 on every device and fp32 on CPU only.
        if A.dtype == torch.bfloat16 or A.device.type == "cpu":
            return torch._grouped_mm(A, B_t, offs=offs)
        ends = offs.tolist()
        rows = [A[lo:hi] @ B for lo, hi, B in zip([0, *ends[:-1]], ends, B_t, strict=True)]
        return torch.cat([*rows, A.new_zeros(A.size(0) - ends[-1], B_t.size(-1))])


def _local(weight: torch.Tensor) -> torch.Tensor:
    """This rank's part of a weight. Ranks that hold the same part have different tokens."""
    if not isinstance(weight, DTensor):
        return weight
    gradient = [Partial() if p.is_replicate() else p for p in weight.placements]
    return weight.to_local(grad_placements=gradient)


def _row_ends(counts_E: torch.Tensor, x_RD: torch.Tensor) -> torch.Tensor:
    """Where each expert's rows end, int32 [E]; for SPMD type checking, of the rows' type."""
    if torch.compiler.is_compiling() or not spmd.is_type_checking():
        return counts_E.cumsum(0, dtype=torch.int32)
    with spmd.no_typecheck():
        offsets_E = counts_E.cumsum(0, dtype=torch.int32)
    # As sums over ranks (the type of the counts) offsets could not meet rows, which vary.
    spmd.assert_local_type_like(offsets_E, x_RD)
    return offsets_E

"""A layer of causal attention over packed documents, alone and under context parallelism."""

import torch
from torch import Tensor, nn

from titan_custom_cp import (
    DSAContextParallelContext,
    UlyssesContextParallelContext,
    current_context,
)

# B batch, S rows of the sequence, L rows of a rank, T keys, H heads, D features

B, S, H, D = 2, 32, 4, 6


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """x [B, S, H * D], and positions [B, S] of documents that cross the borders of ranks."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(B, S, H * D, generator=g, dtype=torch.float64).to(dtype)
    first = torch.arange(S).remainder(13)
    return x, torch.stack([first, (torch.arange(S) + 5).remainder(21)])


class Attention(nn.Module):
    """Queries of H heads over a key head of one (`shared`) or of each head's own."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.shared = shared
        torch.manual_seed(0)
        self.q = nn.Linear(H * D, H * D, dtype=torch.float64)
        self.k = nn.Linear(H * D, D if shared else H * D, dtype=torch.float64)
        self.v = nn.Linear(H * D, D if shared else H * D, dtype=torch.float64)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        cp = current_context()
        q = self.q(x).unflatten(-1, (H, D))
        k, v = self.k(x), self.v(x)
        index = torch.arange(x.shape[1]) if cp is None else cp.index
        low, high = index - positions, index + 1
        if self.shared:
            if isinstance(cp, DSAContextParallelContext):
                k, v = cp.gather_keys(k, v)
            k, v = k.unsqueeze(2).expand(-1, -1, H, -1), v.unsqueeze(2).expand(-1, -1, H, -1)
            out = attend(q, k, v, low, high)
        else:
            k, v = k.unflatten(-1, (H, D)), v.unflatten(-1, (H, D))
            if isinstance(cp, UlyssesContextParallelContext):
                whole = torch.arange(S)
                low = whole - batch()[1]

                def attention(q, k, v):
                    return attend(q, k, v, low, whole + 1)

                out = cp.attend(attention, q, k, v)
            else:
                out = attend(q, k, v, low, high)
        return out.flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor, low: Tensor, high: Tensor) -> Tensor:
    key_T = torch.arange(k.shape[1])
    hidden = (key_T < low[..., None]) | (key_T >= high[..., None])
    if hidden.dim() == 2:
        hidden = hidden[None]
    logits = torch.einsum("bshd,bthd->bhst", q, k).masked_fill(hidden[:, None], -torch.inf)
    return torch.einsum("bhst,bthd->bshd", logits.softmax(-1), v)


def weights(positions: Tensor, index: Tensor) -> Tensor:
    """A weight for each row of the loss: every row has another gradient."""
    return torch.sin(1.0 + index.double())[None, :, None] + 0.1 * positions[..., None]


def step(model: Attention, x: Tensor, positions: Tensor, index: Tensor) -> Tensor:
    out = model(x, positions)
    loss = (out.square() * weights(positions, index)).sum() / (B * S)
    loss.backward()
    return loss.detach()

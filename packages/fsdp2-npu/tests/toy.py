"""A small model with what FSDP2 must tell apart: dense weights, experts, and an fp32 side branch.

Shapes: T tokens, D width, E experts, V vocabulary.
"""

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.utils.checkpoint import checkpoint

DIM, VOCAB, LENGTH = 8, 16, 4


class GroupedExperts(nn.Module):
    """Adds the outputs of all experts; under expert parallelism each rank holds a slice of them."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.w_EDD = nn.Parameter(torch.randn(experts, DIM, DIM) / (DIM**0.5 * experts))
        self.group = None

    def forward(self, x_TD):
        if self.group is not None:
            x_TD = funcol.all_gather_tensor_autograd(x_TD, 0, self.group)
        y_TD = torch.einsum("td,xde->te", x_TD, self.w_EDD)
        if self.group is not None:
            y_TD = funcol.reduce_scatter_tensor_autograd(y_TD, "sum", 0, self.group)
        return y_TD


class Block(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.dense = nn.Linear(DIM, DIM)
        self.experts = GroupedExperts(experts)
        # As in an indexer: fp32, and the input is detached, so that no gradient reaches it.
        self.scorer = nn.Linear(DIM, 2, bias=False)
        self.recompute = False
        self.at_sync = lambda: None

    def forward(self, x_TD):
        if self.recompute:
            return checkpoint(self._forward, x_TD, use_reentrant=False)
        return self._forward(x_TD)

    def _forward(self, x_TD):
        h_TD = torch.tanh(self.dense(x_TD))
        # As in expert dispatch: how many tokens go where is wanted on the host.
        if int((h_TD.detach() > 2).sum()) == 0:
            self.at_sync()
        score_T = self.scorer(h_TD.detach().float()).square().sum(-1)
        # Trains the scorer alone, as an auxiliary loss does; adds nothing to the output.
        side_T = (score_T - score_T.detach()).to(h_TD.dtype)
        return x_TD + self.experts(h_TD) + side_T[:, None] * h_TD.detach()


class Toy(nn.Module):
    def __init__(self, layers: int, experts: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block(experts) for _ in range(layers))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB)
        self.recompute = False

    def forward(self, tokens_T):
        x_TD = self.embedding(tokens_T)
        for layer in self.layers:
            if self.recompute:  # around a sharded block; Block.recompute is inside of it
                x_TD = checkpoint(layer, x_TD, use_reentrant=False)
            else:
                x_TD = layer(x_TD)
        return self.head(self.norm(x_TD))

    def blocks(self):
        return [self.embedding, *self.layers, [self.norm, self.head]]


def build(layers: int = 3, experts: int = 4) -> Toy:
    torch.manual_seed(0)
    return Toy(layers, experts)


def batch(ranks: int) -> torch.Tensor:
    """[ranks * LENGTH] tokens; rank r owns the r-th slice."""
    return torch.randint(VOCAB, (ranks * LENGTH,), generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, tokens_T: torch.Tensor, total_tokens: int) -> torch.Tensor:
    logits_TV = model(tokens_T).float()
    return nn.functional.cross_entropy(logits_TV, tokens_T, reduction="sum") / total_tokens

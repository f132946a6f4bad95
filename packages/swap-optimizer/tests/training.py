"""Small trainings that are run with an optimizer and with the same one swapped, bit by bit."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from swap_optimizer import SwapOptimizer

Make = Callable[..., Optimizer]

WIDTH = 24
# Every kind of state: none, one tensor or three, of no dimension, rows and columns, and late ones.
OPTIMIZERS: dict[str, Make] = {
    "AdamW": partial(AdamW, lr=1e-2, foreach=False),
    "AdamW foreach": partial(AdamW, lr=1e-2, foreach=True),
    "AdamW fused": partial(AdamW, lr=1e-2, fused=True),
    "Adam amsgrad": partial(Adam, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "SGD momentum": partial(SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "SGD": partial(SGD, lr=1e-2),
    "Adagrad": partial(Adagrad, lr=1e-2),
    "Muon": partial(Muon, lr=1e-2),
    "Adafactor": partial(Adafactor, lr=1e-2),
    "NAdam": partial(NAdam, lr=1e-2),
    "RMSprop": partial(RMSprop, lr=1e-2, centered=True, momentum=0.5, maximize=True),
}  # fmt: skip
OTHERS: dict[str, Make] = {
    "Adadelta": Adadelta,
    "Adamax": Adamax,
    "ASGD": ASGD,
    "RAdam": RAdam,
    "Rprop": Rprop,
    "Adagrad fused": partial(Adagrad, fused=True),
    "SGD fused": partial(SGD, fused=True),
    # Made anew each time: schedulers write into the tensor.
    "AdamW tensor lr": lambda groups: AdamW(groups, lr=torch.tensor(1e-2), fused=True),
}


class Toy(nn.Module):
    """Layers of several shapes; the one in the middle is left out of some steps."""

    def __init__(self, vectors: bool = True) -> None:
        super().__init__()
        widths = [WIDTH, 40, 8, 40, WIDTH, 16]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=vectors) for a, b in pairwise(widths))
        self.sometimes = nn.Linear(WIDTH, WIDTH, bias=vectors)
        self.scale = nn.Parameter(torch.tensor(1.0)) if vectors else 1.0

    def forward(self, x: Tensor, whole: bool) -> Tensor:
        if whole:
            x = x + self.sometimes(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale


class Training:
    """A model, its optimizer with two param groups, and a scheduler with warm-up.

    Args:
        make: of param groups, an optimizer.
        wrap: what is done to it, for example swap it.
        shard: what is done to the model.
        backward: gradients are the loss's, clipped; False: made-up ones, no communication.
    """

    def __init__(
        self,
        make: Make,
        wrap: Callable[[Optimizer], Optimizer] = lambda optimizer: optimizer,
        shard: Callable[[nn.Module], object] = lambda model: None,
        dtype: torch.dtype = torch.float32,
        backward: bool = True,
    ) -> None:
        torch.manual_seed(0)
        muon = getattr(make, "func", make) is Muon
        self.model = Toy(vectors=not muon).to(dtype)
        self.dtype = dtype
        self.backward = backward
        shard(self.model)
        first = list(self.model.layers[:3].parameters())
        ids = {id(p) for p in first}
        others = [p for p in self.model.parameters() if id(p) not in ids]
        groups = [{"params": first}, {"params": others, "weight_decay": 0.05}]
        self.optimizer = wrap(make(groups))
        self.scheduler = SequentialLR(
            self.optimizer,
            [LinearLR(self.optimizer, 0.1, total_iters=4), CosineAnnealingLR(self.optimizer, 20)],
            milestones=[4],
        )

    def step(self, i: int) -> Tensor | None:
        """Step number `i`, with data of its own; every third leaves a layer without a gradient."""
        whole, loss = i % 3 == 1, None
        if self.backward:
            generator = torch.Generator().manual_seed(100 + i)
            x = torch.randn(6, WIDTH, generator=generator).to(self.dtype)
            loss = (self.model(x, whole) - 0.5).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        else:
            for name, p in self.model.named_parameters():
                if whole or "sometimes" not in name:
                    p.grad = torch.sin(p.detach() * (3 + i) + i)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return None if loss is None else loss.detach()

    def run(self, steps: range) -> "Training":
        for i in steps:
            self.step(i)
        return self

    def states(self) -> dict[str, object]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def load(self, states: dict[str, object]) -> "Training":
        self.model.load_state_dict(states["model"])
        self.optimizer.load_state_dict(states["optimizer"])
        self.scheduler.load_state_dict(states["scheduler"])
        return self


def swapped(storage: str = "host", slices: int = 5, **options: object):
    return partial(SwapOptimizer, storage=storage, slices=slices, **options)


def assert_same_bits(a: Training, b: Training) -> None:
    """Parameters, states and groups of two trainings."""
    for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True):
        assert same_bits(p, q)
    one, other = a.optimizer.state_dict(), b.optimizer.state_dict()
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for i, state in one["state"].items():
        assert list(state) == list(other["state"][i])
        for key, value in state.items():
            assert same_bits(value, other["state"][i][key]), (i, key)


def same_bits(x: object, y: object) -> bool:
    if not isinstance(x, Tensor):
        return x == y
    x, y = (t.to_local() if hasattr(t, "to_local") else t for t in (x, y))
    if (x.dtype, x.shape, x.device) != (y.dtype, y.shape, y.device):
        return False
    return torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (x, y)))

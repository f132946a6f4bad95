"""The indexer against its formulas, written out in fp64."""

import math

import pytest
import torch

from tiny import TINY, packed_positions, tiny_model


@pytest.fixture
def case():
    """An indexer with random weights and inputs, a row of two documents."""
    indexer = tiny_model().layers["1"].attention.indexer
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 64, TINY.dim, generator=generator)
    q_latent = torch.randn(1, 64, TINY.q_lora_rank, generator=generator)
    return indexer, x, q_latent, packed_positions((40, 24))


def sylvester(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.size(0) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def rotated(vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Half-split rotation of the first channels by YaRN's angles (factor 40, original 4096)."""
    dim = TINY.qk_rope_head_dim
    angles = []
    for i in range(dim // 2):
        frequency = 10000.0 ** (-2 * i / dim)

        def boundary(turns: float) -> float:
            return dim * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(10000.0))

        low, high = max(math.floor(boundary(32)), 0), min(math.ceil(boundary(1)), dim - 1)
        slow = min(max((i - low) / (high - low), 0.0), 1.0)
        angles.append(positions.double() * (frequency / 40 * slow + frequency * (1 - slow)))
    out = vectors.clone()
    for i, angle in enumerate(angles):
        a, b = vectors[..., i], vectors[..., i + dim // 2]
        cos, sin = (
            t.view(*t.shape, *(1,) * (a.dim() - t.dim())) for t in (angle.cos(), angle.sin())
        )
        out[..., i] = a * cos - b * sin
        out[..., i + dim // 2] = a * sin + b * cos
    return out


def test_projections(case):
    indexer, x, q_latent, positions = case
    heads, width = TINY.index_n_heads, TINY.index_head_dim
    q, k, weights = indexer(x, q_latent, positions)
    w = {name: p.detach().double() for name, p in indexer.named_parameters()}
    x, q_latent = x.double(), q_latent.double()

    q_before = (q_latent @ w["wq_b.weight"].T).view(1, 64, heads, width)
    k_before = x @ w["wk.weight"].T
    centred = k_before - k_before.mean(-1, keepdim=True)
    k_before = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    k_before = k_before * w["k_norm.weight"] + w["k_norm.bias"]
    hadamard = sylvester(width) * width**-0.5
    torch.testing.assert_close(
        q.double(), rotated(q_before, positions) @ hadamard, rtol=0, atol=1e-5
    )
    torch.testing.assert_close(
        k.double(), rotated(k_before, positions) @ hadamard, rtol=0, atol=1e-5
    )
    expected = (x @ w["weights_proj.weight"].T) * heads**-0.5 * width**-0.5
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-6)


def test_bf16_activations_keep_fp32_weights(case):
    """Head weights are fp32 whatever the activations are; so is the key norm inside."""
    indexer, x, q_latent, positions = case
    exact = indexer(x.bfloat16().float(), q_latent.bfloat16().float(), positions)[2]
    indexer.wq_b.bfloat16()
    indexer.wk.bfloat16()
    q, k, weights = indexer(x.bfloat16(), q_latent.bfloat16(), positions)
    assert (q.dtype, k.dtype, weights.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    torch.testing.assert_close(weights, exact)

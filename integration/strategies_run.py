"""One rank of test_strategies_on_kernels: the layer as DTensors, next to one process."""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import npu_dsa_kernels as kernels
from dtensor_npu_strategies import redistributions, register

# B batch, S queries and keys, H heads, D key dim, V value dim, G index heads, E index head dim
B, S, H, D, V, G, E = 2, 16, 4, 24, 16, 4, 8
R = Replicate()
# Placements of q, kv, q_index, k_index, weights and bounds.
SPLITS = {
    "batch": (Shard(0),) * 6,
    "sequence": (Shard(1), R, Shard(1), R, Shard(1), Shard(1)),
    "heads": (Shard(2), R, R, R, R, R),
}


def train(inputs, bounds):
    leaves = [x.detach().requires_grad_() for x in inputs]
    layer = kernels.dsa_attention(
        *leaves, topk=4, scale=0.3, v_dim=V, bounds=bounds, backend="torch"
    )
    layer.out.square().sum().backward()
    layer.kl.sum().backward()
    return [layer.out, layer.kl, *(x.grad for x in leaves)]


def main() -> None:
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    shapes = (B, S, H, D), (B, S, D), (B, S, G, E), (B, S, E), (B, S, G)
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    bounds = kernels.causal_bounds(torch.arange(S).expand(B, -1))
    expected = train(inputs, bounds)
    registration = register()
    found = {"absent": [n for n in registration.absent if n.startswith("npu_dsa::")]}
    for name, placements in SPLITS.items():
        given = [
            distribute_tensor(x, mesh, [p])
            for x, p in zip((*inputs, bounds), placements, strict=True)
        ]
        got = []
        moved = redistributions(lambda given=given, got=got: got.extend(train(given[:5], given[5])))
        worst = max(
            float((a.full_tensor() - b).norm() / b.norm())
            for a, b in zip(got, expected, strict=True)
        )
        found[name] = [worst, [[m.operator, m.argument] for m in moved if m.bytes]]
    if dist.get_rank() == 0:
        print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # torch 2.14 now and then aborts when an interpreter that used Gloo shuts down


if __name__ == "__main__":
    main()

"""What sparse attention communicates and computes on each rank of a mesh."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils.flop_counter import FlopCounterMode
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.spmd_types import annotate_input_spmd_types

from collectives import Collectives
from npu_dsa_kernels import QuerySplit, causal_bounds
from tiny import TINY, packed_positions
from titan_custom_cp import DSAContextParallelContext
from titan_npu_train.deepseek_v32 import FLAVORS, model_config, parallelize
from titan_npu_train.deepseek_v32.indexer_loss import DSAMasks
from titan_npu_train.deepseek_v32.model import DeepSeekV32Model
from titan_npu_train.fsdp import FSDPOptions
from titan_ranks import run_ranks

LAYERS, SEQ_LEN = 2, 64
DENSE = replace(TINY, n_layers=LAYERS, n_dense_layers=LAYERS)


def collectives(rank: int, cases: list[dict]) -> list[tuple[dict, dict, int]]:
    return [_count(**case) for case in cases]


def _count(typecheck: bool = False, coefficient: float = 1.0, **degrees: int):
    """Of one forward and backward: collectives of each, and bytes over TP."""
    _clear_sharding_prop_cache()
    degrees = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1} | degrees
    dims = ParallelDims(**degrees, world_size=dist.get_world_size())
    dims.build_mesh()
    dist_utils.set_spmd_backend("spmd_types")
    parallelism = ParallelismConfig(tensor_parallel_degree=dims.tp, context_parallel_degree=dims.cp)
    config = model_config(DENSE)
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    model = config.build()
    torch.manual_seed(0)
    model.init_states()
    model.parallelize(dims)
    training = TrainingConfig(mixed_precision_param="float32")
    parallelize._apply_fsdp(model, dims, training, parallelism, FSDPOptions())

    tokens = torch.arange(SEQ_LEN).remainder(DENSE.vocab_size).unsqueeze(0)
    positions = packed_positions((40, 24))
    with _context(dims, tokens, positions) as cp:
        index_S = None if cp is None else cp.index
        counts = torch.ones_like(positions, dtype=torch.bool) if coefficient else None
        masks = DSAMasks.from_positions(positions, index_S=index_S, kl_mask_BS=counts)
        spmd_context = dist_utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=typecheck)
        log, labels = Collectives(dims), tokens.clone()
        with spmd_context():
            if typecheck:
                annotate_input_spmd_types(dims, tokens, labels, {"positions": positions})
            with log:
                logits = model(tokens, positions, masks)
            forward = dict(log.seen)
            log.seen.clear()
            with log:
                logits.backward(torch.ones_like(logits))
    return _shared(forward), _shared(dict(log.seen)), log.tp_bytes


def _context(dims, tokens, positions):
    if not dims.cp_enabled:
        return contextlib.nullcontext()
    return DSAContextParallelContext(
        dims.get_mesh("cp"), buffers=[tokens, positions], buffer_seq_dims=[1, 1]
    )


def _shared(seen: dict) -> dict:
    """Without FSDP's own."""
    return {f"{axis} {kind}": n for (axis, kind), n in seen.items() if axis != "fsdp"}


CASES = {
    2: [{"cp": 2}, {"cp": 2, "coefficient": 0.0}, {"tp": 2}, {"tp": 2, "coefficient": 0.0}],
    4: [{"cp": 4}, {"cp": 2, "tp": 2}, {"dp_shard": 2, "cp": 2}],
}


@pytest.fixture(scope="module")
def counted() -> dict:
    return {
        (ranks, *sorted(case.items())): counts
        for ranks, cases in CASES.items()
        for by_rank in [run_ranks(collectives, ranks, cases, timeout=300)]
        for case, counts in zip(cases, zip(*by_rank, strict=True), strict=True)
    }


@pytest.mark.distributed
@pytest.mark.parametrize("case", [c for c in CASES[2] + CASES[4] if "cp" in c and "tp" not in c])
def test_context_parallel_attention_gathers_once_and_scatters_once(counted, case):
    ranks = 4 if case in CASES[4] else 2
    for forward, backward, _ in counted[ranks, *sorted(case.items())]:
        assert forward == {"cp all_gather": LAYERS}
        assert backward == {"cp reduce_scatter": LAYERS}


@pytest.mark.distributed
def test_tensor_parallel_indexer_gathers_indices_and_scatters_the_target(counted):
    # Besides: embedding and each block's two parts in and out, the last norm.
    blocks = 2 * LAYERS
    for case in ({"tp": 2}, {"tp": 2, "coefficient": 0.0}):
        kl = "coefficient" not in case
        for forward, backward, _ in counted[2, *sorted(case.items())]:
            assert forward == {
                "tp all_gather": blocks + 1 + LAYERS,
                "tp reduce_scatter": blocks + 1 + LAYERS * kl,
            }
            assert backward == {"tp all_gather": blocks + 1, "tp reduce_scatter": blocks + 1}


@pytest.mark.distributed
def test_both_at_once(counted):
    blocks = 2 * LAYERS
    for forward, backward, _ in counted[4, ("cp", 2), ("tp", 2)]:
        assert forward == {
            "cp all_gather": LAYERS,
            "tp all_gather": blocks + 1 + LAYERS,
            "tp reduce_scatter": blocks + 1 + LAYERS,
        }
        assert backward == {
            "cp reduce_scatter": LAYERS,
            "tp all_gather": blocks + 1,
            "tp reduce_scatter": blocks + 1,
        }


def indexer_flops(rank: int) -> tuple[float, float]:
    """FLOPs of the 671B model's indexer at 4K, for one rank with everything and for this one of 4.

    Projections and transforms as counted in a call with fewer tokens; scores by the visible keys of
    the queries that come out.
    """
    S, rows = 4096, 32
    config = model_config(replace(FLAVORS["671B"], n_layers=1, n_mtp_layers=0, max_seq_len=S))
    indexer = config.layers[0].attention.indexer
    module = indexer.build()
    x = torch.zeros(1, rows, config.dim)
    q_latent = torch.zeros(1, rows, indexer.wq_b.in_features)
    dims = ParallelDims(1, 1, 1, dist.get_world_size(), 1, 1, world_size=dist.get_world_size())
    dims.build_mesh()
    found = []
    for parallel in (False, True):
        if parallel:
            module.parallelize(dims)
        bounds = causal_bounds(torch.arange(S).unsqueeze(0))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            q_index, _, _ = module(x, q_latent, torch.arange(rows).unsqueeze(0))
        if q_index.size(1) < rows:
            bounds = QuerySplit(dims.get_mesh("tp").get_group()).take(bounds)
        cells = (bounds[..., 1] - bounds[..., 0]).sum().item()
        assert bounds.size(1) * rows == q_index.size(1) * S
        scores = cells * 2 * indexer.n_heads * indexer.head_dim
        found.append(counter.get_total_flops() / rows * S + scores)
    return tuple(found)


@pytest.mark.distributed
def test_tensor_parallel_ranks_share_the_indexer_s_work():
    for whole, mine in run_ranks(indexer_flops, 4):
        assert mine <= 0.30 * whole


def typechecked(rank: int, cases: list[dict]) -> None:
    for case in cases:
        _count(typecheck=True, **case)


@pytest.mark.distributed
def test_spmd_type_checking_passes():
    run_ranks(typechecked, 2, [{"tp": 2}, {"cp": 2}], timeout=300)


def without_context(rank: int) -> str:
    dims = ParallelDims(1, 1, 2, 1, 1, 1, world_size=2)
    dims.build_mesh()
    dist_utils.set_spmd_backend("spmd_types")
    config = model_config(DENSE)
    config.update_from_config(config=SimpleNamespace(parallelism=ParallelismConfig()))
    model: DeepSeekV32Model = config.build()
    model.init_states()
    model.parallelize(dims)
    context = dist_utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)
    message = r"inside of a .*DSAContextParallelContext, but none is"
    with torch.no_grad(), context(), pytest.raises(RuntimeError, match=message):
        model(torch.zeros(1, 8, dtype=torch.int64), torch.arange(8).unsqueeze(0))
    return "refused"


@pytest.mark.distributed
def test_context_parallel_attention_without_a_context_is_refused():
    assert run_ranks(without_context, 2) == ["refused"] * 2

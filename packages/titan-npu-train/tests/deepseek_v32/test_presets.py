"""The 671B presets on 128 ranks that are not there: every parameter is where the plan has it."""

import json
import math
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

# Rows over tensor-parallel ranks (heads, hidden units, vocabulary), columns, and the rest: whole.
ROWS = ("wq_b", "wkv_b", "w1", "w3", "lm_head", "tok_embeddings")
COLUMNS = ("wo", "w2")
PRESETS = {
    "deepseek_v32_671b_4k_128die": {"shard": 32, "cp": 1, "tp": 4, "ep": 64, "pp": 1},
    "deepseek_v32_671b_32k_128die": {"shard": 4, "cp": 8, "tp": 4, "ep": 64, "pp": 1},
    "deepseek_v32_671b_32k_128die_pp2": {"shard": 1, "cp": 16, "tp": 4, "ep": 64, "pp": 2},
}
EXPERTS = 256 * 3 * 7168 * 2048  # parameters of one layer


def measure(what: str, wanted: list[tuple[str, int]]) -> list[dict]:
    script = Path(__file__).with_name("preset_rank.py")
    words = [what, *(str(word) for pair in wanted for word in pair)]
    command = [sys.executable, str(script), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


@pytest.fixture(scope="module")
def layouts() -> dict[str, list[dict[str, dict]]]:
    """By preset, the parameters of the first rank of each pipeline stage."""
    wanted = [(name, r) for name, d in PRESETS.items() for r in range(0, 128, 128 // d["pp"])]
    found = defaultdict(list)
    for (name, _), layout in zip(wanted, measure("layout", wanted), strict=True):
        found[name].append(layout)
    return found


def planned(name: str, shape: list[int], degrees: dict[str, int]) -> tuple[dict, list[int]]:
    """Sharded dimension by mesh axis, and the first rank's part."""
    local = list(shape)

    def split(dim: int, ranks: int) -> int:
        local[dim] = math.ceil(local[dim] / ranks)
        return dim

    if ".routed_experts." in name:
        expert_fsdp = degrees["shard"] * degrees["cp"] * degrees["tp"] // degrees["ep"]
        return {"ep": split(0, degrees["ep"]), "efsdp": split(0, expert_fsdp)}, local
    part = name.split(".")[-2]
    tp = None
    if ".indexer." not in name and part in ROWS + COLUMNS:
        tp = split(0 if part in ROWS else 1, degrees["tp"])
    axes = [axis for axis in ("shard", "cp") if degrees[axis] > 1 or axis == "shard"]
    fsdp = "_".join({"shard": "dp_shard", "cp": "cp"}[axis] for axis in axes)
    return {fsdp: split(0, degrees["shard"] * degrees["cp"]), "tp": tp}, local


@pytest.mark.parametrize("name", PRESETS)
def test_every_parameter_is_where_the_plan_has_it(layouts, name):
    degrees = PRESETS[name]
    for stage in layouts[name]:
        for parameter, layout in stage.items():
            axes, local = planned(parameter, layout["shape"], degrees)
            assert layout["placements"] == axes, parameter
            assert layout["local"] == local, parameter


@pytest.mark.parametrize("name", PRESETS)
def test_the_ranks_hold_one_model_together(layouts, name):
    stages, degrees = layouts[name], PRESETS[name]
    names = [parameter for stage in stages for parameter in stage]
    assert len(set(names)) == len(names)
    layers = {m[0] for n in names if (m := re.match(r"(mtp_)?layers\.\d+", n))}
    mtp = degrees["pp"] == 1
    assert len(layers) == 61 + mtp
    experts = 0
    print(f"\n{name}: GiB of fp32 parameters a rank")
    for number, stage in enumerate(stages):
        kinds = defaultdict(int)
        for parameter, layout in stage.items():
            kinds[kind(parameter)] += layout["bytes"]
        sizes = ", ".join(f"{k} {v / 2**30:.3f}" for k, v in sorted(kinds.items()))
        total = sum(kinds.values())
        print(f"  stage {number}: {sizes}; together {total / 2**30:.3f}")
        experts += kinds["experts"]
        assert total < 21 * 2**30  # of 64; gradients take as much again
    assert experts * 128 // degrees["pp"] == (58 + mtp) * EXPERTS * 4


def kind(parameter: str) -> str:
    for word, name in ((".routed_experts.", "experts"), (".indexer.", "indexers")):
        if word in parameter:
            return name
    return "attention" if ".attention." in parameter else "rest"


def test_nothing_is_communicated_that_the_plan_does_not_name():
    """Of one dense and one MoE layer, FSDP's own collectives apart."""
    for found, degrees in zip(
        measure("collectives", [(name, 5) for name in PRESETS]), PRESETS.values(), strict=True
    ):
        # In and out of two attentions, a feed-forward and a shared expert; embedding, last norm.
        through = 2 * 2 + 1
        forward = {
            "tp all_gather": through + 2,  # each layer's indices
            "tp reduce_scatter": through + 2,  # each layer's target
            "ep all_to_all": 3,
        }
        backward = {"tp all_gather": through, "tp reduce_scatter": through, "ep all_to_all": 2}
        if degrees["cp"] > 1:
            forward["cp all_gather"] = backward["cp reduce_scatter"] = 2
        assert found == {"forward": forward, "backward": backward}

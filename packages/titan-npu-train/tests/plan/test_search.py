"""The search: which splits it looks at, in which order, and what it says of the others."""

import dataclasses
import json
import re

import pytest
from torchtitan.components.optimizer import default_adamw

from titan_npu_train import cli
from titan_npu_train.deepseek_v32 import config_registry
from titan_npu_train.failures import UserError
from titan_npu_train.optimizer import swappable
from titan_npu_train.plan import command, search
from titan_npu_train.plan.bounds import least_memory
from titan_npu_train.plan.cost import Machine, cost
from titan_npu_train.plan.memory import PARTS, Estimate, RankEstimate, estimate
from titan_npu_train.plan.split import split_of

GIB = 2**30


@pytest.fixture
def config():
    return config_registry.deepseek_v32_671b_32k_128die_pp2()


@pytest.fixture
def estimated(monkeypatch):
    """Replaces the estimate by the bound and some more; lists the splits it was asked about."""
    asked = []

    def stand_in(config, world, *, device, exact):
        assert not exact
        split = split_of(config, world)
        asked.append(split)
        parts = dict.fromkeys(PARTS, 0)
        parts |= {name: round(size) for name, size in least_memory(config, split).items()}
        parts["runtime"] = 5 * GIB
        return Estimate(world, (RankEstimate(0, 0, parts),), ())

    monkeypatch.setattr(search, "estimate", stand_in)
    return asked


def test_what_fits_is_fastest_first_and_one_of_a_kind(config, estimated):
    found = search.search(config, 128, 64 * GIB, wanted=5)
    assert len(found.fitting) == 5
    totals = [candidate.cost.total for candidate in found.fitting]
    assert totals == sorted(totals)
    degrees = [search._degrees(candidate.split) for candidate in found.fitting]
    assert len(set(degrees)) == 5
    assert all(candidate.fits and not candidate.why_not for candidate in found.fitting)
    # Nothing that was not looked at would have been faster.
    slowest = max(totals)
    looked_at = {search._degrees(split) for split in estimated}
    for split in search.candidates(config, 128):
        if cost(config, split).total < slowest and search._degrees(split) not in looked_at:
            too_large = sum(least_memory(config, split).values()) > 64 * GIB
            assert too_large or next(iter(split.problems(config)), "")


def test_what_cannot_fit_is_never_estimated(config, estimated):
    search.search(config, 128, 64 * GIB, wanted=3)
    assert estimated
    for split in estimated:
        assert sum(least_memory(config, split).values()) <= 64 * GIB


def test_every_split_ends_up_somewhere(config, estimated):
    def few(split):
        return split.pipeline in (2, 8) and split.tensor == 4 and split.context >= 8

    found = search.search(config, 128, 50 * GIB, wanted=None, only=few)
    kinds = {search._degrees(s) for s in search.candidates(config, 128) if few(s)}
    where = [
        {search._degrees(c.split) for c in found.fitting},
        {search._degrees(c.split) for c in found.too_large},
        {search._degrees(s) for s in found.hopeless},
        {search._degrees(s) for splits in found.refused.values() for s in splits},
    ]
    assert set().union(*where) == kinds
    assert not where[0] & where[1] and not where[0] & where[2]
    for candidate in found.too_large:
        assert "needs" in candidate.why_not and "of 50" in candidate.why_not
        assert "parameters" in candidate.why_not
    assert found.unseen == 0


def test_a_smaller_device_gives_up_time_for_memory(config, estimated):
    def published(split):
        return split.name() == "PP2 TP4 CP16 FSDP1 EP64"

    roomy = search.search(config, 128, 200 * GIB, only=published).fitting[0].split
    tight = search.search(config, 128, 56 * GIB, only=published).fitting[0].split
    assert (roomy.checkpointing, roomy.swap) == ("none", False)
    assert tight.swap
    with_less = search.search(config, 128, 20 * GIB, only=published)
    assert not with_less.fitting and not with_less.too_large
    ((split, least),) = with_less.hopeless.items()
    assert (split.checkpointing, split.swap) == ("full", True)
    assert sum(least.values()) > 20 * GIB


def test_reasons_of_splits_that_cannot_run():
    config = config_registry.deepseek_v32_671b_4k_128die()  # with MTP
    with pytest.raises(UserError, match="multi-token-prediction"):
        search.search(
            config, 128, 10_000 * GIB, only=lambda s: s.name() == "PP2 TP4 CP4 FSDP4 EP64"
        )
    with pytest.raises(UserError, match="no division of 7 devices divides the batch"):
        search.search(config, 7, 64 * GIB, only=lambda split: False)


def bound_and_estimate(config, split) -> tuple[float, Estimate]:
    whole = estimate(split.apply(config), split.world, device="npu", exact=False)
    return sum(least_memory(config, split).values()), whole


@pytest.mark.parametrize(
    ("preset", "world"),
    [
        ("deepseek_v32_671b_32k_128die", 128),
        ("deepseek_v32_671b_32k_128die_pp2", 128),
        ("deepseek_v32_debugmodel", 2),
    ],
)
@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("swap", [False, True])
def test_the_bound_is_below_the_estimate(preset, world, policy, swap):
    config = getattr(config_registry, preset)()
    split = dataclasses.replace(split_of(config, world), checkpointing=policy, swap=swap)
    least, whole = bound_and_estimate(config, split)
    assert least <= min(rank.total for rank in whole.ranks)
    if world == 128:  # and worth asking
        assert least > 0.3 * whole.largest.total


@pytest.mark.parametrize("kind", ["warm-up", "bf16", "no second moment", "bf16 moments"])
def test_the_bound_knows_what_is_trained_and_how(config, kind):
    match kind:
        case "warm-up":
            config.dsa.stage = "dense_warmup"
            config.model_spec.model.stage = "dense_warmup"
            groups = [
                dataclasses.replace(g, pattern="indexer") for g in config.optimizer.param_groups
            ]
            config.optimizer = dataclasses.replace(config.optimizer, param_groups=groups)
        case "bf16":
            config.training.dtype = "bfloat16"
        case "no second moment":
            groups = [
                dataclasses.replace(g, optimizer_name="DistMuon")
                for g in config.optimizer.param_groups
            ]
            config.optimizer = dataclasses.replace(config.optimizer, param_groups=groups)
        case "bf16 moments":
            config.optimizer = swappable(
                dataclasses.replace(default_adamw(), implementation="fused_opt_states_bf16")
            )
    split = dataclasses.replace(split_of(config, 128), swap=False)
    least = least_memory(config, split)
    assert ("optimizer" in least) == (kind == "bf16")
    if kind == "no second moment":
        return  # it cannot be built on devices that are not there
    total, whole = bound_and_estimate(config, split)
    assert total <= min(rank.total for rank in whole.ranks)


def test_of_two_that_cost_the_same_the_one_that_recomputes_less(monkeypatch, estimated):
    config = config_registry.deepseek_v32_debugmodel()
    machine = Machine(link=1e3)  # communication is all there is
    found = search.search(config, 2, 64 * GIB, machine=machine, device="cpu", wanted=None)
    fsdp = next(c.split for c in found.fitting if c.split.name() == "FSDP2")
    full = dataclasses.replace(fsdp, checkpointing="full")
    assert cost(config, fsdp, machine).total == cost(config, full, machine).total
    assert fsdp.checkpointing == "none"


def test_a_split_that_fails_when_it_is_estimated_is_refused(config, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no such shape")

    monkeypatch.setattr(search, "estimate", fails)
    with pytest.raises(UserError, match="RuntimeError: no such shape"):
        search.search(config, 128, 640 * GIB, only=lambda s: s.name() == "PP2 TP4 CP16 FSDP1 EP64")


@pytest.fixture
def plan(capsys):
    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.run(["plan", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_a_small_plan_as_a_table_a_picture_and_json(plan, tmp_path):
    small = ("deepseek_v32_debugmodel", "--world", "2", "--top", "1", "--device", "cpu")
    code, out, err = plan(*small, "--device-memory", "4GB", "--out", str(tmp_path))
    assert code == 0, err
    for word in ("FSDP2", "parameters", "gradients", "together", "fits, with", "fastest first"):
        assert word in out
    assert "…" not in out  # no figure is cut off
    picture = (tmp_path / "plan.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["plan"]["fits"] and document["fitting"]
    ranks = document["plan"]["memory"]["ranks"]
    assert ranks[0]["total"] == sum(ranks[0]["parts"].values())
    code, out, _ = plan(*small, "--device-memory", "4GB", "--json")
    assert code == 0
    assert json.loads(out)["plan"]["memory"]["ranks"][0]["parts"].keys() == set(PARTS)


def test_a_plan_that_does_not_fit_says_what_is_too_large(plan):
    code, out, _ = plan(
        "deepseek_v32_debugmodel", "--world", "2", "--top", "0", "--device-memory", "20MB"
    )
    assert code == 0
    assert re.search(r"needs \d\.\d GiB of 0.0195: communication 2.0, runtime 1.0", out)


def test_the_published_counting(plan):
    arguments = ("deepseek_v32_671b_4k_128die", "--world", "128", "--counting", "published")
    code, out, _ = plan(*arguments, "--json")
    assert code == 0
    rows = json.loads(out)
    order = [(r["pipeline"], r["tensor"], r["data"], r["expert"]) for r in rows]
    pp2, tp8, pp4 = (2, 4, 16, 64), (1, 8, 16, 128), (4, 2, 16, 32)
    fits = {key: row["fits"] for key, row in zip(order, rows, strict=True)}
    assert fits[pp2] and fits[tp8] and not fits[pp4]
    assert order.index(pp2) < order.index(tp8) < order.index(pp4)
    code, out, _ = plan(*arguments)
    for figure in ("5.06293", "20.2517", "0.8477", "13.500", "71.3315"):
        assert figure in out


def test_nothing_fits_and_nothing_can_be_drawn(plan, tmp_path):
    preset = "deepseek_v32_671b_32k_128die"
    code, out, err = plan(preset, "--world", "8", "--out", str(tmp_path))
    assert code == 0, err
    assert "does not run on 8 devices" in out and "--world 128" in out and "--nproc" not in out
    assert "No split fits." in out and "nothing to draw" in out
    assert json.loads((tmp_path / "plan.json").read_text())["hopeless"]
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_offloaded_parameters_are_not_on_the_device(plan):
    small = ("deepseek_v32_debugmodel", "--world", "2", "--top", "0", "--json")
    planned = [
        json.loads(plan(*small, *more)[1])["plan"]["memory"]["ranks"][0]["parts"]
        for more in ((), ("--training.enable_cpu_offload",))
    ]
    assert planned[0]["parameters"] > 0 == planned[1]["parameters"]
    assert planned[0]["activations"] == planned[1]["activations"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device-memory", "lots"], ["--device-memory", "64GB", "'lots'"]),
        (["--device-memory", "0GB"], ["--device-memory", "0GB"]),
        (["--device-memory", "64"], ["--device-memory", "64GB", "'64'"]),
        (["--top", "0", "--parallelism.data_parallel_replicate_degree", "2"], ["--world 1"]),
        (["--machine", "speed=3"], ["--machine speed=3", "host_link"]),
        (["--counting", "mine"], ["--counting", "'mine'"]),
        (["--device", "tpu"], ["--device", "'tpu'"]),
        (["--training.steps", "many"], ["--training.steps", "many"]),
        (["--top", "0", "--parallelism.tensor_parallel_degree", "3"], ["3"]),
    ],
)
def test_bad_input(plan, arguments, words):
    code, _, err = plan("deepseek_v32_debugmodel", "--world", "2", *arguments)
    assert code == 2
    for word in words:
        assert word in err


def test_no_such_number_of_devices(plan):
    code, _, err = plan("deepseek_v32_671b_4k_128die", "--world", "5", "--top", "0")
    assert code == 2
    assert "128" in err


def test_sizes():
    assert command.memory_size("64GB") == command.memory_size("64 GiB") == 64 * GIB
    assert command.memory_size("1.5g") == 3 * GIB // 2
    assert command.memory_size("2097152") == 2 * 2**20

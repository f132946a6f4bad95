"""The dense warm-up stage: what learns, from what, and how a run goes on to the next stage."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

import titan_npu_train
from npu_dsa_kernels import QuerySplit
from tiny import TINY, backward, build, forward, gradients, packed_positions, worst_difference
from titan_npu_train.checkpoint import Checkpoint
from titan_npu_train.checkpoint.stage import stage_problem
from titan_npu_train.deepseek_v32 import model_config
from titan_npu_train.deepseek_v32.attention import DSA, DenseAttention
from titan_npu_train.deepseek_v32.flops import training_flops
from titan_npu_train.deepseek_v32.indexer_loss import DSAMasks
from titan_npu_train.deepseek_v32.options import DSAOptions
from titan_npu_train.deepseek_v32.parallelize import DSASelectiveAC, apply_activation_checkpointing
from titan_npu_train.deepseek_v32.warmup import groups_of_indexers
from titan_npu_train.recall import found_keys, sampled_queries
from titan_ranks import run_ranks

SEQ_LEN = 64  # top-k is 16
POSITIONS = packed_positions((64,), (40, 24), (1, 62, 1), (30, 34))


def config(flavor=TINY, *, dsa: DSAOptions | None = None, **parallelism):
    made = model_config(flavor)
    run = SimpleNamespace(
        parallelism=ParallelismConfig(**parallelism),
        training=TrainingConfig(seq_len=SEQ_LEN),
        debug=SimpleNamespace(moe_force_load_balance=False),
        dsa=dsa or DSAOptions(stage="dense_warmup"),
    )
    made.update_from_config(config=run)
    return made


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels (some ignored) and positions of four rows with packed documents."""
    torch.manual_seed(11)
    tokens = torch.randint(0, TINY.vocab_size, (4, SEQ_LEN))
    labels = torch.randint(0, TINY.vocab_size, (4, SEQ_LEN))
    labels[0, 5:20] = -100
    labels[3, -9:] = -100
    return tokens, labels, POSITIONS


def indexers(found: dict) -> dict:
    return {name: gradient for name, gradient in found.items() if ".indexer." in name}


def losses(model) -> torch.Tensor:
    taken = model.take_indexer_losses()
    return torch.stack([taken[layer] for layer in sorted(taken)])


def definition(model, batch) -> list[torch.Tensor]:
    """Each layer's loss, mean over the tokens that count, with S x S matrices."""
    tokens, labels, positions = batch
    counts_BS = labels != -100
    bounds_BS2 = DSAMasks.from_positions(positions).bounds_BS2
    key_T = torch.arange(SEQ_LEN)
    seen_BST = (key_T >= bounds_BS2[..., :1]) & (key_T < bounds_BS2[..., 1:])
    hidden_BST = ~seen_BST
    found = []

    def compare(module, args, kwargs):
        q, k, _, q_index, k_index, weights = args
        logits = torch.einsum("bshx,bthx->bsht", q, k) * kwargs["scale"]
        p = logits.masked_fill(hidden_BST.unsqueeze(2), -torch.inf).softmax(-1).sum(2)
        p = p / p.sum(-1, keepdim=True)
        products = torch.einsum("bsic,btc->bsit", q_index, k_index).relu()
        scores = torch.einsum("bsit,bsi->bst", products, weights)
        log_y = scores.masked_fill(hidden_BST, -torch.inf).log_softmax(-1)
        kl = (torch.xlogy(p, p) - torch.where(seen_BST, p * log_y, 0.0)).sum(-1)
        found.append(kl[counts_BS].sum() / counts_BS.sum())

    hooks = [
        attention.inner_attention.register_forward_pre_hook(compare, with_kwargs=True)
        for _, attention in model.attention_modules
    ]
    model(tokens, positions, DSAMasks.from_positions(positions, kl_mask_BS=counts_BS))
    for hook in hooks:
        hook.remove()
    model.take_indexer_losses()
    return found


def test_loss_and_gradients_are_those_of_the_definition(batch):
    model = build(config())
    wanted = definition(model, batch)
    torch.stack(wanted).sum().backward()
    expected = indexers(gradients(model))
    backward(model, *batch)
    found = gradients(model)
    torch.testing.assert_close(losses(model), torch.stack(wanted).detach(), rtol=1e-5, atol=0)
    assert all(found[name] is None for name in found if ".indexer." not in name)
    assert worst_difference(indexers(found), expected)["indexer"] < 1e-5


def test_attention_sees_every_key(batch):
    """Same logits as sparse attention that selects all keys; other ones than with few."""
    tokens, _, positions = batch
    dense = build(config())
    whole = build(config(replace(TINY, index_topk=SEQ_LEN), dsa=DSAOptions()))
    sparse = build(config(dsa=DSAOptions()))
    with torch.no_grad():
        logits, same, other = (model(tokens, positions) for model in (dense, whole, sparse))
    torch.testing.assert_close(logits, same, rtol=1e-4, atol=1e-4)
    assert (logits - other).abs().max() > 1e-2


def test_a_key_outside_of_the_top_k_changes_the_loss():
    """Of the last query, the only one that counts; the sparse loss does not see that key."""
    torch.manual_seed(0)
    H, A, X, V, C, index_heads, topk = 2, 12, 10, 8, 16, 4, 8
    positions = packed_positions((SEQ_LEN,))
    counts = torch.zeros(1, SEQ_LEN, dtype=torch.bool)
    counts[0, -1] = True
    masks = DSAMasks.from_positions(positions, kl_mask_BS=counts)
    q_index = torch.randn(1, SEQ_LEN, index_heads, C)
    k_index = torch.randn(1, SEQ_LEN, C)
    weights = torch.rand(1, SEQ_LEN, index_heads)
    scores = torch.einsum("ht,h->t", (q_index[0, -1] @ k_index[0].mT).relu(), weights[0, -1])
    outside = scores.argsort(descending=True)[topk + 4]
    assert scores[outside] > 0
    changed = k_index.clone()
    changed[0, outside] *= 0.5  # lower still

    def loss(module, *inputs, k_index):
        options = {"topk": topk, "scale": 0.3, "masks": masks}
        return module(*inputs, q_index, k_index, weights, **options)[1]

    dense_inputs = [torch.randn(1, SEQ_LEN, H, width) for width in (X, X, V)]
    sparse_inputs = [torch.randn(1, SEQ_LEN, H, A), torch.randn(1, SEQ_LEN, A)]
    dense = DenseAttention.Config().build()
    sparse = DSA.Config(v_dim=V).build()
    before, after = (loss(dense, *dense_inputs, k_index=k) for k in (k_index, changed))
    assert (after - before).abs() > 1e-3 * before
    before, after = (loss(sparse, *sparse_inputs, k_index=k) for k in (k_index, changed))
    assert torch.equal(before, after)


def test_ignored_tokens_count_for_nothing(batch):
    tokens, labels, positions = (t[3:] for t in batch)  # its last 9 labels are ignored
    found = []
    for changed in (False, True):
        model = build(config())
        other = tokens.clone()
        other[0, -9:] = (other[0, -9:] + int(changed)) % TINY.vocab_size
        backward(model, other, labels, positions)
        found.append(indexers(gradients(model)))
    assert worst_difference(found[1], found[0])["indexer"] < 1e-6

    model = build(config())
    backward(model, tokens, torch.full_like(labels, -100), positions, valid_tokens=1)
    assert all(g.abs().max() == 0 for g in indexers(gradients(model)).values())
    assert torch.equal(losses(model), torch.zeros(TINY.n_layers))


@pytest.mark.parametrize("policy", [FullAC, DSASelectiveAC])
def test_checkpointing_and_microbatches_in_flight_change_nothing(batch, policy):
    expected = build(config())
    backward(expected, *batch)
    model = build(config())
    settings = FullAC.Config() if policy is FullAC else SelectiveAC.Config()
    apply_activation_checkpointing(model, policy(settings, dump_folder=""))
    valid = int((batch[1] != -100).sum())
    halves = list(zip(*(t.chunk(2) for t in batch), strict=True))
    for loss in [forward(model, *half, valid_tokens=valid) for half in halves]:
        loss.backward()
    found = gradients(model)
    assert all(found[name] is None for name in found if ".indexer." not in name)
    worst = worst_difference(indexers(found), indexers(gradients(expected)))
    assert worst["indexer"] < 1e-5
    torch.testing.assert_close(losses(model), losses(expected), rtol=1e-5, atol=0)


def test_nothing_of_the_backbone_is_kept_for_the_backward(batch):
    """Kept is what the loss needs, none of it as wide as a feed-forward's hidden layer."""
    model = build(config())
    kept = []

    def keep(tensor):
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = forward(model, *batch)
    loss.backward()
    assert (4, SEQ_LEN, TINY.index_n_heads, TINY.index_head_dim) in kept
    assert not [shape for shape in kept if TINY.dense_hidden_dim in shape]
    assert (4, SEQ_LEN, TINY.n_heads, TINY.v_head_dim) not in kept  # the attention's output


def test_mtp_indexer_warms_up_too(batch):
    model = build(config(replace(TINY, n_mtp_layers=1)))
    tokens, labels, positions = batch
    valid = labels != -100
    masks = DSAMasks.from_positions(positions, kl_mask_BS=valid, kl_scale=1 / valid.sum())
    main, mtp = model(tokens, positions, masks)
    (main.square().mean() + mtp.square().mean()).backward()
    found = gradients(model)
    assert all((g is not None) == (".indexer." in name) for name, g in found.items())
    assert all(g.norm() > 0 for g in indexers(found).values())
    assert sorted(model.take_indexer_losses()) == [0, 1, 2, 3]


def test_the_optimizer_knows_the_indexers_only(batch):
    """Also where a group of its own is for the backbone: nothing would be left in it."""
    made = config()
    model = build(made)
    groups = [
        ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs={"lr": lr})
        for pattern, lr in ((r"\.indexer\.", 1e-3), (r"\.moe\.", 1e-4), (".*", 1e-5))
    ]
    kept = groups_of_indexers(groups, made)
    assert kept == groups[:1]
    settings = OptimizersContainer.Config(param_groups=kept, implementation="for-loop")
    optimizers = settings.build(model_parts=[model])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    backward(model, *batch)
    optimizers.step()
    names = {name for name, _ in model.named_parameters() if ".indexer." in name}
    states = {key for key in optimizers.state_dict() if key.startswith("state.")}
    assert {key.removeprefix("state.").rsplit(".", 1)[0] for key in states} == names
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == (name not in names), name


def test_recall_by_its_definition():
    torch.manual_seed(3)
    B, H, A, C, index_heads, topk, scale = 2, 3, 8, 16, 4, 5, 0.4
    positions = packed_positions((40, 24), (64,))
    bounds = DSAMasks.from_positions(positions).bounds_BS2
    counts = torch.rand(B, SEQ_LEN) > 0.2
    q, keys = torch.randn(B, SEQ_LEN, H, A), torch.randn(B, SEQ_LEN, A)
    q_index, k_index = torch.randn(B, SEQ_LEN, index_heads, C), torch.randn(B, SEQ_LEN, C)
    weights = torch.randn(B, SEQ_LEN, index_heads)
    found = wanted = 0
    for b, t in counts.nonzero().tolist():
        lo, hi = bounds[b, t].tolist()
        if hi - lo <= topk:
            continue
        p = (q[b, t] @ keys[b, lo:hi].mT * scale).softmax(-1).sum(0)
        scores = weights[b, t] @ (q_index[b, t] @ k_index[b, lo:hi].mT).relu()
        # Keys that no head responds to all score 0: the lower one wins.
        true, chosen = (x.sort(stable=True, descending=True).indices[:topk] for x in (p, scores))
        found += len(set(true.tolist()) & set(chosen.tolist()))
        wanted += topk
    index = (q_index, k_index, weights)
    options = {"bounds_BQ2": bounds, "counts_BQ": counts, "topk": topk, "scale": scale}
    assert found_keys(q, keys, *index, **options).tolist() == [found, wanted]
    # Keys of each head, here the same ones.
    per_head = keys.unsqueeze(2).expand(-1, -1, H, -1)
    assert found_keys(q, per_head, *index, **options).tolist() == [found, wanted]
    assert found_keys(
        q[:, :0],
        keys,
        q_index[:, :0],
        k_index,
        weights[:, :0],
        **(options | {"bounds_BQ2": bounds[:, :0], "counts_BQ": counts[:, :0]}),
    ).tolist() == [0, 0]


def test_the_sample_does_not_depend_on_who_has_which_queries():
    bounds = DSAMasks.from_positions(packed_positions((100, 156))).bounds_BS2
    order = torch.randperm(256, generator=torch.manual_seed(0))
    whole = sampled_queries(bounds, 256)
    parts = [part[sampled_queries(bounds[:, part], 256)] for part in order.chunk(4)]
    assert len(whole) == 32
    assert torch.equal(torch.cat(parts).sort().values, whole)


def heads_of_a_rank(rank: int, ranks: int) -> dict[str, float]:
    """Differences between one rank's share of the loss, and that of a process with all heads."""
    B, S, H, N, P, L, V, C, index_heads, topk = 2, 32, 4, 8, 4, 6, 8, 16, 8, 5
    torch.manual_seed(0)
    positions = packed_positions((20, 12), (32,))
    masks = DSAMasks.from_positions(positions, kl_mask_BS=torch.rand(B, S) > 0.2)
    masks = masks._replace(measures_recall=True)
    latent, rope = torch.randn(B, S, L), torch.randn(B, S, P)
    w_uk = torch.randn(H, N, L) * L**-0.5
    q, v = torch.randn(B, S, H, N + P), torch.randn(B, S, H, V)
    k_nope = torch.einsum("bsl,hnl->bshn", latent, w_uk)
    k = torch.cat([k_nope, rope.unsqueeze(2).expand(-1, -1, H, -1)], -1)
    q_latent = torch.einsum("bshn,hnl->bshl", q[..., :N], w_uk)
    absorbed = (torch.cat([q_latent, q[..., N:]], -1), torch.cat([latent, rope], -1))
    index = torch.randn(B, S, index_heads, C), torch.randn(B, S, C), torch.rand(B, S, index_heads)
    options = {"topk": topk, "scale": 0.3, "masks": masks}

    def trained(module, queries, heads, absorbed=None):
        q_index, k_index, weights = (x.clone().requires_grad_() for x in index)
        rows = q_index if queries is None else queries(q_index)
        row_weights = weights if queries is None else queries(weights)
        out, kl = module(
            *(x[:, :, heads] for x in (q, k, v)),
            rows,
            k_index,
            row_weights,
            absorbed=absorbed,
            **options,
        )
        kl.backward()
        found = module.found_keys.take()
        return out, [kl.detach(), found, *(x.grad for x in (q_index, k_index, weights))]

    out, wanted = trained(DenseAttention.Config().build(), None, slice(None))
    module = DenseAttention.Config().build()
    module.query_split = QuerySplit(dist.group.WORLD)
    mine = slice(rank * H // ranks, (rank + 1) * H // ranks)
    mine_out, got = trained(
        module, module.query_split.take, mine, (absorbed[0][:, :, mine], absorbed[1])
    )
    for value in got:
        dist.all_reduce(value)
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(got, wanted, strict=True)]
    names = ("kl", "found keys", "q_index", "k_index", "weights", "out")
    errors.append(((mine_out - out[:, :, mine]).norm() / out[:, :, mine].norm()).item())
    return dict(zip(names, errors, strict=True))


@pytest.mark.parametrize("ranks", [2, 4])
def test_split_heads_add_up(ranks):
    for errors in run_ranks(heads_of_a_rank, ranks, ranks):
        assert errors["found keys"] == 0
        assert max(errors.values()) < 1e-5, errors


def test_flops_by_hand():
    """A forward of the backbone over every visible key; both directions of the indexer's."""
    flavor = replace(TINY, n_layers=1, index_topk=2)
    sparse = training_flops(config(flavor, dsa=DSAOptions()), seq_len=4)
    flops = training_flops(config(flavor), seq_len=4)
    visible = 10 / 4
    assert flops.linear == sparse.linear / 3
    assert flops.indexer_linear == sparse.indexer_linear
    assert flops.attention == 2 * visible * 4 * (8 + 8 + 8)
    assert flops.indexer_scores == 3 * 2 * 16 * 16 * visible


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "absorbed"}, "leave dsa.form out"),
        ({"indexer_loss_coefficient": 0.0}, "use a positive one"),
        ({"stage": "warmup"}, "must be 'dense_warmup' or 'sparse', got 'warmup'"),
    ],
)
def test_options_that_do_not_apply(options, message):
    with pytest.raises(ValueError, match=message):
        DSAOptions(**({"stage": "dense_warmup"} | options))


def test_parallelism_that_does_not_apply(monkeypatch):
    split = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"}
    with pytest.raises(ValueError, match="use 1F1B or Interleaved1F1B"):
        config(**split)
    monkeypatch.setattr("titan_npu_train.deepseek_v32.model.resolve", lambda *_: "npu")
    with pytest.raises(ValueError, match=r"--dsa\.kl_backend torch"):
        config(tensor_parallel_degree=2)


def test_a_pipeline_stage_without_layers_is_refused():
    model = build(config())
    model.layers = type(model.layers)()
    with pytest.raises(ValueError, match="a pipeline stage has no layers"):
        model.parallelize(None)


def test_a_checkpoint_of_another_stage():
    old = Checkpoint(Path("run/checkpoint/step-7"), {}, True)
    warmup = replace(old, stage="dense_warmup")
    assert stage_problem(old, "sparse") is None
    assert stage_problem(warmup, "dense_warmup") is None
    assert "--dsa.stage sparse" in stage_problem(old, "dense_warmup")
    problem = stage_problem(warmup, "sparse")
    assert "--dsa.stage dense_warmup" in problem
    assert f"--checkpoint.initial_load_path {warmup.path.absolute()}" in problem


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict:
    """What warmup_run.py found: its stages trained on this package's own source as text."""
    folder = tmp_path_factory.mktemp("runs")
    command = [sys.executable, str(Path(__file__).with_name("warmup_run.py"))]
    subprocess.run(
        [*command, str(folder), str(Path(titan_npu_train.__file__).parent)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return json.loads((folder / "found.json").read_text())


def test_recall_rises_on_text(runs):
    recalls = [record["topk_recall"] for record in runs["records"]]
    assert sum(recalls[-4:]) / 4 > sum(recalls[:2]) / 2 + 0.1
    assert all(len(record["topk_recall_layers"]) == 4 for record in runs["records"])
    losses = [record["indexer_loss"] for record in runs["records"]]
    assert sum(losses[-4:]) / 4 < 0.85 * sum(losses[:2]) / 2


def test_a_run_trains_and_optimizes_the_indexers_only(runs):
    warmup = runs["warmup"]
    assert warmup["failure"] is None
    assert len(warmup["changed"]) == 5 * 4
    assert warmup["changed"] == warmup["gradients"] == warmup["optimized"]
    assert all(".indexer." in name for name in warmup["changed"])
    assert warmup["rates"] == [1e-2]  # the group for the backbone is left out


def test_a_run_goes_on_in_its_stage_only(runs):
    assert runs["stage"] == "dense_warmup"
    assert "was written in dsa.stage 'dense_warmup'" in runs["refused"]["failure"]
    assert runs["refused"]["changed"] == []
    assert runs["refused"]["step"] == 0
    assert runs["resumed"]["failure"] is None
    assert [record["step"] for record in runs["records"]] == list(range(1, 26))


def test_the_sparse_stage_begins_with_the_weights_of_the_warm_up(runs):
    sparse, records = runs["sparse"], runs["sparse_records"]
    assert sparse["failure"] is None
    assert [record["step"] for record in records] == [1, 2]
    assert records[0]["topk_recall"] is None
    assert sparse["rates"] == [1e-2, 3e-3]
    assert len(sparse["gradients"]) == len(sparse["optimized"]) > 5 * 4

import copy
import dataclasses
import json
import math
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console

from titan_npu_train import data, preflight
from titan_npu_train.deepseek_v32 import Flavor, model_config
from titan_npu_train.failures import UserError
from titan_npu_train.report import report
from titan_npu_train.report.evaluate import evaluate_model, evaluate_run, load_model
from titan_npu_train.run_folder import RUN_FILE, RunInfo, read_metrics

TOPK = 8


def write_metrics(folder: Path, records: list[dict], *, cut: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines + cut)


def record(step: int, **figures: object) -> dict:
    return {
        "step": step,
        "loss": 8.0 - step,
        "indexer_loss": 0.1 * step,
        "indexer_loss_layers": [0.1 * step, 0.2 * step],
        "grad_norm": 2.0 / step,
        "tokens_per_second": 100.0 * step,
        "mfu": None,
        "step_seconds": 0.5,
        "peak_memory_bytes": 2**30 + step,
    } | figures


# ------------------------------------------------------------------------------- metrics.jsonl


def test_a_resumed_run_replaces_what_came_after_its_checkpoint(tmp_path):
    # killed at 5, resumed from 2, stopped at 4: the first try's step 5 belongs to no history
    steps = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.0), (3, 30.0), (4, 40.0)]
    write_metrics(tmp_path, [record(s, loss=loss) for s, loss in steps], cut='{"step": 5, "lo')
    read = [(r["step"], r["loss"]) for r in read_metrics(tmp_path)]
    assert read == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]


def test_folders_without_metrics_are_refused_by_name(tmp_path):
    for prepare, message in (
        (lambda: None, "no run folder"),
        (lambda: (tmp_path / "run").mkdir(), "no metrics.jsonl in"),
        (lambda: (tmp_path / "run" / "metrics.jsonl").write_text('{"st'), "has no record"),
    ):
        prepare()
        with pytest.raises(UserError, match=message) as refused:
            report(tmp_path / "run")
        assert str(tmp_path / "run") in str(refused.value)


# ------------------------------------------------------------------------- table, picture, json


def test_report_of_a_run_without_checkpoint(tmp_path):
    write_metrics(tmp_path, [record(s) for s in (1, 2, 3)])
    console = Console(record=True, width=100)
    summary = report(tmp_path, console=console)
    text = console.export_text()

    assert summary == json.loads((tmp_path / "report.json").read_text())
    expected = {
        "steps": 3,
        "first_loss": 7.0,
        "last_loss": 5.0,
        "first_indexer_loss": 0.1,
        "last_indexer_loss": pytest.approx(0.3),
        "tokens_per_second": 200.0,
        "peak_memory_bytes": 2**30 + 3,
        "mfu": None,
        "indexer_kl_trained": None,
        "indexer_kl_untrained": None,
        "topk_recall": None,
        "topk_recall_chance": None,
    }
    assert expected.items() <= summary.items()
    assert "run.json" in summary["evaluation"]["not_evaluated"]
    for shown in ("7.0000", "5.0000", "0.3000", "200", "1.00 GiB", "indexer not evaluated: no"):
        assert shown in text
    assert not list(tmp_path.glob(".*"))  # no half-written file


def test_the_picture_is_a_png_that_changes_with_the_run(tmp_path):
    pictures = []
    for folder, records in (
        ("a", [record(s) for s in (1, 2, 3)]),
        ("b", [record(s, loss=1.0) for s in (1, 2, 3)]),
        ("c", [record(1, indexer_loss=None, indexer_loss_layers=None)]),
    ):
        write_metrics(tmp_path / folder, records)
        report(tmp_path / folder, evaluate=False, console=Console(quiet=True))
        pictures.append((tmp_path / folder / "report.png").read_bytes())
    for picture in pictures:
        assert picture.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", picture[16:24])
        assert (width, height) == (1800, 1000)
    assert len(set(pictures)) == 3


# ------------------------------------------------------------------------------------ evaluation


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """A tiny model whose attention and index scores are spread out."""
    flavor = Flavor(
        vocab_size=64,
        dim=32,
        n_layers=2,
        n_dense_layers=1,
        n_mtp_layers=0,
        n_heads=3,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        dense_hidden_dim=48,
        moe_hidden_dim=16,
        num_experts=4,
        experts_per_token=2,
        num_expert_groups=None,
        num_limited_groups=None,
        index_n_heads=8,
        index_head_dim=16,
        index_topk=TOPK,
        max_seq_len=64,
    )
    model = model_config(flavor).build()
    with torch.no_grad():
        model.init_states()
        torch.manual_seed(3)
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=parameter.size(-1) ** -0.5)
    return model.eval()


@pytest.fixture(scope="module")
def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two rows of packed documents; some labels do not count."""
    torch.manual_seed(4)
    tokens, labels = torch.randint(0, 64, (2, 2, 40))
    labels[0, 3:9] = -100
    lengths = ((25, 15), (4, 30, 6))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    return tokens, labels, positions


def by_definition(model, layer: int, batch) -> dict[str, float]:
    """KL, chance and recall of one layer's own indexer, in fp64 loops over queries."""
    tokens, labels, positions = batch
    _, attention = model.attention_modules[layer]
    seen = {}
    handle = attention.inner_attention.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(args=args, **kwargs), with_kwargs=True
    )
    with torch.no_grad():
        model(tokens, positions)
    handle.remove()
    q, kv, q_index, k_index, weights = (a.double() for a in seen["args"])
    kl, kl_topk, recall, chance = [], [], [], []
    for b in range(tokens.size(0)):
        for t in range(tokens.size(1)):
            if labels[b, t] == -100:
                continue
            first = t - int(positions[b, t])
            keys = range(first, t + 1)

            def score(s, b=b, t=t):
                return sum(
                    weights[b, t, h] * max(0.0, q_index[b, t, h] @ k_index[b, s])
                    for h in range(weights.size(-1))
                )

            def target(keys, b=b, t=t):
                heads = [
                    torch.stack([seen["scale"] * q[b, t, h] @ kv[b, s] for s in keys]).softmax(0)
                    for h in range(q.size(2))
                ]
                return torch.stack(heads).mean(0)

            scores = torch.stack([torch.as_tensor(score(s)) for s in keys])
            p = target(keys)
            kl.append((p * (p.log() - scores.log_softmax(0))).sum())
            best = scores.topk(min(TOPK, len(keys))).indices
            p_best = target([first + int(i) for i in best])
            kl_topk.append((p_best * (p_best.log() - scores[best].log_softmax(0))).sum())
            if len(keys) > TOPK:
                true = set(p.topk(TOPK).indices.tolist())
                recall.append(len(true & set(best.tolist())) / TOPK)
                chance.append(TOPK / len(keys))
    return {
        "kl_trained": float(sum(kl) / len(kl)),
        "kl_topk_trained": float(sum(kl_topk) / len(kl_topk)),
        "trained": sum(recall) / len(recall),
        "chance": sum(chance) / len(chance),
    }


def test_figures_agree_with_their_definition(model, batch, monkeypatch):
    # several blocks of queries
    monkeypatch.setattr("titan_npu_train.recall._BLOCK_SCORES", 2 * 3 * 40 * 7)
    evaluation = evaluate_model(model, [batch], seeds=(0,))
    assert [f.layer for f in evaluation.layers] == [0, 1]
    assert (evaluation.queries, evaluation.rows, evaluation.topk) == (74, 2, TOPK)
    for layer, figures in enumerate(evaluation.layers):
        got = {**vars(figures), **vars(figures.recall)}
        for name, value in by_definition(model, layer, batch).items():
            assert got[name] == pytest.approx(value, rel=2e-5), name
        assert 0.1 < figures.recall.trained < 1
    mean = evaluation.mean
    assert mean.kl_trained == pytest.approx(
        sum(f.kl_trained for f in evaluation.layers) / len(evaluation.layers)
    )


def test_the_training_s_own_indexer_loss_is_the_top_k_one(model, batch):
    """The same number that the model reports while it trains."""
    from titan_npu_train.deepseek_v32.indexer_loss import DSAMasks

    tokens, labels, positions = batch
    valid = labels != -100
    masks = DSAMasks.from_positions(positions, kl_mask_BS=valid, kl_scale=1 / valid.sum())
    model(tokens, positions, masks).sum().backward()
    losses = model.take_indexer_losses()
    evaluation = evaluate_model(model, [batch], seeds=(0,))
    for figures in evaluation.layers:
        assert figures.kl_topk_trained == pytest.approx(losses[figures.layer].item(), rel=1e-4)


def test_a_fresh_indexer_against_itself(model, batch):
    """With the trained indexers replaced by fresh ones of seed 5, both columns agree."""
    fresh = copy.deepcopy(model)
    for _, attention in fresh.attention_modules:
        torch.manual_seed(5)
        attention.indexer.init_states()
    state = torch.random.get_rng_state()
    evaluation = evaluate_model(fresh, [batch], seeds=(5,))
    assert torch.equal(state, torch.random.get_rng_state())  # the caller's randomness is its own
    for figures in evaluation.layers:
        assert figures.kl_untrained == figures.kl_trained
        assert figures.kl_topk_untrained == figures.kl_topk_trained
        assert figures.recall.untrained == figures.recall.trained
    assert (
        evaluate_model(fresh, [batch], seeds=(6,)).mean.kl_untrained != evaluation.mean.kl_trained
    )


def test_an_indexer_that_knows_finds_all(model, batch, monkeypatch):
    """Scores that are the log of the truth: no divergence, every key found."""
    from titan_npu_train.report import evaluate

    truth = {}
    original = evaluate.mean_distribution

    def remember(logits, seen):
        truth["p"] = original(logits, seen)
        return truth["p"]

    monkeypatch.setattr(evaluate, "mean_distribution", remember)
    monkeypatch.setattr(evaluate, "index_scores", lambda q, k, w: truth["p"].log())
    figures = evaluate_model(model, [batch], seeds=(0,)).layers[0]
    assert abs(figures.kl_trained) < 1e-5
    assert figures.recall.trained == 1.0


def test_rows_that_are_short_have_no_recall(model):
    tokens = torch.randint(0, 64, (1, TOPK))
    evaluation = evaluate_model(model, [(tokens, tokens, torch.arange(TOPK)[None])], seeds=(0,))
    assert evaluation.mean.recall is None and evaluation.long_queries == 0
    assert math.isfinite(evaluation.mean.kl_trained)
    nothing = torch.full_like(tokens, -100)
    with pytest.raises(UserError, match="no token to measure on"):
        evaluate_model(model, [(tokens, nothing, torch.arange(TOPK)[None])])


# --------------------------------------------------------------------------- from a run's folder


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """A run's folder with a dataset, run.json, metrics and a checkpoint of random weights."""
    folder = tmp_path_factory.mktemp("run")
    text = folder / "text"
    text.mkdir()
    for number in range(12):
        (text / f"{number}.txt").write_text(f"{number} " + "words of some text " * 60)
    data.prepare(text, folder / "dataset", vocab_size=300, heldout=0.3)
    options = [
        *("--dataloader.dataset_path", str(folder / "dataset")),
        *("--training.seq_len", "64", "--dsa.topk", "16", "--dsa.form", "unabsorbed"),
        *("--parallelism.expert_parallel_degree", "2"),
    ]
    versions = {"torch": torch.__version__}
    config = "deepseek_v32_debugmodel"
    RunInfo(preflight.DEFAULT_MODULE, config, options, 2, "cpu", versions).write(folder)
    write_metrics(folder, [record(1), record(2)])
    settings = preflight.load_config(preflight.DEFAULT_MODULE, config, options)
    weights = settings.model_spec.model.build()
    torch.manual_seed(7)
    with torch.no_grad():
        weights.init_states()
    state = {**weights.state_dict(), "train_state.step": 2}
    dcp.save(state, checkpoint_id=folder / "checkpoint" / "step-2", no_dist=True)
    return folder


def test_the_checkpoint_s_weights_are_evaluated(run_dir):
    info = RunInfo.read(run_dir)
    settings = preflight.load_config(info.module, info.config, info.options)
    model = load_model(settings, run_dir / "checkpoint" / "step-2")
    saved = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    dcp.load(saved, checkpoint_id=run_dir / "checkpoint" / "step-2", no_dist=True)
    assert len(saved) > 30
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved[name]), name
    assert all(not p.is_meta for p in model.parameters())


def test_report_with_evaluation(run_dir):
    console = Console(record=True, width=120)
    summary = report(run_dir, rows=3, console=console)
    evaluation = summary["evaluation"]
    assert (evaluation["step"], evaluation["rows"], evaluation["topk"]) == (2, 3, 16)
    assert 0 < summary["topk_recall_chance"] < 1 and 0 < summary["topk_recall"] < 1
    assert summary["indexer_kl_trained"] > 0 and summary["indexer_kl_untrained"] > 0
    # random weights know nothing: the held-out loss is that of a guess
    info = RunInfo.read(run_dir)
    config = preflight.load_config(info.module, info.config, info.options)
    guess = math.log(config.model_spec.model.vocab_size)
    assert summary["heldout_loss"] == pytest.approx(guess, rel=0.1)
    text = console.export_text()
    assert "indexer on held-out text" in text and f"{evaluation['queries']:,} held-out" in text
    assert json.loads((run_dir / "report.json").read_text()) == summary
    assert dataclasses.asdict(evaluate_run(run_dir, rows=3)) == evaluation  # the same every time


def test_the_command_in_a_process_of_its_own(run_dir):
    """Where nothing has chosen the platform before."""
    command = [sys.executable, "-m", "titan_npu_train.cli", "report", str(run_dir), "--rows", "1"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "On 64 held-out tokens" in " ".join(result.stdout.split())


def test_why_a_run_cannot_be_evaluated(run_dir, tmp_path):
    write_metrics(tmp_path, [record(1)])
    console = Console(quiet=True)

    def reason() -> str:
        return report(tmp_path, console=console)["evaluation"]["not_evaluated"]

    assert "no run.json" in reason()
    (tmp_path / RUN_FILE).write_text((run_dir / RUN_FILE).read_text())
    assert "no complete checkpoint" in reason()
    checkpoint = tmp_path / "checkpoint" / "step-2"
    checkpoint.parent.mkdir()
    checkpoint.symlink_to(run_dir / "checkpoint" / "step-2")
    summary = report(tmp_path, data=tmp_path / "nodata", console=console)
    assert "nodata" in summary["evaluation"]["not_evaluated"]
    (tmp_path / RUN_FILE).write_text("{")
    assert "cannot be read" in reason()

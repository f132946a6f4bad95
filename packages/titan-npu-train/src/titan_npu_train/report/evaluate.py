"""How well a run's indexers know what its attention looks at, measured on held-out text.

For each layer and query t the truth is the attention's own distribution over every visible key, the
mean over heads: p[t, :] = mean over h of softmax_{s visible}(scale * q'[t, h] . kv[s]). An indexer
with scores I[t, :] predicts y[t, :] = softmax_{s visible}(I[t, s]).

- KL(p || y) over every visible key, for the trained indexer and for freshly initialised ones on the
  same backbone. All of them are compared on one support; over an indexer's own top-k (the training
  loss of the sparse stage, also reported) two indexers would be judged on different keys.
- recall: the share of the k keys with the largest p that are among the k with the largest I, over
  queries that see more than k keys. A random choice finds k / visible of them.

The backbone attends to the keys its trained indexers choose, also after a dense warm-up, as it will
in the stage that follows. One process, one device: for models that fit it.

Shape letters: B batch, S queries, Q queries of a block, T keys, H heads, A latent + rotary dim,
I index heads, C index head dim, K selected keys.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titan_npu_train import platform, preflight
from titan_npu_train.failures import UserError
from titan_npu_train.recall import (
    attention_logits,
    index_scores,
    mean_distribution,
    query_blocks,
    top_keys,
    visible_keys,
)
from titan_npu_train.run_folder import RunInfo

__all__ = ["Evaluation", "Figures", "evaluate_model", "evaluate_run", "load_model"]

SEEDS = (0, 1, 2)
_BATCH_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class Recall:
    """Share of the true top-k found, 0 to 1: trained indexer, fresh ones, a random choice."""

    trained: float
    untrained: float
    chance: float


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of one layer, or (layer None) the mean over layers. KL in nats a token; recall is None where
    no query sees more than k keys."""

    layer: int | None
    kl_trained: float
    kl_untrained: float
    kl_topk_trained: float
    kl_topk_untrained: float
    recall: Recall | None


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Attributes:
    step: of the checkpoint; None for a model that came from none.
    topk: keys an indexer selects.
    seeds: number of fresh indexers, averaged.
    rows, queries: held-out rows, and the tokens in them that the loss counts.
    long_queries: queries that see more than ``topk`` keys; recall is over them.
    heldout_loss: LM loss, nats a token.
    layers: one entry a layer.
    mean: over the layers.
    """

    step: int | None
    topk: int
    seeds: int
    rows: int
    queries: int
    long_queries: int
    heldout_loss: float
    layers: list[Figures]
    mean: Figures


def evaluate_run(run_dir: Path, *, data: Path | None = None, rows: int = 16) -> Evaluation:
    """Evaluate the newest complete checkpoint of a run on at most ``rows`` held-out rows.

    Raises:
        UserError: the run does not say what it trained, has no complete checkpoint, or trained a
            model without indexers.
        DataError: the dataset is missing, or has no held-out text.
    """
    run_dir = Path(run_dir)
    info = RunInfo.read(run_dir)
    platform.select()  # before anything below imports torchtitan
    from titan_npu_train.data import PackedRows, PreparedDataset, dataset_directory

    config = preflight.load_config(info.module, info.config, info.options)
    path = preflight.newest_checkpoint(run_dir / config.checkpoint.folder)
    if path is None:
        raise UserError(
            f"no complete checkpoint in '{run_dir / config.checkpoint.folder}'. Train with "
            "--checkpoint.enable."
        )
    loader = config.dataloader
    dataset = PreparedDataset(data or dataset_directory(loader.dataset, loader.dataset_path))
    packed = PackedRows(
        dataset.split("heldout"),
        seq_len=config.training.seq_len,
        eod_id=dataset.manifest.tokenizer.eod_id,
        document_mask=loader.document_mask,
    )
    model = load_model(config, path)
    # Evenly over the held-out text: neighbouring rows come from the same documents.
    count = min(rows, len(packed))
    chosen = [packed[i * len(packed) // count] for i in range(count)]
    parts = [torch.from_numpy(np.stack(part)) for part in zip(*chosen, strict=True)]
    batch = max(1, _BATCH_TOKENS // config.training.seq_len)
    batches = zip(*(part.split(batch) for part in parts), strict=True)
    return evaluate_model(model, batches, step=int(path.name.removeprefix("step-")))


def load_model(config: Any, checkpoint: Path) -> torch.nn.Module:
    """Build the model of ``config`` on this process alone, with a checkpoint's weights.

    Raises:
        UserError: the configuration has no DeepSeek-V3.2 model.
        CheckpointError: the checkpoint is damaged.
    """
    import torch.distributed.checkpoint as dcp
    from torchtitan.config import TORCH_DTYPE_MAP, ParallelismConfig
    from torchtitan.tools.utils import set_default_dtype

    from titan_npu_train.checkpoint import Checkpoint, CheckpointError
    from titan_npu_train.deepseek_v32 import DeepSeekV32Model
    from titan_npu_train.deepseek_v32.options import SPARSE

    model_config = config.model_spec.model
    if not isinstance(model_config, DeepSeekV32Model.Config):
        raise UserError("the run trained a model without indexers.")
    if damage := Checkpoint.open(checkpoint).damage():
        raise CheckpointError(damage)
    alone = dataclasses.replace(
        config,
        parallelism=ParallelismConfig(),
        # The same function; only this form hands over the latent that all heads share. Of a dense
        # warm-up, it is the sparse model that follows.
        dsa=dataclasses.replace(config.dsa, stage=SPARSE, form="absorbed"),
    )
    model_config.update_from_config(config=alone)
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
        model = model_config.build()
    model.to_empty(device=platform.current().device_type)
    with torch.no_grad():
        model.init_states()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    model.load_state_dict(state)
    return model.eval()


@torch.no_grad()
def evaluate_model(
    model: Any,
    batches: Iterator[Sequence[torch.Tensor]] | Sequence[Sequence[torch.Tensor]],
    *,
    step: int | None = None,
    seeds: Sequence[int] = SEEDS,
) -> Evaluation:
    """Evaluate a model's indexers.

    Args:
        model: a DeepSeekV32Model whose attention is absorbed.
        batches: (tokens, labels, positions), int64 [B, S] each; labels of -100 do not count.
        step: for the record.
        seeds: of the fresh indexers.
    """
    device = next(model.parameters()).device
    fresh = {
        name: [_fresh(attention.indexer, seed) for seed in seeds]
        for name, attention in model.attention_modules
    }
    sums: dict[str, _Sums] = {}
    rows = queries = 0
    loss = 0.0
    for batch in batches:
        tokens_BS, labels_BS, positions_BS = (part.to(device) for part in batch)
        counts_BS = labels_BS != -100

        def measure(name: str, indexer_inputs: tuple, inner: tuple, options: dict) -> None:
            # Sees this batch's counts: it is called within this iteration's forward.
            layer = sums.setdefault(name, _Sums(len(seeds)))
            layer.add(fresh[name], indexer_inputs, inner, options, counts_BS)  # noqa: B023

        with _attention_calls(model, measure):
            logits = model(tokens_BS, positions_BS)
        if isinstance(logits, (list, tuple)):
            logits = logits[0]  # the others predict further ahead
        loss += torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), labels_BS.flatten(), reduction="sum", ignore_index=-100
        ).item()
        rows += tokens_BS.size(0)
        queries += int(counts_BS.sum())
    if not queries:
        raise UserError("the held-out text has no token to measure on. Prepare more text.")
    layers = [sums[name].figures(model.layer_index(name)) for name in sums]
    any_layer = next(iter(sums.values()))
    return Evaluation(
        step=step,
        topk=any_layer.topk,
        seeds=len(seeds),
        rows=rows,
        queries=queries,
        long_queries=any_layer.long_queries,
        heldout_loss=loss / queries,
        layers=layers,
        mean=_mean(layers),
    )


class _Sums:
    """One layer's sums over the queries seen so far."""

    def __init__(self, seeds: int) -> None:
        self.queries = self.long_queries = self.topk = 0
        self.chance = 0.0
        self.kl, self.kl_topk, self.found = ([0.0] * (1 + seeds) for _ in range(3))

    def add(
        self,
        fresh: Sequence[torch.nn.Module],
        indexer_inputs: tuple,
        inner: tuple,
        options: dict[str, Any],
        counts_BS: torch.Tensor,
    ) -> None:
        q_BSHA, kv_BTA, *trained = inner
        bounds_BS2, topk, scale = options["masks"].bounds_BS2, options["topk"], options["scale"]
        visible_BS = (bounds_BS2[..., 1] - bounds_BS2[..., 0]).clamp(min=0)
        long_BS = counts_BS & (visible_BS > topk)
        self.topk = topk
        self.queries += int(counts_BS.sum())
        self.long_queries += int(long_BS.sum())
        self.chance += (topk / visible_BS[long_BS].double()).sum().item()

        indexers = [tuple(trained), *(indexer(*indexer_inputs) for indexer in fresh)]
        for block in query_blocks(q_BSHA, kv_BTA.size(1)):
            long_BQ, counts_BQ = long_BS[:, block], counts_BS[:, block]
            seen_BQT = visible_keys(bounds_BS2[:, block], kv_BTA.size(1))
            logits_BQHT = attention_logits(q_BSHA[:, block], kv_BTA, scale)
            p_BQT = mean_distribution(logits_BQHT, seen_BQT)
            top_BQT = top_keys(p_BQT, seen_BQT, topk)
            for i, (q_index, k_index, weights) in enumerate(indexers):
                scores_BQT = index_scores(q_index[:, block], k_index, weights[:, block])
                chosen_BQT = top_keys(scores_BQT, seen_BQT, topk)
                kl_BQ = distribution_kl(p_BQT, scores_BQT, seen_BQT)
                kl_topk_BQ = distribution_kl(
                    mean_distribution(logits_BQHT, chosen_BQT), scores_BQT, chosen_BQT
                )
                hits_BQ = (top_BQT & chosen_BQT).sum(-1)
                self.kl[i] += kl_BQ[counts_BQ].double().sum().item()
                self.kl_topk[i] += kl_topk_BQ[counts_BQ].double().sum().item()
                self.found[i] += (hits_BQ[long_BQ].double() / topk).sum().item()

    def figures(self, layer: int) -> Figures:
        def split(sums: Sequence[float], count: int) -> tuple[float, float]:
            """Of the trained indexer, and the mean of the fresh ones."""
            return sums[0] / count, _average(sums[1:]) / count

        kl = split(self.kl, self.queries)
        kl_topk = split(self.kl_topk, self.queries)
        recall = None
        if self.long_queries:
            chance = self.chance / self.long_queries
            recall = Recall(*split(self.found, self.long_queries), chance)
        return Figures(layer, *kl, *kl_topk, recall)


def distribution_kl(
    p_BQT: torch.Tensor, scores_BQT: torch.Tensor, seen_BQT: torch.Tensor
) -> torch.Tensor:
    """KL(p || softmax of the scores over the keys seen), [B, Q]; 0 log 0 = 0."""
    log_y_BQT = scores_BQT.masked_fill(~seen_BQT, float("-inf")).log_softmax(-1)
    terms_BQT = torch.xlogy(p_BQT, p_BQT) - p_BQT * log_y_BQT
    return terms_BQT.masked_fill(~seen_BQT, 0.0).sum(-1)


def _fresh(indexer: Any, seed: int) -> Any:
    """A copy of an indexer with new random weights, as training starts with."""
    copied = copy.deepcopy(indexer)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        copied.init_states()
    return copied


def _mean(layers: Sequence[Figures]) -> Figures:
    recalls = [f.recall for f in layers if f.recall is not None]
    return Figures(
        layer=None,
        kl_trained=_average([f.kl_trained for f in layers]),
        kl_untrained=_average([f.kl_untrained for f in layers]),
        kl_topk_trained=_average([f.kl_topk_trained for f in layers]),
        kl_topk_untrained=_average([f.kl_topk_untrained for f in layers]),
        recall=Recall(
            trained=_average([r.trained for r in recalls]),
            untrained=_average([r.untrained for r in recalls]),
            chance=_average([r.chance for r in recalls]),
        )
        if recalls
        else None,
    )


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class _attention_calls:
    """Calls ``measure(name, indexer inputs, inner attention inputs, options)`` for every layer."""

    def __init__(self, model: Any, measure: Callable[[str, tuple, tuple, dict], None]) -> None:
        self._model, self._measure = model, measure
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for name, attention in self._model.attention_modules:
            kept: dict[str, tuple] = {}

            def keep(module: Any, args: tuple, kept: dict[str, tuple] = kept) -> None:
                kept["indexer"] = args

            def call(
                module: Any,
                args: tuple,
                kwargs: dict[str, Any],
                name: str = name,
                kept: dict[str, tuple] = kept,
            ) -> None:
                self._measure(name, kept.pop("indexer"), args, kwargs)

            self._handles += [
                attention.indexer.register_forward_pre_hook(keep),
                attention.inner_attention.register_forward_pre_hook(call, with_kwargs=True),
            ]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

"""A whole training step: forward, backward, clipping, AdamW, in the shape of the published table.

1 dense + 3 and 1 dense + 7 MoE layers at S 4096, with the widths of titan-npu-train's `_small`
configurations: DeepSeek-V3.2's proportions, narrow enough for two cores and 24 GB (dim 512, 8 heads
of 32 + 16, latent 128, 4 index heads of 32, 8 experts of 160, vocabulary 2048). fp32, one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.protocols.module import Module

from benchmarks import small_operators
from benchmarks.checks import Check, at_least, at_most
from benchmarks.dsa import NO_HELPER, OURS, PLAIN, SMALL
from benchmarks.measure import Case, Implementation, Params, Result, Task
from titan_npu_train.deepseek_v32 import config_registry
from titan_npu_train.deepseek_v32.flops import mean_selected_keys
from titan_npu_train.deepseek_v32.indexer_loss import DSAMasks
from titan_npu_train.deepseek_v32.options import DSAOptions
from titan_npu_train.deepseek_v32.parallelize import (
    DSASelectiveAC,
    apply_activation_checkpointing,
)

EAGER = "titan-npu-train, form unabsorbed"
CHECKPOINTING = "recompute"
PUBLISHED = {4: 568 / 402, 8: 400 / 155}


class SmallOperators(Module):
    """The published baseline in the place of the model's inner attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config):
        super().__init__()

    def forward(
        self,
        q_BSHX: Tensor,
        k_BSHX: Tensor,
        v_BSHV: Tensor,
        q_index_BSIC: Tensor,
        k_index_BSC: Tensor,
        weights_BSI: Tensor,
        *,
        topk: int,
        scale: float,
        masks: DSAMasks,
    ) -> tuple[Tensor, Tensor | None]:
        # One document a row: the mask is plainly causal.
        out, kl = small_operators.dsa_attention(
            q_BSHX,
            k_BSHX,
            v_BSHV,
            q_index_BSIC,
            k_index_BSC,
            weights_BSI,
            topk=topk,
            scale=scale,
            train_indexer=masks.trains_indexer,
        )
        return out, None if kl is None else kl.sum()


def model_of(p: Params) -> torch.nn.Module:
    """The registry's model with this case's length, top-k and form, always the same weights."""
    config = getattr(config_registry, f"deepseek_v32_{p['layers']}layers_small")()
    config.training.seq_len = p["S"]
    config.dsa = DSAOptions(topk=p["K"], form=p["_form"])
    model_config = config.model_spec.model
    model_config.update_from_config(config=config)
    if p.get("_inner") == "small operators":
        for layer in model_config.layers:
            layer.attention.inner_attention = SmallOperators.Config()
    model = model_config.build()
    torch.manual_seed(1)
    model.init_states()
    if p[CHECKPOINTING] == "selective":
        policy = DSASelectiveAC(config.activation_checkpoint, dump_folder="")
        apply_activation_checkpointing(model, policy)
    return model.train()


def build(p: Params) -> Task:
    model = model_of(p)
    torch.manual_seed(2)
    vocabulary = model.config.vocab_size
    tokens_BS = torch.randint(vocabulary, (1, p["S"] + 1))
    inputs_BS, labels_BS = tokens_BS[:, :-1], tokens_BS[:, 1:]
    positions_BS = torch.arange(p["S"]).unsqueeze(0)
    masks = DSAMasks.from_positions(
        positions_BS,
        kl_mask_BS=torch.ones(1, p["S"], dtype=torch.bool),
        kl_scale=1.0 / p["S"],
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)

    def run() -> Tensor:
        optimizer.zero_grad()
        logits_BSV = model(inputs_BS, attention_masks=masks, positions=positions_BS)
        loss = F.cross_entropy(logits_BSV.flatten(0, 1).float(), labels_BS.flatten())
        del logits_BSV
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    def result(loss: Tensor) -> dict[str, Tensor]:
        """Of the first step: its losses, and where every key is selected their gradients.

        With few index heads many scores are exactly 0, and equal scores at the edge of the top-k
        go to the lower key in one form and to any in the other: another key, another gradient.
        """
        gradients = {True: [], False: []}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            gradients[".indexer." in name].append(parameter.grad.flatten())
        losses = {
            "loss": loss,
            "indexer losses": torch.stack([*model.take_indexer_losses().values()]),
        }
        if p["K"] < p["S"]:
            return losses
        return losses | {
            "backbone gradients": torch.cat(gradients[False]),
            "indexer gradients": torch.cat(gradients[True]),
        }

    return Task(run, result)


def step_case(layers: int, S: int, K: int, *, recompute: str = "none", eager: bool = False) -> Case:
    absorbed = {"_form": "absorbed"}
    unabsorbed = {"_form": "unabsorbed"}
    implementations = [
        Implementation(name=OURS, build=build, options=absorbed),
        Implementation(name=PLAIN, build=build, options=absorbed, environment=NO_HELPER),
        Implementation(name=SMALL, build=build, options={**unabsorbed, "_inner": SMALL}),
    ]
    if eager:
        implementations.append(Implementation(name=EAGER, build=build, options=unabsorbed))
    return Case(
        name="training step",
        params={"layers": layers, "S": S, "K": K, CHECKPOINTING: recompute},
        implementations=tuple(implementations),
        small={"S": 96, "K": 96},
        tolerance=5e-3,
        tokens=S,
    )


def preload(chosen: list[Case]) -> tuple[str, ...]:
    return ("torchtitan.models.deepseek_v3",)


def cases(quick: bool) -> Iterator[Case]:
    if quick:
        for K in (24, 128):
            yield step_case(4, 192, K, eager=True)
        yield step_case(8, 192, 24, recompute="selective")
        return
    for layers in (8, 4):
        for K in (512, 2048):
            yield step_case(layers, 4096, K)
    yield step_case(8, 4096, 512, recompute="selective")
    # Is the package's own eager form the baseline, or slower? Ours is the one that counts.
    yield step_case(4, 4096, 512, eager=True)


def checks(results: list[Result]) -> Iterator[Check]:
    for result in results:
        p = result.case.params
        if p["S"] != 4096 or p["K"] != 512 or EAGER in result.measurements:
            continue
        where = f"{p['layers']} layers, K 512, recompute {p[CHECKPOINTING]}"
        faster = result.ratio(SMALL)
        yield at_least(f"{where}: ours faster than small operators", faster, PUBLISHED[p["layers"]])
        ours, small = result.ours, result.measurements[SMALL]
        if ours.peak_bytes and small.peak_bytes:
            text = f"{where}: memory over small operators"
            yield at_most(text, ours.peak_bytes / small.peak_bytes, 1.0)


def findings(results: list[Result]) -> Iterator[str]:
    """What remains where selecting keys saves no FLOPs."""
    for result in results:
        p = result.case.params
        ours, small = result.ours, result.measurements[SMALL]
        if not (ours.seconds and small.seconds and ours.peak_bytes and small.peak_bytes):
            continue
        config = getattr(config_registry, f"deepseek_v32_{p['layers']}layers_small")()
        attention = config.model_spec.model.layers[0].attention
        latent, rope = attention.kv_lora_rank, attention.qk_rope_head_dim
        head = attention.qk_nope_head_dim + rope + attention.v_head_dim
        selected = mean_selected_keys(p["S"], p["K"])
        more = selected * (2 * latent + rope) / (p["S"] * head)
        dense = selected * (2 * latent + rope) / ((p["S"] + 1) / 2 * head)
        yield (
            f"{p['layers']} layers, S {p['S']}, K {p['K']}, recompute {p[CHECKPOINTING]}: absorbed "
            f"sparse attention does {more:.2f}x the FLOPs of the S x S form and {dense:.2f}x those "
            f"of causal dense attention; a step is {result.ratio(SMALL):.2f}x faster than with "
            f"small operators and takes {ours.peak_bytes / small.peak_bytes:.2f}x the memory"
            + (": what remains is memory traffic, not arithmetic" if more >= 1 else "")
        )

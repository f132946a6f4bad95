"""What a layer keeps for its backward pass, and needs at its worst moment: run, not guessed.

One layer of each kind runs forward and backward with the real modules, activation checkpointing,
sharding and loss, on tensors without data, in a process group whose other ranks do not exist. Every
storage is counted from the operator that makes it to its last reference. What the operators use
inside of themselves is not seen.

Gathered parameters are there before the count begins, and their gradients are counted apart:
what FSDP adds depends on the whole model (see :mod:`.memory`).
"""

import copy
import functools
import math
import warnings
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.distributed import ParallelDims, full_dtensor
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.tools import utils

import dtensor_npu_strategies
from titan_custom_cp import current_context
from titan_npu_train.deepseek_v32.indexer_loss import DSAMasks
from titan_npu_train.deepseek_v32.mtp import shifted_labels, shifted_tokens
from titan_npu_train.expert_dispatch import ExpertDispatcher
from titan_npu_train.plan.layout import build, fake_world, reduced

__all__ = ["LayerMemory", "Need", "Storages", "layer_memory"]

_REST = ("embedding", "head")


@dataclass(frozen=True)
class Need:
    """Bytes of one block for one microbatch, beyond what was there before it.

    Attributes:
        saved: kept from its forward to its backward, its output included.
        forward: at its forward's worst moment.
        backward: at its backward's worst moment, including what it had saved.
        gradients: of its parameters, among ``backward``, at that moment.
    """

    saved: int
    forward: int
    backward: int
    gradients: int


@dataclass(frozen=True)
class LayerMemory:
    """Needs by kind of block.

    Attributes:
        blocks: with the same number of tokens at every expert.
        crowded: MoE blocks that get every token of their expert-parallel group that can come.
        rows, crowded_rows: tokens that come to a rank's experts in the two cases.
        output: bytes of a block's output, which is what pipeline stages exchange.
    """

    blocks: dict[str, Need]
    crowded: dict[str, Need]
    rows: int
    crowded_rows: int
    output: int


def layer_memory(config: Any) -> LayerMemory:
    """Needs of the blocks of ``config``, a configuration :func:`.layout.as_trained`.

    They depend on the widths of the layers and on how a sequence and its tokens are divided, not on
    the number of layers, pipeline stages or data-parallel ranks; what was simulated once is kept.
    """
    config = copy.deepcopy(config)
    parallelism = config.parallelism
    if parallelism.pipeline_parallel_degree > 1:
        config.training.local_batch_size = parallelism.pipeline_parallel_microbatch_size
    inner = parallelism.context_parallel_degree * parallelism.tensor_parallel_degree
    # As few data-parallel ranks as give the experts their own.
    shards = math.lcm(inner, parallelism.expert_parallel_degree) // inner
    config.parallelism = replace(
        parallelism,
        pipeline_parallel_degree=1,
        data_parallel_replicate_degree=1,
        data_parallel_shard_degree=shards,
        fsdp_reshard_after_forward="never",
        module_fqns_per_model_part=None,
        pipeline_parallel_schedule="1F1B",
        pipeline_parallel_schedule_csv="",
        pipeline_parallel_layers_per_stage=None,
    )
    # Gradients are counted as autograd makes them; FSDP's conversions are counted with FSDP.
    config.training.mixed_precision_reduce = config.training.mixed_precision_param
    config.training.global_batch_size = -1
    reduced(config)
    return _simulated(_Case(config, shards * inner))


@dataclass(frozen=True)
class _Case:
    """A configuration that is equal to another if it needs the same memory."""

    config: Any = field(compare=False)
    world: int
    key: str = ""

    def __post_init__(self) -> None:
        c = self.config
        relevant = (c.model_spec.model, c.parallelism, c.training, c.activation_checkpoint)
        others = (c.dsa, c.loss, c.compile, c.context_parallel, c.override)
        object.__setattr__(self, "key", repr((relevant, others)))


@functools.lru_cache(maxsize=256)
def _simulated(case: _Case) -> LayerMemory:
    balanced = _run(case.config, case.world, crowded=False)
    crowded = balanced
    if case.config.parallelism.expert_parallel_degree > 1 and any(
        layer.moe is not None for layer in case.config.model_spec.model.layers
    ):
        crowded = _run(case.config, case.world, crowded=True)
    return LayerMemory(
        balanced.blocks,
        {k: v for k, v in crowded.blocks.items() if k not in _REST},
        balanced.rows,
        crowded.rows,
        balanced.output,
    )


class PlannedDispatcher(ExpertDispatcher):
    """Sends tokens where a plan says, instead of where a router does.

    Balanced: every expert gets as many tokens as any other. Crowded: every token of the group that
    can comes to this rank; a token goes to as many of a rank's experts as it chooses, at most.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ExpertDispatcher.Config):
        crowded: bool = False

    def __init__(self, config: Config):
        super().__init__(config)
        self.crowded = config.crowded
        self.rows = 0

    def dispatch(self, x_TD: torch.Tensor, *args: Any) -> Any:
        self._tokens = x_TD.shape[0]
        self.rows = self._tokens * self.top_k
        return super().dispatch(x_TD, *args)

    def _sync_token_count_exchange(
        self, num_local_tokens_per_expert_E: torch.Tensor, counts_EP_e: torch.Tensor, ep_size: int
    ) -> tuple[torch.Tensor, list[int], list[int]]:
        sent = _shares(self._tokens * self.top_k, ep_size)
        received = sent
        if self.crowded:
            received = [self._tokens * min(self.top_k, self.num_experts // ep_size)] * ep_size
        self.rows = sum(received)
        return counts_EP_e.reshape(-1), sent, received


def _shares(total: int, parts: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]


class Storages(TorchDispatchMode):
    """Counts the bytes of storages from the operator that makes them to their last reference.

    ``events`` holds (storage number, bytes), negative when they are given back, in order;
    ``marks`` the number of events at a named moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, int]] = []
        self.marks: list[tuple[str, int]] = []
        self._known = WeakIdKeyDictionary()
        self._numbers = 0

    def mark(self, name: str) -> None:
        self.marks.append((name, len(self.events)))

    def number(self, tensor: torch.Tensor) -> int | None:
        """Of the tensor's storage; None if it was there before."""
        known = self._known.get(tensor.untyped_storage())
        return None if known is None else known[0]

    def _freed(self, number: int, size: int) -> None:
        self.events.append((number, -size))

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if storage not in self._known:
            number = self._numbers
            self._numbers += 1
        else:
            known = self._known[storage]
            if known is None or known[1] == size:
                return
            number, before, finalizer = known
            finalizer.detach()
            self.events.append((number, -before))
        self.events.append((number, size))
        finalizer = weakref.finalize(storage, self._freed, number, size)
        finalizer.atexit = False
        self._known[storage] = (number, size, finalizer)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # first to local tensors
        kwargs = kwargs or {}
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._known.setdefault(tensor.untyped_storage(), None)
        if func is torch.ops.aten._grouped_mm.default:
            result = _grouped_mm(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor)
        return result


def _grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The shape of the result: torch's own rule for it refuses fp32, which its kernel takes."""
    dtype = out_dtype or a.dtype
    if a.dim() == 2 and b.dim() == 3:
        return a.new_empty(a.size(0), b.size(-1), dtype=dtype)
    assert offs is not None
    if a.dim() == 2:
        return a.new_empty(offs.numel(), a.size(0), b.size(-1), dtype=dtype)
    return a.new_empty(a.size(1), b.size(-1), dtype=dtype)


@dataclass(frozen=True)
class _Run:
    blocks: dict[str, Need]
    rows: int
    output: int


def _run(config: Any, world: int, *, crowded: bool) -> _Run:
    config = copy.deepcopy(config)
    strategies: Any = nullcontext()
    if config.parallelism.spmd_backend != "spmd_types":
        strategies = dtensor_npu_strategies.register()
    with fake_world(config, world) as dims, strategies, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators and of FSDP, which training gives, too
        _plan_dispatch(config, crowded)
        model: Any = config.model_spec.parallelize_fn(
            build(config),
            parallel_dims=dims,
            training=config.training,
            parallelism=config.parallelism,
            compile_config=config.compile,
            ac_config=config.activation_checkpoint,
            dump_folder="",
        )
        return _measure(config, dims, model)


def _plan_dispatch(config: Any, crowded: bool) -> None:
    model = config.model_spec.model
    for layer in [*model.layers, *model.mtp_layers]:
        if layer.moe is not None:
            experts = layer.moe.routed_experts
            own = experts.token_dispatcher
            if not isinstance(own, ExpertDispatcher.Config):
                raise ValueError(
                    f"memory is planned for ExpertDispatcher, not for {type(own).__name__}"
                )
            experts.token_dispatcher = PlannedDispatcher.Config(
                num_experts=own.num_experts, top_k=own.top_k, crowded=crowded
            )


def _measure(config: Any, dims: ParallelDims, model: Any) -> _Run:
    inputs, labels = _batch(config, dims)
    sharded: Any = nullcontext()
    if dims.cp_enabled:
        sharded = config.context_parallel.open(
            config.parallelism, dims.get_mesh("cp"), [*inputs.values(), labels]
        )
    loss_fn = config.loss.build(compile_config=config.compile)
    if isinstance(loss_fn, ChunkedLossWrapper):
        loss_fn.set_lm_head(model.lm_head)
        model._skip_lm_head = True
        # It asks for a reduction with its last chunk, and frees the weight: counted with FSDP.
        model.lm_head.set_requires_gradient_sync = lambda *_, **__: None
        model.lm_head.reshard = lambda: None
    spmd = dist_utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)
    count = Storages()
    gradients: set[int | None] = set()

    def tag(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        gradients.add(count.number(_local(parameter.grad)))

    # The batch is real, so that its order can be read; everything the model makes of it is not.
    with sharded, FakeTensorMode(allow_non_fake_inputs=True), spmd():
        model.to_empty(device=_device())
        model.train()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_reshard_after_backward(False, recurse=False)
                FSDPModule.set_requires_gradient_sync(module, False, recurse=False)
                module.unshard()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(tag)
        tokens, labels, kwargs = _as_the_model_takes_them(config, dims, inputs, labels)
        marks = _Marks(model, count)
        with count:
            output = model(tokens, **kwargs)
            loss, _ = loss_fn(output, labels, torch.ones(()), positions=kwargs["positions"])
            del output
            loss.backward()
            del loss
            count.mark("end")
        model.zero_grad()
    rows = [
        dispatcher.rows
        for module in model.modules()
        if isinstance(dispatcher := getattr(module, "token_dispatcher", None), PlannedDispatcher)
    ]
    needs = _needs(count, marks.kinds, {g for g in gradients if g is not None})
    return _Run(needs, max(rows, default=0), marks.output)


def _device() -> torch.device:
    return torch.device(utils.device_type)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _batch(config: Any, dims: ParallelDims) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Rows of one document each, with what multi-token prediction reads of them."""
    shape = (config.training.local_batch_size, config.training.seq_len)
    tokens = torch.zeros(shape, dtype=torch.int64)
    positions = torch.arange(shape[1]).expand(shape).contiguous()
    labels = torch.zeros_like(tokens)
    inputs = {"input": tokens, "positions": positions}
    if depths := len(config.model_spec.model.mtp_layers):
        inputs["mtp_tokens"], inputs["mtp_exist"] = shifted_tokens(tokens, positions, depths)
        labels = shifted_labels(labels, positions, depths)
    return inputs, labels


def _as_the_model_takes_them(
    config: Any, dims: ParallelDims, inputs: dict[str, torch.Tensor], labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """What the trainer makes of a batch that is on the device and sharded already."""
    kwargs: dict[str, Any] = {name: x.clone() for name, x in inputs.items()}
    tokens, labels = kwargs.pop("input"), labels.clone()
    open_context = current_context()
    masks = DSAMasks.from_positions(
        kwargs["positions"], index_S=None if open_context is None else open_context.index
    )
    if config.dsa.indexer_loss_coefficient > 0:
        counts = torch.ones_like(kwargs["positions"], dtype=torch.bool)
        masks = masks._replace(kl_mask_BS=counts, kl_scale=torch.ones(()), microbatch=0)
    exist = kwargs.get("mtp_exist")
    backend = config.parallelism.spmd_backend
    if backend == "full_dtensor":
        tokens, labels, kwargs = full_dtensor.parallelize_inputs(dims, tokens, labels, kwargs)
    elif backend == "spmd_types":
        tokens, labels, kwargs = annotate_input_spmd_types(dims, tokens, labels, kwargs)
        for name in ("mtp_tokens", "mtp_exist"):
            if name in kwargs:
                annotate_input_spmd_types(dims, kwargs[name], labels, {})
    kwargs["attention_masks"] = masks
    if exist is not None:
        kwargs["mtp_masks"] = [masks.restricted_to(exist[..., d]) for d in range(exist.size(-1))]
    return tokens, labels, kwargs


class _Marks:
    """Marks where each block begins and ends, forward, and where its gradient arrives."""

    def __init__(self, model: Any, count: Storages) -> None:
        self.kinds: dict[str, str] = {"embedding": "embedding"}
        self.output = 0
        self._count = count
        self._seen: set[str] = set()
        self._watch("embedding", model.tok_embeddings)  # MTP reads it again
        for group in ("layers", "mtp_layers"):
            for name, layer in (getattr(model, group, None) or nn.Module()).named_children():
                kind = "moe" if layer.moe_enabled else "dense"
                self.kinds[f"{group}.{name}"] = "mtp" if group == "mtp_layers" else kind
                self._watch(f"{group}.{name}", layer)

    def _watch(self, name: str, module: nn.Module) -> None:
        def after(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            self._count.mark(f"after {name}")
            if name in self._seen:
                return
            self._seen.add(name)
            if name.startswith("layers."):
                local = _local(output)
                self.output = local.numel() * local.element_size()
            if output.requires_grad:
                output.register_hook(lambda _: self._count.mark(f"gradient {name}"))

        module.register_forward_pre_hook(lambda *_: self._count.mark(f"before {name}"))
        module.register_forward_hook(after)


def _needs(count: Storages, kinds: dict[str, str], gradients: set[int]) -> dict[str, Need]:
    """Needs of the blocks, from what was counted between the marks."""
    # What is alive after each event, without gradients; and the gradients that came by then.
    live, made = [0], [0]
    for number, size in count.events:
        live.append(live[-1] + (0 if number in gradients else size))
        made.append(made[-1] + (max(size, 0) if number in gradients else 0))
    first: dict[str, int] = {}
    for name, at in count.marks:
        first.setdefault(name, at)
    names = sorted(kinds, key=lambda name: first[f"before {name}"])
    backward = sorted(
        (at, name) for name in names if (at := first.get(f"gradient {name}")) is not None
    )
    ends = [at for at, _ in backward[1:]] + [first["end"]]
    windows = {name: (at, end) for (at, name), end in zip(backward, ends, strict=True)}

    needs: dict[str, Need] = {}
    start = 0
    for name in names:
        end = first[f"after {name}"]
        base = live[start]
        peak, gradient = 0, 0
        if name in windows:
            lo, hi = windows[name]
            at = max(range(lo, hi + 1), key=lambda i: live[i] + made[i] - made[lo])
            peak, gradient = live[at] - base + made[at] - made[lo], made[at] - made[lo]
        needs[kinds[name]] = Need(
            live[end] - base, max(live[start : end + 1]) - base, peak, gradient
        )
        start = end
    begun = backward[0][0] if backward else first["end"]
    needs["head"] = Need(0, max(live[start : begun + 1]) - live[start], 0, 0)
    return needs

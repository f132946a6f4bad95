"""A step of a whole model with the real FSDP2, on tensors without data: its live bytes."""

import copy
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.distributed import utils as dist_utils

from titan_npu_train.plan import simulate
from titan_npu_train.plan.layout import as_trained, build, fake_world


@dataclass(frozen=True)
class Step:
    """Bytes: of parameters, and the most that was alive besides them, forward and backward."""

    parameters: int
    peak: int
    after: int


class Resized(simulate.Storages):
    """Sees storages, too, that FSDP2 empties and fills without an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._watched: list[tuple[Any, list[int]]] = []

    def hand_over(self, storage: Any) -> None:
        """Look at its size from now on, instead of waiting for its end."""
        self.look()
        size = 0
        if (known := self._known.get(storage)) is not None:
            _, size, finalizer = known
            finalizer.detach()
        self._known[storage] = None
        self._watched.append((weakref.ref(storage), [size]))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.look()
        return result

    def look(self) -> None:
        self.live += sum(size for _, size in self.events)
        self.events.clear()
        for reference, size in self._watched:
            storage = reference()
            now = 0 if storage is None else storage.nbytes()
            self.live += now - size[0]
            size[0] = now
        self.peak = max(self.peak, self.live)


def whole_step(config: Any, world: int, rank: int = 0) -> Step:
    """One forward and backward; two, the second to accumulate, with a global batch size."""
    config = as_trained(copy.deepcopy(config))
    with fake_world(config, world, rank) as dims:
        simulate._plan_dispatch(config, crowded=False)
        model = config.model_spec.parallelize_fn(
            build(config),
            parallel_dims=dims,
            training=config.training,
            parallelism=config.parallelism,
            compile_config=config.compile,
            ac_config=config.activation_checkpoint,
            dump_folder="",
        )
        inputs, labels = simulate._batch(config, dims)
        sharded: Any = nullcontext()
        if dims.cp_enabled:
            sharded = config.context_parallel.open(
                config.parallelism, dims.get_mesh("cp"), [*inputs.values(), labels]
            )
        loss_fn = config.loss.build(compile_config=config.compile)
        if isinstance(loss_fn, ChunkedLossWrapper):
            loss_fn.set_lm_head(model.lm_head)
            model._skip_lm_head = True
        spmd = dist_utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)
        count = Resized()
        with sharded, FakeTensorMode(allow_non_fake_inputs=True), spmd():
            with count:
                model.to_empty(device="cpu")
            model.train()
            parameters = sum(p.to_local().untyped_storage().nbytes() for p in model.parameters())
            tokens, labels, kwargs = simulate._as_the_model_takes_them(config, dims, inputs, labels)
            _states(model)[0]._lazy_init()  # the root's
            count.look()
            count.live = count.peak = 0
            _watch_gathered(model, count)
            with count:
                for _ in range(2 if config.training.global_batch_size > 0 else 1):
                    output = model(tokens, **kwargs)
                    positions = kwargs["positions"]
                    loss, _ = loss_fn(output, labels, torch.ones(()), positions=positions)
                    del output
                    loss.backward()
                    del loss
            count.look()
            return Step(parameters, count.peak, count.live)


def _states(model: Any) -> list[Any]:
    """FSDP's states; modules of one group share one."""
    modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
    return list({id(s): s for m in modules for s in [m._get_fsdp_state()]}.values())


def _watch_gathered(model: Any, count: Resized) -> None:
    """What FSDP2 gathers into is made once, then emptied and filled without an operator."""
    for state in _states(model):
        for group in state._fsdp_param_groups:
            for parameter in group.fsdp_params:
                make = parameter.init_all_gather_outputs

                def watched(*args, parameter=parameter, make=make, **kwargs):
                    if not parameter.all_gather_outputs:
                        make(*args, **kwargs)
                        for tensor in parameter.all_gather_outputs:
                            count.hand_over(tensor.untyped_storage())

                parameter.init_all_gather_outputs = watched

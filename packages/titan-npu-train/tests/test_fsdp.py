import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.distributed import ParallelDims

from fsdp2_npu.microbatch import ReducesEachMicrobatch
from titan_npu_train.deepseek_v32 import config_registry
from titan_npu_train.fsdp import FSDPOptions


def test_bad_options():
    with pytest.raises(ValueError, match=r"fsdp\.pipeline_reduction must be 'last' or 'each'"):
        FSDPOptions(pipeline_reduction="never")
    with pytest.raises(ValueError, match=r"fsdp\.prefetch_forward is a number of blocks"):
        FSDPOptions(prefetch_forward=-1)
    with pytest.raises(ValueError, match=r"fsdp\.prefetch_backward is 2, but of another model"):
        FSDPOptions(prefetch_backward=2).refuse_if_set("of another model")
    FSDPOptions().refuse_if_set("nothing is set")


def test_the_published_pipeline_reduces_after_each_microbatch():
    config = config_registry.deepseek_v32_671b_32k_128die_pp2()
    assert config.fsdp.pipeline_reduction == "each"


@pytest.fixture
def fake_ranks():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("pipeline", "reduction", "declines"),
    [(2, "each", True), (2, "last", False), (1, "each", False)],
)
def test_options_reach_the_model(fake_ranks, pipeline, reduction, declines):
    config = config_registry.deepseek_v32_debugmodel()
    config.parallelism.pipeline_parallel_degree = pipeline
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    config.fsdp = FSDPOptions(pipeline_reduction=reduction, prefetch_forward=2, prefetch_backward=1)
    dims = ParallelDims.from_config(config.parallelism, 2)
    spec = config.model_spec
    spec.model.update_from_config(config=config)
    model = spec.model.build()
    spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=None,
        dump_folder="",
    )
    assert isinstance(model, ReducesEachMicrobatch) is declines
    first = model.layers["0"]._get_fsdp_state()
    assert (
        len({s._modules[0] for s in first._states_to_forward_prefetch} & {*model.layers.values()})
        == 2
    )
    assert len(first._states_to_backward_prefetch) == 1

"""Real ranks against one process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

from attention import Attention, B, D, H, S, batch, step
from cp_ranks import run_ranks
from titan_custom_cp import (
    Contiguous,
    CustomContextParallelContext,
    DSAContextParallelContext,
    HeadTail,
    UlyssesContextParallelContext,
    current_context,
    gather_sequence,
    gather_sequences,
)

pytestmark = pytest.mark.distributed

BALANCERS = {"head-tail": HeadTail(), "contiguous": Contiguous(), "default": None}
CONTEXTS = {True: DSAContextParallelContext, False: UlyssesContextParallelContext}


def _mesh():
    return dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def one_process(shared):
    model, (x, positions) = Attention(shared), batch()
    loss = step(model, x, positions, torch.arange(S))
    return loss, [p.grad for p in model.parameters()]


def _train(rank, shared, balancer, recompute):
    model, (x, positions) = Attention(shared), batch()
    inner = model.forward
    if recompute:
        model.forward = lambda *args: checkpoint(inner, *args, use_reentrant=False)
    context = CONTEXTS[shared](
        _mesh(), buffers=[x, positions], buffer_seq_dims=[1, -1], load_balancer=BALANCERS[balancer]
    )
    counts = []
    for _ in range(2):  # the same context for the next batch
        model.zero_grad()
        with context as cp, CommDebugMode() as comm:
            assert current_context() is cp
            assert x.shape == (B, S // dist.get_world_size(), H * D)
            loss = step(model, x, positions, cp.index)
        counts.append({str(op): n for op, n in comm.get_comm_counts().items()})
    assert current_context() is None
    assert torch.equal(x, batch()[0]) and torch.equal(positions, batch()[1])
    grads = [p.grad for p in model.parameters()]
    for value in (loss, *grads):
        dist.all_reduce(value)
    assert counts[0] == counts[1]
    return loss.item(), [g.numpy() for g in grads], counts[0]


CASES = [
    (shared, balancer, recompute)
    for shared in (True, False)
    for balancer in BALANCERS
    for recompute in (False, True)
    if not (recompute and balancer == "contiguous")
]


def _train_all(rank):
    return {case: _train(rank, *case) for case in CASES}


@pytest.fixture(scope="module", params=[2, 4])
def trained(request):
    return run_ranks(_train_all, request.param)


@pytest.mark.parametrize(("shared", "balancer", "recompute"), CASES)
def test_ranks_equal_one_process(trained, shared, balancer, recompute):
    expected_loss, expected = one_process(shared)
    for result in trained:
        loss, grads, counts = result[shared, balancer, recompute]
        assert abs(loss - expected_loss) < 1e-14 * abs(expected_loss) * S
        for actual, wanted in zip(grads, expected, strict=True):
            # A bias of keys has no gradient but rounding: nothing of its size to compare with.
            assert (torch.from_numpy(actual) - wanted).norm() < 1e-13 * max(wanted.norm(), 1e-2)
        once = 2 if recompute else 1  # the forward's run again
        if shared:  # keys and values in one collective
            assert counts == {
                "c10d._allgather_base_": once, "c10d._reduce_scatter_base_": 1
            }  # fmt: skip
        else:  # q, k, v there, out back; and the gradients of the four
            # The way back saves nothing for its gradient, so a recomputation ends before it.
            assert counts == {"c10d.alltoall_base_": 8 + 3 * (once - 1)}


def _gather(rank):
    mesh, R = _mesh(), dist.get_world_size()
    whole = torch.arange(3 * 8 * 2 * 5.0).view(3, 8, 2, 5)
    found = {}
    for balancer in (HeadTail(), Contiguous()):
        index = balancer.order(8, R).chunk(R)[rank]
        for dim in (1, -3):
            x = whole[:, index].transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
            y = gather_sequence(x, mesh, dim, balancer)
            assert torch.equal(y, whole)
            # Used twice, and with a gradient that is a permuted view of another one.
            weight = (whole + rank).transpose(0, 3).contiguous().transpose(0, 3)
            ((y * weight).sum() + y.square().sum()).backward()
            total = sum((whole + r) + 2 * whole for r in range(R))
            assert torch.equal(x.grad, total[:, index])
            # The gradient of an expanded scalar.
            x.grad = None
            gather_sequence(x, mesh, dim, balancer).sum().backward()
            assert torch.equal(x.grad, torch.full_like(x, R))
        a, b = whole[:, index, 0].requires_grad_(), whole[:, index].bfloat16().float()
        c = whole[:, index, 0, 0]
        for got, wanted in zip(
            gather_sequences((a, b, c), mesh, 1, balancer),
            (whole[:, :, 0], whole, whole[:, :, 0, 0]),
            strict=True,
        ):
            assert torch.equal(got, wanted)
        d_a = torch.autograd.grad(gather_sequences((a, b, c), mesh, 1, balancer)[0].sum(), a)[0]
        assert torch.equal(d_a, torch.full_like(a, R))
        half = whole[:, index].bfloat16().requires_grad_()
        assert gather_sequence(half, mesh, 1, balancer).dtype == torch.bfloat16
        found[type(balancer).__name__] = index.tolist()
    return found


def test_gathering():
    results = run_ranks(_gather, 4)
    assert [r["HeadTail"] for r in results] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert [r["Contiguous"] for r in results] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def _errors(rank):
    mesh = _mesh()
    said = []

    def attempt(function):
        try:
            function()
        except (ValueError, TypeError, RuntimeError) as error:
            said.append(str(error))

    x, y = torch.zeros(2, 8), torch.zeros(8)
    arguments = {"buffers": [x, y], "buffer_seq_dims": [1, 0]}

    def make(**changes):
        return DSAContextParallelContext(mesh, **arguments | changes)

    with CommDebugMode() as comm:
        attempt(lambda: make(buffer_seq_dims=[1]))
        attempt(lambda: make(buffers=[], buffer_seq_dims=[]))
        attempt(lambda: make(buffer_seq_dims=[1, 1]))
        attempt(lambda: make(buffers=[x, torch.zeros(6)]))
        attempt(lambda: make(buffers=[x, torch.zeros(8, requires_grad=True)]))
        attempt(lambda: make(buffers=[x, x], buffer_seq_dims=[1, 1]))
        attempt(lambda: make(no_restore_buffers=[torch.zeros(3)]))
        attempt(lambda: make(buffers=[torch.zeros(6)], buffer_seq_dims=[0]))
        attempt(lambda: make(buffers=[torch.zeros(3)], buffer_seq_dims=[0],
                             load_balancer=Contiguous()))  # fmt: skip
        square = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
        attempt(lambda: DSAContextParallelContext(square, **arguments))
        attempt(lambda: DSAContextParallelContext("cp", **arguments))
        context = make()
        attempt(lambda: context.gather_keys(torch.zeros(1, 8, 3)))
        attempt(lambda: context.gather_keys(torch.zeros(1, 4, 3), torch.zeros(1, 4, 3).half()))
        attempt(lambda: context.gather_keys(torch.zeros(1, 4, 3), torch.zeros(2, 4, 3)))
        ulysses = UlyssesContextParallelContext(mesh, **arguments)
        attempt(lambda: ulysses.to_heads(torch.zeros(1, 4, 3, 2)))
        attempt(lambda: ulysses.to_heads(torch.zeros(1, 4, 2)))
        attempt(lambda: ulysses.to_heads(torch.zeros(1, 8, 2, 2)))
        attempt(lambda: ulysses.to_sequence(torch.zeros(1, 4, 2, 2)))
        with context:
            attempt(context.__enter__)
    assert comm.get_total_counts() == 0
    return said


def test_bad_input():
    first, second = run_ranks(_errors, 2)
    assert first == second
    expected = [
        "buffer_seq_dims: got 1 dimensions for 2 buffers",
        "buffers: got none; expected at least one tensor",
        "buffer_seq_dims[1]: got 1 for shape (8,)",
        "buffers[1]: got a sequence of 6 (dimension 0); expected 8, as buffers[0] has",
        "buffers[1]: it requires gradients",
        "buffers[1]: the same tensor is in buffers twice",
        "no_restore_buffers: got a tensor of shape (3,) that is not one of buffers",
        "buffers: got a sequence of 6; load_balancer HeadTail needs a multiple of 4 (pad to 4 or",
        "buffers: got a sequence of 3; load_balancer Contiguous needs a multiple of 2",
        "mesh: got 2 dimensions ('dp', 'cp'); expected the one that shares the sequence",
        "mesh: got str; expected a DeviceMesh",
        "tensors[0]: got 8 rows; expected 4, a rank's share of 8",
        "tensors[1]: got torch.float16; expected torch.float32, as tensors[0] is",
        "tensors[1]: got shape (2, 4, 3); expected it to start with (1, 4), as tensors[0] does",
        "x: got H=3 heads; expected a multiple of 2, the number of ranks",
        "x: got shape (1, 4, 2); expected [B, L, H, D]",
        "x: got 8 rows; expected 4, a rank's share of 8",
        "x: got 4 rows; expected 8, all of them",
        "this context is open already",
    ]
    assert len(first) == len(expected)
    for said, wanted in zip(first, expected, strict=True):
        assert said.startswith(wanted), said


def _restoring(rank):
    mesh = _mesh()
    x, kept = torch.arange(8.0), torch.arange(8)
    storage = x.data_ptr()
    context = CustomContextParallelContext(
        mesh, buffers=[x, kept], buffer_seq_dims=[0, 0], no_restore_buffers=[kept]
    )
    try:
        with context:
            inside = x.clone()
            raise KeyError("a fault of the step")
    except KeyError:
        pass
    assert torch.equal(inside, context.index.float()) and torch.equal(kept, context.index)
    assert torch.equal(x, torch.arange(8.0)) and x.data_ptr() == storage
    assert current_context() is None
    with pytest.raises(RuntimeError, match="used up"):
        context.__enter__()
    outer = CustomContextParallelContext(mesh, buffers=[x], buffer_seq_dims=[0])
    y = torch.arange(8)
    with outer, CustomContextParallelContext(mesh, buffers=[y], buffer_seq_dims=[0]) as inner:
        assert current_context() is inner
    return True


def test_buffers_come_back():
    assert run_ranks(_restoring, 2) == [True, True]

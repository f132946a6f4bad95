import pytest
import torch

from titan_custom_cp import Contiguous, HeadTail
from titan_custom_cp.collectives import Order


def cells(balancer, length, ranks):
    """Keys that the causal queries of each rank see."""
    return [(shard + 1).sum().item() for shard in balancer.order(length, ranks).chunk(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("balancer", [HeadTail(), Contiguous()])
def test_every_row_is_somewhere_once(balancer, ranks):
    order = balancer.order(96, ranks)
    assert torch.equal(order.sort().values, torch.arange(96))
    # Inside of a rank, rows stay in order: what is causal stays so.
    assert all(torch.equal(shard, shard.sort().values) for shard in order.chunk(ranks))


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_head_tail_shares_causal_work_equally(ranks):
    assert len(set(cells(HeadTail(), 4096, ranks))) == 1


def test_contiguous_gives_the_last_rank_most():
    first, *_, last = cells(Contiguous(), 4096, 4)
    assert last / first == pytest.approx(7, rel=0.01)


@pytest.mark.parametrize(
    ("balancer", "length", "message"),
    [
        (
            HeadTail(),
            100,
            r"a sequence of 100; load_balancer HeadTail needs a multiple of 8 .*96 or",
        ),
        (HeadTail(), 4, r"sequence of 4; .* multiple of 8 \(pad to 8\)"),
        (Contiguous(), 99, r"sequence of 99; load_balancer Contiguous needs a multiple of 4"),
    ],
)
def test_lengths_that_do_not_divide(balancer, length, message):
    with pytest.raises(ValueError, match=message):
        balancer.order(length, 4)


class Repeats:
    def order(self, length, ranks):
        return torch.zeros(length, dtype=torch.int64)


@pytest.mark.parametrize(
    ("balancer", "error", "message"),
    [
        (HeadTail, TypeError, r"load_balancer: got <class .*e.g. HeadTail\(\)"),
        ("headtail", TypeError, "load_balancer: got 'headtail'"),
        (Repeats(), ValueError, "order of Repeats for 8 rows is no permutation"),
    ],
)
def test_what_is_no_order_is_refused(balancer, error, message):
    with pytest.raises(error, match=message):
        Order.of(balancer, 8, 2)

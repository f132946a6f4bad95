import pytest
import torch

from npu_dsa_kernels import causal_bounds


def test_one_document_is_causal():
    bounds = causal_bounds(torch.arange(5).expand(2, 5))
    assert bounds.dtype == torch.int32
    assert bounds.shape == (2, 5, 2)
    assert bounds[1].tolist() == [[0, 1], [0, 2], [0, 3], [0, 4], [0, 5]]


def test_packed_documents_start_anew():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
    assert causal_bounds(positions)[0].tolist() == [[0, 1], [0, 2], [0, 3], [3, 4], [3, 5], [5, 6]]


@pytest.mark.parametrize("per_row", [False, True])
def test_global_index_of_a_context_parallel_shard(per_row):
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    head_tail = torch.tensor([0, 1, 6, 7])
    index = head_tail.expand(1, 4) if per_row else head_tail
    shard = causal_bounds(positions[:, head_tail], index=index)
    assert torch.equal(shard, causal_bounds(positions)[:, head_tail])


def test_position_minus_one_hides_the_row():
    bounds = causal_bounds(torch.tensor([[0, 1, -1, -1]]))
    lo, hi = bounds[0].unbind(-1)
    assert (lo[2:] == hi[2:]).all()
    assert (lo[:2] < hi[:2]).all()


def test_document_that_began_before_the_row():
    assert causal_bounds(torch.tensor([[7, 8, 0]]))[0].tolist() == [[0, 1], [0, 2], [2, 3]]


def test_empty_row():
    assert causal_bounds(torch.zeros(1, 0, dtype=torch.int64)).shape == (1, 0, 2)


@pytest.mark.parametrize(
    ("positions", "index", "message"),
    [
        (torch.arange(4), None, r"positions: got shape \(4,\)"),
        (torch.zeros(1, 4), None, r"positions: got torch.float32; expected int32 or int64"),
        (torch.zeros(1, 4, dtype=torch.int64), torch.arange(3), r"index: got shape \(3,\)"),
        (torch.zeros(1, 4, dtype=torch.int64), torch.zeros(2, 4).long(), r"index: got shape"),
        (torch.zeros(1, 4, dtype=torch.int64), torch.zeros(4), r"index: got torch.float32"),
        (
            torch.zeros(1, 4, dtype=torch.int64),
            torch.zeros(4, dtype=torch.int64, device="meta"),
            r"index: got device meta; expected cpu",
        ),
    ],
)
def test_bad_input(positions, index, message):
    with pytest.raises(ValueError, match=message):
        causal_bounds(positions, index=index)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_numbers_near_the_end_of_int32_do_not_wrap(dtype):
    top = 2**31 - 1
    positions = torch.tensor([[0, top, -top - 1]], dtype=dtype)
    bounds = causal_bounds(positions, index=torch.tensor([top, 5, 5], dtype=dtype))
    # Nothing of the first is left below 2^31; the last has a position below 0, which hides it.
    assert bounds.tolist() == [[[top, top], [0, 6], [6, 6]]]

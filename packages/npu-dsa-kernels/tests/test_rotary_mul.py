import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import base_definitions as definition
from base_definitions import assert_follows, assert_rounds_less_than, values_and_gradients
from dsa_definitions import assert_close, leaves
from npu_dsa_kernels import rotary_mul


def tables(angles, interleaved):
    twice = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    return twice.cos(), twice.sin()


def sample(B=2, S=5, H=3, D=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, S, H, D, generator=g)
    return x, 6 * torch.rand(B, S, D // 2, generator=g, dtype=torch.float64)


@pytest.fixture(params=[False, True], ids=["half", "interleaved"])
def interleaved(request):
    return request.param


@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4)),
    per_row=st.booleans(),
    turned=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_values_and_gradients(sizes, per_row, turned, seed):
    B, S, H, half = sizes
    x, angles = sample(B, S, H, 2 * half, seed)
    if not per_row:
        angles = angles[:1].expand(B, S, half)
    cos, sin = tables(angles if per_row else angles[0], turned)
    assert_follows(
        lambda x, backend: rotary_mul(x, cos, sin, interleaved=turned, backend=backend),
        lambda x: definition.rotary_mul(x, angles, turned),
        [x],
    )


def test_the_two_layouts_are_the_same_turn_of_other_pairs(backend):
    x, angles = sample()
    half = rotary_mul(x, *tables(angles, False), backend=backend)
    order = torch.arange(8).view(2, 4).T.flatten()  # 0 4 1 5 2 6 3 7: partners side by side
    turned = rotary_mul(x[..., order], *tables(angles, True), interleaved=True, backend=backend)
    assert_close(turned, half[..., order], 1e-7)
    # And not the same function: what half a dozen indexers got wrong.
    wrong = rotary_mul(x, *tables(angles, True), interleaved=True, backend=backend)
    assert (wrong - half).abs().max() > 0.1


def test_scores_depend_on_the_distance_alone(backend, interleaved):
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).unbind(0)
    frequency = 10000.0 ** -(torch.arange(4) / 4)

    def at(x, position):
        table = tables(torch.tensor([position]).double()[:, None] * frequency, interleaved)
        return rotary_mul(x, *table, interleaved=interleaved, backend=backend)

    near = (at(q, 7) * at(k, 3)).sum()
    assert_close((at(q, 1007) * at(k, 1003)).sum(), near, 1e-11)
    assert (at(q, 8) * at(k, 3)).sum() != near


def test_tables_need_not_be_pairs(backend, interleaved):
    # Not a rotation then, but the formula all the same, and its transpose in the backward.
    x, _ = sample()
    cos, sin = torch.randn(2, 5, 8).double(), torch.randn(2, 5, 8).double()

    def formula(x):
        partner = torch.arange(8).view(-1, 2).flip(1).flatten()
        sign = torch.tensor([-1.0, 1.0]).repeat(4)
        if not interleaved:
            partner, sign = torch.arange(8).roll(4), sign.view(4, 2).T.flatten()
        return x * cos[:, :, None] + x[..., partner] * sign * sin[:, :, None]

    actual = values_and_gradients(
        lambda x: rotary_mul(x, cos, sin, interleaved=interleaved, backend=backend), [x.double()]
    )
    for a, e in zip(actual, values_and_gradients(formula, [x.double()]), strict=True):
        assert_close(a, e, 1e-14)


def test_gradcheck_and_second_derivatives(backend, interleaved):
    x, angles = sample(1, 2, 2, 4)
    x = x.double().requires_grad_()
    cos, sin = tables(angles, interleaved)

    def f(x):
        return rotary_mul(x, cos, sin, interleaved=interleaved, backend=backend)

    assert torch.autograd.gradcheck(f, (x,))
    assert torch.autograd.gradgradcheck(lambda x: f(x).sin(), (x,))


def eager(interleaved, cos, sin):
    cos, sin = cos.bfloat16().unsqueeze(2), sin.bfloat16().unsqueeze(2)

    def f(x):
        if interleaved:
            rotated = torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)
        else:
            rotated = torch.cat([-x[..., 4:], x[..., :4]], -1)
        return x * cos + rotated * sin

    return f


def test_half_precision(interleaved):
    x, angles = sample(2, 16)
    cos, sin = tables(angles.float(), interleaved)
    assert_rounds_less_than(
        eager(interleaved, cos, sin),
        lambda x, backend: rotary_mul(x, cos, sin, interleaved=interleaved, backend=backend),
        lambda x: definition.rotary_mul(x, angles, interleaved),
        [x],
    )


def test_non_contiguous(backend, interleaved):
    x, angles = sample()
    cos, sin = tables(angles, interleaved)
    (x_plain,) = leaves(x)
    expected = rotary_mul(x_plain, cos, sin, interleaved=interleaved, backend=backend)
    wide = torch.cat([x, x], -1).transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    strided = [t.mT.contiguous().mT for t in (cos, sin)]
    y = rotary_mul(wide[..., 8:], *strided, interleaved=interleaved, backend=backend)
    assert torch.equal(y, expected)
    (d_wide,) = torch.autograd.grad(y.sum(), wide)
    (d_x,) = torch.autograd.grad(expected, x_plain, torch.ones_like(expected))
    assert torch.equal(d_wide[..., 8:], d_x)
    assert (d_wide[..., :8] == 0).all()


@pytest.mark.parametrize("shape", [(0, 4, 2, 6), (2, 0, 2, 6), (2, 4, 0, 6), (2, 4, 2, 0)])
def test_empty(backend, interleaved, shape):
    x = torch.zeros(shape, requires_grad=True)
    angle = torch.zeros(shape[1], shape[3])
    y = rotary_mul(x, angle, angle, interleaved=interleaved, backend=backend)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape


X, COS = torch.randn(2, 5, 3, 8), torch.randn(5, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": X[0]}, r"x: got shape \(5, 3, 8\); expected 4 dimensions \[B, S, H, D\]"),
        ({"x": X.long()}, r"x: got torch.int64; expected float64"),
        ({"x": X[..., :7]}, r"x: got shape \(2, 5, 3, 7\); expected an even last dimension D"),
        ({"cos": COS[:4]}, r"cos: got shape \(4, 8\); expected \[S=5, D=8\]"),
        ({"cos": COS[:, :4]}, r"cos: got shape \(5, 4\); expected \[S=5, D=8\]"),
        ({"sin": COS.expand(3, 5, 8)}, r"sin: got shape \(3, 5, 8\); expected \[B=2, S=5, D=8\]"),
        ({"sin": COS[0]}, r"sin: got shape \(8,\); expected 3 dimensions"),
        ({"sin": COS.int()}, r"sin: got torch.int32; expected float64"),
        ({"sin": COS.to("meta")}, r"sin: got device meta; expected cpu, where x is"),
        (
            {"cos": COS.clone().requires_grad_()},
            r"cos: got a tensor that requires grad; angles have no gradient; pass cos.detach\(\)",
        ),
        ({"sin": COS.clone().requires_grad_()}, r"sin: got a tensor that requires grad"),
        ({"interleaved": "half"}, r"interleaved: got 'half'; expected True or False"),
        ({"backend": "fast"}, r"backend: got 'fast'; expected one of reference"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        rotary_mul(**{"x": X, "cos": COS, "sin": COS} | change)

"""One matmul per group of rows: all experts of a layer in one call."""

import torch
from torch import Tensor

from npu_dsa_kernels import checks
from npu_dsa_kernels.backends import kernels, reference, resolve
from npu_dsa_kernels.backends.precision import no_autocast
from npu_dsa_kernels.ops._autograd import no_forward_mode, once_differentiable

# N rows, G groups, I input features, O output features


def grouped_matmul(
    x: Tensor,
    weight: Tensor,
    *,
    counts: Tensor | None = None,
    offsets: Tensor | None = None,
    backend: str | None = None,
    validate: bool = False,
) -> Tensor:
    """``x[start_g : end_g] @ weight[g]`` for every group g of consecutive rows.

    Differentiable in `x` and `weight`. Group sizes are tensors, so shapes do not depend on them: a
    group may be empty (zero gradient of its weight), and rows beyond the last group give zeros and
    get zero gradients, without being read.

    Args:
        x: [N, I], sorted by group; float64, float32, bfloat16 or float16.
        weight: [G, I, O], of the same dtype.
        counts: int32 or int64 [G], rows of each group; or
        offsets: int32 or int64 [G], the row where each group ends (the running sum of counts).
        backend: see `backends`.
        validate: check the values of `counts` or `offsets` too (synchronises with the device).
            Otherwise wrong values give a wrong result, but reach no memory beyond `x`.

    Returns:
        [N, O] in the dtype of `x`; products are summed in float32 at least.

    Raises:
        ValueError: wrong shape, dtype or device, both or neither of `counts` and `offsets`, groups
            of negative size or of more than N rows (with `validate`), unknown backend.
        RuntimeError: at a double backward through any backend but "reference".
    """
    checks.tensor("x", x, "N I")
    checks.floating("x", x)
    N, I = x.shape
    checks.tensor("weight", weight, "G I O")
    checks.dtype("weight", weight, (x.dtype,), ", the dtype of x")
    checks.not_empty("weight", weight, G=0)
    G, _, O = weight.shape
    checks.shape("weight", weight, G=G, I=I, O=O)
    if counts is not None and offsets is None:
        given, groups = "counts", counts
    elif offsets is not None and counts is None:
        given, groups = "offsets", offsets
    else:
        got = "neither it nor offsets" if counts is None else "both it and offsets"
        raise checks.bad("counts", got, "expected one of the two")
    checks.group_ends(given, groups, G, N, validate=validate)
    checks.same_device("x", x, weight=weight, **{given: groups})
    ends = _ends(groups, N, cumulative=given == "offsets")
    name = resolve(backend, x.device)
    if name == "reference":
        with no_autocast(x):
            return reference.grouped_matmul(x, weight, ends)
    no_forward_mode("grouped_matmul", x, weight)
    return _grouped_matmul(x, weight, ends, name)


def _ends(groups: Tensor, N: int, *, cumulative: bool) -> Tensor:
    """int64 [G], never falling and within [0, N] whatever was given."""
    groups = groups.long().clamp(0, N)
    return groups.cummax(0).values if cumulative else groups.cumsum(0).clamp(max=N)


@torch.library.custom_op("npu_dsa::grouped_matmul", mutates_args=())
def _grouped_matmul(x: Tensor, weight: Tensor, ends: Tensor, backend: str) -> Tensor:
    """`ends`: int64 [G], never falling and within [0, N]."""
    with no_autocast(x):
        return kernels(backend).grouped_matmul(x, weight, ends)


@_grouped_matmul.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, backend: str) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op("npu_dsa::grouped_matmul_backward", mutates_args=())
def _grouped_matmul_backward(
    d_y: Tensor, x: Tensor, weight: Tensor, ends: Tensor, backend: str
) -> tuple[Tensor, Tensor]:
    with no_autocast(x):
        return kernels(backend).grouped_matmul_backward(d_y, x, weight, ends)


@_grouped_matmul_backward.register_fake
def _(d_y: Tensor, x: Tensor, weight: Tensor, ends: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _setup_context(ctx, inputs, output) -> None:
    x, weight, ends, ctx.backend = inputs
    ctx.save_for_backward(x, weight, ends)


def _backward(ctx, d_y: Tensor):
    dx, dw = _grouped_matmul_backward(d_y, *ctx.saved_tensors, ctx.backend)
    return dx, dw, None, None


_grouped_matmul.register_autograd(_backward, setup_context=_setup_context)
once_differentiable(_grouped_matmul_backward, "grouped_matmul")

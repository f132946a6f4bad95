"""Tokens to experts and back, and the experts' matrix products.

**Tokens stay where they are.** Where tokens are sharded, each rank permutes its own: row numbers
are those of the rank, and the permuted tokens are, rank by rank, sorted by expert. Counts of an
expert's rows are then a sum over ranks, and a product of such rows takes exactly that: `Partial`
group sizes are those of the rank's own rows.

**Experts stay where they are.** Weights sharded by expert go with rows and group sizes sharded in
the same way: a rank's rows are those of its experts.

Neither is undone without being asked for, since the gathered rows would be in another order.
"""

from collections.abc import Callable, Iterator

from torch.distributed.tensor import Partial, Replicate, Shard

from dtensor_npu_strategies.rules import Arguments, Rule, linear, operator, sharded

# N tokens or rows, M rows of the permuted tokens, D features, k experts of a token
# E experts, I input features, O output features

ROWS, COLUMNS, SUM, SAME = Shard(0), Shard(1), Partial(), Replicate()

WHY_GROUPS = (
    "Rows sharded over ranks need group sizes of the rank's own rows: Partial where each rank has "
    "rows of all experts, Shard(0) where weight is sharded by expert. Nothing is gathered instead; "
    "redistribute if the rows are sorted over all ranks."
)
WHY_ROWS = (
    "Row numbers of sharded tokens are those of each rank, and cannot be gathered: keep the rows "
    "they belong to sharded in the same way."
)
GROUPED = {"x": 0, "weight": 0, "ends": None}


@operator("npu_dsa::grouped_matmul", group="moe", pinned=GROUPED, why_pinned=WHY_GROUPS)
def grouped_matmul(a: Arguments) -> Iterator[Rule]:
    yield from sharded(a, "x:NI weight:EIO ends:E -> NO", "IO")
    yield Rule({"x": ROWS, "ends": SUM}, (ROWS,))
    yield Rule({"x": ROWS, "weight": ROWS, "ends": ROWS}, (ROWS,))
    yield linear(["x"], True)
    yield linear(["weight"], True)


@operator("npu_dsa::grouped_matmul_backward", group="moe", pinned=GROUPED, why_pinned=WHY_GROUPS)
def grouped_matmul_backward(a: Arguments) -> Iterator[Rule]:
    yield from sharded(a, "d_y:NO x:NI weight:EIO ends:E -> NI EIO", "IO")
    yield Rule({"d_y": ROWS, "x": ROWS, "ends": SUM}, (ROWS, SUM))
    yield Rule({"d_y": ROWS, "x": ROWS, "weight": ROWS, "ends": ROWS}, (ROWS, ROWS))
    yield linear(["d_y"], True, True)
    yield linear(["x"], False, True)
    yield linear(["weight"], True, False)
    yield linear(["x", "weight"], True, True)


@operator(
    "npu::npu_grouped_matmul", "npu::npu_grouped_matmul.List", group="moe",
    pinned={"x": 0, "weight": 0, "group_list": None}, why_pinned=WHY_GROUPS,
)  # fmt: skip
def npu_grouped_matmul(a: Arguments) -> Iterator[Rule]:
    """Group type 0: y = x @ weight by groups of rows. Type 2: y[e] = x[:, e] @ weight[e]."""
    many = len(a.weight) if a.split_item in (0, 1) else 1
    yield Rule({}, (SAME,) * many)
    plain = all(
        getattr(a, name) is None
        for name in (
            "bias", "scale", "offset", "antiquant_scale", "antiquant_offset", "per_token_scale",
            "activation_input", "activation_quant_scale", "activation_quant_offset",
        )
    )  # fmt: skip
    if not plain or a.act_type:
        return
    counts = hasattr(a.group_list, "shape")  # and not the host's, the same on all ranks
    if a.group_type == 2 and len(a.x) == len(a.weight) == 1:
        yield from sharded(a, "x:IN weight:NO group_list:E -> EIO", "IO")
        if counts:
            yield Rule({"x": COLUMNS, "weight": ROWS, "group_list": SUM}, (SUM,))
            yield Rule({"x": COLUMNS, "weight": ROWS, "group_list": ROWS}, (ROWS,))
    elif a.group_type in (0, -1, None):
        one_weight = a.ndim("weight") == 3
        weight = "EIO" if one_weight else "IO"
        outputs = " ".join(["NO"] * many)
        yield from sharded(a, f"x:NI weight:{weight} group_list:E -> {outputs}", "IO")
        if one_weight and counts and a.group_type == 0:
            yield Rule({"x": ROWS, "group_list": SUM}, (ROWS,))
            yield Rule({"x": ROWS, "weight": ROWS, "group_list": ROWS}, (ROWS,))
    else:
        return
    yield linear(["x"], *[True] * many)
    yield linear(["weight"], *[True] * many)


@operator("npu::npu_grouped_matmul_add_", group="moe",
          pinned={"x": 0, "weight": 0, "group_list": None}, why_pinned=WHY_GROUPS)  # fmt: skip
def npu_grouped_matmul_add_(a: Arguments) -> Iterator[Rule]:
    """input[e] += x[e].T @ weight[e] by groups of rows."""
    if not a.transpose_x or a.transpose_weight or a.group_type != 2:
        return
    if a.ndim("input") == 3:
        yield from sharded(a, "input:EIO x:NI weight:NO group_list:E -> EIO", "IO")
    else:
        yield from sharded(a, "input:_O x:NI weight:NO group_list:E -> _O", "O")
    yield Rule({"input": SUM, "x": ROWS, "weight": ROWS, "group_list": SUM}, (SUM,))
    yield Rule({"input": ROWS, "x": ROWS, "weight": ROWS, "group_list": ROWS}, (ROWS,))
    yield linear(["input", "x"], True)
    yield linear(["input", "weight"], True)


# --- permutation, npu_dsa ------------------------------------------------------------------------

Share = Callable[[str, int], int]


def _all_slots(a: Arguments) -> bool:
    """Whether every slot has a row: else a rank's number of rows is not known."""
    slots = a.experts.shape[0] * a.experts.shape[1]
    return a.num_out_tokens == slots


def _rows_out(a: Arguments, share: Share) -> dict[str, int]:
    if not _all_slots(a):
        return {}
    N, k = a.experts.shape
    return {"num_out_tokens": share("experts", N) * k}


@operator("npu_dsa::moe_permute", group="moe", local_values=_rows_out)
def moe_permute(a: Arguments) -> Iterator[Rule]:
    yield from sharded(a, "tokens:ND experts:Nk probs:Nk -> MD =M =Nk =E", "D")
    if _all_slots(a):
        probs = {} if a.probs is None else {"probs": ROWS}
        outputs = (ROWS, ROWS if probs else SAME, ROWS, SUM)
        yield Rule({"tokens": ROWS, "experts": ROWS, **probs}, outputs)
    yield linear(["tokens"], True, False, False, False)


@operator("npu_dsa::moe_permute_backward", group="moe", pinned={"rows": 0}, why_pinned=WHY_ROWS)
def moe_permute_backward(a: Arguments) -> Iterator[Rule]:
    yield from sharded(a, "d_tokens:MD d_probs:M rows:Nk -> ND =Nk", "D")
    probs = {} if a.d_probs is None else {"d_probs": ROWS}
    yield Rule({"d_tokens": ROWS, "rows": ROWS, **probs}, (ROWS, ROWS if probs else SAME))
    yield linear(["d_tokens"], True, False)
    if probs:
        yield linear(["d_tokens", "d_probs"], True, True)


@operator("npu_dsa::moe_unpermute", group="moe", pinned={"rows": 0}, why_pinned=WHY_ROWS)
def moe_unpermute(a: Arguments) -> Iterator[Rule]:
    yield from sharded(a, "x:MD rows:Nk probs:Nk -> ND", "D")
    probs = {} if a.probs is None else {"probs": ROWS}
    yield Rule({"x": ROWS, "rows": ROWS, **probs}, (ROWS,))
    yield linear(["x"], True)


def _rows_in(a: Arguments, share: Share) -> dict[str, int]:
    N, k = a.rows.shape
    return {"num_rows": share("rows", N) * k} if a.num_rows == N * k else {}


@operator(
    "npu_dsa::moe_unpermute_backward", group="moe", pinned={"rows": 0}, why_pinned=WHY_ROWS,
    local_values=_rows_in,
)  # fmt: skip
def moe_unpermute_backward(a: Arguments) -> Iterator[Rule]:
    N, k = a.rows.shape
    d_probs = "=Nk" if a.probs is None else "Nk"
    yield from sharded(a, f"d_y:ND x:MD rows:Nk probs:Nk -> MD {d_probs}", "D")
    if a.num_rows == N * k:
        given = {name: ROWS for name in ("x", "probs") if getattr(a, name) is not None}
        outputs = (ROWS, SAME if a.probs is None else ROWS)
        yield Rule({"d_y": ROWS, "rows": ROWS, **given}, outputs)
    yield linear(["d_y"], True, a.probs is not None)


# --- permutation, torch_npu ----------------------------------------------------------------------


def _npu_all_slots(a: Arguments) -> bool:
    slots = a.indices.shape[0] * (a.indices.shape[1] if len(a.indices.shape) == 2 else 1)
    return not a.padded_mode and a.num_out_tokens in (None, 0, slots)


def _npu_rows_out(a: Arguments, share: Share) -> dict[str, int]:
    if a.num_out_tokens in (None, 0) or not _npu_all_slots(a):
        return {}
    N = a.indices.shape[0]
    return {"num_out_tokens": share("indices", N) * (a.num_out_tokens // N)}


@operator("npu::npu_moe_token_permute", group="moe", local_values=_npu_rows_out)
def npu_moe_token_permute(a: Arguments) -> Iterator[Rule]:
    indices = "Nk"[: a.ndim("indices")]
    yield from sharded(a, f"tokens:ND indices:{indices} -> MD =M", "D")
    if _npu_all_slots(a):
        yield Rule({"tokens": ROWS, "indices": ROWS}, (ROWS, ROWS))
    yield linear(["tokens"], True, False)


NUMBERED = {"pinned": {"sorted_indices": 0}, "why_pinned": WHY_ROWS}


def _npu_tokens(a: Arguments, share: Share) -> dict[str, int]:
    # As many as the forward's tokens had: not always those of a shard of the permuted rows.
    return {"tokens_size_0": share("sorted_indices", a.tokens_size_0)}


@operator("npu::npu_moe_token_permute_grad_v2", group="moe", local_values=_npu_tokens, **NUMBERED)
def npu_moe_token_permute_grad_v2(a: Arguments) -> Iterator[Rule]:
    yield from sharded(a, "grad_permuted_tokens:MD sorted_indices:M -> ND", "D")
    if not a.padded_mode:
        yield Rule({"grad_permuted_tokens": ROWS, "sorted_indices": ROWS}, (ROWS,))
    yield linear(["grad_permuted_tokens"], True)


@operator("npu::npu_moe_token_unpermute", group="moe", **NUMBERED)
def npu_moe_token_unpermute(a: Arguments) -> Iterator[Rule]:
    yield from _npu_unpermute(a, 1)


@operator("npu::_npu_moe_token_unpermute", group="moe", **NUMBERED)
def npu_moe_token_unpermute_and_saved(a: Arguments) -> Iterator[Rule]:
    yield from _npu_unpermute(a, 2)


def _npu_unpermute(a: Arguments, outputs: int) -> Iterator[Rule]:
    dims = " ".join(["ND", "MD"][:outputs])
    yield from sharded(a, f"permuted_tokens:MD sorted_indices:M probs:Nk -> {dims}", "D")
    if not a.padded_mode and a.restore_shape is None:
        probs = {} if a.probs is None else {"probs": ROWS}
        yield Rule({"permuted_tokens": ROWS, "sorted_indices": ROWS, **probs}, (ROWS,) * outputs)
    yield linear(["permuted_tokens"], *[True] * outputs)


def _npu_permuted(a: Arguments, share: Share) -> dict[str, int]:
    N = a.grad_unpermuted_tokens.shape[0]
    k = a.sorted_indices.shape[0] // N
    return {"permuted_tokens_size_0": share("grad_unpermuted_tokens", N) * k}


@operator(
    "npu::npu_moe_token_unpermute_grad_v2", group="moe", local_values=_npu_permuted, **NUMBERED
)
def npu_moe_token_unpermute_grad_v2(a: Arguments) -> Iterator[Rule]:
    d_probs = "=_" if a.probs is None else "Nk"
    inputs = "grad_unpermuted_tokens:ND sorted_indices:M probs:Nk permuted_tokens:MD"
    yield from sharded(a, f"{inputs} -> MD {d_probs}", "D")
    if _npu_even(a):
        given = {n: ROWS for n in ("probs", "permuted_tokens") if getattr(a, n) is not None}
        outputs = (ROWS, SAME if a.probs is None else ROWS)
        yield Rule({"grad_unpermuted_tokens": ROWS, "sorted_indices": ROWS, **given}, outputs)
    yield linear(["grad_unpermuted_tokens"], True, a.probs is not None)


def _npu_even(a: Arguments) -> bool:
    if a.padded_mode or a.restore_shape is not None:
        return False
    rows = a.sorted_indices.shape[0]
    return a.permuted_tokens_size_0 == rows and rows % a.grad_unpermuted_tokens.shape[0] == 0


@operator("npu::npu_moe_token_permute_with_routing_map", group="moe")
def npu_moe_token_permute_with_routing_map(a: Arguments) -> Iterator[Rule]:
    """By features alone: how many rows a rank's tokens give depends on the values of the map."""
    yield from sharded(a, "tokens:ND routing_map:NE probs:NE -> MD =M =M", "D")

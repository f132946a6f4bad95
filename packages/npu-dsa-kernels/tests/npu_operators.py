"""What is stated about torch_npu's operators: their schemas, and the limits of their arguments.

The shape functions of the real operators let almost anything pass, so each call is checked here,
against the public documentation and written apart from the backend's own checks: by the numeric
emulation, and by the contract tests with the real operators.
"""

from types import SimpleNamespace

import torch

INT64_MAX = 9223372036854775807

SCHEMAS = {
    "npu_lightning_indexer": (
        "(Tensor query, Tensor key, Tensor weights, *, Tensor? actual_seq_lengths_query=None, "
        "Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, "
        'str layout_query="BSND", str layout_key="BSND", int sparse_count=2048, '
        "int sparse_mode=3, int pre_tokens=9223372036854775807, "
        "int next_tokens=9223372036854775807, bool return_value=False) -> (Tensor, Tensor)"
    ),
    "npu_sparse_flash_attention": (
        "(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices, float scale_value, *, "
        "Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, "
        "Tensor? actual_seq_lengths_kv=None, Tensor? query_rope=None, Tensor? key_rope=None, "
        'int sparse_block_size=1, str layout_query="BSND", str layout_kv="BSND", '
        "int sparse_mode=3, int pre_tokens=9223372036854775807, "
        "int next_tokens=9223372036854775807, int attention_mode=0, "
        "bool return_softmax_lse=False, Tensor? sinks=None) -> (Tensor, Tensor, Tensor)"
    ),
    "npu_sparse_flash_attention_grad": (
        "(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices, Tensor d_out, "
        "Tensor out, Tensor softmax_max, Tensor softmax_sum, float scale_value, "
        "int sparse_block_size, Tensor? query_rope=None, Tensor? key_rope=None, "
        "Tensor? actual_seq_qlen=None, Tensor? actual_seq_kvlen=None, "
        'str? layout="BSND", int? sparse_mode=3, int? pre_tokens=9223372036854775807, '
        "int? next_tokens=9223372036854775807, int? attention_mode=0) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "npu_sparse_lightning_indexer_grad_kl_loss": (
        "(Tensor query, Tensor key, Tensor query_index, Tensor key_index, Tensor weights, "
        "Tensor sparse_indices, Tensor softmax_max, Tensor softmax_sum, float scale_value, *, "
        "Tensor? query_rope=None, Tensor? key_rope=None, SymInt[]? actual_seq_qlen=None, "
        'SymInt[]? actual_seq_klen=None, str? layout="BSND", int? sparse_mode=3, '
        "int? pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807, "
        "Tensor? sinks=None) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "npu_fusion_attention": (
        "(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, "
        "Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., "
        "float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, "
        "int inner_precise=0, int[]? prefix=None, int[]? actual_seq_qlen=None, "
        "int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, "
        'bool sync=False, str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, '
        "int seed=0, int offset=0) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
    ),
    "npu_fusion_attention_grad": (
        "(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str input_layout, *, "
        "Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, "
        "Tensor? softmax_max=None, Tensor? softmax_sum=None, Tensor? softmax_in=None, "
        "Tensor? attention_in=None, float scale_value=1., float keep_prob=1., "
        "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, "
        "int seed=0, int offset=0, int numels=0, int[]? prefix=None, int[]? actual_seq_qlen=None, "
        "int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, "
        'bool sync=False, str softmax_layout="", Tensor? sink=None) '
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "npu_dense_lightning_indexer_softmax_lse": (
        "(Tensor query_index, Tensor key_index, Tensor weights, *, "
        "SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_klen=None, "
        'str? layout="BSND", int? sparse_mode=3, int? pre_tokens=9223372036854775807, '
        "int? next_tokens=9223372036854775807) -> (Tensor, Tensor)"
    ),
    "npu_dense_lightning_indexer_grad_kl_loss": (
        "(Tensor query, Tensor key, Tensor query_index, Tensor key_index, Tensor weights, "
        "Tensor softmax_max, Tensor softmax_sum, Tensor softmax_max_index, "
        "Tensor softmax_sum_index, float scale_value, *, Tensor? query_rope=None, "
        "Tensor? key_rope=None, SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_klen=None, "
        'str? layout="BSND", int? sparse_mode=3, int? pre_tokens=9223372036854775807, '
        "int? next_tokens=9223372036854775807) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "npu_rms_norm": "(Tensor input, Tensor gamma, float epsilon=1e-6) -> (Tensor, Tensor)",
    "npu_rms_norm_backward": (
        "(Tensor dy, Tensor input, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)"
    ),
    "npu_rotary_mul": (
        '(Tensor input, Tensor r1, Tensor r2, str rotary_mode="half", Tensor? rotate=None) '
        "-> Tensor"
    ),
    "npu_swiglu": "(Tensor input, int dim=-1) -> Tensor",
    "npu_swiglu_backward": "(Tensor grad_output, Tensor input, int dim=-1) -> Tensor",
    "npu_grouped_matmul": (
        "(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, "
        "Tensor[]? offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, "
        "Tensor[]? per_token_scale=None, Tensor? group_list=None, "
        "Tensor[]? activation_input=None, Tensor[]? activation_quant_scale=None, "
        "Tensor[]? activation_quant_offset=None, int? split_item=0, int? group_type=None, "
        "int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, "
        "int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None, "
        "int? scale_dtype=None, int? per_token_scale_dtype=None) -> Tensor[]"
    ),
    "npu_moe_token_permute": (
        "(Tensor tokens, Tensor indices, int? num_out_tokens=None, bool padded_mode=False) "
        "-> (Tensor, Tensor)"
    ),
    "npu_moe_token_permute_grad_v2": (
        "(Tensor grad_permuted_tokens, Tensor sorted_indices, SymInt tokens_size_0, "
        "ScalarType tokens_dtype, SymInt num_topK, bool padded_mode=False) -> Tensor"
    ),
    "npu_moe_token_unpermute": (
        "(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, "
        "bool padded_mode=False, int[]? restore_shape=None) -> Tensor"
    ),
    "npu_moe_token_unpermute_grad_v2": (
        "(Tensor grad_unpermuted_tokens, Tensor sorted_indices, SymInt permuted_tokens_size_0, "
        "ScalarType permuted_tokens_dtype, Tensor? probs=None, bool padded_mode=False, "
        "int[]? restore_shape=None, Tensor? permuted_tokens=None) -> (Tensor, Tensor)"
    ),
}
"""Of torch_npu 2.13 and 2.14."""

HALF = (torch.bfloat16, torch.float16)
FLOATS = (*HALF, torch.float32)

STATED = SimpleNamespace(
    half=HALF,
    latent=512,
    rope=64,
    heads=(1, 2, 4, 8, 16, 32, 64, 128),
    loss_heads=(8, 16, 32, 64, 128),
    dense_heads=(32, 64, 128),
    dense_head_dim=128,
    index_heads=(8, 16, 32, 64),
    index_dim=128,
    slots=2048,
    topk=(*range(1, 2049), *range(3072, 8193, 1024)),
    sequences=256,
)


class NotStated(AssertionError):
    """A call outside of what is stated."""


def bind(name: str, args: tuple, kwargs: dict) -> SimpleNamespace:
    """The call's arguments by name, defaults filled in."""
    schema = torch._C.parse_schema(f"npu::{name}{SCHEMAS[name]}")
    bound = {}
    for i, argument in enumerate(schema.arguments):
        if i < len(args):
            bound[argument.name] = args[i]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            bound[argument.name] = argument.default_value
        else:
            raise NotStated(f"{name}: no {argument.name}")
    return SimpleNamespace(**bound)


def check(name: str, args: tuple, kwargs: dict, stated: SimpleNamespace = STATED) -> None:
    """Raise `NotStated` if the call is outside of the stated limits."""
    a = bind(name, args, kwargs)
    try:
        _CHECKS[name](a, stated)
    except AssertionError as error:
        raise NotStated(f"{name}: {error}") from None


def _want(true: bool, message: str) -> None:
    if not true:
        raise AssertionError(message)


def _tensor(a, name: str, shape: tuple, dtypes: tuple, *, contiguous: bool = True) -> None:
    x = getattr(a, name)
    _want(isinstance(x, torch.Tensor), f"{name} is missing")
    _want(tuple(x.shape) == tuple(shape), f"{name} is {tuple(x.shape)}, not {tuple(shape)}")
    _want(x.dtype in dtypes, f"{name} is {x.dtype}")
    _want(not contiguous or x.is_contiguous(), f"{name} is not contiguous")


def _ends(a, name: str, total: int, stated, *, tensor: bool) -> int:
    ends = getattr(a, name)
    _want(ends is not None, f"{name} is missing")
    if tensor:
        _want(ends.dtype == torch.int32 and ends.dim() == 1, f"{name} is {ends.dtype}")
        count = len(ends)
        ends = None if _fake(ends) else ends.tolist()
    else:
        _want(all(type(x) is int for x in ends), f"{name} is not a list of int")
        count = len(ends)
    _want(0 < count <= stated.sequences, f"{count} sequences")
    if ends is not None:
        _want(ends == sorted(ends) and ends[-1] == total, f"{name} is {ends}, of {total}")
    return count


def _fake(x) -> bool:
    return isinstance(x, torch._subclasses.FakeTensor)


def _rows(a, layout: str, query: str, key: str) -> tuple[tuple, tuple]:
    """The leading dims of queries and keys."""
    _want(layout in ("BSND", "TND"), f"layout {layout}")
    dims = 2 if layout == "BSND" else 1
    q, k = getattr(a, query), getattr(a, key)
    _want(q.dim() == k.dim() == dims + 2, f"{query} is {tuple(q.shape)} in layout {layout}")
    _want(layout == "TND" or q.shape[0] == k.shape[0], f"B of {query} and {key}")
    return tuple(q.shape[:dims]), tuple(k.shape[:dims])


def _no_window(a) -> None:
    _want(a.pre_tokens == a.next_tokens == INT64_MAX, "pre_tokens, next_tokens")


def _lightning_indexer(a, stated) -> None:
    _want(a.layout_key == a.layout_query, f"layouts {a.layout_query} and {a.layout_key}")
    rows, keys = _rows(a, a.layout_query, "query", "key")
    dtype = (a.query.dtype,)
    H = a.query.shape[-2]
    _want(H in stated.index_heads, f"{H} heads")
    _tensor(a, "query", (*rows, H, stated.index_dim), stated.half)
    _tensor(a, "key", (*keys, 1, stated.index_dim), dtype)
    _tensor(a, "weights", (*rows, H), dtype)
    _want(a.sparse_count in stated.topk, f"sparse_count {a.sparse_count}")
    _want(a.sparse_mode in (0, 3), f"sparse_mode {a.sparse_mode}")
    _want(a.block_table is None, "block_table")
    _want(a.return_value, "no values are returned")
    _no_window(a)
    if a.layout_query == "TND":
        count = _ends(a, "actual_seq_lengths_query", rows[0], stated, tensor=True)
        _want(
            _ends(a, "actual_seq_lengths_key", keys[0], stated, tensor=True) == count,
            "as many sequences of keys as of queries",
        )


def _attention(a, stated, rows: tuple, keys: tuple, heads: tuple) -> None:
    dtype = (a.query.dtype,)
    H = a.query.shape[-2]
    _want(H in heads, f"{H} heads")
    _tensor(a, "query", (*rows, H, stated.latent), stated.half)
    _tensor(a, "key", (*keys, 1, stated.latent), dtype)
    _tensor(a, "query_rope", (*rows, H, stated.rope), dtype)
    _tensor(a, "key_rope", (*keys, 1, stated.rope), dtype)
    _tensor(a, "sparse_indices", (*rows, 1, stated.slots), (torch.int32,))
    if not _fake(a.sparse_indices):
        valid = a.sparse_indices >= 0
        _want(bool((valid.int().diff(dim=-1) <= 0).all()), "valid indices are not first")
        _want(bool((a.sparse_indices[~valid] == -1).all()), "empty slots other than -1")


def _statistics(a, rows: tuple) -> None:
    H = a.query.shape[-2]
    shape = (rows[0], 1, rows[1], H) if len(rows) == 2 else (1, rows[0], H)
    _tensor(a, "softmax_max", shape, (torch.float32,))
    _tensor(a, "softmax_sum", shape, (torch.float32,))


def _sparse_flash_attention(a, stated) -> None:
    _want(a.layout_query == a.layout_kv == "BSND", f"layouts {a.layout_query}, {a.layout_kv}")
    rows, keys = _rows(a, a.layout_query, "query", "key")
    _attention(a, stated, rows, keys, stated.heads)
    _want(a.value is not None, "value is missing (CANN before 9.2)")
    _tensor(a, "value", tuple(a.key.shape), (a.query.dtype,))
    _want(a.sparse_mode == 0, f"sparse_mode {a.sparse_mode} masks besides the indices")
    _want(a.attention_mode == 2, f"attention_mode {a.attention_mode}")
    _want(a.sparse_block_size == 1, f"sparse_block_size {a.sparse_block_size}")
    _want(a.return_softmax_lse, "no statistics are returned")
    _want(a.sinks is None and a.block_table is None, "sinks, block_table")
    _no_window(a)


def _sparse_flash_attention_grad(a, stated) -> None:
    _want(a.layout == "BSND", f"layout {a.layout}")
    rows, keys = _rows(a, a.layout, "query", "key")
    _attention(a, stated, rows, keys, stated.heads)
    dtype = (a.query.dtype,)
    _want(a.value is not None, "value is missing (CANN before 9.2)")
    _tensor(a, "value", tuple(a.key.shape), dtype)
    _tensor(a, "d_out", tuple(a.query.shape), dtype)
    _tensor(a, "out", tuple(a.query.shape), dtype)
    _statistics(a, rows)
    _want(a.sparse_mode == 0, f"sparse_mode {a.sparse_mode} masks besides the indices")
    _want(a.attention_mode == 2, f"attention_mode {a.attention_mode}")
    _want(a.sparse_block_size == 1, f"sparse_block_size {a.sparse_block_size}")
    _no_window(a)


def _kl_loss(a, stated) -> None:
    rows, keys = _rows(a, a.layout, "query", "key")
    _attention(a, stated, rows, keys, stated.loss_heads)
    _statistics(a, rows)
    _want(a.sinks is None, "sinks")
    _indexer_of_loss(a, stated, rows, keys, (a.query.dtype,))


def _indexer_of_loss(a, stated, rows: tuple, keys: tuple, dtype: tuple) -> None:
    H = a.query_index.shape[-2]
    _want(H in stated.index_heads, f"{H} index heads")
    _tensor(a, "query_index", (*rows, H, stated.index_dim), dtype)
    _tensor(a, "key_index", (*keys, 1, stated.index_dim), dtype)
    _tensor(a, "weights", (*rows, H), dtype)
    _want(a.sparse_mode == 3, f"sparse_mode {a.sparse_mode}")
    _no_window(a)
    if a.layout == "TND":
        count = _ends(a, "actual_seq_qlen", rows[0], stated, tensor=False)
        _want(
            _ends(a, "actual_seq_klen", keys[0], stated, tensor=False) == count,
            "as many sequences of keys as of queries",
        )


def _fusion_attention(a, stated) -> None:
    rows, keys = _rows(a, a.input_layout, "query", "key")
    H, D = a.query.shape[-2:]
    _want(a.head_num == H <= 256 and D <= 768, f"head_num {a.head_num}, of {H} x {D}")
    _want(max(rows[-1], keys[-1]) <= 2**20, f"{rows[-1]} queries and {keys[-1]} keys")
    _tensor(a, "query", (*rows, H, D), FLOATS)
    _tensor(a, "key", (*keys, H, D), (a.query.dtype,))
    _want(a.value.shape[-1] <= D, "values wider than keys")
    _tensor(a, "value", (*keys, H, a.value.shape[-1]), (a.query.dtype,))
    _want(a.sparse_mode == 3, f"sparse_mode {a.sparse_mode}")
    _tensor(a, "atten_mask", (2048, 2048), (torch.bool,))
    if not _fake(a.atten_mask):
        _want(torch.equal(a.atten_mask, torch.ones(2048, 2048).triu(1).bool()), "another mask")
    _want(a.keep_prob == 1.0 and a.pse is None and a.sink is None, "keep_prob, pse, sink")
    if a.input_layout == "TND":
        _want(a.softmax_layout == "TND", "statistics in another order than their shape says")
        count = _ends(a, "actual_seq_qlen", rows[0], stated, tensor=False)
        _want(
            _ends(a, "actual_seq_kvlen", keys[0], stated, tensor=False) == count,
            "as many sequences of keys as of queries",
        )


def _fusion_attention_grad(a, stated) -> None:
    _fusion_attention(a, stated)
    *rows, H, _ = a.query.shape
    for name in ("dy", "attention_in"):
        _tensor(a, name, (*rows, H, a.value.shape[-1]), (a.query.dtype,))
    shape = (rows[0], H, rows[1], 8) if len(rows) == 2 else (*rows, H, 8)
    for name in ("softmax_max", "softmax_sum"):
        _tensor(a, name, shape, (torch.float32,))


def _dense_softmax(a, stated) -> None:
    rows, keys = _rows(a, a.layout, "query_index", "key_index")
    _want(a.query_index.dtype in stated.half, f"query_index is {a.query_index.dtype}")
    _indexer_of_loss(a, stated, rows, keys, (a.query_index.dtype,))
    if a.layout == "TND":
        _ends(a, "actual_seq_qlen", rows[0], stated, tensor=False)
        _ends(a, "actual_seq_klen", keys[0], stated, tensor=False)


def _dense_loss(a, stated) -> None:
    rows, keys = _rows(a, a.layout, "query", "key")
    _dense_softmax(a, stated)
    H, dtype = a.query.shape[-2], (a.query_index.dtype,)
    _want(H in stated.dense_heads, f"{H} heads")
    for name, lead in (("query", rows), ("key", keys)):
        _tensor(a, name, (*lead, H, stated.dense_head_dim), dtype)
        _tensor(a, f"{name}_rope", (*lead, H, stated.rope), dtype)
    batch = rows[:-1]
    for name in ("softmax_max", "softmax_sum"):
        _tensor(a, name, (*batch, H, rows[-1], 1), (torch.float32,))
        _tensor(a, f"{name}_index", (*batch, 1, rows[-1]), (torch.float32,))


def _rms_norm(a, stated) -> None:
    D = a.input.shape[-1]
    _want(2 <= a.input.dim() <= 8, f"{a.input.dim()} dimensions")
    _tensor(a, "input", a.input.shape, FLOATS)
    _tensor(a, "gamma", (D,), (a.input.dtype,))


def _rms_norm_backward(a, stated) -> None:
    _rms_norm(a, stated)
    _tensor(a, "dy", a.input.shape, (a.input.dtype,))
    _tensor(a, "rstd", (*a.input.shape[:-1], 1), (torch.float32,))


def _rotary_mul(a, stated) -> None:
    B, S, N, D = a.input.shape
    _want(B * N < 1000 and D < 896 and D % 2 == 0, f"input {tuple(a.input.shape)}")
    _want(a.rotary_mode in ("half", "interleave"), f"rotary_mode {a.rotary_mode}")
    _tensor(a, "input", (B, S, N, D), FLOATS)
    _tensor(a, "r1", (1, S, 1, D), (a.input.dtype,))
    _tensor(a, "r2", (1, S, 1, D), (a.input.dtype,))
    _want(a.rotate is None, "rotate")


def _swiglu(a, stated) -> None:
    _want(1 <= a.input.dim() <= 8, f"{a.input.dim()} dimensions")
    _want(a.input.shape[a.dim] % 2 == 0, f"input {tuple(a.input.shape)}")
    _tensor(a, "input", a.input.shape, FLOATS)


def _swiglu_backward(a, stated) -> None:
    _swiglu(a, stated)
    shape = list(a.input.shape)
    shape[a.dim] //= 2
    _tensor(a, "grad_output", tuple(shape), (a.input.dtype,))


def _grouped_matmul(a, stated) -> None:
    _want(len(a.x) == len(a.weight) == 1, "lists of more than one tensor")
    (x,), (weight,) = a.x, a.weight
    b = SimpleNamespace(x=x, weight=weight, group_list=a.group_list)
    _want(a.split_item in (2, 3), f"split_item {a.split_item}")
    _want(a.group_list_type == 0, f"group_list_type {a.group_list_type}")
    _want(x.dim() == 2 and max(x.shape[-1], weight.shape[-1]) < 65536, f"x {tuple(x.shape)}")
    if a.group_type == 0:
        G, I, _ = weight.shape
        total = x.shape[0]
        _tensor(b, "x", (total, I), FLOATS)
        _want(weight.is_contiguous() or weight.transpose(1, 2).is_contiguous(), "weight's strides")
    else:
        _want(a.group_type == 2, f"group_type {a.group_type}")
        total = x.shape[1]
        _want(x.T.is_contiguous() and x.dtype in FLOATS, "x is not a transposed matrix")
        _tensor(b, "weight", (total, weight.shape[-1]), FLOATS)
        G = len(a.group_list) if a.group_list is not None else 0
    _want(weight.dtype == x.dtype, f"weight is {weight.dtype}")
    _want(G <= 1024, f"{G} groups")
    _tensor(b, "group_list", (G,), (torch.int64,))
    if not _fake(a.group_list):
        ends = a.group_list.tolist()
        _want(ends == sorted(ends) and ends[0] >= 0 and ends[-1] == total, f"group_list {ends}")


def _moe_permute(a, stated) -> None:
    N, k = a.indices.shape
    _want(N * k < 2**24 - 1 and k <= 512, f"indices {N, k}")
    _tensor(a, "tokens", (N, a.tokens.shape[1]), FLOATS)
    _tensor(a, "indices", (N, k), (torch.int32, torch.int64))
    _want(a.num_out_tokens is None or 0 < a.num_out_tokens <= N * k, f"{a.num_out_tokens} rows")
    _want(not a.padded_mode, "padded_mode")
    if not _fake(a.indices):
        _want(bool((a.indices >= 0).all()), "negative indices")


def _slot_map(a, slots: int) -> None:
    _tensor(a, "sorted_indices", (slots,), (torch.int32,))
    _want(not a.padded_mode, "padded_mode")
    if not _fake(a.sorted_indices):
        ordered = a.sorted_indices.sort().values
        _want(torch.equal(ordered, torch.arange(slots).int()), "not a permutation of the slots")


def _moe_permute_grad(a, stated) -> None:
    slots = a.tokens_size_0 * a.num_topK
    _tensor(a, "grad_permuted_tokens", (slots, a.grad_permuted_tokens.shape[1]), FLOATS)
    _want(a.tokens_dtype == a.grad_permuted_tokens.dtype, f"tokens_dtype {a.tokens_dtype}")
    _slot_map(a, slots)


def _moe_unpermute(a, stated) -> None:
    _want(a.probs is not None, "probs is missing: one slot for each token")
    N, k = a.probs.shape
    _want(k <= 512, f"probs {N, k}")
    _tensor(a, "permuted_tokens", (N * k, a.permuted_tokens.shape[1]), FLOATS)
    _tensor(a, "probs", (N, k), (a.permuted_tokens.dtype, torch.float32))
    _want(a.restore_shape is None, "restore_shape")
    _slot_map(a, N * k)


def _moe_unpermute_grad(a, stated) -> None:
    _moe_unpermute(a, stated)
    N, D = a.probs.shape[0], a.permuted_tokens.shape[1]
    _tensor(a, "grad_unpermuted_tokens", (N, D), (a.permuted_tokens.dtype,))
    _want(a.permuted_tokens_size_0 == a.probs.numel(), "permuted_tokens_size_0")
    _want(a.permuted_tokens_dtype == a.permuted_tokens.dtype, "permuted_tokens_dtype")


_CHECKS = {
    "npu_lightning_indexer": _lightning_indexer,
    "npu_sparse_flash_attention": _sparse_flash_attention,
    "npu_sparse_flash_attention_grad": _sparse_flash_attention_grad,
    "npu_sparse_lightning_indexer_grad_kl_loss": _kl_loss,
    "npu_fusion_attention": _fusion_attention,
    "npu_fusion_attention_grad": _fusion_attention_grad,
    "npu_dense_lightning_indexer_softmax_lse": _dense_softmax,
    "npu_dense_lightning_indexer_grad_kl_loss": _dense_loss,
    "npu_rms_norm": _rms_norm,
    "npu_rms_norm_backward": _rms_norm_backward,
    "npu_rotary_mul": _rotary_mul,
    "npu_swiglu": _swiglu,
    "npu_swiglu_backward": _swiglu_backward,
    "npu_grouped_matmul": _grouped_matmul,
    "npu_moe_token_permute": _moe_permute,
    "npu_moe_token_permute_grad_v2": _moe_permute_grad,
    "npu_moe_token_unpermute": _moe_unpermute,
    "npu_moe_token_unpermute_grad_v2": _moe_unpermute_grad,
}

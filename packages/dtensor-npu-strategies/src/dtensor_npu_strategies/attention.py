"""The operators of sparse attention (DSA).

Queries shard by batch or sequence, and heads shard where the operator is a sum over heads or has
them one by one; keys replicate unless the batch is sharded. What belongs to keys, or to all heads,
is then a sum over ranks in the backward. Keys never shard: a query selects among all of them.
"""

from collections.abc import Iterator

from torch.distributed.tensor import Partial, Replicate, Shard

from dtensor_npu_strategies.rules import Arguments, Rule, linear, operator, sharded

# B batch, S queries, T keys, H heads, D key dim, V value dim, K selected keys
# G index heads, E index head dim

# --- npu_dsa -------------------------------------------------------------------------------------

INDEXER = "q_index:BSGE k_index:BTE weights:BSG"


def _queries(a: Arguments) -> str:
    """Without bounds the mask is causal by row number, which a shard of rows does not know."""
    return "B" if a.bounds is None else "BS"


@operator("npu_dsa::lightning_indexer", group="dsa")
def lightning_indexer(a: Arguments) -> Iterator[Rule]:
    yield from sharded(a, f"{INDEXER} bounds:BS_ -> BSK BSK", _queries(a))


@operator("npu_dsa::sparse_attention", group="dsa")
def sparse_attention(a: Arguments) -> Iterator[Rule]:
    yield from sharded(a, "q:BSHD kv:BTD indices:BSK -> BSHV BSH", "BSH")


@operator("npu_dsa::sparse_attention_with_target", group="dsa")
def sparse_attention_with_target(a: Arguments) -> Iterator[Rule]:
    yield from sharded(a, "q:BSHD kv:BTD indices:BSK -> BSHV BSH BSK", "BSH")


@operator("npu_dsa::sparse_attention_backward", group="dsa")
def sparse_attention_backward(a: Arguments) -> Iterator[Rule]:
    inputs = "d_out:BSHV d_lse:BSH q:BSHD kv:BTD indices:BSK out:BSHV lse:BSH"
    yield from sharded(a, f"{inputs} -> BSHD BTD", "BSH")
    yield linear(["d_out"] if a.d_lse is None else ["d_out", "d_lse"], True, True)


@operator("npu_dsa::dense_attention", group="dsa")
def dense_attention(a: Arguments) -> Iterator[Rule]:
    """Keys are of each head's own."""
    pattern = "q:BSHD k:BTHD v:BTHV bounds:BS_ -> BSHV BSH"
    yield from sharded(a, pattern, _queries(a) + "H")


@operator("npu_dsa::dense_attention_backward", group="dsa")
def dense_attention_backward(a: Arguments) -> Iterator[Rule]:
    inputs = "d_out:BSHV d_lse:BSH q:BSHD k:BTHD v:BTHV bounds:BS_ out:BSHV lse:BSH"
    yield from sharded(a, f"{inputs} -> BSHD BTHD BTHV", _queries(a) + "H")
    yield linear(["d_out"] if a.d_lse is None else ["d_out", "d_lse"], True, True, True)


@operator("npu_dsa::attention_target", group="dsa")
def attention_target(a: Arguments) -> Iterator[Rule]:
    yield from sharded(a, "q:BSHD kv:BTD indices:BSK lse:BSH -> BSK", "BSH")


@operator("npu_dsa::indexer_kl_loss", group="dsa")
def indexer_kl_loss(a: Arguments) -> Iterator[Rule]:
    yield from sharded(a, f"{INDEXER} indices:BSK target:BSK scores:BSK -> BS", "BS")


@operator("npu_dsa::indexer_kl_loss_backward", group="dsa")
def indexer_kl_loss_backward(a: Arguments) -> Iterator[Rule]:
    pattern = f"d_loss:BS {INDEXER} indices:BSK target:BSK -> BSGE BTE BSG"
    yield from sharded(a, pattern, "BS")
    yield linear(["d_loss"], True, True, True)


@operator("npu_dsa::dense_indexer_kl_loss", group="dsa")
def dense_indexer_kl_loss(a: Arguments) -> Iterator[Rule]:
    yield from sharded(a, f"{INDEXER} q:BSHD kv:{_dense_keys(a)} bounds:BS_ -> BS", _queries(a))


@operator("npu_dsa::dense_indexer_kl_loss_backward", group="dsa")
def dense_indexer_kl_loss_backward(a: Arguments) -> Iterator[Rule]:
    pattern = f"d_loss:BS {INDEXER} q:BSHD kv:{_dense_keys(a)} bounds:BS_ -> BSGE BTE BSG"
    yield from sharded(a, pattern, _queries(a))
    yield linear(["d_loss"], True, True, True)


def _dense_keys(a: Arguments) -> str:
    return "BTHD" if a.ndim("kv") == 4 else "BTD"


@operator("npu_dsa::fused_kl_loss", group="dsa")
def fused_kl_loss(a: Arguments) -> Iterator[Rule]:
    """The loss, a sum over queries, and its gradients; needs all heads at once."""
    inputs = f"q:BSHD kv:BTD {INDEXER} indices:BSK lse:BSH bounds:BS_"
    yield from sharded(a, f"{inputs} -> . BSGE BTE BSG", _queries(a))


@operator("npu_dsa::fused_dense_kl_loss", group="dsa")
def fused_dense_kl_loss(a: Arguments) -> Iterator[Rule]:
    keys = "BTHD" if a.ndim("k") == 4 else "BTD"
    inputs = f"{INDEXER} q:BSHD k:{keys} bounds:BS_"
    yield from sharded(a, f"{inputs} -> . BSGE BTE BSG", _queries(a))


@operator("npu_dsa::fused_kl_loss_backward", group="dsa")
def fused_kl_loss_backward(a: Arguments) -> Iterator[Rule]:
    """The gradients of the forward, scaled: each as it is, sums over ranks as such."""
    whole = Replicate()
    for dk in (Shard(0), Partial()):
        placed = (Shard(0), dk, Shard(0)) if dk == Shard(0) else (Shard(1), dk, Shard(1))
        yield Rule(dict(zip(("d_loss", "dq", "dk", "dw"), (whole, *placed), strict=True)), placed)
    yield linear(["d_loss"], True, True, True)


# --- torch_npu -----------------------------------------------------------------------------------

# B batch, S queries, T keys, N heads, J index heads; layouts BSND and TND, here QND for queries of
# all sequences in one dimension, which cannot be cut by rows: lengths count from its start.


def _rows(a: Arguments, layout: str, lengths: str) -> str:
    """Queries shard by row only without a mask: modes with one align its corner to the last row."""
    if layout != "BSND":
        return ""
    return "BS" if a.sparse_mode == 0 and getattr(a, lengths) is None else "B"


@operator("npu::npu_lightning_indexer", group="dsa")
def npu_lightning_indexer(a: Arguments) -> Iterator[Rule]:
    if a.layout_key != a.layout_query or a.block_table is not None:
        return
    lengths = "actual_seq_lengths_query:B actual_seq_lengths_key:B"
    values = "BS__" if a.return_value else "=_"
    pattern = f"query:BSJ_ key:BT__ weights:BSJ {lengths} -> BS__ {values}"
    yield from sharded(a, pattern, _rows(a, a.layout_query, "actual_seq_lengths_query"))


@operator("npu::npu_lightning_indexer_grad", group="dsa")
def npu_lightning_indexer_grad(a: Arguments) -> Iterator[Rule]:
    lengths = "actual_seq_lengths_query:B actual_seq_lengths_key:B"
    inputs = f"query:BSJ_ key:BT__ dy:BS__ sparse_indices:BS__ weights:BSJ {lengths}"
    over = _rows(a, a.layout, "actual_seq_lengths_query")
    yield from sharded(a, f"{inputs} -> BSJ_ BT__ BSJ", over)


@operator("npu::npu_sparse_flash_attention", group="dsa")
def npu_sparse_flash_attention(a: Arguments) -> Iterator[Rule]:
    if a.layout_kv != a.layout_query or a.block_table is not None:
        return
    over = _rows(a, a.layout_query, "actual_seq_lengths_query")
    lengths = "actual_seq_lengths_query:B actual_seq_lengths_kv:B"
    if a.layout_query == "TND":
        lengths = "actual_seq_lengths_query:_ actual_seq_lengths_kv:_"
    inputs, q, statistics = _attention(a, a.layout_query)
    statistics = statistics if a.return_softmax_lse else "=_"
    yield from sharded(
        a, f"{inputs} {lengths} sinks:N -> {q} {statistics} {statistics}", over + _heads(a)
    )


@operator("npu::npu_sparse_flash_attention_grad", group="dsa")
def npu_sparse_flash_attention_grad(a: Arguments) -> Iterator[Rule]:
    over = _rows(a, a.layout, "actual_seq_qlen")
    one = "_" if a.layout == "TND" else "B"
    lengths = f"actual_seq_qlen:{one} actual_seq_kvlen:{one}"
    inputs, q, statistics = _attention(a, a.layout)
    inputs += f" d_out:{q} out:{q} softmax_max:{statistics} softmax_sum:{statistics} {lengths}"
    key = "T__" if a.layout == "TND" else "BT__"
    outputs = [q, key, "=_" if a.value is None else key]
    outputs += ["=_", "=_"] if a.query_rope is None else [q, key]
    yield from sharded(a, f"{inputs} -> {' '.join(outputs)}", over + _heads(a))
    yield linear(["d_out"], *("=" not in dims for dims in outputs))


def _attention(a: Arguments, layout: str) -> tuple[str, str, str]:
    """Inputs of both directions, the queries' dimensions and those of the softmax statistics."""
    if layout == "TND":
        q, key, indices, statistics = "QN_", "T__", "Q__", "_QN"
    else:
        q, key, indices, statistics = "BSN_", "BT__", "BS__", "B_SN"
    inputs = f"query:{q} key:{key} value:{key} sparse_indices:{indices} "
    return inputs + f"query_rope:{q} key_rope:{key}", q, statistics


def _heads(a: Arguments) -> str:
    """Heads of queries shard where they share one head of keys."""
    return "N" if a.key.shape[-2] == 1 else ""


@operator("npu::npu_sparse_lightning_indexer_grad_kl_loss", group="dsa")
def npu_sparse_lightning_indexer_grad_kl_loss(a: Arguments) -> Iterator[Rule]:
    """By batch alone: its mask is always causal, and it needs all heads of a token."""
    inputs = (
        "query:BSN_ key:BT__ query_index:BSJ_ key_index:BT__ weights:BSJ sparse_indices:BS__ "
        "softmax_max:B_SN softmax_sum:B_SN query_rope:BSN_ key_rope:BT__ sinks:N"
    )
    yield from sharded(a, f"{inputs} -> BSJ_ BT__ BSJ _", _batch(a))


@operator("npu::npu_dense_lightning_indexer_softmax_lse", group="dsa")
def npu_dense_lightning_indexer_softmax_lse(a: Arguments) -> Iterator[Rule]:
    pattern = "query_index:BSJ_ key_index:BT__ weights:BSJ -> B_S B_S"
    yield from sharded(a, pattern, _batch(a))


@operator("npu::npu_dense_lightning_indexer_grad_kl_loss", group="dsa")
def npu_dense_lightning_indexer_grad_kl_loss(a: Arguments) -> Iterator[Rule]:
    inputs = (
        "query:BSN_ key:BTN_ query_index:BSJ_ key_index:BT__ weights:BSJ softmax_max:BNS_ "
        "softmax_sum:BNS_ softmax_max_index:B_S softmax_sum_index:B_S query_rope:BSN_ key_rope:BTN_"
    )
    yield from sharded(a, f"{inputs} -> BSJ_ BT__ BSJ _", _batch(a))


def _batch(a: Arguments) -> str:
    """Lengths are the host's, of the whole batch: no rank has its own."""
    lengths = a.actual_seq_qlen is not None or a.actual_seq_klen is not None
    return "" if a.layout != "BSND" or lengths else "B"

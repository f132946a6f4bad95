"""Calls of torch_npu's operators, as they are made for a model: whole tensors, and what else."""

import torch

from npu_dtensors import empty

# B batch, S queries and keys, N heads, L latent, W rope, J index heads, E index head dim,
# K selected keys, M tokens, k experts of a token, D features, F output features
B, S, N, L, W, J, E, K = 8, 100, 16, 512, 64, 8, 128, 16
M, k, D, F, EXPERTS = 96, 2, 64, 48, 8

f32, i32, i64 = torch.float32, torch.int32, torch.int64


def calls() -> dict[str, list[dict]]:
    q, kv = empty(B, S, N, L), empty(B, S, 1, L)
    q_rope, k_rope = empty(B, S, N, W), empty(B, S, 1, W)
    selected, statistics = empty(B, S, 1, K, dtype=i32), empty(B, 1, S, N, dtype=f32)
    index = {"query": empty(B, S, J, E), "key": empty(B, S, 1, E), "weights": empty(B, S, J)}
    lengths = {"actual_seq_lengths_key": empty(B, dtype=i32)}
    sfa = {"query": q, "key": kv, "value": kv, "sparse_indices": selected, "scale_value": 0.1,
           "query_rope": q_rope, "key_rope": k_rope, "attention_mode": 2}  # fmt: skip
    sfa_grad = {**sfa, "d_out": q, "out": q, "softmax_max": statistics, "softmax_sum": statistics,
                "sparse_block_size": 1}  # fmt: skip
    tnd = {"query": empty(800, N, L), "key": empty(800, 1, L), "value": empty(800, 1, L),
           "sparse_indices": empty(800, 1, K, dtype=i32), "query_rope": empty(800, N, W),
           "key_rope": empty(800, 1, W), "scale_value": 0.1, "attention_mode": 2}  # fmt: skip
    ends = {"actual_seq_lengths_query": empty(4, dtype=i32),
            "actual_seq_lengths_kv": empty(4, dtype=i32)}  # fmt: skip
    indexer = {"query_index": index["query"], "key_index": index["key"],
               "weights": index["weights"]}  # fmt: skip
    kl = {"query": q, "key": kv, **indexer, "sparse_indices": selected, "softmax_max": statistics,
          "softmax_sum": statistics, "scale_value": 0.1, "query_rope": q_rope,
          "key_rope": k_rope}  # fmt: skip
    per_head = empty(B, N, S, 8, dtype=f32)
    dense = {"query": empty(B, S, N, 128), "key": empty(B, S, N, 128), **indexer,
             "softmax_max": per_head, "softmax_sum": per_head,
             "softmax_max_index": empty(B, 1, S, dtype=f32),
             "softmax_sum_index": empty(B, 1, S, dtype=f32), "scale_value": 0.1,
             "query_rope": q_rope, "key_rope": empty(B, S, N, W)}  # fmt: skip
    x, gamma = empty(3, S, 16, D), empty(D)
    norm = {"input": x, "gamma": gamma}
    angles = empty(1, S, 1, D)
    rope = {"input": x, "r1": angles, "r2": angles}
    rows, weight, groups = empty(M, D), empty(EXPERTS, D, F), empty(EXPERTS, dtype=i64)
    gmm = {"x": [rows], "weight": [weight], "split_item": 3, "group_list": groups,
           "group_list_type": 1}  # fmt: skip
    dw = {**gmm, "x": [empty(D, M)], "weight": [empty(M, F)], "group_type": 2}
    add = {"x": rows, "weight": empty(M, F), "group_list": groups}
    permuted, numbers = empty(M * k, D), empty(M * k, dtype=i32)
    experts, probs = empty(M, k, dtype=i32), empty(M, k)
    back = {"permuted_tokens": permuted, "sorted_indices": numbers}
    to_rows = {"grad_unpermuted_tokens": rows, "sorted_indices": numbers,
               "permuted_tokens_size_0": M * k,
               "permuted_tokens_dtype": torch.bfloat16}  # fmt: skip
    found = {
        "npu_lightning_indexer": [
            {**index, "sparse_count": K}, {**index, "sparse_count": K, "sparse_mode": 0, **lengths,
                                           "return_value": True},
        ],
        "npu_lightning_indexer_grad": [
            {**index, "dy": empty(B, S, 1, K), "sparse_indices": selected},
            {**index, "dy": empty(B, S, 1, K), "sparse_indices": selected, "sparse_mode": 0},
        ],
        "npu_sparse_flash_attention": [
            {**sfa, "return_softmax_lse": True, "sparse_mode": 0}, sfa,
            {**tnd, **ends, "layout_query": "TND", "layout_kv": "TND", "return_softmax_lse": True},
        ],
        "npu_sparse_flash_attention_grad": [sfa_grad, {**sfa_grad, "sparse_mode": 0}],
        "npu_sparse_lightning_indexer_grad_kl_loss": [kl],
        "npu_dense_lightning_indexer_softmax_lse": [indexer],
        "npu_dense_lightning_indexer_grad_kl_loss": [dense],
        "npu_rms_norm": [norm, {"input": x, "gamma": empty(16, D)}],
        "npu_rms_norm_backward": [{"dy": x, **norm, "rstd": empty(3, S, 16, 1, dtype=f32)}],
        "npu_rotary_mul": [rope],
        "npu_rotary_mul_backward": [{"grad": x, **rope}],
        "npu_swiglu": [{"input": x}, {"input": x, "dim": 2}],
        "npu_swiglu_backward": [{"grad_output": empty(3, S, 16, D // 2), "input": x}],
        "npu_grouped_matmul": [{**gmm, "group_type": 0}, dw],
        "npu_grouped_matmul.List": [
            {**gmm, "weight": [empty(D, F)] * 2, "group_list": [M // 2, M], "group_type": 0,
             "group_list_type": 0},
        ],
        "npu_grouped_matmul_add_": [
            {"input": empty(EXPERTS, D, F, dtype=f32), **add},
            {"input": empty(EXPERTS * D, F, dtype=f32), **add},
        ],
        "npu_moe_token_permute": [
            {"tokens": rows, "indices": experts}, {"tokens": rows, "indices": experts,
                                                   "num_out_tokens": M * k},
        ],
        "npu_moe_token_permute_grad_v2": [
            {"grad_permuted_tokens": permuted, "sorted_indices": numbers, "tokens_size_0": M,
             "tokens_dtype": torch.bfloat16, "num_topK": k},
        ],
        "npu_moe_token_unpermute": [{**back, "probs": probs}],
        "_npu_moe_token_unpermute": [{**back, "probs": probs}],
        "npu_moe_token_unpermute_grad_v2": [
            {**to_rows, "probs": probs, "permuted_tokens": permuted},
        ],
        "npu_moe_token_permute_with_routing_map": [
            {"tokens": rows, "routing_map": empty(M, EXPERTS, dtype=torch.bool),
             "probs": empty(M, EXPERTS), "num_out_tokens": M * k},
        ],
    }  # fmt: skip
    return {f"npu::{name}": given for name, given in found.items()}


def overload(name: str):
    packet, _, which = name.partition("::")[2].partition(".")
    return getattr(getattr(torch.ops.npu, packet), which or "default")


def complete(name: str, call: dict) -> dict:
    """All arguments, defaults filled in."""
    arguments = overload(name)._schema.arguments
    assert call.keys() <= {argument.name for argument in arguments}, name
    return {a.name: call.get(a.name, a.default_value) for a in arguments}


def invoke(name: str, call: dict):
    """With keywords for what takes nothing else."""
    keywords = {a.name for a in overload(name)._schema.arguments if a.kwarg_only}
    positional = [x for n, x in call.items() if n not in keywords]
    return overload(name)(*positional, **{n: x for n, x in call.items() if n in keywords})

"""DeepSeek Sparse Attention from small operators: the published baseline, over S x S scores.

Nothing is made slow on purpose: one matmul where one will do, in-place operations where autograd
allows, the scale on the queries, torch.topk, no copies. The result is what the fused operators
compute.

Shape letters: B batch, S queries, T keys, H heads, X key dim of a head, V value dim of a head,
A = latent + rope, I index heads, C index head dim, K selected keys.
"""

import torch
from torch import Tensor


def causal(S: int, device: torch.device) -> Tensor:
    """True where a query must not look."""
    return torch.ones(S, S, dtype=torch.bool, device=device).triu_(1)


def hidden_keys(indices_BSK: Tensor, causal_ST: Tensor) -> Tensor:
    """True where a key is not selected or not visible."""
    B, S, _ = indices_BSK.shape
    hidden_BST = causal_ST.new_ones(B, S, causal_ST.shape[1])
    return hidden_BST.scatter_(-1, indices_BSK, False).logical_or_(causal_ST)


def index_scores(q_BSIC: Tensor, k_BTC: Tensor, w_BSI: Tensor) -> Tensor:
    """fp32 [B, S, T], every key's score."""
    relu_BSIT = torch.einsum("bsic,btc->bsit", q_BSIC.float(), k_BTC.float()).relu_()
    return torch.matmul(w_BSI.float().unsqueeze(2), relu_BSIT).squeeze(2)


def select(scores_BST: Tensor, causal_ST: Tensor, topk: int) -> Tensor:
    """int64 [B, S, K]; rows with fewer visible keys are filled up with hidden ones."""
    return scores_BST.detach().masked_fill(causal_ST, float("-inf")).topk(topk, dim=-1).indices


def attention(
    q_BSHX: Tensor, k_BTHX: Tensor, v_BTHV: Tensor, hidden_BST: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Per-head keys and values: ``out_BSHV`` and the probabilities fp32 [B, H, S, T]."""
    q_BHSX = q_BSHX.transpose(1, 2) * scale
    scores_BHST = q_BHSX @ k_BTHX.permute(0, 2, 3, 1)
    scores_BHST.masked_fill_(hidden_BST.unsqueeze(1), float("-inf"))
    p_BHST = scores_BHST.softmax(-1, dtype=torch.float32)
    out_BHSV = p_BHST.to(v_BTHV.dtype) @ v_BTHV.transpose(1, 2)
    return out_BHSV.transpose(1, 2), p_BHST


def absorbed_attention(
    q_BSHA: Tensor, kv_BTA: Tensor, hidden_BST: Tensor, scale: float, v_dim: int
) -> Tensor:
    """One key and value for all heads, the same S x S scores."""
    scores_BSHT = torch.einsum("bsha,bta->bsht", q_BSHA * scale, kv_BTA)
    scores_BSHT.masked_fill_(hidden_BST.unsqueeze(2), float("-inf"))
    p_BSHT = scores_BSHT.softmax(-1, dtype=torch.float32).to(kv_BTA.dtype)
    return torch.einsum("bsht,btv->bshv", p_BSHT, kv_BTA[..., :v_dim])


def indexer_loss(scores_BST: Tensor, hidden_BST: Tensor, p_BST: Tensor) -> Tensor:
    """KL divergence [B, S] from normalised targets to the indexer, both over all T columns."""
    log_y_BST = scores_BST.masked_fill(hidden_BST, float("-inf")).log_softmax(-1)
    cross_BST = p_BST * log_y_BST.masked_fill(hidden_BST, 0.0)
    return (torch.xlogy(p_BST, p_BST) - cross_BST).sum(-1)


def dsa_attention(
    q_BSHX: Tensor,
    k_BTHX: Tensor,
    v_BTHV: Tensor,
    q_BSIC: Tensor,
    k_BTC: Tensor,
    w_BSI: Tensor,
    *,
    topk: int,
    scale: float,
    causal_ST: Tensor | None = None,
    train_indexer: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The whole layer: ``out_BSHV`` and the indexer's loss per token [B, S]."""
    S = q_BSHX.shape[1]
    causal_ST = causal(S, q_BSHX.device) if causal_ST is None else causal_ST
    with torch.set_grad_enabled(torch.is_grad_enabled() and train_indexer):
        scores_BST = index_scores(q_BSIC, k_BTC, w_BSI)
    hidden_BST = hidden_keys(select(scores_BST, causal_ST, min(topk, S)), causal_ST)
    out_BSHV, p_BHST = attention(q_BSHX, k_BTHX, v_BTHV, hidden_BST, scale)
    if not train_indexer:
        return out_BSHV, None
    target_BST = p_BHST.detach().sum(1).div_(q_BSHX.shape[2])
    return out_BSHV, indexer_loss(scores_BST, hidden_BST, target_BST)

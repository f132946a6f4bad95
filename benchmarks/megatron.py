"""megatron-core's eager DeepSeek Sparse Attention, called as its own module calls it.

Its ``DSAttention`` cannot be called whole without CUDA: ``DSAIndexer`` rotates its activations with
``fast_hadamard_transform``, a CUDA extension ("fast_hadamard_transform is not installed."), and the
loss tracker asks for ``torch.cuda.current_device()``. Everything the benchmark compares lies
between the two and is the package's own code, unchanged: ``DSAIndexer._compute_index_scores``,
``unfused_dsa_fn`` and ``compute_dsa_indexer_loss``, in the order of ``DSAttention.forward``.

Shape letters: S queries and keys, B batch, H heads, X key dim, V value dim, I index heads,
C index head dim, K selected keys.
"""

import importlib
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

MODULE = "megatron.core.transformer.experimental_attention_variant.dsa"


def _dsa() -> ModuleType:
    return importlib.import_module(MODULE)


def causal(S: int, device: torch.device) -> Tensor:
    """0 where a query may look, -inf elsewhere: fp32 [S, S]."""
    return torch.full((S, S), float("-inf"), device=device).triu_(1)


def index_scores(q_SBIC: Tensor, k_SBC: Tensor, w_SBI: Tensor) -> Tensor:
    """fp32 [B, S, S] with -inf where a query may not look, as DSAIndexer.forward_with_scores."""
    # A method that reads nothing of its object.
    scores_BSS = _dsa().DSAIndexer._compute_index_scores(None, q_SBIC, w_SBI, k_SBC)
    return scores_BSS + causal(q_SBIC.shape[0], q_SBIC.device)


def attention(
    q_SBHX: Tensor, k_SBHX: Tensor, v_SBHV: Tensor, indices_BSK: Tensor, scale: float
) -> Tensor:
    """[S, B, H * V]."""
    return _dsa().unfused_dsa_fn(q_SBHX, k_SBHX, v_SBHV, indices_BSK, scale)


def indexer_loss(
    scores_BSS: Tensor, indices_BSK: Tensor, q_SBHX: Tensor, k_SBHX: Tensor, scale: float
) -> Tensor:
    """Mean KL over the tokens, a scalar; computes the attention's distribution itself."""
    one_rank = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    return _dsa().compute_dsa_indexer_loss(
        scores_BSS, indices_BSK, q_SBHX.detach(), k_SBHX.detach(), scale, 1.0, True, one_rank
    )


def dsa_attention(
    q_SBHX: Tensor,
    k_SBHX: Tensor,
    v_SBHV: Tensor,
    q_SBIC: Tensor,
    k_SBC: Tensor,
    w_SBI: Tensor,
    *,
    topk: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The whole layer in the order of DSAttention.forward: output [S, B, H * V] and mean KL."""
    scores_BSS = index_scores(q_SBIC, k_SBC, w_SBI)
    indices_BSK = scores_BSS.topk(min(topk, scores_BSS.shape[-1]), dim=-1)[1]
    out_SBO = attention(q_SBHX, k_SBHX, v_SBHV, indices_BSK, scale)
    return out_SBO, indexer_loss(scores_BSS, indices_BSK, q_SBHX, k_SBHX, scale)

"""The compiled part of the "torch" backend on CPU: a C library, called through ctypes.

It holds the same kernels for several instruction sets and takes the best one the machine has.
`NPU_DSA_COMPILED` overrides that: ``0`` switches it off, so that the blocked torch code runs, and
the name of an instruction set selects it.
"""

import ctypes
import functools
import os
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from npu_dsa_kernels import checks

# B batch, S queries, T keys, H heads, D head dim, V value dim, K selected keys

ENVIRONMENT_VARIABLE = "NPU_DSA_COMPILED"
PATH = Path(__file__).with_name("libdsa.so")

# Of cpp/dsa.h.
_DIM_MULTIPLE = 32
_INTERFACE_VERSION = 1


class _Shape(ctypes.Structure):
    """``dsa_shape`` in cpp/dsa.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("B", "S", "T", "H", "D", "V", "K")),
        ("dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("instruction_set", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


def status() -> str:
    """Which instruction set runs, or why none does."""
    library, problem = _load()
    if library is None:
        return problem
    number = _instruction_set()
    if number is None:
        return (
            f"switched off by {ENVIRONMENT_VARIABLE}=0; 'torch' runs its blocked torch code on CPU"
        )
    return f"part of 'torch' on CPU: {instruction_sets()[number]}"


def takes(q: Tensor, kv: Tensor) -> bool:
    """Whether these tensors are computed here. float64 is not, and what is empty has no kernel."""
    if q.device.type != "cpu" or q.dtype == torch.float64 or not (q.numel() and kv.numel()):
        return False
    return _load()[0] is not None and _instruction_set() is not None


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    if not PATH.exists():
        return None, (
            "not in this installation, which was built without a C++ compiler; "
            "'torch' runs its blocked torch code on CPU"
        )
    try:
        # After torch: its OpenMP library then serves both, with one pool of threads.
        library = ctypes.CDLL(str(PATH))
    except OSError as error:
        return None, f"cannot be loaded ({error}); 'torch' runs its blocked torch code on CPU"
    version = getattr(library, "dsa_interface_version", lambda: 0)()
    if version != _INTERFACE_VERSION:
        return None, (
            f"left over from another version ({PATH}: interface {version}, not "
            f"{_INTERFACE_VERSION}), reinstall npu-dsa-kernels; 'torch' runs its blocked torch "
            "code on CPU"
        )
    library.dsa_instruction_sets.restype = ctypes.c_char_p
    return library, ""


@functools.cache
def instruction_sets() -> list[str]:
    """Those the library was built for and this machine has, best first."""
    library, _ = _load()
    return [] if library is None else library.dsa_instruction_sets().decode().split()


def _instruction_set() -> int | None:
    """The number of the one to run; None if switched off."""
    wanted = os.environ.get(ENVIRONMENT_VARIABLE) or "1"
    if wanted in ("0", "1"):
        return None if wanted == "0" else 0
    names = instruction_sets()
    if wanted not in names:
        want = f"expected 0 (off), 1 (the best) or one of {', '.join(names)}"
        raise checks.bad(ENVIRONMENT_VARIABLE, repr(wanted), want)
    return names.index(wanted)


# ---------------------------------------------------------------------------------- the operators


def lightning_indexer(
    q_BSHD: Tensor, k_BTD: Tensor, w_BSH: Tensor, bounds_BS2: Tensor | None, topk: int
) -> tuple[Tensor, Tensor]:
    B, S, _, _ = q_BSHD.shape
    indices_BSK = torch.empty(B, S, topk, dtype=torch.int32)
    scores_BSK = torch.empty(B, S, topk)
    q_BSHD, k_BTD = _operands(q_BSHD, k_BTD)
    bounds_BS2 = None if bounds_BS2 is None else bounds_BS2.contiguous()
    shape = _shape(q_BSHD, k_BTD, topk)
    _call(
        "dsa_lightning_indexer",
        shape, q_BSHD, k_BTD, _float(w_BSH), bounds_BS2, indices_BSK, scores_BSK,
    )  # fmt: skip
    return indices_BSK, scores_BSK


def sparse_attention(
    q_BSHD: Tensor,
    kv_BTD: Tensor,
    indices_BSK: Tensor,
    scale: float,
    v_dim: int,
    target_BSK: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Fills `target_BSK`, contiguous float32, too if there is one."""
    B, S, H, _ = q_BSHD.shape
    dtype = q_BSHD.dtype
    q_BSHD, kv_BTD = _operands(q_BSHD, kv_BTD)
    out_BSHV = q_BSHD.new_empty(B, S, H, _padded(v_dim))
    lse_BSH = torch.empty(B, S, H)
    shape = _shape(q_BSHD, kv_BTD, indices_BSK.shape[2], V=out_BSHV.shape[3], scale=scale)
    _call(
        "dsa_sparse_attention",
        shape, q_BSHD, kv_BTD, indices_BSK.contiguous(), out_BSHV, lse_BSH, target_BSK,
    )  # fmt: skip
    return _trimmed(out_BSHV, v_dim, dtype), lse_BSH


def sparse_attention_backward(
    d_out_BSHV: Tensor,
    d_lse_BSH: Tensor,
    q_BSHD: Tensor,
    kv_BTD: Tensor,
    indices_BSK: Tensor,
    lse_BSH: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    D, dtype = q_BSHD.shape[3], q_BSHD.dtype
    q_BSHD, kv_BTD, d_out_BSHV = _operands(q_BSHD, kv_BTD, d_out_BSHV)
    dq_BSHD = torch.empty_like(q_BSHD)
    d_kv_BTD = torch.zeros(kv_BTD.shape)
    shape = _shape(q_BSHD, kv_BTD, indices_BSK.shape[2], V=d_out_BSHV.shape[3], scale=scale)
    _call(
        "dsa_sparse_attention_backward",
        shape, q_BSHD, kv_BTD, indices_BSK.contiguous(), _float(lse_BSH), d_out_BSHV,
        _float(d_lse_BSH), dq_BSHD, d_kv_BTD,
    )  # fmt: skip
    return _trimmed(dq_BSHD, D, dtype), _trimmed(d_kv_BTD, D, dtype)


def attention_target(
    q_BSHD: Tensor, kv_BTD: Tensor, indices_BSK: Tensor, lse_BSH: Tensor, scale: float
) -> Tensor:
    q_BSHD, kv_BTD = _operands(q_BSHD, kv_BTD)
    target_BSK = torch.empty(indices_BSK.shape)
    shape = _shape(q_BSHD, kv_BTD, indices_BSK.shape[2], scale=scale)
    _call(
        "dsa_attention_target",
        shape, q_BSHD, kv_BTD, indices_BSK.contiguous(), _float(lse_BSH), target_BSK,
    )  # fmt: skip
    return target_BSK


def indexer_kl_loss(
    q_BSHD: Tensor, k_BTD: Tensor, w_BSH: Tensor, indices_BSK: Tensor, target_BSK: Tensor
) -> Tensor:
    loss_BS = torch.empty(q_BSHD.shape[:2])
    q_BSHD, k_BTD = _operands(q_BSHD, k_BTD)
    shape = _shape(q_BSHD, k_BTD, indices_BSK.shape[2])
    _call(
        "dsa_indexer_kl_loss",
        shape, q_BSHD, k_BTD, _float(w_BSH), indices_BSK.contiguous(), _float(target_BSK), loss_BS,
    )  # fmt: skip
    return loss_BS


def indexer_kl_loss_backward(
    d_loss_BS: Tensor,
    q_BSHD: Tensor,
    k_BTD: Tensor,
    w_BSH: Tensor,
    indices_BSK: Tensor,
    target_BSK: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    D, dtype = q_BSHD.shape[3], q_BSHD.dtype
    q_BSHD, k_BTD = _operands(q_BSHD, k_BTD)
    dq_BSHD = torch.empty_like(q_BSHD)
    dk_BTD = torch.zeros(k_BTD.shape)
    dw_BSH = torch.empty(w_BSH.shape)
    shape = _shape(q_BSHD, k_BTD, indices_BSK.shape[2])
    _call(
        "dsa_indexer_kl_loss_backward",
        shape, q_BSHD, k_BTD, _float(w_BSH), indices_BSK.contiguous(), _float(target_BSK),
        _float(d_loss_BS), dq_BSHD, dk_BTD, dw_BSH,
    )  # fmt: skip
    return _trimmed(dq_BSHD, D, dtype), _trimmed(dk_BTD, D, dtype), dw_BSH.to(w_BSH.dtype)


def _shape(q_BSHD: Tensor, kv_BTD: Tensor, K: int, *, V: int = 0, scale: float = 1.0) -> _Shape:
    B, S, H, D = q_BSHD.shape
    return _Shape(
        B=B, S=S, T=kv_BTD.shape[1], H=H, D=D, V=V, K=K,
        dtype=int(q_BSHD.dtype == torch.bfloat16),
        threads=max(1, min(torch.get_num_threads(), B * S)),
        instruction_set=_instruction_set() or 0,
        scale=scale,
    )  # fmt: skip


def _call(name: str, shape: _Shape, *tensors: Tensor | None) -> None:
    library, _ = _load()
    assert library is not None
    pointers = [ctypes.c_void_p(None if x is None else x.data_ptr()) for x in tensors]
    code = getattr(library, name)(ctypes.byref(shape), *pointers)
    if code == 1:
        raise MemoryError(f"{name}: no memory for the buffers of {shape.threads} threads")
    if code != 0:
        raise RuntimeError(f"{name}: status {code} for dtype {shape.dtype}")


def _operands(*tensors: Tensor) -> list[Tensor]:
    """Contiguous, in an element type the kernels multiply, the last dim padded with zeros."""
    library, _ = _load()
    assert library is not None
    multiplies = library.dsa_multiplies_bfloat16(_instruction_set() or 0)
    native = (torch.float32, torch.bfloat16) if multiplies else (torch.float32,)
    prepared = []
    for x in tensors:
        x = x if x.dtype in native else x.float()
        missing = _padded(x.shape[-1]) - x.shape[-1]
        prepared.append(F.pad(x, (0, missing)) if missing else x.contiguous())
    return prepared


def _padded(dim: int) -> int:
    return -(-dim // _DIM_MULTIPLE) * _DIM_MULTIPLE


def _trimmed(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return x[..., :dim].to(dtype).contiguous()


def _float(x: Tensor) -> Tensor:
    return x.float().contiguous()

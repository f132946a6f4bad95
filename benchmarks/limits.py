"""What the machine itself can do: the floor under every operator's time."""

from collections.abc import Callable

import torch

from benchmarks.measure import Implementation, Params, Task

# A square product of this side is large enough to run at the full rate and small enough to be
# repeated until the FLOPs are the case's.
_SIDE = 2048
_COPY_BYTES = 256 * 2**20


def build_gemm(params: Params) -> Task:
    """`_flops` FLOPs as products of large square matrices, written into memory that exists."""
    dtype = getattr(torch, params["dtype"])
    flops = params["_limit_flops"](params)
    side = int(min(_SIDE, max(64, (flops / 2) ** (1 / 3))))
    a, b = torch.randn(side, side, dtype=dtype), torch.randn(side, side, dtype=dtype)
    out = torch.empty(side, side, dtype=dtype)
    # The last product has fewer rows: the sum is the case's FLOPs to within one row.
    whole, rest = divmod(flops, 2 * side**3)
    rows = round(rest / (2 * side**2))

    def run() -> None:
        for _ in range(int(whole)):
            torch.mm(a, b, out=out)
        if rows:
            torch.mm(a[:rows], b, out=out[:rows])

    return Task(run, lambda _: {})


def gemm(flops: Callable[[Params], float], like: str = "ours") -> Implementation:
    """The FLOPs of `flops` as one large GEMM of the case's dtype."""
    return Implementation(
        name=f"limit: GEMM of the FLOPs of {like}",
        build=build_gemm,
        options={"_limit_flops": flops},
        compare="never",
        flops=flops,
    )


def build_copy(params: Params) -> Task:
    """`_bytes` bytes read or written, by copying between two buffers that exist."""
    total = int(params["_limit_bytes"](params)) // 2
    size = max(1, min(total, _COPY_BYTES))
    source, target = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
    whole, rest = divmod(total, size)

    def run() -> None:
        for _ in range(whole):
            target.copy_(source)
        if rest:
            target[:rest].copy_(source[:rest])

    return Task(run, lambda _: {})


def copy(bytes_moved: Callable[[Params], float]) -> Implementation:
    """The bytes that must be read and written, at the speed of a copy."""
    return Implementation(
        name="limit: copy of the same bytes",
        build=build_copy,
        options={"_limit_bytes": bytes_moved},
        compare="never",
    )

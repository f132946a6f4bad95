"""aten.matmul and its backward, which some devices have as operators of their own."""

# Dimensions by position: batch dimensions A B C ..., then m k of `self` and k n of `other`.

from collections.abc import Iterator

from dtensor_npu_strategies.rules import Arguments, Rule, linear, operator, sharded


def _dims(a: Arguments) -> tuple[str, str, str, str]:
    """Names of the dimensions of both factors and of the product, and the names to shard over."""
    left, right = a.self.shape, a.other.shape
    batches = max(len(left), len(right)) - 2

    def name(shape, matrix: str) -> str:
        count = len(shape) - 2
        letters = [chr(ord("A") + batches - count + i) for i in range(count)]
        return "".join(letters) + matrix

    x = name(left, "mk") if len(left) > 1 else "k"
    w = name(right, "kn") if len(right) > 1 else "k"
    over = [chr(ord("A") + i) for i in range(max(batches, 0))]
    # A batch dimension of size 1 is repeated along the other factor's.
    for letter in over:
        if letter in x and letter in w:
            sizes = left[x.index(letter)], right[w.index(letter)]
            if sizes[0] != sizes[1]:
                x = x.replace(letter, "_") if sizes[0] == 1 else x
                w = w.replace(letter, "_") if sizes[1] == 1 else w
    y = "".join(over) + x[-2:-1] + (w[-1:] if len(w) > 1 else "") or "."
    return x, w, y, "".join(over) + "".join(c for c in "mnk" if c in x + w)


@operator("aten::matmul", group="matmul")
def matmul(a: Arguments) -> Iterator[Rule]:
    x, w, y, over = _dims(a)
    yield from sharded(a, f"self:{x} other:{w} -> {y}", over)
    yield linear(["self"], True)
    yield linear(["other"], True)


@operator("aten::matmul_backward", group="matmul")
def matmul_backward(a: Arguments) -> Iterator[Rule]:
    """d_self has the placement of `self` and d_other that of `other`, where both fit the gradient.

    Each is a product of its own; their rules are joined where they agree on the gradient's.
    """
    x, w, y, over = _dims(a)
    yield from sharded(a, f"grad:{y.strip('.')} self:{x} other:{w} -> {x} {w}", over)
    yield linear(["grad"], True, True)
    yield linear(["self"], False, True)
    yield linear(["other"], True, False)
    yield linear(["self", "other"], True, True)

"""A launch of a Triton kernel, lowered as triton-ascend lowers it on a host with an NPU.

Arguments are bound and specialised by triton-ascend's own launcher code, so an integer of 1 becomes
a constant here as it does there, and the passes are those it runs before it calls the compiler.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from triton._C.libtriton import ir
from triton.backends.ascend import compiler as ascend
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

ARCHITECTURE = "Ascend910_9392"
"""Atlas A3, as the compiler names it."""

_TARGET = GPUTarget("npu", ARCHITECTURE, 0)
_BACKEND = make_backend(_TARGET)


@dataclass(frozen=True)
class Signature:
    """What a launch is compiled for."""

    types: dict[str, str]
    """Type by name of all parameters but the declared constants: ``*bf16``, ``i32``, ..."""
    constants: dict[str, Any]
    """Constants of the compilation by name: declared ones, and integers that are 1."""
    attributes: Any
    """Which arguments are multiples of 16."""
    values: dict[str, Any]
    """What is passed at run time, by name."""

    def key(self, kernel: Any) -> str:
        """A name for what `kernel` becomes under this signature."""
        parts = (kernel.cache_key, self.types, self.constants, self.attributes.to_dict())
        return f"{kernel.__name__}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"


def bind(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Signature:
    """Bind and specialise as `kernel[grid](*arguments, **constants)` does.

    Raises:
        TypeError: arguments are missing, too many or of no type that a kernel takes.
    """
    if kernel.binder is None:
        kernel.create_binder(_BACKEND)
    bound, types, _, _, options = kernel.binder(*arguments, **constants)
    if options:
        raise TypeError(f"{kernel.__name__} has no parameters {sorted(options)}")
    if any(value is None for value in bound.values()):
        raise TypeError(f"{kernel.__name__}: None is no argument of a kernel here")
    values = tuple(bound.values())
    attributes = _BACKEND.get_attrs_descriptor(kernel.params, values)
    ones = attributes.get_constants()
    names = [kernel.params[i].name for i in kernel.non_constexpr_indices]
    constants = {
        param.name: value
        for param, value in zip(kernel.params, values, strict=True)
        if param.is_constexpr or param.num in ones
    }
    return Signature(
        types=dict(zip(names, types[: len(names)], strict=True)),
        constants=constants,
        attributes=attributes,
        values={name: bound[name] for name in names if name not in constants},
    )


@dataclass(frozen=True)
class Lowered:
    """A kernel as the text that triton-ascend hands to bishengir-compile."""

    text: str
    parameters: tuple[str, ...]
    """MLIR types of the function's parameters, without the grid's six and the two in front."""
    function: str

    @property
    def element_loops(self) -> int:
        """Loops that read or write memory an element at a time, where indices are data."""
        found, lines = 0, self.text.splitlines()
        for end, line in enumerate(lines):
            if "{ExtractedLoadOrStore" not in line:
                continue
            indent = " " * (len(line) - len(line.lstrip()))
            head = re.compile(rf"{indent}(?:%\S+ = )?scf\.for ")
            start = max(i for i in range(end) if head.match(lines[i]))
            found += bool(_ELEMENT.search("\n".join(lines[start:end])))
        return found


_ELEMENT = re.compile(r"reinterpret_cast .* sizes: \[(?:1, )*1\]")


def lower(kernel: Any, signature: Signature) -> Lowered:
    """Lower to TTAdapter, MLIR's linalg on tensors and memrefs.

    Raises:
        subprocess.CalledProcessError: a pass failed; its message is in `stderr`.
        triton.compiler.errors.CompilationError: the kernel is no valid Triton code.
    """
    source = ASTSource(kernel, signature.types, signature.constants, signature.attributes)
    options = _BACKEND.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    _BACKEND.load_dialects(context)
    module = source.make_ir(
        options, _BACKEND.get_codegen_implementation(), _BACKEND.get_module_map(), context
    )
    metadata = {"hash": kernel.__name__, "target": _TARGET, **options.__dict__}
    module = ascend.make_ttir(module, metadata, options)
    text = ascend.ttir_to_linalg(module, metadata, options, named_ops=True)
    text, _ = ascend._parse_linalg_metadata(text, metadata)  # takes out what the compiler refuses
    found = re.search(r"func\.func @(\w+)\((.*?)\) attributes", text, re.DOTALL)
    if found is None:
        raise ValueError(f"no kernel in what triton-ascend made:\n{text[:2000]}")
    types = re.findall(r"%arg\d+: ([^,{)]+?)\s*(?:\{[^}]*\})?(?:, (?=%arg)|$)", found[2])
    # In front a lock and a workspace of the compiler's, behind the grid's size and the place in it.
    return Lowered(text, tuple(types[2:-6]), found[1])

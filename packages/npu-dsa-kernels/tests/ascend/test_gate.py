"""The gate fails what it is there to fail. (That it passes the kernels is the session itself.)"""

import dataclasses
import functools
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import a3
import gate
import host_tools
import jobs
import lowering
import session
import wrong_kernels
from cases import CASES, Case, error
from gate import Gate
from jobs import Job, Outcome, Reporter
from known import Known
from npu_dsa_kernels.backends.triton import kernels
from npu_dsa_kernels.backends.triton import tiles as table
from npu_dsa_kernels.backends.triton.tiles import Tiles

TILES = Tiles(1, 1)
BF16, FP32 = torch.bfloat16, torch.float32


def alone(run: Callable[[Reporter], Any]) -> Outcome:
    """`run` in a process of its own, as the session's cases."""
    ((_, outcome),) = jobs.run([Job("it", run)])
    return outcome


def started(kernel: Any, folder: Path, *arguments: Any, **constants: Any) -> Outcome:
    """`kernel`, run by the gate; the tensors after it, as lists."""

    def run(reporter: Reporter) -> list[Any]:
        Gate(folder, reporter)(kernel, 2, arguments, constants, TILES)
        return [x.tolist() for x in arguments if isinstance(x, torch.Tensor)]

    return alone(run)


def case(operator: str, *words: str) -> Case:
    """The first case of an operator whose inputs are described with all of the words."""
    return next(
        x for x in CASES if x.operator == operator and all(word in x.inputs for word in words)
    )


# --- execution -----------------------------------------------------------------------------------


def test_programs_share_a_tensor_they_add_to(tmp_path: Path) -> None:
    x = torch.randn(9, 32)
    index = torch.tensor([3, 0, 3, 3, 6, 1, 0, 6, 3], dtype=torch.int32)
    y = torch.ones(7, 32)
    outcome = started(wrong_kernels.add_rows, tmp_path, x, index, y, 9, D=32)
    assert outcome.error is None
    y = torch.tensor(outcome.result[2])
    assert error(y, torch.ones(7, 32).index_add(0, index, x)) < 1e-6


def test_an_integer_of_one_is_a_constant_as_on_the_device(tmp_path: Path) -> None:
    x, y = torch.randn(1, 32), torch.zeros(2, 32)
    index = torch.ones(1, dtype=torch.int32)
    outcome = started(wrong_kernels.add_rows, tmp_path, x, index, y, 1, D=32)
    assert outcome.error is None
    assert outcome.notes[0].constants == {"work": 1, "D": 32}
    assert outcome.result[2] == [[0.0] * 32, *x.tolist()]


@pytest.mark.parametrize("index", [-1, 7])
def test_a_row_outside_of_a_tensor_is_seen(tmp_path: Path, index: int) -> None:
    x, y = torch.randn(1, 32), torch.zeros(7, 32)
    indices = torch.tensor([index], dtype=torch.int32)
    outcome = started(wrong_kernels.add_rows, tmp_path, x, indices, y, 1, D=32)
    assert outcome.error is not None
    assert "running add_rows: " in outcome.error
    assert "y_ptr: touched" in outcome.error or "y_ptr: bytes around it" in outcome.error


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (wrong_kernels.writes_behind, "y_ptr: bytes around it were written"),
        (wrong_kernels.writes_before, "y_ptr: touched 8 bytes before its start (guard page)"),
    ],
)
def test_a_write_outside_of_a_tensor_is_seen(tmp_path: Path, kernel: Any, said: str) -> None:
    outcome = started(kernel, tmp_path, torch.randn(64), torch.zeros(64), 2, D=64)
    assert outcome.error is not None
    assert said in outcome.error


def test_what_was_never_written_is_not_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = torch.randn(64), torch.ones(64)
    outcome = started(wrong_kernels.copies_half, tmp_path, x, y, 2, D=64)
    assert outcome.result[1] == [*x[:32].tolist(), *[0.0] * 32]

    lower = lowering.lower

    def without_fill(kernel: Any, signature: lowering.Signature) -> lowering.Lowered:
        lowered = lower(kernel, signature)
        lines = lowered.text.splitlines()
        kept = "\n".join(line for line in lines if "linalg.fill" not in line)
        return dataclasses.replace(lowered, text=kept)

    monkeypatch.setattr(lowering, "lower", without_fill)
    (tmp_path / "other").mkdir()
    outcome = started(wrong_kernels.copies_half, tmp_path / "other", x, y, 2, D=64)
    assert torch.tensor(outcome.result[1][32:]).isnan().all()


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    x = torch.randn(96)
    outcome = started(wrong_kernels.copies_half, tmp_path, x[:64], x[32:], 2, D=64)
    assert outcome.error is not None
    assert "x_ptr and y_ptr overlap in memory" in outcome.error


def test_a_kernel_that_does_not_end_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "RUN", 1.0)
    outcome = started(wrong_kernels.never_ends, tmp_path, torch.randn(64), torch.zeros(64), 2, D=64)
    assert outcome.error == "running never_ends: not over after 1 s, stopped"


def test_what_cannot_be_run_here_is_no_success(tmp_path: Path) -> None:
    outcome = started(wrong_kernels.sorts, tmp_path, torch.randn(64), torch.zeros(64), 2, D=64)
    assert outcome.error is not None
    assert outcome.error.startswith("building sorts: ")


# --- operators -----------------------------------------------------------------------------------


def with_change(
    folder: Path, file: str, old: str, new: str, run: Callable[[Reporter], Any]
) -> Callable[[Reporter], Any]:
    """`run` on the package's kernels with one piece of text replaced."""
    copy = folder / "changed"
    shutil.copytree(kernels.__path__[0], copy)
    text = (copy / file).read_text()
    assert text.count(old) == 1, f"{file} does not have {old!r} once"
    (copy / file).write_text(text.replace(old, new))

    def changed(reporter: Reporter) -> Any:
        # In a process of its own, which ends with it.
        kernels.__path__ = [str(copy)]
        backend = kernels.__name__.removesuffix(".kernels")
        for name in list(sys.modules):
            if name.startswith(f"{kernels.__name__}.") or name in (
                f"{backend}.dsa",
                f"{backend}.base",
            ):
                del sys.modules[name]
        return run(reporter)

    return changed


CLAMP = ("rows.py", "return tl.where(valid_K, index_K, spare), valid_K", "return index_K, valid_K")


@pytest.mark.parametrize(
    "operator", ["sparse_attention", "sparse_attention_backward", "attention_target"]
)
def test_an_index_that_is_not_clamped_is_seen(tmp_path: Path, operator: str) -> None:
    one = case(operator, "D 512", "indices outside")
    run = functools.partial(session.run_case, one, BF16, tmp_path)
    outcome = alone(with_change(tmp_path, *CLAMP, run))
    assert outcome.error is not None
    assert "kv_ptr: touched" in outcome.error


def test_a_wrong_result_is_seen(tmp_path: Path) -> None:
    change = ("sparse_attention.py", "logits_HK * scale", "logits_HK * scale * 1.01")
    run = functools.partial(session.run_case, case("sparse_attention", "D 512"), FP32, tmp_path)
    outcome = alone(with_change(tmp_path, *change, run))
    assert outcome.error is not None
    assert "out is off by" in outcome.error


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kernel", ["sparse_attention", "sparse_attention_backward"])
def test_twice_the_heads_do_not_fit(tmp_path: Path, kernel: str, dtype: torch.dtype) -> None:
    tiles = table.find(kernel, gate.TARGET, dtype)
    assert tiles is not None
    doubled = {kernel: Tiles(2 * tiles.rows, tiles.columns)}
    one = case(kernel, "H 128", "D 576")

    def run(reporter: Reporter) -> None:
        for launch in session.lower_case(one, dtype, tmp_path, reporter, doubled):
            session.compile_kernel(tmp_path, launch.key, reporter)

    outcome = alone(run)
    assert outcome.error is not None
    assert "ub overflow" in outcome.error or "cc overflow" in outcome.error


def test_a_mask_over_rows_makes_an_addition_go_by_elements(tmp_path: Path) -> None:
    change = (
        "rows.py",
        "tl.atomic_add(pointers_KC, rows_KC, sem",
        "tl.atomic_add(pointers_KC, rows_KC, mask=valid_K[:, None], sem",
    )
    one = case("sparse_attention_backward", "D 576")
    run = functools.partial(session.lower_case, one, BF16, tmp_path)
    as_it_is, masked = alone(run), alone(with_change(tmp_path, *change, run))
    assert sum(x.element_loops for x in as_it_is.result) == 0
    assert sum(x.element_loops for x in masked.result) > 0


# --- the compiler for A3 -------------------------------------------------------------------------


def test_a_compiler_that_hangs_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(a3, "COMPILER", compiler)
    monkeypatch.setattr(session, "COMPILE", 3.0)
    started(wrong_kernels.copies_half, tmp_path, torch.randn(64), torch.zeros(64), 2, D=64)
    (lowered,) = tmp_path.glob("*.json")
    outcome = alone(functools.partial(session.compile_kernel, tmp_path, lowered.stem))
    assert outcome.error == f"compiling for {a3.ARCHITECTURE}: not over after 3 s, stopped"
    assert not runs((tmp_path / "pid").read_text().strip())


def runs(process: str) -> bool:
    """Whether it is there, and more than an entry that nobody has waited for."""
    status = Path("/proc", process, "stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_memory_is_read_a_function_at_a_time() -> None:
    def function(name: str, kind: str, place: int, space: str) -> str:
        core = f"hivm.func_core_type = #hivm.func_core_type<{kind}>"
        return (
            f"  func.func @{name}() attributes {{hacc.entry, {core}}} {{\n"
            f"    %c0_i64 = arith.constant {place} : i64\n"
            "    %c64_i64 = arith.constant 64 : i64\n"
            "    %0 = hivm.hir.pointer_cast(%c0_i64, %c64_i64)"
            f" : memref<2x16xbf16, #hivm.address_space<{space}>>\n  }}\n"
        )

    both = a3.read(function("aic", "AIC", 128, "cbuf") + function("aiv", "AIV", 0, "ub"))
    assert (both.l1_bytes, both.ub_bytes, both.l0c_bytes) == (192, 128, 0)
    assert both.cores == "cube + 2 vector"
    with pytest.raises(ValueError, match="a buffer that cannot be read"):
        a3.read(function("aiv", "AIV", 0, "ub").replace("2x16x", "?x16x"))


# --- the session ---------------------------------------------------------------------------------


def test_tiles_that_no_case_reaches_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "entries", lambda target: [("a_kernel", 2, Tiles(16, 64))])
    assert list(session.unreached(session.Report())) == [
        "a_kernel, 2 bytes, 16 x 64: no case reaches it"
    ]


def test_a_known_failure_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = case("rms_norm", "33 x 512")
    tiles = table.find("rms_norm", gate.TARGET, FP32)
    assert tiles is not None
    fits = Known("rms_norm", one.inputs, "float32", "rms_norm", tiles, "ub overflow", "none")
    fails = dataclasses.replace(fits, tiles=Tiles(64, 4 * tiles.columns))
    otherwise = dataclasses.replace(fails, message="cc overflow")
    monkeypatch.setattr(session, "KNOWN", (fits, fails, otherwise))
    messages, complaints = session.try_known(tmp_path, lambda text: None)
    assert [bool(re.match(r"ub overflow, requires \d+ bits", x)) for x in messages.values()] == [
        False, True, False
    ]  # fmt: skip
    passes, differs = sorted(complaints, key=len)
    assert "passes now" in passes
    assert "fails otherwise" in differs


def test_a_page_out_of_date_fails_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "RECORD", tmp_path / "recorded.json")
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- generated:ascend-gate-table -->\n<!-- /generated -->\nb\n")

    def write(off: str, bytes_: str, check: bool) -> list[str]:
        blocks = {"table": f"| {off} | {bytes_} |\n"}
        return session._write(page, blocks, [{"ub_bytes": bytes_}], check)

    assert write("3e-07", "1,024", check=False) == []
    assert "| 3e-07 | 1,024 |" in page.read_text()
    assert write("4e-07", "1,024", check=True) == []  # another host's arithmetic
    assert len(write("3e-07", "1,056", check=True)) == 2


def test_missing_programs_are_named_with_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    said = host_tools.missing()
    assert said is not None
    assert said.endswith("apt-get install gcc llvm-19 mlir-19-tools")

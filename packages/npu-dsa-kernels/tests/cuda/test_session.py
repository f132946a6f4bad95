"""The session fails what it is there to fail. (That it passes the kernels is the session.)"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime import driver

import offline
import session
import wrong_kernels
from cases import CASES, Case, empty
from npu_dsa_kernels.backends.triton import tiles as table
from npu_dsa_kernels.backends.triton.tiles import Tiles
from offline import ARCHITECTURES, Launch, Recorder
from session import Report

BF16, FP32 = torch.bfloat16, torch.float32
HOPPER = ARCHITECTURES[90]


@pytest.fixture(autouse=True)
def hopper() -> Iterator[None]:
    offline.compile_for(HOPPER.capability)
    yield
    if torch.cuda.is_available():  # the next test of this process may run kernels on it
        driver.reset_active()


def case(operator: str, *words: str) -> Case:
    """The first case of an operator whose inputs are described with all of the words."""
    return next(
        x for x in CASES if x.operator == operator and all(word in x.inputs for word in words)
    )


def started(kernel: Any, *sizes: tuple[int, torch.dtype], **constants: Any) -> list[Launch]:
    """`kernel`, started with x and y of each size and a `work` of that size, too."""
    recorder = Recorder()
    for size, dtype in sizes:
        x = empty(size, size, dtype=dtype)
        tiles = Tiles(size, size)
        recorder(kernel, 1, (x, empty(size, size), size), {"SIDE": size, **constants}, tiles)
    return recorder.launches


def compiled(launches: list[Launch], folder: Path) -> Report:
    return session.compile_all(launches, HOPPER, folder, lambda text: None)


def test_twice_the_heads_do_not_fit(tmp_path: Path) -> None:
    name = "sparse_attention_backward"
    tiles = table.find(name, offline.TARGET, BF16)
    assert tiles is not None
    doubled = Tiles(2 * tiles.rows, tiles.columns, tiles.warps, tiles.stages)
    one = case(name, "H 128, D 576, K 2048")
    (failure,) = compiled(session.record([one], [BF16], {name: doubled}), tmp_path).failures
    assert failure.startswith(f"{name} bfloat16 {doubled.rows} x {doubled.columns}")
    assert failure.endswith("bytes of shared memory, sm_90 has 232,448")


@pytest.mark.parametrize("size", [16, 64])
def test_products_outside_of_the_tensor_cores_are_seen(tmp_path: Path, size: int) -> None:
    wrong = compiled(started(wrong_kernels.multiplies, (size, BF16), UPCAST=True), tmp_path)
    (failure,) = wrong.failures
    assert failure.endswith("computes products of torch.bfloat16 without tensor cores")
    sizes = (size, BF16), (size, FP32)
    right = compiled(started(wrong_kernels.multiplies, *sizes, UPCAST=False), tmp_path)
    assert right.failures == []
    found = {dtype: row.compiled[0].products for (_, dtype, _), row in right.rows.items()}
    # A warp group's product takes 64 rows; one in fp32 that is not rounded takes no tensor core.
    assert found == {BF16: ("wgmma",) if size == 64 else ("mma",), FP32: ("fma",)}


def test_what_does_not_compile_is_seen(tmp_path: Path) -> None:
    (failure,) = compiled(
        started(wrong_kernels.is_no_code, (64, BF16), UPCAST=False), tmp_path
    ).failures
    assert failure.startswith("is_no_code bfloat16 64 x 64")
    assert "compiling: CompilationError" in failure


def test_registers_that_do_not_suffice_are_counted(tmp_path: Path) -> None:
    few, many = (
        next(iter(compiled(launches, tmp_path).rows.values())).compiled[0]
        for launches in (
            started(wrong_kernels.multiplies, (64, BF16), UPCAST=upcast) for upcast in (True, False)
        )
    )
    assert few.spilled_bytes > 0
    assert 0 < many.registers < 255 and many.spilled_bytes == 0


@pytest.mark.parametrize(
    ("shared_kb", "registers", "warps", "programs"),
    [
        (0, 8, 4, 16),  # places for warps
        (0, 8, 1, 32),  # places for programs
        (0, 250, 8, 1),  # registers: 256 x 256 of them
        (0, 168, 4, 3),
        (113, 32, 4, 2),  # shared memory, and 1 KB of the system's
        (114, 32, 4, 1),
    ],
)
def test_programs_of_a_multiprocessor(
    shared_kb: int, registers: int, warps: int, programs: int
) -> None:
    compiled = offline.Compiled(shared_kb * 1024, registers, 0, (), warps)
    assert compiled.programs(HOPPER) == programs


def test_a_compiler_that_does_not_end_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "COMPILE", 0.01)
    (failure,) = compiled(
        started(wrong_kernels.multiplies, (128, FP32), UPCAST=False), tmp_path
    ).failures
    assert failure.endswith("compiling: not over after 0.01 s, stopped")


def test_programs_are_told_apart_as_on_the_device() -> None:
    recorder, tiles = Recorder(), Tiles(64, 64)
    x = empty(64, 64, dtype=BF16)
    for work in (64, 32, 1, 3, 5):  # a multiple of 16, the same, a constant, any, the same
        constants = {"SIDE": 64, "UPCAST": False}
        recorder(wrong_kernels.multiplies, 1, (x, empty(64, 64), work), constants, tiles)
    assert len(recorder.launches) == 3


def test_tiles_that_no_case_reaches_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "entries", lambda target: [("a_kernel", 2, Tiles(16, 64))])
    assert list(session.unreached(Report(HOPPER))) == [
        "a_kernel, 2 bytes, 16 x 64: no case reaches it"
    ]


def test_a_page_that_differs_is_named_or_written(tmp_path: Path) -> None:
    report = compiled(session.record([case("rms_norm", "7168")], [BF16]), tmp_path)
    page = tmp_path / "page.md"
    old = "before\n<!-- generated:cuda-table -->\nold\n<!-- /generated -->\nafter\n"
    page.write_text(old)
    assert session.write(page, report, check=True) == ["docs/page.md is out of date: nox -s cuda"]
    assert page.read_text() == old
    assert session.write(page, report, check=False) == []
    assert session.write(page, report, check=True) == []
    new = page.read_text()
    assert new.startswith("before\n") and new.endswith("after\n") and "old" not in new
    assert "| rms_norm | bfloat16 |" in new

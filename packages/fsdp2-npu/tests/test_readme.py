import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def _run(code: str, folder: Path) -> dict[str, str]:
    """What each of two ranks prints."""
    # torch 2.14 now and then aborts when an interpreter that used Gloo shuts down.
    leave = "import os, sys\nsys.stdout.flush()\nos._exit(0)\n"
    (folder / "example.py").write_text(code + leave, encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # One file a rank: what ranks print into one pipe may come out mixed.
    logs = ["--redirects", "3", "--log-dir", str(folder / "logs")]
    result = subprocess.run(
        [*launcher, "--nproc-per-node", "2", *logs, str(folder / "example.py")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.returncode == 0, [
        result.stderr,
        *(log.read_text() for log in (folder / "logs").rglob("stderr.log")),
    ]
    return {log.parent.name: log.read_text() for log in (folder / "logs").rglob("stdout.log")}


@pytest.mark.distributed
def test_sharding(tmp_path):
    line = "(Shard(dim=0),) torch.Size([32, 64])"
    printed = _run(EXAMPLES[0], tmp_path)
    assert {rank: text.strip() for rank, text in printed.items()} == {
        rank: f"{rank} {line}" for rank in ("0", "1")
    }


@pytest.mark.distributed
def test_trace_and_overlap(tmp_path):
    for text in _run(EXAMPLES[1], tmp_path).values():
        lines = text.splitlines()
        assert lines[0] == "0 forward all_gather  dense 1050624"
        table = next(i for i, line in enumerate(lines) if line.startswith("layer "))
        assert lines[table].split()[-1] == "share"
        assert lines[table + 1].split()[:3] == ["0", "forward", "1"]
        assert lines[-1].split()[:3] == ["all", "layers", "all"]


@pytest.mark.distributed
def test_microbatches(tmp_path):
    for text in _run(EXAMPLES[2], tmp_path).values():
        assert text.splitlines() == ["last 2", "each 8"]


def test_examples_are_short():
    assert len(EXAMPLES) == 3
    for code in EXAMPLES:
        assert sum(bool(line.strip()) for line in code.splitlines()) <= 20

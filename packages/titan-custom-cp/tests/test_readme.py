import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_example_prints_the_same_on_any_number_of_ranks(tmp_path, ranks):
    readme = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    # torch 2.14 now and then aborts when an interpreter that used Gloo shuts down.
    leave = "import os, sys\nsys.stdout.flush()\nos._exit(0)\n"
    (tmp_path / "example.py").write_text(code + leave, encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # One file a rank: what ranks print into one pipe may come out mixed.
    logs = ["--redirects", "3", "--log-dir", str(tmp_path / "logs")]
    result = subprocess.run(
        [*launcher, "--nproc-per-node", str(ranks), *logs, str(tmp_path / "example.py")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.returncode == 0, [
        result.stderr,
        *(log.read_text() for log in (tmp_path / "logs").rglob("stderr.log")),
    ]
    printed = {log.parent.name: log.read_text() for log in (tmp_path / "logs").rglob("stdout.log")}
    line = "torch.Size([1, 32, 16]) 2.7651 7.2022"
    assert {rank: text.strip() for rank, text in printed.items()} == {
        str(rank): f"{rank} {line}" for rank in range(ranks)
    }

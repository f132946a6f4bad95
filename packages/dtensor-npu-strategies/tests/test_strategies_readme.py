import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.distributed
def test_the_example_prints_what_is_shown(tmp_path):
    text = README.read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    # torch 2.14 now and then aborts when an interpreter that used Gloo shuts down.
    leave = "import os, sys\nsys.stdout.flush()\nos._exit(0)\n"
    (tmp_path / "example.py").write_text(code + leave, encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    logs = ["--redirects", "3", "--log-dir", str(tmp_path / "logs")]
    result = subprocess.run(
        [*launcher, "--nproc-per-node", "2", *logs, str(tmp_path / "example.py")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    logs = list((tmp_path / "logs").rglob("stderr.log"))
    assert result.returncode == 0, [result.stderr, *(log.read_text() for log in logs)]
    for log in (tmp_path / "logs").rglob("stdout.log"):
        assert log.read_text() == shown

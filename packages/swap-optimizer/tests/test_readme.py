"""The README's examples, as they stand there; and what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(*examples):
    """Run pairs of folder and code one after the other, in one process of its own."""
    parts = [f"os.chdir({str(folder)!r})\n{code}" for folder, code in examples]
    done = subprocess.run(
        [sys.executable, "-c", "import os\n" + "\nprint('---')\n".join(parts)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("---\n")


def plainly(code):
    """The same example with the optimizer that is wrapped."""
    code = re.sub(r"SwapOptimizer\((.*), slices=4, storage=\"disk\"\)", r"\1", code)
    return code.split("stats =")[0] + "\nprint(f'loss {loss:.3f}')\n" if "stats" in code else code


@pytest.fixture
def folders(tmp_path):
    folders = [tmp_path / name for name in ("swapped", "plain")]
    for folder in folders:
        folder.mkdir()
    return folders


def losses(text):
    return re.findall(r"loss ([\d.]+)", text)


def same(one, other):
    assert one["state"].keys() == other["state"].keys() and len(one["state"]) > 4
    for i, state in one["state"].items():
        assert all(torch.equal(value, other["state"][i][key]) for key, value in state.items())


def test_the_plain_loop(folders):
    swapped, plain = run((folders[0], EXAMPLES[0]), (folders[1], plainly(EXAMPLES[0])))
    assert losses(swapped) == losses(plain)
    n = 8 * (64 * 64 + 64)
    assert f"; {8 * n} bytes of states on disk\n" in swapped
    (peak,) = re.findall(r"at most (\d+) in a step, nothing", swapped)
    assert 8 * n / 4 < int(peak) < 8 * n * 0.55
    same(*(torch.load(folder / "optimizer.pt") for folder in folders))


def test_the_trainer(folders):
    """And again from the plain optimizer's checkpoint: it ends where that did."""
    swap, plain = folders
    resume = EXAMPLES[1].replace(".train()", ".train(resume_from_checkpoint=True)")
    resume = "import shutil\nshutil.move('run/checkpoint-20', 'whole')\n" + resume
    said = run((swap, EXAMPLES[1]), (plain, plainly(EXAMPLES[1])), (plain, resume))
    assert losses(said[0])[-1] == losses(said[1])[-1]
    ends = swap / "run/checkpoint-20", plain / "whole", plain / "run/checkpoint-20"
    states = [torch.load(end / "optimizer.pt") for end in ends]
    same(states[0], states[1])
    same(states[0], states[2])


def test_examples_are_short():
    assert len(EXAMPLES) == 2
    for code in EXAMPLES:
        assert sum(bool(line.strip()) for line in code.splitlines()) <= 20

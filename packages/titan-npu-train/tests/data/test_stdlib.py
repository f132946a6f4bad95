"""The standard library as a corpus: there at once, made once, whoever asks."""

import subprocess
import sys
from pathlib import Path

import pytest

from titan_npu_train.data import OutputError, PreparedDataset, stdlib_corpus, stdlib_source

SMALL = {"vocab_size": 300, "max_bytes": 100_000}


def test_source_is_the_library_and_nothing_else() -> None:
    source = stdlib_source()
    places = {place for place, _ in source.files}
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= places
    assert all(place.endswith(".py") for place in places)
    folders = {part for place in places for part in place.split("/")[:-1]}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    assert source.ignored == ()
    size = sum(path.stat().st_size for _, path in source.files)
    assert 5e6 < size < 5e7


def test_made_once(tmp_path: Path) -> None:
    stages: list[str] = []
    out = stdlib_corpus(
        cache=tmp_path, progress=lambda stage, done, total: stages.append(stage), **SMALL
    )
    assert stages
    manifest = PreparedDataset(out, verify="always").manifest
    assert manifest.splits["train"].text_bytes <= 100_000
    assert manifest.splits["heldout"].documents >= 1
    stages.clear()
    assert stdlib_corpus(cache=tmp_path, **SMALL) == out
    assert stages == []
    other = stdlib_corpus(cache=tmp_path, **SMALL | {"vocab_size": 310})
    assert other != out


def test_cache_folder_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out = stdlib_corpus(**SMALL)
    assert out.parent == tmp_path / "titan-npu-train" / "data"


CALL = """
from pathlib import Path
from titan_npu_train.data import stdlib_corpus
stages = set()
out = stdlib_corpus(
    cache={cache!r}, vocab_size=300, max_bytes=100_000, progress=lambda s, d, t: stages.add(s)
)
print(out, "reading" in stages)
"""


def test_several_processes_at_once(tmp_path: Path) -> None:
    code = CALL.format(cache=str(tmp_path))
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    answers = [process.communicate(timeout=60)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len({out for out, _ in answers}) == 1
    assert sorted(prepared for _, prepared in answers) == ["False", "False", "True"]
    PreparedDataset(answers[0][0], verify="always").split("train")


def test_half_made_cache_is_made_anew(tmp_path: Path) -> None:
    out = stdlib_corpus(cache=tmp_path, **SMALL)
    manifest = out / "manifest.json"
    before = manifest.read_bytes()
    manifest.write_bytes(before[:100])
    assert stdlib_corpus(cache=tmp_path, **SMALL) == out
    assert manifest.read_bytes() == before


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="set XDG_CACHE_HOME"):
        stdlib_corpus(cache=tmp_path / "file", **SMALL)

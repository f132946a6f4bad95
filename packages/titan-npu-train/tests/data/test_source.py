"""Every kind of source gives its documents; whatever is left out is named with its reason."""

import gzip
import json
import os
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from titan_npu_train.data import Source, SourceError

ROWS = [
    {"text": "one", "id": 1},
    {"text": "zwei\nZeilen 稀疏", "id": 2},
    {"text": "  \n", "id": 3},
    {"text": None, "id": 4},
    {"text": "drei", "id": 5},
]
TEXTS = ["one", "zwei\nZeilen 稀疏", "drei"]


def read(path: Path, **options: str) -> tuple[list[str], Counter[str]]:
    source = Source.scan(path, **options)
    documents = [*source.ignored, *source.documents()]
    texts = [document.text for document in documents if not document.skipped]
    return texts, Counter(document.skipped for document in documents if document.skipped)


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines))
    elif path.name.endswith(".zst"):
        with pa.CompressedOutputStream(pa.OSFile(str(path), "wb"), "zstd") as file:
            file.write(lines)
    else:
        path.write_bytes(lines)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "A.JSONL"])
def test_rows(tmp_path: Path, name: str) -> None:
    texts, skipped = read(write_rows(tmp_path / name, ROWS))
    assert texts == TEXTS
    assert skipped == {"empty": 1, "null text": 1}


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_text_column(tmp_path: Path, name: str) -> None:
    rows = [{"body": row["text"], "id": row["id"]} for row in ROWS]
    path = write_rows(tmp_path / name, rows)
    assert read(path, text_column="body")[0] == TEXTS
    with pytest.raises(SourceError, match=r"no column 'text'.*body, id"):
        read(path)


def test_zstd_in_several_frames(tmp_path: Path) -> None:
    one = write_rows(tmp_path / "a.jsonl.zst", ROWS).read_bytes()
    (tmp_path / "a.jsonl.zst").write_bytes(one + one)
    assert read(tmp_path / "a.jsonl.zst")[0] == TEXTS * 2


def test_bad_rows_are_counted_by_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"text": "good"}\n'
        b"\n"
        b"{broken\n"
        b'["text"]\n'
        b'{"other": "x"}\n'
        b'{"text": 7}\n'
        b'{"text": "\\ud800"}\n'
        b'{"text": "\xff"}\n'
    )
    assert read(path) == (
        ["good"],
        {
            "invalid JSON": 1,
            "not a JSON object": 1,
            "no text column": 1,
            "text is no string": 1,
            "not UTF-8": 2,
        },
    )


def test_folder(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.py").write_text("print()\r\n", newline="")
    (tmp_path / "a.md").write_text("\ufeffmark", "utf-8")
    (tmp_path / "bin.dat").write_bytes(b"abc\0def")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / ".env").write_text("hidden")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")  # reading it would hang
    write_rows(tmp_path / "c.jsonl", [{"text": "row"}])
    # Line ends and a byte order mark are text: nothing is normalised.
    assert read(tmp_path) == (
        ["\ufeffmark", "print()\r\n", "row"],
        {
            "binary file": 1,
            "not UTF-8": 1,
            "empty": 1,
            "hidden": 2,
            "link to a folder": 1,
            "not a regular file": 2,
        },
    )


def test_places_tell_where_a_document_is(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", ROWS)
    write_rows(tmp_path / "b.parquet", ROWS)
    documents = list(Source.scan(tmp_path).documents())
    assert [document.place for document in documents] == [
        *(f"a.jsonl:{line}" for line in range(1, 6)),
        *(f"b.parquet#{row}" for row in range(5)),
    ]


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (pa.large_string(), None),
        (pa.dictionary(pa.int8(), pa.string()), None),
        (pa.int64(), "int64"),
    ],
)
def test_parquet_types(tmp_path: Path, kind: pa.DataType, match: str | None) -> None:
    values = [1, 2] if match else ["a", "b"]
    pq.write_table(pa.table({"text": pa.array(values).cast(kind)}), tmp_path / "a.parquet")
    if match:
        with pytest.raises(SourceError, match=match):
            read(tmp_path)
    else:
        assert read(tmp_path)[0] == ["a", "b"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
@pytest.mark.parametrize("damage", ["cut", "garbled"])
def test_corrupt_container(tmp_path: Path, name: str, damage: str) -> None:
    rows: list[dict[str, object]] = [{"text": os.urandom(64).hex()} for _ in range(500)]
    path = write_rows(tmp_path / name, rows)
    data = path.read_bytes()
    half = len(data) // 2
    path.write_bytes(data[:half] if damage == "cut" else data[:half] + b"\xa5" * 64)
    with pytest.raises(SourceError, match=rf"{name} is unreadable, corrupt or truncated"):
        read(path)


def test_missing_source(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="nowhere does not exist"):
        Source.scan(tmp_path / "nowhere")


def test_folder_without_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    with pytest.raises(SourceError, match="holds no file"):
        Source.scan(tmp_path)

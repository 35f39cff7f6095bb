import gzip
import json
import sys
import zlib

import pyarrow
import pytest
from pyarrow import parquet

from recipes.task import DataError
from recipes.text.config import TextConfig
from recipes.text.corpus import corpus_files, find, is_held_out
from recipes.text.documents import TextEncoder
from recipes.text.rows import BadRows
from recipes.text.tokenizers import ByteTokenizer

ROWS = [{"text": "one"}, {"text": "zwei ü", "more": 1}]


def read(*patterns, limit=0, **config):
    """The documents of a source as bytes, and what was skipped."""
    encoder = TextEncoder(ByteTokenizer(), config.pop("text_key", "text"))
    source = find("data", TextConfig(files=[str(p) for p in patterns] or None, **config))
    source.check_formats(encoder.readers)
    bad = BadRows(limit)
    rows = list(source.rows(encoder.readers, encoder.columns, bad))
    return [document.content for document in encoder.encode(rows, bad)], bad


def test_the_default_corpus_is_the_standard_library_without_tests_and_packages():
    files = corpus_files([])
    assert len(files) > 300
    assert any(file.name == "argparse.py" for file in files)
    assert not any({"site-packages", "test"} & set(file.parts) for file in files)


def test_globs_and_documents(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "deep" / "b.txt").write_bytes(b"\xff\xfe not utf-8")
    (tmp_path / "c.jsonl").write_text(
        "\ufeff" + "\n".join(json.dumps(row) for row in ROWS) + "\n\n"
    )
    files = corpus_files([str(tmp_path / "**" / "*.txt"), str(tmp_path / "c.jsonl")])
    assert [file.name for file in files] == ["a.txt", "c.jsonl", "b.txt", "empty.txt"]
    documents, _ = read(tmp_path / "**" / "*.txt", tmp_path / "c.jsonl")
    assert documents == [b"first", b"one", "zwei ü".encode(), b"\xff\xfe not utf-8"]


def write_parquet(file, rows=ROWS):
    parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=1)


def write_packed(file, kind):
    text = "\n".join(json.dumps(row) for row in ROWS).encode()
    if kind == "gz":
        file.write_bytes(gzip.compress(text, mtime=0))
    else:
        file.write_bytes(pyarrow.Codec("zstd").compress(text).to_pybytes())


def test_every_format_gives_the_same_documents(tmp_path):
    """Parquet, packed lines, and a folder through the library `datasets`, a saved one and a plain one."""
    import datasets

    expected = [row["text"].encode() for row in ROWS]
    write_parquet(tmp_path / "a.parquet")
    write_packed(tmp_path / "a.jsonl.gz", "gz")
    write_packed(tmp_path / "a.ndjson.zst", "zst")
    for name in ("a.parquet", "a.jsonl.gz", "a.ndjson.zst"):
        assert read(tmp_path / name)[0] == expected, name
    rows = [{"text": row["text"]} for row in ROWS]
    made = datasets.Dataset.from_list(rows)
    made.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=made, test=made.select([1])).save_to_disk(tmp_path / "splits")
    (tmp_path / "plain").mkdir()
    write_parquet(tmp_path / "plain" / "train.parquet", rows)
    for folder in ("saved", "splits", "plain"):
        assert read(dataset=str(tmp_path / folder))[0] == expected, folder
    assert read(dataset=str(tmp_path / "splits"), split="test")[0] == expected[1:]


BAD_LINES = [
    (b"{not json", r"bad\.jsonl:2: not JSON"),
    (b'{"body": "x"}', r":2: no 'text' \(data\.text_key\), but 'body'"),
    (b"[1]", r":2: a JSON list, where an object is needed"),
    (b'{"text": 3}', r":2: int under 'text', where text is needed"),
    (b'{"text": ""}', r":2: an empty text under 'text'"),
    (b'{"text": null}', r":2: NoneType under 'text'"),
    (b'{"text": "\xff"}', r":2: not UTF-8 \(invalid start byte at byte 10\)"),
    (b'{"text": "\\ud800"}', r":2: not UTF-8 \(surrogates"),
    (b"[" * 100_000, r":2: not JSON"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_broken_line_is_named(tmp_path, line, message):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b'{"text": "fine"}\n' + line + b'\n{"text": "also"}')
    with pytest.raises(DataError, match=message + ".*set data.max_bad_rows"):
        read(file)
    documents, bad = read(file, limit=1)
    assert documents == [b"fine", b"also"]
    assert bad.count == 1


def test_more_broken_lines_than_allowed_name_the_first(tmp_path):
    (tmp_path / "bad.jsonl").write_text("x\n" * 9 + '{"text": "fine"}')
    assert read(tmp_path / "bad.jsonl", limit=9)[1].count == 9
    with pytest.raises(
        DataError, match=r"more than data.max_bad_rows=8 bad rows.*:1: not JSON.*:5: "
    ):
        read(tmp_path / "bad.jsonl", limit=8)


def test_a_row_of_parquet_is_named_and_so_is_a_missing_column(tmp_path):
    write_parquet(tmp_path / "a.parquet", [{"text": "one"}, {"text": None}])
    with pytest.raises(DataError, match=r"a\.parquet:2: NoneType under 'text'"):
        read(tmp_path / "a.parquet")
    odd = pyarrow.array([b"fine", b"\xff"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": odd}), tmp_path / "odd.parquet")
    with pytest.raises(DataError, match=r"odd\.parquet:2: not UTF-8 \(invalid start byte\)"):
        read(tmp_path / "odd.parquet")
    assert read(tmp_path / "odd.parquet", limit=1)[0] == [b"fine"]
    write_parquet(tmp_path / "b.parquet", [{"body": "one", "n": 1}])
    with pytest.raises(
        DataError, match=r"has no column text; there are body, n: set data\.text_key"
    ):
        read(tmp_path / "b.parquet")
    assert read(tmp_path / "b.parquet", text_key="body")[0] == [b"one"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl.gz", gzip.compress(b"x" * 1000, mtime=0)[:-20], "cannot read .*a.jsonl.gz"),
        ("a.jsonl.gz", b"not packed", "cannot read .*a.jsonl.gz"),
        ("a.jsonl.zst", b"not packed", "cannot read .*a.jsonl.zst"),
        ("a.parquet", b"not parquet", "cannot read .*a.parquet"),
        ("a.txt.gz", zlib.compress(b"x"), "cannot read .*a.txt.gz"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / name, limit=100)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.zst"])
def test_without_the_library_the_extra_is_named(tmp_path, name, monkeypatch):
    (tmp_path / name).touch()
    for module in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=r"pip install 'springtide\[data\]'"):
        read(tmp_path / name)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"data.dataset needs .* pip install 'springtide\[data\]'"):
        read(dataset="name")


def test_a_dataset_that_is_not_there_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(
        DataError, match=r"data\.dataset=no/where cannot be loaded .*set data.dataset"
    ):
        read(dataset="no/where")
    write_parquet(tmp_path / "train.parquet")
    with pytest.raises(DataError, match=r"cannot be loaded \(.*test.*\)"):
        read(dataset=str(tmp_path), split="test")


def test_a_pattern_without_files_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nothing\*\.txt matches no file: set data\.files"):
        corpus_files([str(tmp_path / "nothing*.txt")])
    with pytest.raises(DataError, match="matches folders only"):
        corpus_files([str(tmp_path)])


def test_the_held_out_share_is_about_what_was_asked_for():
    documents = [str(n).encode() for n in range(4000)]
    share = sum(is_held_out(d, 0.05) for d in documents) / len(documents)
    assert 0.04 < share < 0.06
    assert not any(is_held_out(d, 0.0) for d in documents)

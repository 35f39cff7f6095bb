import json

import pytest

from recipes.task import DataError
from recipes.text.corpus import corpus_files, is_held_out, read_documents


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
    rows = [{"text": "one"}, {"text": ""}, {"text": "zwei \u00fc", "more": 1}]
    (tmp_path / "c.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    files = corpus_files([str(tmp_path / "**" / "*.txt"), str(tmp_path / "c.jsonl")])
    assert [file.name for file in files] == ["a.txt", "c.jsonl", "b.txt", "empty.txt"]
    documents = list(read_documents(files, "text"))
    assert documents == [b"first", b"one", "zwei \u00fc".encode(), b"\xff\xfe not utf-8"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", r"bad\.jsonl, line 2: not JSON"),
        ('{"body": "x"}', r"line 2: no text under 'text': set data\.text_key"),
        ("[1]", r"line 2: no text under 'text'"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, message):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(DataError, match=message):
        list(read_documents([file], "text"))


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

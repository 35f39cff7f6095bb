import json

import pytest

from recipes.lelora.labelled import LabelledConfig, read_labelled
from recipes.task import DataError


def read(tmp_path, name, content, **settings):
    (tmp_path / name).write_text(content)
    return read_labelled(
        LabelledConfig(files=[str(tmp_path / name)], **{"holdout": 0.0} | settings)
    )


def test_three_kinds_of_files_hold_the_same(tmp_path):
    rows = [("good, very", "pos"), ("bad", "neg"), ("fine", "pos")]
    kinds = {
        "a.jsonl": "\n".join(json.dumps({"text": t, "label": x}) for t, x in rows),
        "a.csv": "text,label\n" + "\n".join(f'"{t}",{x}' for t, x in rows),
        "a.tsv": "text\tlabel\n" + "\n".join(f"{t}\t{x}" for t, x in rows),
    }
    parts = [read(tmp_path, name, content)[0] for name, content in kinds.items()]
    assert parts[0] == parts[1] == parts[2]
    assert parts[0].names == ["neg", "pos"]
    assert parts[0].labels == [1, 0, 1]


def test_labels_that_are_numbers_are_in_order(tmp_path):
    content = "\n".join(json.dumps({"sentence": f"s{n}", "y": n % 12}) for n in range(24))
    train, _ = read(tmp_path, "a.jsonl", content, text="sentence", label="y")
    assert train.names == [str(n) for n in range(12)]


def test_held_out_texts_are_not_trained_on(tmp_path):
    content = "text\tlabel\n" + "\n".join(f"word {n}\t{n % 2}" for n in range(400))
    train, held_out = read(tmp_path, "a.tsv", content, holdout=0.25)
    assert not set(train.texts) & set(held_out.texts)
    assert 60 < len(held_out.texts) < 140


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("text\tlabel\na\tx\nb\tx", "2 texts have 1 label"),
        ("text\tlabel\na\tx\n\ty", r"a.tsv:3: no text in its field 'text'"),
        ("text\tlabel\na\tx\nb\t", r"a.tsv:3: no label in its field 'label'"),
        ("body\tlabel\na\tx", r"a.tsv:2: no text in its field 'text' \(data.text\)"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, content, words):
    with pytest.raises(DataError, match=words):
        read(tmp_path, "a.tsv", content)


def test_files_that_are_none(tmp_path):
    with pytest.raises(DataError, match="is none of .jsonl, .csv, .tsv"):
        read(tmp_path, "a.txt", "x")
    (tmp_path / "t.tsv").write_text("text\tlabel\na\tz")
    with pytest.raises(DataError, match="the label 'z', which no text of data.files has"):
        read(tmp_path, "a.tsv", "text\tlabel\na\tx\nb\ty", test_files=[str(tmp_path / "t.tsv")])

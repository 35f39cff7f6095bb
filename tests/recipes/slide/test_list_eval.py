"""The comparison: rows against plain searches, on any number of ranks, and going on."""

import json

import numpy as np
import pytest
import torch.distributed as dist

from models.slide.decode import beam_search, greedy_list
from models.slide.folder import load_folder
from models.slide.history import NOTHING, pad_left
from recipes.slide import latency
from recipes.slide.config import SequencesConfig
from recipes.slide.rows import parse_row
from recipes.slide.sources import read_source
from recipes.slide.split import Split
from recipes.task import DataError
from tests.ranks import run_ranks
from tests.recipes.slide.stages import (
    PLANTED,
    build_ids,
    done,
    evaluation,
    exported,
    one_rank,
    student,
    teacher,
)

ROWS = [
    "popularity", "cooccurrence", "i:beam10", "t:repeat", "s:greedy", "t:beam12+counts", "t:beam12",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def made(tmp_path_factory):
    """Models by name, one of which has IDs of its own: it is SASRec."""
    one_rank()
    folder = tmp_path_factory.mktemp("made")
    sids = build_ids(folder / "sids", collisions="keep", cap=40, codes=6)  # some items share an ID
    models = {
        "t": exported(teacher(sids), folder / "teacher"),
        "s": exported(student(sids, source="real"), folder / "student", seed=1),
    }
    own = build_ids(folder / "items", method="items")
    models["i"] = exported(teacher(own), folder / "sasrec", seed=2)
    yield models
    dist.destroy_process_group()


def on_ranks(folder, models):
    latency.ROUNDS = 2
    figures = done(evaluation(models=models, rows=ROWS, latency=[2]), folder)
    dist.barrier()
    return figures


@pytest.fixture(scope="module")
def whole(made, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, on_ranks(folder, made)


def lists(folder, row):
    with np.load(folder / "rows" / f"{row.replace(':', '-')}.npz") as stored:
        return {name: stored[name] for name in ("raw", "new", "free") if name in stored}


def test_rows_are_searches_for_each_user(made, whole):
    models = made
    loaded = {name: load_folder(folder) for name, folder in models.items()}
    trie = loaded["t"].trie
    split = Split(read_source(PLANTED)[0])
    for user, event in list(enumerate(split.targets("test").tolist()))[::13]:
        history = split.history(user, event)
        one, met = pad_left([history], 6), pad_left([history], len(history))
        for kind, out in (("raw", one[:, :0]), ("new", met)):
            expected = {
                "t:repeat": greedy_list([loaded["t"].model], trie, one, 10, out, feedback=False),
                "s:greedy": greedy_list([loaded["s"].model], trie, one, 10, out),
                "t:beam12": beam_search([loaded["t"].model], trie, one, 12, out),
                "i:beam10": beam_search([loaded["i"].model], loaded["i"].trie, one, 10, out),
            }
            for row, found in expected.items():
                assert lists(whole[0], row)[kind][user].tolist() == found.items_BK[0, :10].tolist()


def test_nothing_that_is_no_item_no_item_twice_none_that_was_met(whole):
    result = json.loads((whole[0] / "eval.json").read_text())
    split = Split(read_source(PLANTED)[0])
    for row in ROWS:
        for kind in ("raw", "new"):
            assert result["rows"][row][kind]["repeats"] == 0 == result["rows"][row][kind]["missing"]
        for user, items in enumerate(lists(whole[0], row)["new"].tolist()):
            assert not set(items) & set(
                split.history(user, int(split.targets("test")[user])).tolist()
            )
    free = result["rows"]["s:greedy"]["without_trie"]
    assert free["invalid"] + free["repeats"] > 0  # so the trie has something to do
    assert "without_trie" not in result["rows"]["t:beam12"]


def test_figures_are_those_of_the_lists(whole):
    result = json.loads((whole[0] / "eval.json").read_text())
    split = Split(read_source(PLANTED)[0])
    targets = split.sequences.items_E[split.targets("test")].tolist()
    reference = lists(whole[0], "t:beam12")["raw"].tolist()
    for row in ROWS:
        items = lists(whole[0], row)["raw"].tolist()
        found = result["rows"][row]["raw"]
        hits = [target in mine for target, mine in zip(targets, items, strict=True)]
        theirs = [target in other for target, other in zip(targets, reference, strict=True)]
        assert found["recall@10"] == pytest.approx(np.mean(hits))
        assert found["recall@10"] == whole[1][f"recall@10_of_{row}"]
        assert found["recall@10_minus_reference"] == pytest.approx(np.mean(hits) - np.mean(theirs))
        assert sum(found["by_position"]) == pytest.approx(np.mean(hits))
        same = split.strata("test")["same_day"]
        assert found["recall@10_later"] == pytest.approx(np.mean(np.array(hits)[~same]))
    assert result["rows"]["t:beam12"]["raw"]["overlap"] == 1
    time = result["rows"]["t:beam12"]["latency"][0]
    assert (time["batch"], time["steps"], time["row_steps"]) == (2, 3, 1 + 12 * 2)
    assert "latency" not in result["rows"]["popularity"]


def test_two_ranks_find_what_one_does(made, whole, tmp_path):
    first, second = run_ranks(2, on_ranks, tmp_path, made)
    assert first == whole[1] == second
    for row in ROWS:
        one, two = lists(whole[0], row), lists(tmp_path, row)
        assert all(np.array_equal(one[kind], two[kind]) for kind in one)


def test_rows_that_are_done_are_not_done_again(made, whole, tmp_path):
    models = made
    asked = iter([False, False, True])
    task = evaluation(models=models, rows=ROWS)
    assert done(task, tmp_path, lambda: next(asked)) is None
    names = sorted(file.name for file in (tmp_path / "rows").iterdir())
    assert names == ["cooccurrence.npz", "popularity.npz"]
    when = {n: (tmp_path / "rows" / n).stat().st_mtime_ns for n in names}
    assert done(evaluation(models=models, rows=ROWS), tmp_path) == whole[1]
    assert all((tmp_path / "rows" / n).stat().st_mtime_ns == t for n, t in when.items())
    with pytest.raises(
        DataError, match="was made from another model, other data or other settings"
    ):
        done(evaluation(models=models, rows=ROWS, part="validation"), tmp_path)
    (tmp_path / "rows" / "popularity.npz").write_bytes(b"no")
    with pytest.raises(DataError, match=r"popularity.npz is damaged"):
        done(evaluation(models=models, rows=ROWS), tmp_path)


def test_panels_are_plain_and_complete(made, whole):
    task = evaluation(models=made, rows=ROWS, latency=[2])
    assert task.panels() == []
    done(task, whole[0])
    panels = task.panels()
    assert json.loads(json.dumps(panels)) == panels
    raw, new, curve, curve_of_new, plot, times = panels
    assert plot["title"] == "Recall against latency, batch 2"
    assert {name: points for name, points in plot["series"].items()} == {
        row[0]: [[row[times["columns"].index("ms")], row[1]]] for row in times["rows"]
    }
    assert [row[0] for row in raw["rows"]] == ROWS == [row[0] for row in new["rows"]]
    assert all(len(row) == len(raw["columns"]) for row in raw["rows"])
    assert None not in raw["rows"][0]
    for of, lists in ((curve, raw), (curve_of_new, new)):
        assert of["series"]["t:beam12"][-1][1] == pytest.approx(lists["rows"][-1][1])
    assert [row[0] for row in times["rows"]] == ["i:beam10", "t:repeat", "s:greedy", "t:beam12"]


def test_models_of_other_data_are_refused(made):
    """They may have been trained on what is to be tested."""
    other = SequencesConfig(source="planted", planted_users=61)
    with pytest.raises(DataError, match=r"task.models.t=.* was trained on other data"):
        evaluation(other, models=made, rows=["t:greedy"]).check()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("markow", "which is none of popularity, markov, cooccurrence, NAME:greedy"),
        ("t:beam0", "which is none of"),
        ("u:greedy", "and task.models has t: set task.models.u to its exported folder"),
    ],
)
def test_rows_that_cannot_be(row, message):
    with pytest.raises(ValueError, match=message):
        parse_row(row, {"t": "folder"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": []}, "task.rows is empty"),
        ({"reference": "markow"}, "set task.reference=markov"),
        ({"part": "training"}, "task.part=training is not one of"),
        ({"latency": [0]}, "set task.latency to 1 or more"),
    ],
)
def test_comparisons_that_cannot_be(made, change, message):
    with pytest.raises(ValueError, match=message):
        evaluation(**change)


def test_a_list_may_be_longer_than_the_catalogue(made, tmp_path):
    models = made
    done(
        evaluation(models=models, rows=["popularity", "t:beam1", "s:greedy"], length=97),
        tmp_path,
    )
    for row in ("popularity", "t:beam1", "s:greedy"):
        items = lists(tmp_path, row)["raw"]
        assert items.shape == (60, 97)
        assert (items[:, 96] == NOTHING).all()

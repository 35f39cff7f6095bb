"""From a packed set to the page's tables, with models too small to be good."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.pages import filled
from benchmarks.slide import __main__ as program
from benchmarks.slide import page, study, verdicts
from benchmarks.slide.compared import against, load
from benchmarks.slide.everything import ASIDE
from benchmarks.slide.plan import LEARNINGS, REINFORCEMENTS, TEACHINGS, TINY
from benchmarks.slide.scored import read, written
from benchmarks.slide.sets import Prepared
from models.slide.history import NOTHING
from recipes.ctr.significance import Difference
from recipes.slide.metrics import MISSED, gains, places
from tests.benchmarks.slide.small import planted


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["benchmarks.slide", *map(str, words)])
    program.main()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    _, file = planted(folder)
    packed = file.rename(folder / "beauty.npz")
    with pytest.MonkeyPatch.context() as patch:
        for what in ("counts", "study", "latency", "weights"):
            run(patch, what, "--set", packed, "--plan", "tiny", "--device", "cpu", "--out", folder)
    return folder, packed


def test_a_study_has_every_row_with_every_user(results):
    folder, _ = results
    found = json.loads((folder / "slide-beauty-0.json").read_text())
    rows = {row["row"]: row for row in found["rows"]}
    assert {"s:beam50", "h:beam50", "s:repeat", "sasrec:beam10", "e:beam12", "e:beam12+counts", "heads:greedy",
            "steps:greedy", "direct_heads:greedy", "weak_heads:greedy", "cross_heads:greedy", "rl_heads:greedy",
            "heads:beam50"} <= set(rows)  # fmt: skip
    assert found["summary"]["whole"]
    for row in rows.values():
        for kind in ("raw", "new"):
            place_X = read(row["places"][kind])
            assert len(place_X) == found["config"]["users"] == 60
            recall = gains(place_X, 10)["recall@10"].mean()
            assert row["figures"][kind]["recall@10"] == pytest.approx(recall)
            assert row["figures"][kind]["repeats"] == 0
            assert row["figures"][kind]["missing"] == 0
    trained = found["summary"]["trainings"]
    for one in trained.values():
        assert one["best"]["ndcg@10"] == max(entry["ndcg@10"] for entry in one["log"])
    assert found["summary"]["about"]["ensemble"]["chosen"] in ("heads", "all")


def test_what_is_whole_is_not_done_again(results, monkeypatch, capsys):
    folder, packed = results
    monkeypatch.setattr(study.Study, "run", None)
    words = ("study", "--set", packed, "--plan", "tiny", "--device", "cpu", "--out", folder)
    run(monkeypatch, *words, "--resume")
    assert "is whole" in capsys.readouterr().out
    with pytest.raises(TypeError):
        run(monkeypatch, *words)


def cut_at(judge, row):
    """As if somebody stopped the study there."""

    def cut(self, text):
        if text == row:
            raise KeyboardInterrupt
        judge(self, text)

    return cut


def test_a_cut_study_goes_on_after_its_searches(results, monkeypatch):
    folder, packed = results
    whole = json.loads((folder / "slide-beauty-0.json").read_text())
    words = ("study", "--set", packed, "--plan", "tiny", "--device", "cpu", "--out", folder / "cut")
    with monkeypatch.context() as patch:
        patch.setattr(study.Judging, "judge", cut_at(study.Judging.judge, "heads:greedy"))
        with pytest.raises(KeyboardInterrupt):
            run(patch, *words)
    file = folder / "cut" / "slide-beauty-0.json"
    assert json.loads(file.read_text())["summary"]["stage"] == "students"
    assert (folder / "cut" / "slide-beauty-0.weights" / "m.safetensors").exists()
    patched = cut_at(study.Judging.judge, "s:beam50")  # a row of a stage that is done
    monkeypatch.setattr(study.Judging, "judge", patched)
    run(monkeypatch, *words, "--resume")
    found = json.loads(file.read_text())
    assert [row["row"] for row in found["rows"]] == [row["row"] for row in whole["rows"]]
    for one, other in zip(found["rows"], whole["rows"], strict=True):
        assert one["places"] == other["places"]
    assert not (folder / "cut" / "slide-beauty-0.weights").exists()


def test_studies_train_as_is_best_in_trials(results, monkeypatch):
    folder, packed = results
    run(monkeypatch, "trials", "--set", packed, "--plan", "tiny", "--device", "cpu", "--out",
        folder / "tried")  # fmt: skip
    summary = json.loads((folder / "tried" / "slide-trials.json").read_text())["summary"]
    figures = summary["validation ndcg@10"]
    assert set(figures) == set(TEACHINGS)
    assert figures[summary["chosen"]] == max(figures.values())
    lines = page.tables(folder / "tried")["trials"]
    assert lines[0].startswith("| way | weight decay | beta | lr | dropout | tied | by target |")
    assert lines[2].startswith(f"| {summary['chosen']} | ")
    for out in (folder / "tried", folder / "tried" / "levers"):
        assert program.taught(TINY, out).teaching == TEACHINGS[summary["chosen"]]
    assert program.taught(TINY, folder / "elsewhere") == TINY


def test_and_their_students(results, monkeypatch):
    folder, packed = results
    run(monkeypatch, "students", "--set", packed, "--plan", "tiny", "--device", "cpu", "--out",
        folder / "learned")  # fmt: skip
    file = json.loads((folder / "learned" / "slide-student-trials.json").read_text())
    figures, chosen = file["summary"]["validation ndcg@10"], file["summary"]["chosen"]
    assert set(figures) == set(LEARNINGS)
    assert figures[chosen] == max(figures.values())
    trained = file["summary"]["trainings"]
    assert trained["long"]["steps"] > 2 * trained["short"]["steps"]
    lines = page.tables(folder / "learned")["learnings"]
    assert lines[0].startswith("| way | epochs | lr | dropout | copies |")
    assert program.taught(TINY, folder / "learned").learning == LEARNINGS[chosen]


def test_and_reinforced(results, monkeypatch):
    folder, packed = results
    ways = {name: REINFORCEMENTS[name] for name in ("first", "ends, scores")}
    monkeypatch.setattr(program, "REINFORCEMENTS", ways)
    monkeypatch.setitem(program.PLANS, "tiny", replace(TINY, students=("heads",), folds=0))
    out = folder / "reinforced"
    run(monkeypatch, "reinforcements", "--set", packed, "--plan", "tiny", "--device", "cpu", "--out",
        out)  # fmt: skip
    summary = json.loads((out / "slide-rl-trials.json").read_text())["summary"]
    figures, chosen = summary["validation ndcg@10"], summary["chosen"]
    found = json.loads((out / "slide-beauty-0.json").read_text())["summary"]
    before = found["trainings"]["heads"]["best"]["ndcg@10"]
    assert set(figures) == set(ways)
    assert before <= figures[chosen] == max(figures.values())
    assert [row["step"] for row in found["trainings"]["rl: ends, scores"]["log"]] == [0, 1, 2]
    assert 0 < found["about"]["agreement"]["heads"]["ends"] <= 1
    assert page.tables(out)["reinforcements"][2].startswith(f"| {chosen} | ")
    assert program.taught(TINY, out).reinforcements == {chosen: ways[chosen]}
    with monkeypatch.context() as patch:
        patch.setattr(study.Study, "run", None)
        run(patch, "reinforcements", "--set", packed, "--plan", "tiny", "--device", "cpu", "--out",
            out, "--resume")  # fmt: skip


def test_nothing_is_learnt_from_what_validation_asks(results):
    """Whole training parts are those of users who are not evaluated, and their rows have no target."""
    _, packed = results
    plan = replace(TINY, students=("heads",), folds=0)
    one = study.Study(Prepared.of(packed), plan, 0, torch.device("cpu"), graphs=False)
    one.teachers()
    one.judging.ensemble()
    one.judging.counted("e")
    one.lists()
    ends, strong = one.exported["ends"], one.exported["strong"]
    assert len(ends.users_R) == 60 - len(one.judging.some_users()) == 20
    assert not set(ends.users_R.tolist()) & set(one.judging.some_users())
    assert (ends.targets_R == NOTHING).all()
    assert (strong.events_R < one.data.split.train_ends[strong.users_R]).all()


def test_the_page_has_what_is_in_the_files(results):
    folder, _ = results
    tables = page.tables(folder)
    found = json.loads((folder / "slide-beauty-0.json").read_text())
    recall = next(r for r in found["rows"] if r["row"] == "heads:greedy")["figures"]["new"][
        "recall@10"
    ]
    (line,) = (x for x in tables["online"] if x.startswith("| student with heads, one greedy pass"))
    assert line.split(" | ")[3] == f"{recall:.4f}".replace("0.", ".", 1)
    assert any(x.startswith("| co-occurrence counts |") for x in tables["offline"])
    timed = json.loads((folder / "slide-latency.json").read_text())["rows"]
    first = next(r for r in timed if (r["codes"], r["how"], r["batch"]) == ("steps", "greedy", 1))
    assert f"{first['ms']:.2f}" in tables["latency"][2]
    text = "a\n<!-- online -->\nold\n<!-- end -->\nb"
    new = filled(text, tables)
    assert "old" not in new
    assert filled(new, tables) == new


def test_sentences_say_what_the_tests_of_the_tables_do(results, monkeypatch):
    folder, _ = results
    sets = load(folder)
    about = [*page.CLAIMS, ("a row that nobody has", "heads:greedy", "nobody:greedy")]
    found = verdicts.tested(sets["beauty"], about)
    rows = [line.split(" | ") for line in page.tables(folder)["claims"] if line.startswith("| ")]
    assert [one.label for one in found] == [row[0].removeprefix("| ") for row in rows[1:]]
    signs = {"shown": +0.01, "below": -0.01, "open": +0.01}
    for verdict, mean in signs.items():
        p = 0.5 if verdict == "open" else 0.01
        one = verdicts.Tested("a claim", "recall@10", Difference(mean, 0.0, 0.0, p), 2, p)
        assert one.verdict == verdict
        with monkeypatch.context() as patch:
            patch.setattr(verdicts, "tested", lambda *_, one=one: [one])
            lines = verdicts.verdicts(sets, about, folder)
        said = f"{verdicts.VERDICTS[verdict]} Beauty (recall {mean:+.4f}; 2 seeds)"
        assert lines[0] == f"- A claim: {said.replace('0.', '.', 1)}."
    lines = verdicts.verdicts(sets, about, folder)
    assert any("a row that nobody has" in line for line in lines if "Not measured" in line)
    assert (
        "- Nothing is trained yet on Toys, Yelp-P5, MovieLens-1M and Beauty, ties permuted."
        in lines
    )
    assert "- Students of Beauty (seed 0) learnt for 1 epochs at a rate of 0.0005, with 1 copy of each history." in lines  # fmt: skip


def test_plans_that_stand_apart_have_tables_of_their_own(results, tmp_path):
    """The tiny plan has the students of both."""
    folder, _ = results
    for name in ("slide-beauty-0.json", "slide-beauty-counts.json"):
        (tmp_path / name).write_text((folder / name).read_text())
        for plan in ASIDE:
            (tmp_path / plan).mkdir(exist_ok=True)
            if "counts" not in name:
                (tmp_path / plan / name).write_text((folder / name).read_text())
    made, rows = page.tables(tmp_path), {}
    for plan in ASIDE:
        rows[plan] = [line.split(" | ")[0] for line in made[plan] if line.startswith("| ")]
    assert "| lists shuffled" in rows["levers"]
    assert "| in their order above shuffled" in rows["levers"]
    assert "| student of teachers that did not train on the list's user" in rows["cross"]
    assert "| teachers of other users above one of all" in rows["cross"]
    (line,) = (x for x in made["cross"] if x.startswith("| Beauty | 0 | fold0, fold1 |"))
    about = json.loads((folder / "slide-beauty-0.json").read_text())["summary"]["about"]
    assert f"{about['targets in the lists of fold0+fold1']['10']:.3f}" in line
    assert page.tables(folder)["levers"] == [page.NOT_YET, "", page.NOT_YET]


def test_differences_are_paired_by_user(results):
    folder, _ = results
    of = load(folder)["beauty"]
    made, seeds = against(of, "heads:greedy", "cooccurrence", "new", "recall@10")
    assert seeds == 1
    (own,), (other,) = (of.gains(t, "new", "recall@10") for t in ("heads:greedy", "cooccurrence"))
    assert made.mean == pytest.approx((own - other).mean())
    assert made.low <= made.mean <= made.high
    later = against(of, "heads:greedy", "cooccurrence", "new", "recall@10", "later")
    rows = of.stratum("later")
    assert later[0].mean == pytest.approx((own - other)[rows].mean())
    assert against(of, "heads:greedy", "nobody:greedy", "new", "recall@10") is None


def test_places_are_letters():
    lists = np.array([[3, 1, 2], [4, 5, 6], [7, 8, 9]])
    found = places(lists, np.array([2, 9, 7]))
    assert written(found) == "2.0"
    assert read("2.0").tolist() == [2, MISSED, 0]


def test_the_page_is_up_to_date():
    text = page.PAGE.read_text()
    assert text.count("<!-- end -->") == len(page.tables(page.RESULTS))
    assert text == filled(text, page.tables(page.RESULTS))

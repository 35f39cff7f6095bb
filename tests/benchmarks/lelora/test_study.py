"""A study on tiny texts goes through all of it, is resumed, and makes a page."""

import base64
import json
import sys

import numpy as np
import pytest
import torch

from benchmarks.lelora import __main__ as program
from benchmarks.lelora.classification import TUNING, Classifications
from benchmarks.lelora.data import read
from benchmarks.lelora.page import PAGE, committed, filled, policies, tables
from benchmarks.lelora.policy import School
from benchmarks.lelora.study import Study
from benchmarks.lelora.training import Plan
from benchmarks.lelora.tuning import best_rate
from benchmarks.lelora.verdict import against, sentence, values, within, word
from tests.benchmarks.lelora.tiny import write

SMALL = ["--seeds", "2", "--rank", "2", "--steps", "3", "--batch-size", "4", "--runs", "3", "--rounds", "2",
         "--taught-steps", "2", "--heads", "2", "--device", "cpu", "--texts", "30"]  # fmt: skip


def start(monkeypatch, folder, *more):
    arguments = ["--data", str(folder / "data"), "--out", str(folder / "out"), "--json",
                 str(folder / "found.json"), *SMALL, *more]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["benchmarks.lelora", *arguments])
    program.main()
    return json.loads((folder / "found.json").read_text())


def test_a_study_measures_every_method_and_is_resumed(tmp_path, monkeypatch, capsys):
    write(tmp_path / "data")
    found = start(monkeypatch, tmp_path, "--task", "wordnet")
    assert {row["method"] for row in found["rows"]} == set(program.METHODS)
    for row in found["rows"]:
        assert [run["seed"] for run in row["runs"]] == [0, 1]
        tried = found["summary"]["tasks"]["wordnet"]["tuning"][row["method"]]
        assert len(tried) >= len(TUNING.rates("lora"))
        assert row["runs"][0]["lr"] in map(float, tried)
        assert {run["collapsed"] for run in row["runs"]} <= {True, False}
    assert set(found["summary"]["tasks"]["wordnet"]["start"]) == {"validation", "test"}
    capsys.readouterr()
    again = start(monkeypatch, tmp_path, "--task", "wordnet")
    assert "runs:" not in capsys.readouterr().out
    assert again["rows"] == found["rows"]
    with pytest.raises(SystemExit):
        start(monkeypatch, tmp_path, "--steps", "4")
    assert "choose another --out" in capsys.readouterr().err
    page = tables([found])
    assert "**WordNet glosses** (30 test texts)" in page
    for method in program.METHODS:
        assert f"| {method} |" in page
    assert "between online and random" in page or "online is significantly" in page
    assert "what populations chose is better" in page or "populations chose equal ranks" in page
    assert "between learned and frozen" in page or "learned is significantly" in page
    assert filled("a <!-- measured -->old<!-- end of what was measured --> b", "new\n") == (
        "a <!-- measured -->\nnew\n<!-- end of what was measured --> b"
    )
    code = start(monkeypatch, tmp_path, "--task", "reuters", "--seconds", "0")
    assert len(code["rows"]) == len(found["rows"]), "no time, no runs"


def runs_with(accuracies, texts=400):
    """Runs by seed that have so many texts in a hundred right."""
    found = []
    for seed, accuracy in enumerate(accuracies):
        right = np.arange(texts) < texts * accuracy / 100
        bits = base64.b64encode(np.packbits(right).tobytes()).decode()
        found.append({"seed": seed, "texts": texts, "correct": bits})
    return found


def test_verdicts_are_about_paired_differences():
    levels = np.array([70.0, 75.0, 72.0, 80.0, 76.0, 71.0, 78.0, 74.0])
    found = {"lora": values(runs_with(levels)), "same": values(runs_with(levels)),
             "better": values(runs_with(levels + 3)), "half": values(runs_with(levels - 0.25))}  # fmt: skip
    np.testing.assert_allclose(found["lora"].real_S, levels)
    compared = against(found, "lora")
    assert word(*compared["same"]) == "no significant difference"
    assert word(*compared["better"]) == "significantly better"
    assert compared["better"][0].mean == pytest.approx(3)
    assert sentence("better", "lora", *compared["better"]).startswith(
        "better is significantly better"
    )
    assert within(compared["better"][0]).endswith(": shown")
    worse = against({"a": found["lora"], "b": found["better"]}, "b")["a"]
    assert within(worse[0]).endswith("not so")


def test_what_policies_did_is_said():
    contest = {"gain": 0.001, "error": 0.002, "pairs": 32, "better": False}
    row = {"rows": 4, "switched": 2, "learnt": True, "went_back": False}
    runs = {"online": [{"decisions": [row, {"went_back": True}]}] * 2}
    taught, decided = policies(runs, {"contest": contest})
    assert (
        "by 0.0010 nats, standard error 0.0020, in 32 pairs of runs: so equal ranks are kept"
        in taught
    )
    assert (
        "4.0 rows switched in 2.0 matrices; learnt from 1.0 of 2 periods; went back 1.0 times"
        in decided
    )


def test_the_documentation_says_what_is_committed():
    assert PAGE.read_text() == filled(PAGE.read_text(), tables(committed()))


def test_steps_and_decompositions_are_tabled():
    rows = [
        {"kind": "step", "method": "lora", "milliseconds": 10.0},
        {"kind": "step", "method": "lelora", "milliseconds": 11.0},
        {"kind": "step", "method": "lelora", "milliseconds": 12.0},
        {"kind": "svd", "shape": [4096, 4096], "count": 64, "seconds": 3.0},
    ]
    page = tables([{"name": "lelora.cost", "machine": {"device": "some GPU"}, "rows": rows}])
    assert "| lelora | 11.50 | 1.15 |  |  |  |" in page
    assert "| 4096 x 4096 | 3.00 | 64 |" in page
    assert "3.2 minutes on one GPU" in page


def scores(loss, percent, texts=200, first=0):
    """Of a run that has so many right, counted from one of the texts on."""
    right = np.roll(np.arange(texts) < texts * percent / 100, first)
    bits = base64.b64encode(np.packbits(right).tobytes()).decode()
    return {"loss": loss, "accuracy": float(right.mean()), "texts": texts, "correct": bits}


def test_texts_that_cannot_tell_rates_apart_leave_it_to_the_loss():
    """Two more right, where each rate has about ten that the other has wrong; against ten of ten."""
    low, high = [scores(0.3, 90.0)] * 2, [scores(0.4, 91.0, first=10)] * 2
    assert best_rate({1e-3: low, 2e-3: high}, by_loss=False) == 1e-3
    high = [scores(0.4, 95.0)] * 2
    assert best_rate({1e-3: low, 2e-3: high}, by_loss=False) == 2e-3
    assert best_rate({1e-3: low, 2e-3: high}, by_loss=True) == 1e-3
    once = [scores(0.4, 95.0), scores(0.4, 89.0)]
    assert best_rate({1e-3: low, 2e-3: once}, by_loss=False) == 2e-3
    gone = [scores(float("nan"), 95.0), scores(0.1, 95.0)]
    assert best_rate({1e-3: gone, 2e-3: high}, by_loss=False) == 2e-3


def test_a_rate_near_one_at_which_runs_collapse_is_not_chosen(tmp_path):
    """Unless there is none that is safe."""
    write(tmp_path / "data")
    subjects = Classifications(
        read(tmp_path / "data"), rank=2, steps=2, device=torch.device("cpu"), heads=2
    )
    study = Study(subjects, tmp_path, Plan(2, 4), School(), TUNING, rank=2, seeds=2,
                  dtype=torch.float32)  # fmt: skip
    loss, accuracy = study.start("wordnet")["validation"]
    assert study.collapsed("wordnet", "validation", float("nan"), accuracy / 2)
    assert not study.collapsed("wordnet", "validation", loss + 1, accuracy)
    fine, broken = scores(loss / 2, 90), scores(loss + 1, 50 * accuracy)
    better = scores(loss / 3, 95)
    tuning = {"0.001": {"0": fine, "1": fine}, "0.002": {"0": better, "1": better}}
    study.of("wordnet")["tuning"]["lora"] = tuning
    assert study.rate("wordnet", "lora") == 0.002
    tuning["0.004"] = {"0": better, "1": broken}
    assert study.rate("wordnet", "lora") == 0.002, "half of it is far enough"
    tuning["0.003"] = {"0": better, "1": broken}
    assert study.rate("wordnet", "lora") == 0.001
    study.of("wordnet")["tuning"]["lora"] = {"0.004": {"0": broken, "1": broken}}
    assert study.rate("wordnet", "lora") == 0.004

import json
import sys

import numpy as np
import pytest

from benchmarks.trip import __main__ as program
from benchmarks.trip import cells, study
from benchmarks.trip.grid import GROUPS, models, overrides
from benchmarks.trip.training import Plan
from benchmarks.trip.verdict import conclusion, sentence
from recipes.ctr.metrics import auc
from recipes.ctr.significance import Difference
from tests.recipes.ctr.test_trip import ratings

SMALL = ["model.hidden_size=8", "model.max_history=12", "optim.warmup=2", "data.positive_from=3"]
OPTIONS = ["--seeds", "2", "--epochs", "2", "--evaluations", "2", "--batch-size", "64",
           "--resamples", "60", "--device", "cpu"]  # fmt: skip


def run(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["benchmarks.trip", *words])
    program.main()
    return capsys.readouterr().out


def test_a_study_from_models_to_a_verdict_and_again_without_training(tmp_path, monkeypatch, capsys):
    folder, out = ratings(tmp_path, users=20, rows=700), tmp_path / "study"
    words = [*SMALL, *OPTIONS, f"data.folder={folder}", "--out", str(out)]
    for model in ("target_attention", "mean_pooling", "popularity", "cosine"):
        words += ["--model", model]
    first = run(monkeypatch, capsys, *words, "--lr", "1e-3", "--lr", "3e-3")
    cells = list((out / "cells").glob("*.safetensors"))
    assert len(cells) == 2 * (2 + 2)  # two rates that are tried, then two seeds
    assert "no significant difference between target_attention and mean_pooling" in first
    assert "The strongest of the others on the validation part is" in first

    found = json.loads((out / "results.json").read_text())
    rows = {row["model"]: row for row in found["rows"]}
    assert list(rows) == ["target_attention", "mean_pooling", "popularity", "cosine"]
    assert found["summary"]["candidate"] == "target_attention"
    own, other = (np.array(rows[m]["by_seed"]["auc"]) for m in ("target_attention", "mean_pooling"))
    against = rows["mean_pooling"]["against"]["auc"]
    assert against["mean"] == pytest.approx((own - other).mean())
    assert against["low"] < against["mean"] < against["high"]
    assert len(rows["popularity"]["by_seed"]["auc"]) == 1
    assert "logloss" not in rows["cosine"]["against"]
    assert {"auc", "gauc", "logloss", "calibration", "validation"} <= set(
        rows["mean_pooling"]["figures"]
    )
    targets = sum(count for _, count, _ in rows["cosine"]["by_bin"]["length of the history"])
    assert f"{targets:,} test" in found["config"]["targets"]

    with pytest.raises(SystemExit):
        run(monkeypatch, capsys, *words)
    assert "holds a study: --resume goes on with it" in capsys.readouterr().err

    def untrained(*_):
        raise AssertionError("everything was there")

    cells[0].unlink()
    with monkeypatch.context() as patch:  # just the one that is missing is trained again
        patch.setattr(study, "train", untrained)
        with pytest.raises(AssertionError, match="everything was there"):
            run(patch, capsys, *words, "--lr", "1e-3", "--lr", "3e-3", "--resume")
    capsys.readouterr()
    again = run(monkeypatch, capsys, *words, "--lr", "1e-3", "--lr", "3e-3", "--resume")
    assert len(list((out / "cells").glob("*.safetensors"))) == len(cells)
    once_more = json.loads((out / "results.json").read_text())["rows"]
    for row, same in zip(found["rows"], once_more, strict=True):
        assert row["by_seed"] == same["by_seed"]  # what was trained again is bit for bit the same
        assert row["against"] == same["against"]
    assert again.count(" s for 2") == 2
    assert first.count(" s for 2") == 2 * (2 + 2)


def test_parts_that_came_later_leave_the_names_of_older_cells(tmp_path):
    def key(*words):
        config = study.compose("din", [*SMALL, f"data.folder={folder}", *words])
        return cells.key(study.task_of(config), config, Plan(), 1e-3, 0)

    folder = ratings(tmp_path)
    assert not any(f'"{name}"' in key() for name in cells.LATER)
    assert '"verdict": "plain"' in key("model.verdict=plain")


def test_scores_are_those_of_the_samples_one_by_one(tmp_path):
    """The loop's own batches give what the task's collate and the metrics give."""
    import torch

    from benchmarks.trip.training import Data, Plan, train
    from tests.recipes.ctr.test_trip import built, make

    task = make(ratings(tmp_path))
    config = study.Study(
        ["mean_pooling"], [*SMALL, f"data.folder={tmp_path}"], tmp_path, Plan(), 1, [],
        torch.device("cpu"), 10,
    ).config("mean_pooling")  # fmt: skip
    cpu = torch.device("cpu")
    [found] = train(task, config, Plan(0.01, 1, 16), [(0.0, 0)], Data.of(task, cpu), cpu)
    model, samples = built(task), task.eval_samples()  # seed 0, not trained
    with torch.no_grad():
        one = [task.logits(model, task.collate([samples[n]])).item() for n in range(len(samples))]
    cut = len(task.parts.validation)
    assert np.allclose(found.logits_T, one[cut:], atol=1e-5)
    assert found.best == pytest.approx(
        auc(np.array(one)[:cut], task.parts.validation.labels_T), abs=1e-3
    )


def test_what_cannot_be_compared_is_refused(tmp_path, monkeypatch, capsys):
    for words, message in (
        (
            ["--model", "popularity"],
            "--candidate popularity is none of the models that are trained",
        ),
        (["--model", "no_such_model"], "no_such_model"),
        (["--model", "din", "data.folder=/nowhere"], "data.folder=/nowhere has neither"),
        (["--model", "din", "model.sort=1"], "model.sort"),
    ):
        with pytest.raises(SystemExit) as error:
            run(monkeypatch, capsys, *words, "--out", str(tmp_path))
        assert error.value.code == 2
        assert message in capsys.readouterr().err


def test_groups_name_each_model_once():
    assert len(models(["encodings"])) == 30
    assert models(["trip", "parts"]) == GROUPS["parts"]
    assert models(["din", "baselines"])[0] == "din"
    assert len(models(["levers", "together"])) == 24  # one is in both
    assert overrides("transformer model.mask=group") == ["model=transformer", "model.mask=group"]


def test_verdicts_in_words():
    def say(mean, p, metric="auc"):
        return sentence("a", "b", metric, Difference(mean, mean - 0.01, mean + 0.01, p), p)

    assert say(0.02, 0.2).startswith("no significant difference between a and b: +0.0200 AUC")
    assert say(0.02, 0.01).startswith("a is significantly better than b: +0.0200 AUC")
    assert say(-0.02, 0.01, "gauc").startswith("a is significantly worse than b: -0.0200 GAUC")
    assert say(-0.02, 0.01, "logloss").startswith("a is significantly better than b: -0.0200 log")
    assert "by too little to matter (than b): +0.0005 AUC" in say(0.0005, 0.01)
    assert "p 0.01 after Holm's correction" in say(0.02, 0.01)
    found = Difference(0.02, 0.01, 0.03, 0.001)
    words = conclusion("a", "b", "auc", found, 0.01, 3, 4)
    assert words.startswith(
        "The strongest of the others on the validation part is b: a is significantly"
    )
    assert words.endswith("a is significantly better in AUC than 3 of the 4 others.")

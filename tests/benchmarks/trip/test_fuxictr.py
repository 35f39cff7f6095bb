"""What FuxiCTR is given, and what the page makes of the comparison; its package is not needed."""

import json
from pathlib import Path

import numpy as np

from benchmarks.trip import fuxictr, page, study
from benchmarks.trip.fuxictr import items_only, summary
from benchmarks.trip.fuxictr_side import written
from tests.benchmarks.trip.test_study import SMALL
from tests.recipes.ctr.test_trip import ratings


def test_their_files_have_our_targets_and_histories(tmp_path):
    words = [*SMALL, f"data.folder={ratings(tmp_path)}"]
    task = items_only(study.task_of(study.compose("din", words)))
    for name, part in (("train", task.parts.train), ("test", task.parts.test)):
        batch = task.at_once(task.clicks(part), np.arange(len(part)))
        assert not batch["behaviours_BN"].any()
        for post in (False, True):
            with np.load(written(task, tmp_path, post) / f"{name}.npz") as found:
                assert np.array_equal(found["item"], batch["targets_B"])
                assert np.array_equal(found["label"], batch["labels_B"])
                for row, ours in zip(found["history"], batch["items_BN"].numpy(), strict=True):
                    assert np.array_equal(row[row > 0], ours[ours > 0])  # in the same order
                    assert (row[0 if post else -1] > 0) == (ours[-1] > 0)
    about = json.loads((tmp_path / "feature_map.json").read_text())
    assert about["features"][1]["history"]["max_len"] == task.model_config.max_history
    assert about["features"][0]["item"]["vocab_size"] == task.parts.num_items


def test_the_page_says_how_far_ours_is_from_theirs():
    rows = [
        {"model": "FuxiCTR DIN", "beside": "DIN", "auc": [0.70, 0.72]},
        {"model": fuxictr.PAIRED, "beside": "DIN", "auc": [0.701, 0.7005]},
        {"model": "ours, DIN", "beside": "DIN", "auc": [0.721, 0.722]},
        {"model": fuxictr.ALIKE, "beside": "DIN", "auc": [0.702, 0.7]},
        {"model": "FuxiCTR DIEN", "beside": "DIEN", "auc": [0.70]},
    ]
    config = {"targets": "some", "max_history": 30, "hidden_size": 32, "epochs": 4,
              "batch_size": 256, "lr": 1e-3, "seeds": 2}  # fmt: skip
    result = {"name": "trip.fuxictr", "date": "", "machine": {"device": "cpu"}, "config": config,
              "rows": rows, "summary": summary(rows)}  # fmt: skip
    assert result["summary"]["near"]  # from the same start
    text = page.section(Path("trip-fuxictr.json"), result)
    assert "| FuxiCTR DIN | 0.7100 (0.0141) | 0.7000, 0.7200 |" in text
    assert "Ours less theirs: DIN +0.0115 (" in text
    assert "; DIN, as theirs is built -0.0090 (" in text
    assert "From the same start, over the same batches: +0.00100, -0.00050; mean +0.00025 " in text
    assert "(95 % interval -0.00928 to +0.00978)." in text
    rows[3]["auc"] = [0.7021, 0.7016]
    assert not summary(rows)["near"]  # the interval lies above 0
    rows[3]["auc"] = [0.709, 0.7]
    assert not summary(rows)["near"]  # the mean is too far, whatever chance may explain
    assert fuxictr.NEAR == 0.002

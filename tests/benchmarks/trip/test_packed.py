"""What a study reads of a packed file, and what the page makes of its results."""

import json
import sys

import numpy as np
import pytest

from benchmarks.trip import page, study, throughput
from benchmarks.trip.packed import pack, unpack
from tests.benchmarks.trip.test_study import OPTIONS, SMALL, run
from tests.recipes.ctr.test_trip import ratings


def test_a_packed_study_has_the_samples_and_the_start_of_the_table(tmp_path):
    words = [*SMALL, f"data.folder={ratings(tmp_path)}", f"data.cache_dir={tmp_path}"]
    config = study.compose("din", [*words, "model.item_start=counts"])
    one, other = study.task_of(config), study.task_of(config)
    pack(one, tmp_path / "data.npz")
    unpack(tmp_path / "data.npz", other)
    rows = np.arange(len(one.train_samples()))
    expected = one.at_once(one.train_samples(), rows)
    for name, values in other.at_once(other.train_samples(), rows).items():
        assert np.array_equal(values, expected[name])
    assert other.evaluated.fingerprint() == one.evaluated.fingerprint()
    assert np.allclose(other.item_vectors, one.item_vectors, atol=1e-4)


def test_the_page_has_every_figure_of_a_study_by_workers(tmp_path, monkeypatch, capsys):
    folder, out = ratings(tmp_path, users=20, rows=700), tmp_path / "trip-study"
    words = [*SMALL, *OPTIONS, f"data.folder={folder}", "--out", str(out), "--workers", "2"]
    for model in ("causal", "group", "causal model.rank=learned"):
        words += ["--model", f"transformer model.mask={model}"]
    run(monkeypatch, capsys, *words)
    results = json.loads((out / "results.json").read_text())
    against = results["rows"][1]["against"]["auc"]
    results["rows"][0]["trainings"][0]["device"] = "a device"
    (out / "results.json").write_text(json.dumps(results))
    doc = tmp_path / "page.md"
    doc.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    monkeypatch.setattr(sys, "argv", ["page", str(out / "results.json"), "--into", str(doc)])
    page.main()
    text = doc.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "a device" in text
    assert f"{results['rows'][2]['figures']['gauc']:.4f}" in text
    [row] = [line for line in text.splitlines() if line.startswith("| none |")]
    assert f"{-against['mean']:+.4f}" in row
    doc.write_text("no marks")
    with pytest.raises(SystemExit):
        page.main()


def test_throughput_compares_with_the_transformer(tmp_path, monkeypatch):
    file = tmp_path / "trip-throughput.json"
    monkeypatch.setattr(
        sys, "argv",
        ["t", "--device", "cpu", "--length", "6", "--batch-size", "2", "--rounds", "1",
         "--steps", "1", "--profile", "--json", str(file)],
    )  # fmt: skip
    monkeypatch.setattr(throughput, "ITEMS", 50)
    throughput.main()
    found = json.loads(file.read_text())
    base, trip, *_ = found["rows"]
    assert base["kernels"]["train"][0][1] >= base["kernels"]["train"][1][1] > 0
    assert base["model"] == throughput.BASE
    times = found["summary"]["TRIP, 1 + 3 layers, 6"]["train_ms"]
    assert times == pytest.approx(base["train_ms"] / trip["train_ms"])
    assert f"({times:.2f}x)" in page.section(file, found)

"""What a failing rank, a bad batch or a bad folder does to a run; with a third party's task."""

import json
import re
import signal
import time

import pytest

from tests.runs.helpers import (
    SMALL,
    finish,
    launch,
    metrics,
    program,
    reached,
    train,
    wait_for,
)

pytestmark = pytest.mark.slow
FAULTY = ["task=faulty", "model=faulty", "data=faulty", *SMALL, "run.dir=r"]


def test_a_third_partys_task_trains_and_one_that_cannot_be_imported_is_left_out(plugin, tmp_path):
    code, output = train(
        *FAULTY, "trainer.steps=2", "task.hub_token=s3cr3t", cwd=tmp_path, env=plugin
    )
    assert code == 0, output
    assert output.count("task broken") >= 1
    assert (tmp_path / "r" / "metrics.jsonl").is_file()
    for file in (tmp_path / "r").rglob("*"):
        assert not file.is_file() or b"s3cr3t" not in file.read_bytes(), file
    assert "s3cr3t" not in output


def test_a_third_partys_recipe_is_found(plugin, tmp_path):
    """Their YAML, their task; the recipe's name is the file's."""
    small = [word for word in SMALL if not word.startswith("trainer.steps")]
    code, output = train("+recipe=faulty_small", *small, cwd=tmp_path, env=plugin)
    assert code == 0, output
    assert "recipe       faulty_small" in output
    assert "done: 2 steps" in output


def test_an_exception_on_one_rank_ends_the_job_with_its_traceback_once(plugin, tmp_path):
    begin = time.monotonic()
    code, output = program(
        *FAULTY, "trainer.steps=50", "task.fault=raise", cwd=tmp_path, env=plugin
    )
    assert code == 1, output
    assert output.count("Traceback (most recent call last)") == 1
    assert "rank 1 failed:" in output
    assert output.count("RuntimeError: this rank was told to fail") == 1
    assert time.monotonic() - begin < 60
    end = metrics(tmp_path / "r", "end")[-1]  # by the launcher: rank 0 only saw rank 1 go
    assert end["why"] == "rank 1 failed: RuntimeError: this rank was told to fail"
    assert 'class="state failed"' in (tmp_path / "r" / "report.html").read_text()


def test_an_exception_in_process_shows_its_traceback_once(plugin, tmp_path):
    code, output = program(
        *FAULTY, "launch.nproc=1", "task.rank=0", "task.fault=raise", cwd=tmp_path, env=plugin
    )
    assert code == 1, output
    assert output.count("RuntimeError: this rank was told to fail") == 1

    [end] = metrics(tmp_path / "r", "end")
    assert end["why"] == "RuntimeError: this rank was told to fail"
    assert 'class="state failed"' in (tmp_path / "r" / "report.html").read_text()


def test_a_rank_that_leaves_early_ends_the_job(plugin, tmp_path):
    code, output = program(*FAULTY, "task.fault=exit", cwd=tmp_path, env=plugin)
    assert code == 1, output


def test_a_rank_that_hangs_ends_the_job_at_the_timeout(plugin, tmp_path):
    begin = time.monotonic()
    code, output = program(*FAULTY, "task.fault=hang", "launch.timeout=5", cwd=tmp_path, env=plugin)
    assert code == 1, output
    assert time.monotonic() - begin < 80
    assert "timeout" in output.lower() or "timed out" in output.lower()


@pytest.mark.parametrize("fault", ["nan", "inf"])
def test_a_bad_batch_on_one_rank_is_skipped_by_all(fault, plugin, tmp_path):
    common = [*FAULTY, f"task.fault={fault}", "task.at=3", "trainer.steps=8"]
    code, output = train(
        *common, "task.until=4", "logging.statistics=4", cwd=tmp_path, env=plugin
    )  # fmt: skip
    assert code == 0, output
    rows = metrics(tmp_path / "r")
    assert [row["skipped"] for row in rows] == [0, 0, 1, 2, 2, 2, 2, 2]
    assert rows[-1]["loss"] < rows[0]["loss"]
    check_batches_are_named(metrics(tmp_path / "r", "spike"), output)
    first, second = metrics(tmp_path / "r", "statistics")
    assert (first["step"], second["step"]) == (4, 8)
    broken = [figures["broken"] for figures in first["gradients"].values()]
    assert all(broken) == (fault == "nan")
    assert sum(figures["broken"] for figures in second["gradients"].values()) == 0
    layers = [name for name in second["activations"] if name.startswith("model.layers.")]
    assert len(layers) == 2


def check_batches_are_named(rows, output):
    """Those of both steps, with the rank whose samples did it and what those are made of."""
    assert [(row["step"], row["rank"]) for row in rows] == [(3, 1), (4, 1)]
    for row in rows:
        assert len(row["samples"]) == 8
        assert len(row["rank_samples"]) == 4
        assert set(row["rank_samples"]) < set(row["samples"])
        assert set(row["where"]) == set(map(str, row["rank_samples"]))
        assert all(re.search(r"tokens \d+-\d+ of document \d+ of /.*\.py$", words)
                   for origins in row["where"].values() for words in origins)  # fmt: skip
        named = " ".join(f"--sample {sample}" for sample in row["rank_samples"])
        assert f"highest on rank 1: python -m trainer.inspect_data {named}\n" in output


def test_too_many_bad_batches_end_the_run_and_name_the_samples(plugin, tmp_path):
    code, output = train(
        *FAULTY, "task.fault=nan", "task.until=99", "trainer.nonfinite_limit=3", cwd=tmp_path,
        env=plugin,
    )  # fmt: skip
    assert code == 5, output
    assert "not finite 3 steps in a row, last at step 5 (samples " in output
    assert "Traceback" not in output


def test_batches_without_a_label_have_loss_zero(plugin, tmp_path):
    code, output = train(
        *FAULTY, "task.fault=unlabelled", "trainer.steps=3", cwd=tmp_path, env=plugin
    )
    assert code == 0, output
    assert [(r["loss"], r["skipped"]) for r in metrics(tmp_path / "r")] == [(0.0, 0)] * 3


def test_two_runs_in_one_folder(tmp_path):
    first = launch(*SMALL, "trainer.steps=100000", "run.dir=r", cwd=tmp_path)
    wait_for(lambda: reached(tmp_path / "r", 1))
    code, output = program(*SMALL, "run.dir=r", cwd=tmp_path)
    assert code == 2, output
    assert "in use by another run" in output
    first.send_signal(signal.SIGTERM)
    assert finish(first)[0] == 75
    code, output = program(*SMALL, "run.dir=r", cwd=tmp_path)
    assert code == 4, output
    assert "already holds a run" in output
    assert "trainer.resume=auto" in output


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["trainer.resume=nowhere"], 4, "nowhere is not a complete checkpoint"),
        (["data.files=[*.nothing]"], 3, "*.nothing matches no file"),
        (["trainer.batch_size=9"], 2, "cannot be split over 2 ranks"),
        (["paralel.shard=2"], 2, "did you mean parallel.shard?"),
        (["run.dir=file"], 2, "run.dir=file is a file"),
    ],
)
def test_bad_input_is_one_line_and_its_exit_code(arguments, code, message, tmp_path):
    (tmp_path / "file").write_text("")
    got, output = program(*SMALL, *arguments, cwd=tmp_path)
    assert got == code, output
    assert message in output
    assert output.count("\n") == 1
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").glob("*/ranks"))


def test_resuming_another_model_is_refused(tmp_path):
    code, output = train(*SMALL, "trainer.steps=2", "run.dir=r", cwd=tmp_path)
    assert code == 0, output
    code, output = program(
        *SMALL, "model.hidden_size=64", "trainer.steps=4", "run.dir=r", "trainer.resume=auto",
        cwd=tmp_path,
    )  # fmt: skip
    assert code == 4, output
    assert "set model.* as in its config.yaml, or another run.dir or trainer.resume" in output
    assert "Traceback" not in output


def test_what_a_crash_left_behind_is_never_read(tmp_path):
    common = [*SMALL, "run.dir=r", "trainer.resume=auto"]
    code, output = train(*common, "trainer.steps=2", cwd=tmp_path)
    assert code == 0, output
    folder = tmp_path / "r" / "checkpoints"
    for name in (".saving-step-00000004", "step-00000003"):  # half-written, and one without its end
        (folder / name).mkdir()
        (folder / name / "__0_0.distcp").write_bytes(b"half")
    (folder / "latest").write_text("step-00000003")
    code, output = train(*common, "trainer.steps=4", cwd=tmp_path)
    assert code == 0, output
    assert [row["step"] for row in metrics(tmp_path / "r")] == [1, 2, 3, 4]
    assert (folder / "latest").read_text() == "step-00000004"
    assert json.loads((folder / "step-00000004" / "trainer.json").read_text())["samples"] == 32

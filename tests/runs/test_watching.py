"""What a run leaves to look at: two ranks, stopped behind a checkpoint, and resumed from it."""

import pytest

from tests.runs.helpers import SMALL, metrics, program
from tests.trainer.watch.test_tracker import history

pytestmark = pytest.mark.slow


def test_a_resumed_run_has_each_step_once_wherever_one_looks(tmp_path):
    common = [
        *(word for word in SMALL if not word.startswith(("logging.", "checkpoint."))),
        "logging.every=2", "logging.tensorboard=true", "checkpoint.every=3", "launch.nproc=2",
        "run.dir=r", "trainer.resume=auto", "trainer.eval_every=5", "trainer.eval_samples=8",
    ]  # fmt: skip
    environment = {"WANDB_MODE": "offline"}
    code, output = program(
        *common, "trainer.steps=5", "checkpoint.at_end=false", "trainer.profile.steps=[2,3]",
        cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert code == 0, output
    assert "switched off" not in output
    folder = tmp_path / "r"
    assert [row["step"] for row in metrics(folder)] == [2, 3, 4, 5]  # a row ends at the checkpoint
    assert sorted(file.name for file in (folder / "profile").iterdir()) == [
        "rank0.json.gz", "rank1.json.gz",
    ]  # fmt: skip
    code, output = program(*common, "trainer.steps=7", cwd=tmp_path, env=environment)
    assert code == 0, output
    assert "switched off" not in output

    rows = metrics(folder)
    assert [row["step"] for row in rows] == [2, 3, 4, 5, 6, 7]  # and before an evaluation
    assert [row["step"] for row in metrics(folder, "eval")] == [5, 7]
    assert [row["step"] for row in metrics(folder, "start")] == [0, 3]
    assert [row["code"] for row in metrics(folder, "end")] == [0, 0]
    for row in rows:
        parts = [row[f"{part}_seconds"] for part in
                 ("data", "forward", "backward", "communication", "optimizer")]  # fmt: skip
        assert all(part > 0 for part in parts)
        assert sum(parts) <= row["step_seconds"] * 1.2 + 0.05  # means of ranks, and rank 0's clock
        assert row["loss_max"] >= row["loss"] - 0.5
        assert row["imbalance"] >= 1
        assert 0 < row["goodput"] < 1
    [current] = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    assert [step for step, _ in history(current)] == [4, 6, 8, 10, 11, 12, 14, 15]
    assert scalars(folder / "tensorboard") == [2, 3, 4, 5, 6, 7]
    page = (folder / "report.html").read_text()
    assert "started again, from step-00000003" in page
    assert 'class="state done"' in page


def scalars(folder):
    """Steps of the loss that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return [event.step for event in found.Scalars("train/loss")]

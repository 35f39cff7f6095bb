"""`launch.max_restarts`: one command goes on by itself, as often as it helps and no more."""

import os

import pytest

from tests.faults.campaign import COMMON, Campaign
from tests.faults.inject import Fault
from tests.faults.runs import run
from tests.runs.helpers import metrics
from trainer.checkpoint.folder import Checkpoints
from trainer.errors import CHECKPOINT, CONFIG, DATA, FAILED, NON_FINITE, STOPPED
from trainer.restart import Restarts

STEPS = 8


@pytest.mark.slow
def test_a_killed_rank_and_a_damaged_checkpoint_in_one_run(whole, tmp_path):
    """The first restart finds the newest checkpoint damaged, the second begins one before it."""
    campaign = Campaign(
        tmp_path / "r", whole, STEPS, "launch.max_restarts=3", "checkpoint.background=false"
    )
    fault = Fault("kill", "norm", 1, at=6, marker=str(tmp_path / "once"))
    damage = Fault("damage", "optimizer", 0, at=5, marker=str(tmp_path / "damaged"))
    code, output = run(*campaign.words, cwd=campaign.folder, fault=[fault, damage])
    assert code == 0, output
    assert "rank 1 was killed by SIGKILL" in output
    assert "starting again from step-00000004 (restart 1 of 3)" in output
    assert "is damaged: its SHA-256 is not the one that was written" in output
    assert "starting again from step-00000002 (restart 2 of 3); what was damaged is now" in output
    campaign.check_end()
    assert (campaign.run_dir / "checkpoints" / "damaged-step-00000004").is_dir()
    ends = [(row["code"], row["why"]) for row in metrics(campaign.run_dir, "end")]
    assert ends[0] == (1, "rank 1 was killed by SIGKILL (often the kernel, out of memory)")
    assert [code for code, _ in ends] == [1, 4, 0]


@pytest.mark.slow
def test_a_run_that_went_back_does_not_come_to_what_it_left(whole, tmp_path):
    """Killed before it has a new checkpoint: the next start goes on from where it went back to."""
    campaign = Campaign(tmp_path / "r", whole, STEPS)
    campaign.finish()
    good = "r/checkpoints/step-00000006"
    _, output = campaign.strike(Fault("kill", "norm", 1, at=2), f"trainer.resume={good}")
    assert "later checkpoints are put aside: undone-step-00000008\n" in output
    campaign.finish()
    assert [row["resumed"] for row in metrics(campaign.run_dir, "start")] == [
        None, "step-00000006", "step-00000006",
    ]  # fmt: skip
    assert (campaign.run_dir / "checkpoints" / "undone-step-00000008").is_dir()


@pytest.mark.slow
@pytest.mark.long
def test_a_run_that_always_fails_at_one_step_ends(tmp_path):
    words = [*COMMON, "trainer.steps=4", "launch.max_restarts=1", "trainer.resume=never"]
    code, output = run(*words, cwd=tmp_path, fault=Fault("raise", "forward", 1, at=2))
    assert code == 1, output
    assert output.count("starting again from the beginning (restart 1 of 1)") == 1
    assert output.count("RuntimeError: this rank was told to fail") == 2


def checkpoint(folder, step):
    path = Checkpoints(folder).of_step(step)
    path.mkdir(parents=True, exist_ok=True)
    (path / "manifest.json").write_text("{}")
    (folder / "latest").write_text(path.name)


def test_what_is_put_aside_twice_has_two_names(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for _ in range(2):
        for step in (2, 4, 6):
            checkpoint(tmp_path, step)
        checkpoints.undo_after(2)
        assert checkpoints.newest() == checkpoints.of_step(2)
    aside = [path.name for path in sorted(tmp_path.glob("undone-*"))]
    assert aside == [f"undone-step-0000000{step}{again}" for step in (4, 6) for again in ("", "-2")]


def test_only_failures_without_progress_are_counted(tmp_path):
    restarts = Restarts(2, tmp_path)
    assert restarts.after(FAILED).resume is None  # there is none: as it was asked for
    checkpoint(tmp_path, 2)
    for number in (1, 2):
        again = restarts.after(FAILED)
        assert again.resume == "auto"
        assert f"from step-00000002 (restart {number} of 2)" in again.said
    assert restarts.after(FAILED) is None
    checkpoint(tmp_path, 4)
    assert restarts.after(FAILED) is not None


@pytest.mark.parametrize("code", [0, CONFIG, DATA, NON_FINITE, STOPPED])
def test_what_would_fail_again_ends_the_run(code, tmp_path):
    checkpoint(tmp_path, 2)
    assert Restarts(5, tmp_path).after(code) is None


def test_a_save_that_failed_ends_the_run(tmp_path):
    """No checkpoint is damaged: there was no room for another."""
    assert Restarts(5, tmp_path).after(CHECKPOINT) is None
    assert os.listdir(tmp_path) == []

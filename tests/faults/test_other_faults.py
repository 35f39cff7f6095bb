"""Ranks that stop, leave or run out of memory, disks that are full, read-only or gone, data that changes."""

import json
import os
import re
import signal
import time

import pytest

from tests.faults.campaign import COMMON, Campaign, undisturbed
from tests.faults.inject import Fault
from tests.faults.runs import SHARED, begin, check_nothing_left, processes_in, run
from tests.runs.helpers import finish, metrics, reached, wait_for

pytestmark = pytest.mark.slow
FULL = "No space left on device"
TIMEOUT = 10
"""Seconds, `launch.timeout` in `COMMON`."""


BLOWS = [
    (Fault("stop", "forward", 1, at=3), 1, "rank 1 was silent for 10 s"),
    (Fault("stop", "commit", 0, at=1), 1, "rank 1 lost its peers: Timed out waiting 10000ms"),
    (Fault("memory", "backward", 0, at=3), 1, "rank 0 ran out of memory: set trainer.micro_batch"),
    (Fault("ENOSPC", "shards", 1, at=2), 4, FULL),
    (Fault("EROFS", "room", 0, at=2), 4, "Read-only file system"),
    (Fault("raise", "commit", 0, at=1), 4, "RuntimeError: this rank was told to fail"),
    (Fault("ENOSPC", "report", 0, at=4), 4, f"rank 0 cannot write: {FULL}"),
]
"""What happens, the exit code, and what is said."""
MORE = [
    (Fault("stop", "data", 1, at=3), 1, "rank 0 lost its peers: Timed out waiting 10000ms"),
    (Fault("hang", "optimizer", 1, at=3), 1, "rank 0 lost its peers: Timed out waiting 10000ms"),
    (Fault("exit", "forward", 1, at=3), 1, "rank 1 is gone"),
    (Fault("ENOSPC", "manifest", 0, at=2), 4, FULL),
    (Fault("EIO", "pointer", 0, at=2), 4, "Input/output error"),
]


@pytest.mark.parametrize("blows", [BLOWS, pytest.param(MORE, marks=pytest.mark.long)])
def test_blows_that_are_not_kills_cost_no_step_either(blows, tmp_path):
    steps = 2 * len(blows) + 8
    campaign = Campaign(tmp_path / "struck", undisturbed(tmp_path / "whole", steps), steps)
    for fault, code, words in blows:
        began = time.monotonic()
        got, output = campaign.strike(fault)
        assert (got, words in output) == (code, True), f"{fault} ended with {got}:\n{output}"
        said = re.findall(r"^(?:error: |rank \d (?:failed|lost))", output, re.M)
        assert len(said) == 1, f"{fault} is said {len(said)} times:\n{output}"
        assert time.monotonic() - began < TIMEOUT + 30
    campaign.finish()


def test_a_folder_that_vanishes_ends_the_run_and_the_next_starts_afresh(tmp_path):
    fault = Fault("vanish", "commit", 0, at=2)
    code, output = run(*COMMON, "trainer.steps=8", cwd=tmp_path, fault=fault)
    assert code == 4, output
    assert "No such file or directory" in output
    assert "Traceback" not in output
    code, output = run(*COMMON, "trainer.steps=2", cwd=tmp_path)
    assert code == 0, output
    assert "the run folder has no checkpoint yet" in output


def test_figures_that_cannot_be_shown_do_not_end_training(tmp_path):
    """wandb's folder cannot be made, nor the page be written."""
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "wandb").write_text("a file")
    words = ["trainer.steps=4", "logging.wandb.mode=offline"]
    fault = Fault("ENOSPC", "page")
    code, output = run(*COMMON, *words, cwd=tmp_path, fault=fault, env={"WANDB_MODE": "offline"})
    assert code == 0, output
    assert "report.html is switched off after an error" in output
    assert len(metrics(tmp_path / "r")) == 4


def test_a_launcher_that_is_killed_takes_its_ranks_along(tmp_path):
    process = begin(*COMMON, "trainer.steps=100000", cwd=tmp_path)
    wait_for(lambda: reached(tmp_path / "r", 3))
    assert len(processes_in(tmp_path)) >= 3
    os.kill(process.pid, signal.SIGKILL)
    finish(process, 20)
    for left in (tmp_path / "tmp").iterdir():  # nobody was left to remove it
        assert left.stat().st_mode & 0o077 == 0
        for file in left.iterdir():
            file.unlink()
        left.rmdir()
    check_nothing_left(set(SHARED.iterdir()), tmp_path)


def rows(*texts):
    return "".join(json.dumps({"text": text * 40}) + "\n" for text in texts)


def test_data_that_goes_away_while_training_is_not_missed_before_the_next_start(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text(rows(*"abcdefgh"))
    words = [*COMMON, "data.files=[data.jsonl]", "data.holdout=0", "trainer.eval_every=0"]
    fault = Fault("remove data", "data", 0, at=2)
    code, output = run(*words, "trainer.steps=4", cwd=tmp_path, fault=fault)
    assert code == 0, output
    code, output = run(*words, "trainer.steps=6", cwd=tmp_path)
    assert (code, "data.jsonl matches no file" in output) == (3, True), output
    file.write_text(rows(*"abcdefgx"))
    code, output = run(*words, "trainer.steps=6", cwd=tmp_path)
    assert (code, "was trained on other data" in output) == (4, True), output
    file.write_text(rows(*"abcdefgh"))
    code, output = run(*words, "trainer.steps=6", cwd=tmp_path)
    assert code == 0, output

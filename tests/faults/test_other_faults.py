"""Ranks that stop, leave or run out of memory, disks that are full, read-only or gone, data that changes."""

import json
import os
import re
import shutil
import signal
import time

import pytest

from tests.faults.campaign import COMMON, Campaign
from tests.faults.inject import Fault
from tests.faults.runs import SHARED, begin, check_nothing_left, run
from tests.processes import working_in
from tests.runs.helpers import finish, metrics, program, reached, wait_for

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
def test_blows_that_are_not_kills_cost_no_step_either(blows, whole, tmp_path):
    campaign = Campaign(tmp_path / "struck", whole, 24)
    for fault, code, words in blows:
        began = time.monotonic()
        got, output = campaign.strike(fault)
        assert (got, words in output) == (code, True), f"{fault} ended with {got}:\n{output}"
        said = re.findall(r"^(?:error: |rank \d (?:failed|lost))", output, re.M)
        assert len(said) == 1, f"{fault} is said {len(said)} times:\n{output}"
        assert time.monotonic() - began < TIMEOUT + 30
    campaign.finish()


def test_a_folder_that_vanishes_ends_the_run_and_the_next_starts_afresh(tmp_path):
    """Where figures cannot be shown, which does not end training: wandb's folder cannot be made, nor
    the page be written."""
    fault = Fault("vanish", "commit", 0, at=2)
    code, output = run(*COMMON, "trainer.steps=8", cwd=tmp_path, fault=fault)
    assert code == 4, output
    assert "No such file or directory" in output
    assert "Traceback" not in output
    (tmp_path / "r" / "wandb").write_text("a file")
    words = ["trainer.steps=4", "logging.wandb.mode=offline"]
    fault = Fault("ENOSPC", "page")
    code, output = run(*COMMON, *words, cwd=tmp_path, fault=fault, env={"WANDB_MODE": "offline"})
    assert code == 0, output
    assert "the run folder has no checkpoint yet" in output
    assert "report.html is switched off after an error" in output
    assert len(metrics(tmp_path / "r")) == 4


def test_a_clock_that_is_set_and_a_tracker_that_is_killed_change_nothing(whole, tmp_path):
    """A day back on one rank, a day ahead on the other; and wandb's own process dies."""
    campaign = Campaign(tmp_path / "struck", whole, 12, "logging.wandb.mode=offline")
    faults = [Fault("clock back", "data", 0, at=4), Fault("clock ahead", "data", 1, at=6),
              Fault("kill wandb", "report", 0, at=8)]  # fmt: skip
    begun, before = time.monotonic(), set(SHARED.iterdir())
    process = begin(
        *campaign.words, cwd=campaign.folder, fault=faults, env={"WANDB_MODE": "offline"}
    )  # fmt: skip
    code, output = finish(process, 120)
    for left in (campaign.folder / "tmp").glob("wandb-*"):  # it had no time to remove its socket
        shutil.rmtree(left)
    check_nothing_left(before, campaign.folder)
    assert code == 0, output
    assert time.monotonic() - begun < 60
    assert output.count("wandb is switched off after an error") == 1
    assert "Traceback" not in output
    campaign.check_end()
    rows = metrics(campaign.run_dir)
    assert rows[-1]["time"] < rows[0]["time"]
    assert all(0 < row["goodput"] <= 1 for row in rows)


def test_a_launcher_that_is_killed_takes_its_ranks_along(tmp_path):
    process = begin(*COMMON, "trainer.steps=100000", cwd=tmp_path)
    wait_for(lambda: reached(tmp_path / "r", 3))
    assert len(working_in(tmp_path)) >= 3
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


def test_data_that_changes_or_goes_away_is_not_missed_before_the_next_start(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text(rows(*"abcdefgh"))
    words = [
        *COMMON,
        "data.files=[data.jsonl]",
        "data.holdout=0",
        "trainer.eval_every=0",
        "checkpoint.lowest=null",
    ]
    fault = [Fault("change data", "data", 0, at=2), Fault("remove data", "data", 1, at=4)]
    code, output = run(*words, "trainer.steps=4", cwd=tmp_path, fault=fault)
    assert code == 0, output
    code, output = program(*words, "trainer.steps=6", cwd=tmp_path)
    assert (code, "data.jsonl matches no file" in output) == (3, True), output
    file.write_text(rows(*"abcdefgx"))
    code, output = program(*words, "trainer.steps=6", cwd=tmp_path)
    assert (code, "was trained on other data" in output) == (4, True), output
    file.write_text(rows(*"abcdefgh"))
    code, output = run(*words, "trainer.steps=6", cwd=tmp_path)
    assert code == 0, output

"""A rank that stands still for longer than any step: who it is, and where all are."""

import os
import signal

import pytest

from tests.faults.campaign import COMMON
from tests.faults.inject import Fault
from tests.faults.runs import run
from tests.processes import ranks_of
from tests.runs.helpers import SMALL, finish, metrics, reached, start, wait_for

pytestmark = pytest.mark.slow
WORDS = [
    *COMMON,
    "trainer.steps=8",
    "trainer.eval_every=0",
    "checkpoint.lowest=null",
    "checkpoint.every=0",
    "launch.timeout=25",
]


def test_a_stopped_rank_is_the_silent_one(tmp_path):
    code, output = run(*WORDS, cwd=tmp_path, fault=Fault("stop", "forward", 1, at=5))
    assert code == 1, output
    assert "s instead of" in output
    assert "  rank 0: communication, " in output, output
    assert "  rank 1: silent: it is stopped" in output
    stacks = tmp_path / "r" / "stalls" / "step-00000005-rank0.txt"
    assert "trainer/loop.py" in stacks.read_text()
    (row,) = metrics(tmp_path / "r", "stall")
    assert row["step"] == 5
    assert any(line.startswith("rank 1: silent") for line in row["ranks"])


@pytest.mark.long
def test_a_rank_that_hangs_is_the_one_that_does_not_wait(tmp_path):
    code, output = run(*WORDS, cwd=tmp_path, fault=Fault("hang", "optimizer", 0, at=5))
    assert code == 1, output
    assert "  rank 0: optimizer, update (trainer/loop.py" in output
    assert "  rank 1: communication" in output or "  rank 1: data" in output


@pytest.mark.gpu
@pytest.mark.skipif("__import__('torch').cuda.device_count() < 2", reason="needs two GPUs")
def test_nccl_leaves_its_last_collectives_in_the_run_folder(tmp_path):
    words = [*SMALL, "collectives=stock", "trainer.steps=100000", "run.dir=r", "launch.timeout=20"]
    process = start(*words, cwd=tmp_path)
    wait_for(lambda: reached(tmp_path / "r", 5))
    os.kill(ranks_of(process.pid)[1], signal.SIGSTOP)
    code, output = finish(process, 180)
    assert code == 1, output
    assert list((tmp_path / "r" / "nccl").glob("rank_*")), output

"""kill -9 at twenty moments of a run, which its launcher starts again each time.

Whatever state a restart had not brought back would be in the weights and figures from there on, which are
compared at the end; `tests.faults.randomised` also compares after every blow.
"""

import random
import re

import pytest

from tests.faults.campaign import LONGEST, Campaign
from tests.faults.inject import FIRST_RANK, PHASES, Fault, in_turn
from tests.faults.randomised import MOMENTS, strike_at_random
from tests.faults.runs import run

pytestmark = pytest.mark.slow
POINTS = [
    Fault("kill", "data", 1, at=4),
    Fault("kill", "agree", 0, at=3),
    Fault("kill", "forward", 1, at=3),
    Fault("kill", "all-gather", 0, at=9),
    Fault("kill", "gathered", 1, at=9),
    Fault("kill", "backward", 0, at=3),
    Fault("kill", "reduce-scatter", 1, at=5),
    Fault("kill", "norm", 0, at=3),
    Fault("kill", "optimizer", 1, at=3),
    Fault("kill", "report", 0, at=4),
    Fault("kill", "evaluation", 1, at=1),
    Fault("kill", "copy", 1, at=2),
    Fault("kill", "shards", 1, at=2),
    Fault("kill", "metadata", 0, at=2),
    Fault("kill", "checksums", 0, at=2),
    Fault("kill", "manifest", 0, at=2),
    Fault("kill", "commit", 0, at=2),
    Fault("kill", "pointer", 0, at=2),
    Fault("kill", "purging", 0, at=2),
    Fault("kill", "restore", 1, at=1),
]


def test_a_run_killed_at_twenty_moments_ends_as_if_it_had_not_been(whole, tmp_path):
    campaign = Campaign(tmp_path / "struck", whole, LONGEST, f"launch.max_restarts={len(POINTS)}")
    faults = in_turn(POINTS, tmp_path)
    code, output = run(*campaign.words, cwd=campaign.folder, fault=faults, timeout=200)
    assert code == 0, output
    assert "Traceback" not in output
    said = re.findall(r"^rank (\d) was killed by SIGKILL.*\nstarting again from ", output, re.M)
    assert said == [str(fault.rank) for fault in POINTS], output
    campaign.check_end()


@pytest.mark.long
def test_random_blows(tmp_path):
    """`python -m tests.faults.randomised` does two hundred; the failure's output tells the seed."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    strike_at_random(tmp_path, 30, random.Random(seed))


def test_every_moment_is_one_that_exists():
    assert {fault.phase for fault in POINTS} | FIRST_RANK | set(MOMENTS) <= set(PHASES)

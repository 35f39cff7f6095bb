"""Many steps over transports that take their time: nothing drifts, nothing hangs.

`SPRINGTIDE_STRESS=20` makes it twenty times as many: thousands.
"""

import os

import pytest

from tests.collectives import slow
from tests.parallel.tide.training import Case, both
from tests.ranks import run_ranks

SMALL = {"layers": 3, "width": 6, "inner": 4}
TIMES = int(os.environ.get("SPRINGTIDE_STRESS", "1"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "steps", "case"),
    [
        (2, 150, Case("toy", sizes=SMALL, slow=True)),
        (3, 60, Case("toy", sizes=SMALL, slow=True, tide={"slot_reuse": True})),
        (4, 8, Case("toy", sizes=SMALL, slow=True, node_size=2)),
    ],
    ids=["2 ranks", "3 ranks, slot reuse", "2 nodes of 2"],
)
def test_nothing_drifts(world_size, steps, case):
    case.steps = steps * TIMES
    run_ranks(world_size, short_delays, case, timeout=100 * (1 + TIMES))


def short_delays(case):
    slow.DELAY = 0.0003
    both(case, "ordered")

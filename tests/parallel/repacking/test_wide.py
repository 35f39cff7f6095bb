"""Parents of 16 and 32 ranks: one set of 32 processes for everything that is to be seen there.

Starting them is nearly all it takes, so whatever else wants as many ranks adds itself to `CHECKS`.
"""

import pytest

from tests.parallel.repacking.test_exchange import check_exchanges, random_mix
from tests.ranks import run_ranks
from tests.recipes.repacked import check_mixes, wide_mixes

RANKS = 32
CHECKS = [
    (check_exchanges, [random_mix(seed, P) for P in (16, 32) for seed in range(3)]),
    (check_mixes, wide_mixes(range(6))),
]
"""Functions with their argument: each is called on all ranks, one after the other."""
MORE = [
    (check_exchanges, [random_mix(seed, P) for P in (16, 32) for seed in range(3, 6)]),
    (check_mixes, wide_mixes(range(6, 10))),
]


def check_all(checks):
    return [check(argument) for check, argument in checks]


@pytest.mark.slow
@pytest.mark.parametrize("checks", [CHECKS, pytest.param(MORE, marks=pytest.mark.long)])
def test_wide_parents(checks):
    results = run_ranks(RANKS, check_all, checks, timeout=280)
    assert all(each == results[0] for each in results)

"""Ranks that a planner gives samples to train as one process does, in fp64, and exchange what they say."""

import pytest

from tests.ranks import run_ranks
from tests.recipes.repacked import Mix, check_mixes, check_steps, random_mixes

CHOSEN = [
    Mix([90, 1, 1], "solver", (6, 1), node_size=2),  # one key/value head, giants and crumbs
    Mix([3], "wide", (6, 2)),  # ranks without a row
    Mix([1], "repacked", (3, 1), "block"),
    Mix(
        [90, 40, 40, 17, 9, 5, 3], "repacked", (6, 2), settings={"min_child": 2}
    ),  # shorter than its child
    Mix([9, 9, 5, 5, 40], "solver", (6, 2), "selective", settings={"inside_nodes": True}),
]


@pytest.mark.parametrize(
    ("world", "count", "nodes"), [(2, 8, (1,)), (4, 14, (2, 4)), (8, 18, (2, 4))]
)
def test_losses_gradients_and_bytes_are_those_of_one_process(world, count, nodes):
    mixes = random_mixes(count, world, nodes) + CHOSEN
    results = run_ranks(world, check_mixes, mixes)
    assert all(each == results[0] for each in results)
    repacked = [any(len_ > 1 for _, len_, _ in parents) for parents in results[0]]
    assert sum(repacked) >= len(mixes) // 4


def test_five_steps_of_an_optimizer_stay_equal():
    mixes = [
        Mix([], "solver", (6, 2), "block", node_size=2),
        Mix([], "wide", (6, 1)),
        Mix([], "solver", (6, 2), "block", node_size=2, experts=2),
    ]
    assert run_ranks(4, check_steps, mixes) == [3] * 4

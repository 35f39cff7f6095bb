"""Ranks that divide experts train as one process does, in fp64, and send no more than they must."""

from tests.ranks import run_ranks
from tests.recipes.experts import Case, check_divided

TWO = [
    Case(2, (2,), every=True, counted=True),
    Case(2, (0,), {"activation_checkpointing": "block"}, steps=5),  # a rank that never has rows
    Case(2, (9,), {"activation_checkpointing": "selective"}, unvisited=True),
    Case(2, sequence=2),
]
FOUR = [
    Case(2, (1, 2, 3), {"activation_checkpointing": "block"}, counted=True),
    Case(4, (0, 2, 2), unvisited=True, counted=True),
    Case(2, (1, 2, 3), {"replicate": 2, "activation_checkpointing": "selective"}, every=True),
    Case(2, (2, 2, 2), {"prefetch": 1, "reshard_after_forward": False}),
    Case(4, sequence=2, settings={"activation_checkpointing": "block", "prefetch": 2}),
    Case(2, (1, 2, 3), {"activation_checkpointing": "block"}, collectives="tide"),
]


def test_two_ranks_divide_experts_as_if_they_were_one_process():
    check(2, TWO)


def test_four_ranks_divide_experts_in_one_block_or_two():
    found = check(4, FOUR)
    notes, slots = found[-1][1:]
    # TIDE serves what all ranks share, and what ranks with the same experts do: one in use, one on its way.
    assert len(slots) == 2
    assert slots[1] == 2
    assert not any("on torch's collectives" in note for note in notes)


def check(world, cases):
    """Every rank agrees; and first weights are the same however they are divided."""
    results = run_ranks(world, check_divided, cases)
    assert all(each == results[0] for each in results)
    assert len({total for total, *_ in results[0]}) == 1
    return results[0]

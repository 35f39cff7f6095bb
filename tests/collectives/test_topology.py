"""Nodes, rails and the steps of an all-gather along a rail."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.topology import Topology, doubling, make_topology


def test_ranks_are_placed_node_by_node():
    topology = make_topology(range(6), 3, 2)
    assert topology == Topology(3, 2, 1, 1)
    assert topology.rank == 3
    assert topology.neighbours == [2, 3]
    assert topology.rail == [1, 3, 5]
    assert topology.others == [0]
    assert Topology(1, 4, 0, 2).others == [3, 0, 1]


def test_a_group_may_take_a_part_of_each_node():
    """Ranks 0, 2, 4, 6 of nodes of four: two on each."""
    assert make_topology([0, 2, 4, 6], 2, 4) == Topology(2, 2, 1, 0)
    assert make_topology([4, 5], 1, 8) == Topology(1, 2, 0, 1)


@pytest.mark.parametrize(("ranks", "size"), [([0, 1, 2], 2), ([0, 2, 1, 3], 2)])
def test_uneven_groups_are_refused(ranks, size):
    with pytest.raises(ValueError, match="set parallel.node_size"):
        make_topology(ranks, 0, size)


@given(st.integers(1, 40))
def test_doubling_brings_every_block_everywhere_once(num_nodes):
    steps = [doubling(node, num_nodes) for node in range(num_nodes)]
    held = [{node} for node in range(num_nodes)]
    assert {len(s) for s in steps} == {math.ceil(math.log2(num_nodes))}
    for number in range(len(steps[0])):
        before = [set(blocks) for blocks in held]
        for node in range(num_nodes):
            step = steps[node][number]
            assert set(step.sends) <= before[node]
            there = steps[step.target][number]
            assert there.source == node
            assert there.receives == step.sends
            assert not set(step.sends) & before[step.target]
            held[step.target] |= set(step.sends)
    assert all(blocks == set(range(num_nodes)) for blocks in held)

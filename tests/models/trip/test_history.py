import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.trip.history import (
    Grouping,
    ages,
    bucket,
    group,
    quantile_edges,
    session,
    time_edges,
)


@given(unit=st.sampled_from([1, 7, 60, 86400]), age=st.integers(0, 2**33), fine=st.integers(1, 8))
def test_a_bucket_is_the_floor_of_the_logarithm(unit, age, fine):
    """Against exact powers: bucket n holds ages with 2^(n / fine) <= 1 + age / unit < 2^((n + 1) / fine)."""
    edges = time_edges(unit, 24, fine)
    (found,) = bucket(np.array([age]), edges)
    ratio = 1 + Fraction(age, unit)
    expected = 0
    while expected + 1 < 24 * fine and ratio**fine >= 2 ** (expected + 1):
        expected += 1
    assert found == expected


@pytest.mark.parametrize("unit", [1, 86400])
def test_time_buckets_at_their_edges(unit):
    edges = time_edges(unit, octaves=5, fine=4)
    assert (edges[0], len(edges)) == (0, 20)
    assert bucket(np.array([0]), edges) == 0
    for octave in range(1, 5):  # an octave begins at unit * (2^octave - 1), to the second
        start = unit * (2**octave - 1)
        before, at = bucket(np.array([start - 1, start]), edges) // 4
        assert (before, at) == (octave - 1, octave)
    assert bucket(np.array([10**12]), edges) == 19  # the last has no end
    many = np.arange(0, 40 * unit, max(unit // 7, 1))
    assert np.all(np.diff(bucket(many, edges)) >= 0)


def test_ages_refuse_what_lies_after_the_target_and_what_does_not_ascend():
    assert ages(np.array([3, 5, 5]), 9).tolist() == [6, 4, 4]
    assert ages(np.array([], dtype=np.int64), 9).tolist() == []
    with pytest.raises(ValueError, match="event at 10, and its target is at 9"):
        ages(np.array([3, 10]), 9)
    with pytest.raises(ValueError, match="keep only events before"):
        ages(np.array([3, 9]), 9)  # the target itself, perhaps
    with pytest.raises(ValueError, match="4 follows 5"):
        ages(np.array([3, 5, 4]), 9)


def test_groups_at_their_edges():
    assert group(np.array([0, 9, 10, 11, 99, 100, 10**9]), (10, 100)).tolist() == [
        0,
        0,
        1,
        1,
        1,
        2,
        2,
    ]
    assert group(np.array([0, 10**9]), ()).tolist() == [0, 0]


@given(st.lists(st.integers(0, 1000), max_size=200), st.integers(1, 9))
def test_quantile_edges_leave_no_group_empty(values, groups):
    edges = quantile_edges(np.array(values, dtype=np.int64), groups)
    assert list(edges) == sorted(set(edges))
    if values:
        counts = np.bincount(group(np.array(values), edges), minlength=len(edges) + 1)
        assert counts.min() > 0
        assert len(counts) <= groups
    if len(set(values)) == len(values) and len(values) >= groups:  # no ties: equally many, nearly
        assert counts.max() - counts.min() <= math.ceil(len(values) / groups)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 20), st.integers(1, 5))
def test_a_session_ends_where_more_than_the_gap_passes(steps, gap, groups):
    descending = np.cumsum(np.array(steps, dtype=np.int64))[::-1]
    expected, number = [0], 0
    for newer, older in zip(descending[::-1], descending[::-1][1:], strict=False):
        number += older - newer > gap
        expected.append(min(number, groups - 1))
    found = session(descending, gap, groups)
    assert found.tolist() == expected[::-1]
    padded = np.concatenate([[0, 0], descending])  # as batches pad, on the left
    assert (
        Grouping(gap=gap, sessions=groups)(np.stack([padded, padded]))[1, 2:].tolist()
        == found.tolist()
    )


def test_how_many_groups_there_are():
    assert Grouping().count == 1
    assert Grouping((5, 9)).count == 3
    assert Grouping((5, 9))(np.array([9, 8, 4])).tolist() == [2, 1, 0]
    assert Grouping(gap=60, sessions=4).count == 4

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.text.mixture import Interleaved, Mixture, epoch_counts, interleave


class Numbers:
    """Sequences that are as good as their number."""

    def __init__(self, size, name=""):
        self.size, self.name = size, name

    def __len__(self):
        return self.size

    def fingerprint(self):
        return f"{self.size} {self.name}"


weights = st.floats(0.01, 100)
sources = st.lists(st.tuples(st.integers(1, 60), weights), min_size=1, max_size=5)


@given(sources)
def test_an_epoch_has_every_sequence_and_the_shares_that_the_weights_say(made):
    sizes, given_weights = zip(*made, strict=True)
    counts = epoch_counts(sizes, given_weights)
    assert all(count >= size for count, size in zip(counts, sizes, strict=True))
    assert any(count == size for count, size in zip(counts, sizes, strict=True))
    for count, weight in zip(counts, given_weights, strict=True):
        exact = weight / sum(given_weights) * sum(counts)
        assert abs(count - exact) <= len(counts)  # each is rounded


@given(sources)
def test_every_number_is_one_sequence_and_repeats_are_even(made):
    sizes, given_weights = zip(*made, strict=True)
    counts = epoch_counts(sizes, given_weights)
    mixture = Mixture([Numbers(size) for size in sizes], counts)
    step = max(len(mixture) // 3000, 1)
    if step > 1:  # long epochs: only that every number can be located
        for index in range(0, len(mixture), step):
            source, position = mixture.locate(index)
            assert 0 <= position < sizes[source]
        return
    seen = [np.zeros(size, int) for size in sizes]
    for index in range(len(mixture)):
        source, position = mixture.locate(index)
        seen[source][position] += 1
    for times, count in zip(seen, counts, strict=True):
        assert times.sum() == count
        assert times.min() >= 1
        assert times.max() - times.min() <= 1


def test_a_source_without_weight_is_not_trained_on():
    assert epoch_counts([10, 4, 0], [1, 1, 0]) == [10, 10, 0]
    mixture = Mixture([Numbers(10), Numbers(4), Numbers(0)], [10, 10, 0])
    assert {mixture.locate(i)[0] for i in range(20)} == {0, 1}


def test_weights_too_far_apart_are_refused():
    with pytest.raises(ValueError, match="weights 1e-300, 1 lie so far apart"):
        epoch_counts([10, 10], [1e-300, 1])


def test_the_fingerprint_is_of_sources_and_shares():
    def fingerprint(counts, name="x"):
        return Mixture([Numbers(4, name), Numbers(8)], counts).fingerprint()

    assert fingerprint([4, 8]) == fingerprint([4, 8])
    assert len({fingerprint([4, 8]), fingerprint([5, 8]), fingerprint([4, 8], "y")}) == 3


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(any))
def test_any_beginning_of_an_evaluation_has_all_sources_in_it(sizes):
    pairs = [tuple(pair) for pair in interleave(sizes).tolist()]
    assert sorted(pairs) == [(s, p) for s, size in enumerate(sizes) for p in range(size)]
    there = [s for s, size in enumerate(sizes) if size]
    assert sorted(s for s, _ in pairs[: len(there)]) == there
    for source, group in itertools.groupby(sorted(pairs), key=lambda pair: pair[0]):
        positions = [p for _, p in group]
        assert [p for s, p in pairs if s == source] == positions  # each in its own order
    assert len(Interleaved([Numbers(size) for size in sizes])) == sum(sizes)

"""Figures against their definitions, one user and one item at a time."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.slide.history import NOTHING
from recipes.slide.counts import NEAR, NEWEST, Counts
from recipes.slide.metrics import (
    by_stratum,
    exposure,
    gains,
    kendall,
    overlap,
    paired,
    places,
    repeats,
)
from recipes.slide.sources import read_source
from recipes.slide.split import Split
from tests.recipes.slide.stages import PLANTED

ITEMS = 7


@st.composite
def users(draw, lists=1):
    """Lists of different items that may end in nothing, and a target for each user."""
    count, K = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    found = []
    for _ in range(lists):
        rows = []
        for _ in range(count):
            items = draw(st.permutations(range(ITEMS)))[:K]
            length = draw(st.integers(0, K))
            rows.append([*items[:length], *[NOTHING] * (K - length)])
        found.append(np.array(rows))
    targets = np.array(draw(st.lists(st.integers(0, ITEMS - 1), min_size=count, max_size=count)))
    return found, targets


@given(users(), st.integers(1, 6))
def test_recall_ndcg_and_reciprocal_rank(made, cut):
    (lists,), targets = made
    found = gains(places(lists, targets), cut)
    for user, (items, target) in enumerate(zip(lists.tolist(), targets.tolist(), strict=True)):
        at = items.index(target) + 1 if target in items[:cut] else None
        assert found[f"recall@{cut}"][user] == (at is not None)
        ideal = 1 / math.log2(2)
        assert found[f"ndcg@{cut}"][user] == pytest.approx(
            1 / math.log2(1 + at) / ideal if at else 0
        )
        assert found[f"mrr@{cut}"][user] == pytest.approx(1 / at if at else 0)


@given(users(lists=2))
def test_agreement_and_exposure(made):
    (lists, others), _ = made
    common, taus = [], []
    for mine, theirs in zip(lists.tolist(), others.tolist(), strict=True):
        both = [item for item in mine if item != NOTHING and item in theirs]
        common.append(len(both) / len(mine))
        pairs = list(combinations(both, 2))
        if pairs:
            signs = [1 if theirs.index(a) < theirs.index(b) else -1 for a, b in pairs]
            taus.append(sum(signs) / len(signs))
    assert overlap(lists, others) == pytest.approx(np.mean(common))
    if taus:
        assert kendall(lists, others) == pytest.approx(np.mean(taus))
    else:
        assert math.isnan(kendall(lists, others))
    shown = {item for row in lists.tolist() for item in row if item != NOTHING}
    assert exposure(lists, ITEMS)["coverage"] == pytest.approx(len(shown) / ITEMS)
    assert repeats(lists) == 0


def test_repeats_are_counted_where_they_are():
    assert repeats(np.array([[1, 2, 1, 1], [3, NOTHING, NOTHING, 4]])) == 2 / 8


def test_strata_are_means_over_their_users():
    place = np.array([0, 9, 2, 0])
    strata = {"same_day": np.array([True, False, True, False]), "none": np.zeros(4, dtype=bool)}
    found = by_stratum(place, strata, (5,))
    assert found["recall@5"] == 0.75
    assert found["recall@5_same_day"] == 1
    assert found["ndcg@5_same_day"] == pytest.approx((1 + 1 / 2) / 2)
    assert "recall@5_none" not in found


def test_paired_differences_have_the_standard_error_of_their_mean():
    a, b = np.array([1.0, 0, 1, 1]), np.array([0.0, 0, 1, 0])
    mean, error = paired(a, b)
    assert mean == 0.5
    assert error == pytest.approx(np.std(a - b, ddof=1) / 2)


def naive_scores(split, history, window, last):
    counts = {}
    for user in range(split.sequences.num_users):
        items = split.history(user, int(split.train_ends[user])).tolist()
        for a, first in enumerate(items):
            for apart, second in enumerate(items[a + 1 : a + 1 + window], start=1):
                counts[first, second] = counts.get((first, second), 0) + apart**-NEAR
    votes = list(enumerate(list(history)[::-1][:last], start=1))
    return [
        sum(counts.get((h, i), 0) * k**-NEWEST for k, h in votes)
        for i in range(split.sequences.num_items)
    ]


@pytest.mark.parametrize(("window", "last"), [(0, 0), (1, 1), (3, 3)])
def test_counts_then_popularity(window, last):
    split = Split(read_source(PLANTED)[0])
    table, popularity = Counts(split, window, last), split.popularity()
    for user, event in list(enumerate(split.targets("test").tolist()))[::9]:
        history = split.history(user, event)
        scores = naive_scores(split, history.tolist(), window, last)
        removed = set(history.tolist())
        order = sorted(
            range(96), key=lambda i: (-scores[i], -popularity[i] if not scores[i] else 0, i)
        )
        found = table.top(history, 10, history).tolist()
        counted = [i for i in order if i not in removed and scores[i] > 0][:10]
        got = table.scores(history)
        assert [got[i] for i in found[: len(counted)]] == sorted(
            (got[i] for i in counted), reverse=True
        )
        np.testing.assert_allclose(
            [scores[i] for i in found[: len(counted)]], [scores[i] for i in counted], rtol=1e-9
        )
        rest = [
            i
            for i in sorted(range(96), key=lambda i: (-popularity[i], i))
            if i not in removed and not scores[i]
        ]
        assert found[len(counted) :] == rest[: 10 - len(counted)]
        lasts = (
            np.array([[NOTHING] * (last - len(history[-last:])) + history[-last:].tolist()])
            if last
            else None
        )
        if last:
            candidates = np.arange(96)[None]
            np.testing.assert_allclose(table.after(lasts, candidates)[0], scores, atol=1e-9)

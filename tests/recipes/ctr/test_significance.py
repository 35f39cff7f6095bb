from itertools import product

import numpy as np
import pytest

from recipes.ctr.metrics import auc, grouped_auc, log_loss
from recipes.ctr.significance import METRICS, Values, difference, draws, holm, resampled

PLAIN = {
    "auc": lambda s, y, u: auc(s, y),
    "gauc": grouped_auc,
    "logloss": lambda s, y, u: log_loss(s, y),
}


def clicks(users=6, rows=40, seed=0):
    generator = np.random.default_rng(seed)
    who = np.sort(np.concatenate([np.arange(users), generator.integers(users, size=rows - users)]))
    labels = generator.integers(2, size=rows)
    return np.round(generator.normal(labels * 0.7, 1.0), 1), labels, who  # with ties


@pytest.mark.parametrize("name", METRICS)
def test_drawing_a_user_twice_is_having_the_rows_twice(name):
    scores, labels, users = clicks()
    drawn = np.random.default_rng(1).multinomial(6, [1 / 6] * 6, size=20)
    found = METRICS[name](scores, labels, users)(drawn)
    for row, value in zip(drawn, found, strict=True):
        # every copy of a user is a user of its own
        copies = [(np.flatnonzero(users == u), n) for u in range(6) for n in range(row[u])]
        rows = np.concatenate([rows for rows, _ in copies])
        who = np.concatenate([np.full(len(rows), n) for n, (rows, _) in enumerate(copies)])
        assert value == pytest.approx(PLAIN[name](scores[rows], labels[rows], who), abs=1e-12)


def test_the_bootstrap_has_the_distribution_of_all_ways_to_draw():
    """Three users: all 27 draws are equally likely, and can be gone through one by one."""
    scores, labels, users = clicks(users=3, rows=60)
    other = np.random.default_rng(5).normal(size=60)
    metrics = [METRICS["logloss"](s, labels, users) for s in (scores, other)]
    every = np.array([np.bincount(who, minlength=3) for who in product(range(3), repeat=3)])
    exact = metrics[0](every) - metrics[1](every)
    one, two = (resampled([metric], 3, resamples=4000, seed=0) for metric in metrics)
    found = difference(one, two)
    centred = exact - found.mean
    share = np.mean(np.abs(centred) >= abs(found.mean))
    assert found.p == pytest.approx(share, abs=0.03)
    drawn = (one.drawn_RS - two.drawn_RS)[:, 0]
    for value in np.unique(np.round(exact, 9)):
        expected = np.mean(np.isclose(exact, value))
        assert np.mean(np.isclose(drawn, value)) == pytest.approx(expected, abs=0.03)
    assert found.low == pytest.approx(np.quantile(drawn, 0.025))
    assert found.high == pytest.approx(np.quantile(drawn, 0.975))


def test_all_models_get_the_same_draws():
    first, again = (np.concatenate(list(draws(5, 120, seed=3))) for _ in range(2))
    assert np.array_equal(first, again)
    assert first.shape == (120, 5)
    assert np.all(first.sum(1) == 5)


def test_few_seeds_understate_their_spread_and_are_corrected_for_it():
    """Without users' chance, the spread over many resamples is the standard error of the mean."""
    values = np.array([0.1, 0.4, 0.2, 0.9])
    one = Values(values, np.tile(values, (20_000, 1)))
    other = Values(np.zeros(1), np.zeros((20_000, 1)))
    found = difference(one, other)
    error = values.std(ddof=1) / 2
    assert found.mean == pytest.approx(0.4)
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * error, rel=0.1)


def test_no_difference_is_found_about_as_often_as_it_should():
    """Two models of the same quality, many times: one in twenty is called different."""
    called, rounds = 0, 200
    for seed in range(rounds):
        generator = np.random.default_rng(seed)
        users = np.repeat(np.arange(40), 5)
        labels = generator.integers(2, size=200)
        taste = generator.normal(size=40)[users]  # targets of a user go together
        values = [
            resampled(
                [METRICS["logloss"](taste + generator.normal(size=200), labels, users)],
                40,
                200,
                seed,
            )
            for _ in range(2)
        ]
        called += difference(*values).p < 0.05
    assert 0.02 * rounds < called < 0.1 * rounds


def test_holms_correction_by_hand():
    # Holm 1979: the smallest times 4, the next times 3, ... and never below the one before
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([0.02]) == [0.02]
    assert holm([]) == []
    assert holm([0.0125, 0.0125, 0.0125, 0.9]) == pytest.approx([0.05, 0.05, 0.05, 0.9])

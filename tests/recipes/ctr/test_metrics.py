import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.ctr.metrics import auc, calibration, grouped_auc, log_loss, relative_improvement

rows = st.lists(
    st.tuples(st.integers(-3, 3), st.integers(0, 1), st.integers(0, 4)), min_size=1, max_size=60
)


def slow_auc(scores, labels):
    """Every pair of a click and no click."""
    clicks, others = scores[labels == 1], scores[labels == 0]
    if not len(clicks) * len(others):
        return float("nan")
    wins = (clicks[:, None] > others).sum() + 0.5 * (clicks[:, None] == others).sum()
    return wins / (len(clicks) * len(others))


@given(rows)
def test_auc_is_the_share_of_pairs(rows):
    scores, labels, _ = map(np.array, zip(*rows, strict=True))
    assert auc(scores / 2, labels) == pytest.approx(
        slow_auc(scores / 2, labels), nan_ok=True, abs=1e-12
    )


@given(rows)
def test_gauc_weighs_users_by_their_targets(rows):
    scores, labels, users = map(np.array, zip(*rows, strict=True))
    values, weights = [], []
    for user in set(users.tolist()):
        mine = users == user
        value = slow_auc(scores[mine], labels[mine])
        if not np.isnan(value):
            values.append(value)
            weights.append(mine.sum())
    expected = np.average(values, weights=weights) if values else float("nan")
    got = grouped_auc(scores.astype(float), labels, users)
    assert got == pytest.approx(expected, nan_ok=True, abs=1e-12)


def test_log_loss_and_calibration_by_hand():
    chances = np.array([0.9, 0.2, 0.6, 0.3])
    labels = np.array([1, 0, 0, 1])
    logits = np.log(chances / (1 - chances))
    expected = -np.log([0.9, 0.8, 0.4, 0.3]).mean()
    assert log_loss(logits, labels) == pytest.approx(expected)
    ratio, error = calibration(logits, labels, bins=2)  # {.2, .3} has .5 clicks, {.6, .9} too
    assert ratio == pytest.approx(1.0)
    assert error == pytest.approx((0.25 + 0.25) / 2)
    assert np.isfinite(log_loss(np.array([800.0, -800.0]), np.array([0, 1])))
    assert relative_improvement(0.65, 0.65) == 0
    assert relative_improvement(0.7, 0.6) == pytest.approx(1.0)

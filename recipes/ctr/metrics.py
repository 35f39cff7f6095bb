"""AUC and its kin, exact, over whole arrays of scores: no histograms, no samples."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def auc(scores: Floats, labels: Ints) -> float:
    """The share of (click, no click) pairs in the right order, ties half; nan without pairs."""
    clicks = int(labels.sum())
    pairs = clicks * (len(labels) - clicks)
    if pairs == 0:
        return float("nan")
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mean_ranks = np.cumsum(counts) - (counts - 1) / 2
    above = mean_ranks[places][labels == 1].sum() - clicks * (clicks + 1) / 2
    return float(above / pairs)


def grouped_auc(scores: Floats, labels: Ints, users: Ints) -> float:
    """GAUC: each user's AUC, weighted by the user's targets; users of one class are left out."""
    total = weight = 0.0
    for rows in groups_of(users):
        value = auc(scores[rows], labels[rows])
        if not np.isnan(value):
            total += value * len(rows)
            weight += len(rows)
    return total / weight if weight else float("nan")


def groups_of(users: Ints) -> Iterator[NDArray[Any]]:
    """The rows of each user."""
    order = np.argsort(users, kind="stable")
    starts = np.flatnonzero(np.diff(users[order])) + 1
    return iter(np.split(order, starts)) if len(users) else iter(())


def log_loss(logits: Floats, labels: Ints) -> float:
    """Mean cross-entropy in nats."""
    return float(np.mean(np.logaddexp(0.0, np.where(labels == 1, -logits, logits))))


def calibration(logits: Floats, labels: Ints, bins: int = 10) -> tuple[float, float]:
    """Predicted over actual clicks (1 is right), and the expected calibration error.

    The error is the mean distance of prediction and share of clicks over `bins` bins of equally many
    targets, in order of the prediction.
    """
    chances = 1 / (1 + np.exp(-logits))
    order = np.argsort(chances, kind="stable")
    gaps = [
        len(part) * abs(float(chances[part].mean()) - float(labels[part].mean()))
        for part in np.array_split(order, min(bins, len(order)))
    ]
    clicks = float(labels.sum())
    ratio = float(chances.sum()) / clicks if clicks else float("nan")
    return ratio, sum(gaps) / len(labels)


def relative_improvement(value: float, base: float) -> float:
    """RelaImpr of an AUC over another: how much of what is better than chance was added."""
    return (value - 0.5) / (base - 0.5) - 1

"""Which of the learning rates that were tried is taken.

    X validation texts

Of a few hundred texts, two rates often have the same right but for one or two: to take the larger
number is to draw lots, and a lot costs a method more than what methods differ by. So right answers count
only as far as the texts can tell: all rates are in the choice whose accuracy is less than one standard
error (over texts, of the difference, seeds in the mean) below the best one's, and of these the one with
the least loss is taken, which every text has a say in. The rule is the same for all methods. Where loss
rises with the rate before accuracy falls, it takes the lower rate, for all of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.lelora.verdict import right_of
from recipes.ctr.metrics import Floats


def best_rate(tried: Mapping[float, Sequence[Mapping[str, Any]]], *, by_loss: bool) -> float:
    """The rate to take, from its runs' scores on validation; `by_loss` leaves out what is right.

    Runs that are not finite lose to all others.
    """

    def loss(lr: float) -> float:
        return float(np.nan_to_num(np.mean([run["loss"] for run in tried[lr]]), nan=1e9))

    if by_loss:
        return min(tried, key=lambda lr: (loss(lr), lr))
    right_X = {lr: np.mean([right_of(run) for run in runs], axis=0) for lr, runs in tried.items()}
    best = max(tried, key=lambda lr: (right_X[lr].mean(), -loss(lr)))
    equal = [lr for lr in tried if not _tells(right_X[best] - right_X[lr])]
    return min(equal, key=lambda lr: (loss(lr), lr))


def _tells(difference_X: Floats) -> bool:
    """Whether a mean difference of 0 or more is at least its standard error, and not 0."""
    error = difference_X.std(ddof=1) / len(difference_X) ** 0.5
    return bool(difference_X.mean() > 0 and difference_X.mean() >= error)

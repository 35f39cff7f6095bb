"""Is a model better than another? Users and seeds drawn anew, and Holm's correction for many questions.

    T targets, U users, R resamples, S seeds

A difference has two sources of chance: which users happened to test, and which seeds happened to train.
Users are drawn with replacement, the same ones for all models (so differences are paired); the seeds'
differences are drawn with replacement, too, and their spread is widened by sqrt(S / (S - 1)), by which
a few of them understate it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from recipes.ctr.metrics import Floats, Ints, auc, groups_of

Weighted = Callable[[Ints], Floats]
"""A metric for every row of (R, U): how often each user was drawn."""
CHUNK = 50
"""Resamples at a time: the work is in arrays of so many times T."""


def weighted_auc(scores: Floats, labels: Ints, users: Ints) -> Weighted:
    """AUC over the targets of the drawn users; ties count half."""
    order = np.argsort(scores, kind="stable")
    labels, users = labels[order].astype(np.float64), users[order]
    starts = np.flatnonzero(np.diff(scores[order], prepend=np.nan) != 0)

    def of(drawn_RU: Ints) -> Floats:
        weights_RT = drawn_RU[:, users].astype(np.float64)
        clicks_RG = np.add.reduceat(weights_RT * labels, starts, axis=1)
        others_RG = np.add.reduceat(weights_RT * (1 - labels), starts, axis=1)
        below_RG = np.cumsum(others_RG, axis=1) - others_RG / 2
        pairs_R = clicks_RG.sum(1) * others_RG.sum(1)
        right_R: Floats = (clicks_RG * below_RG).sum(1)
        return np.divide(right_R, pairs_R, out=np.full_like(right_R, np.nan), where=pairs_R > 0)

    return of


def weighted_gauc(scores: Floats, labels: Ints, users: Ints) -> Weighted:
    """GAUC over the drawn users."""
    weight_U, value_U = np.zeros(users.max() + 1), np.zeros(users.max() + 1)
    for rows in groups_of(users):
        value = auc(scores[rows], labels[rows])
        if not np.isnan(value):
            weight_U[users[rows[0]]], value_U[users[rows[0]]] = len(rows), value
    return _ratio(weight_U * value_U, weight_U)


def weighted_log_loss(logits: Floats, labels: Ints, users: Ints) -> Weighted:
    """Mean cross-entropy over the targets of the drawn users."""
    nats = np.logaddexp(0.0, np.where(labels == 1, -logits, logits))
    sums_U = np.bincount(users, weights=nats).astype(np.float64)
    return _ratio(sums_U, np.bincount(users).astype(np.float64))


def _ratio(above_U: Floats, below_U: Floats) -> Weighted:
    def of(drawn_RU: Ints) -> Floats:
        with np.errstate(
            invalid="ignore"
        ):  # nan where no drawn user counts, as with one target each
            ratio_R: Floats = (drawn_RU @ above_U) / (drawn_RU @ below_U)
        return ratio_R

    return of


METRICS: dict[str, Callable[[Floats, Ints, Ints], Weighted]] = {
    "auc": weighted_auc,
    "gauc": weighted_gauc,
    "logloss": weighted_log_loss,
}


def draws(num_users: int, resamples: int, seed: int) -> Iterator[Ints]:
    """How often each user is drawn, a few resamples at a time."""
    generator = np.random.default_rng(seed)
    even = np.full(num_users, 1 / num_users)
    for begin in range(0, resamples, CHUNK):
        yield generator.multinomial(num_users, even, size=min(CHUNK, resamples - begin))


@dataclass(frozen=True)
class Values:
    """A metric of one model."""

    real_S: Floats
    """By seed, on the users as they are."""
    drawn_RS: Floats
    """By resample and seed."""


def resampled(metrics: Sequence[Weighted], num_users: int, resamples: int, seed: int) -> Values:
    """Values of a model whose seeds' metrics these are."""
    as_they_are = np.ones((1, num_users), dtype=np.int64)
    real_S = np.concatenate([metric(as_they_are) for metric in metrics])
    parts = [
        np.stack([metric(drawn_RU) for metric in metrics], axis=1)
        for drawn_RU in draws(num_users, resamples, seed)
    ]
    return Values(real_S, np.concatenate(parts))


@dataclass(frozen=True)
class Difference:
    """Of one model's metric from another's."""

    mean: float
    low: float
    high: float
    """The 95 % interval."""
    p: float
    """How often chance alone gives as much, either way."""


def difference(one: Values, other: Values, seed: int = 0) -> Difference:
    """Paired by user and by seed; a model without seeds (counts) stands for all of the other's."""
    real_S, drawn_RS = one.real_S - other.real_S, one.drawn_RS - other.drawn_RS
    mean, S, R = float(real_S.mean()), len(real_S), len(drawn_RS)
    by_users_R = drawn_RS.mean(1) - mean
    by_seeds_R = np.zeros(R)
    if S > 1:
        chosen_RS = np.random.default_rng(seed).integers(S, size=(R, S))
        by_seeds_R = (real_S[chosen_RS].mean(1) - mean) * (S / (S - 1)) ** 0.5
    chance_R = by_users_R + by_seeds_R
    chance_R = chance_R[np.isfinite(chance_R)]
    low, high = mean + np.quantile(chance_R, [0.025, 0.975])
    p = (1 + np.count_nonzero(np.abs(chance_R) >= abs(mean))) / (len(chance_R) + 1)
    return Difference(mean, float(low), float(high), float(p))


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's step-down correction: each p for the question whether *any* finding is by chance."""
    adjusted, highest = [0.0] * len(ps), 0.0
    for place, index in enumerate(sorted(range(len(ps)), key=lambda n: ps[n])):
        highest = max(highest, min(1.0, (len(ps) - place) * ps[index]))
        adjusted[index] = highest
    return adjusted

"""The findings of a study in words: texts and seeds drawn anew, Holm's correction, and no more.

X test texts, C chapters of them, S seeds
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.trip.verdict import LEVEL
from recipes.ctr.metrics import Floats, Ints
from recipes.ctr.significance import Difference, Values, Weighted, difference, holm, resampled


@dataclass(frozen=True)
class Measure:
    """What a task's runs are compared by; more is better."""

    points: str
    """One of what differences are in."""
    margin: float
    """Points by which half the parameters may be worse."""


ACCURACY = Measure("points", 0.5)
LIKELIHOOD = Measure("thousandths of a nat", 5.0)
"""A thousand times the log-likelihood of a token."""


def measure_of(run: Mapping[str, Any]) -> Measure:
    """By what is kept of a run: what is right of each text, or the nats of each chapter."""
    return LIKELIHOOD if "nats" in run else ACCURACY


def values(runs: Sequence[Mapping[str, Any]], resamples: int = 2000) -> Values:
    """Of each seed, on the test part as it is and as drawn: its texts, or whole chapters of it.

    Accuracy in per cent, or log-likelihood of a token in thousandths of a nat.
    """
    ordered = sorted(runs, key=lambda run: int(run["seed"]))
    if measure_of(ordered[0]) is LIKELIHOOD:
        metrics = [_likelihood(run) for run in ordered]
        return resampled(metrics, len(ordered[0]["nats"]), resamples, seed=0)
    return resampled([_accuracy(run) for run in ordered], ordered[0]["texts"], resamples, seed=0)


def right_of(run: Mapping[str, Any]) -> Floats:
    """1 for each text that a run has right, else 0."""
    bits = np.frombuffer(base64.b64decode(run["correct"]), dtype=np.uint8)
    return np.unpackbits(bits, count=run["texts"]).astype(np.float64)


def _accuracy(run: Mapping[str, Any]) -> Weighted:
    right_X = right_of(run)

    def of(drawn_RX: Ints) -> Floats:
        found: Floats = 100 * (drawn_RX @ right_X) / drawn_RX.sum(1)
        return found

    return of


def _likelihood(run: Mapping[str, Any]) -> Weighted:
    nats_C, targets_C = (np.array(run[name], dtype=np.float64) for name in ("nats", "targets"))

    def of(drawn_RC: Ints) -> Floats:
        found: Floats = -1000 * (drawn_RC @ nats_C) / (drawn_RC @ targets_C)
        return found

    return of


def against(found: Mapping[str, Values], other: str) -> dict[str, tuple[Difference, float]]:
    """Each method's difference from `other`, with its p after Holm's correction over all of them."""
    methods = [method for method in found if method != other]
    differences = [difference(found[method], found[other]) for method in methods]
    corrected = holm([d.p for d in differences])
    return dict(zip(methods, zip(differences, corrected, strict=True), strict=True))


def interval(of: Difference) -> str:
    """In points."""
    return f"{of.mean:+.2f} ({of.low:+.2f} to {of.high:+.2f})"


def word(of: Difference, p: float) -> str:
    """Better, worse, or neither."""
    if p >= LEVEL:
        return "no significant difference"
    return "significantly better" if of.mean > 0 else "significantly worse"


def sentence(
    method: str, other: str, of: Difference, p: float, how: str = "after Holm's correction",
    measure: Measure = ACCURACY,
) -> str:  # fmt: skip
    """What may be said of two methods; `how` is said of p."""
    numbers = f"{interval(of)} {measure.points}; p {p:.3g} {how}"
    if p >= LEVEL:
        return f"no significant difference between {method} and {other}: {numbers}"
    return f"{method} is {word(of, p)} than {other}: {numbers}"


def within(of: Difference, measure: Measure = ACCURACY) -> str:
    """Whether a method is at most the margin worse, by the interval's lower end."""
    said = f"at most {measure.margin} {measure.points} worse: "
    if of.low > -measure.margin:
        return f"{said}shown"
    return said + ("not so" if of.high < -measure.margin else "not shown")

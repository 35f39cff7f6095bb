"""The findings of a study in words: texts and seeds drawn anew, Holm's correction, and no more.

X test texts, S seeds
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.trip.verdict import LEVEL
from recipes.ctr.metrics import Floats, Ints
from recipes.ctr.significance import Difference, Values, Weighted, difference, holm, resampled

MARGIN = 0.5
"""Points by which half the parameters may be worse."""


def values(runs: Sequence[Mapping[str, Any]], resamples: int = 2000) -> Values:
    """Accuracy in per cent of each seed, on the test texts as they are and as drawn."""
    ordered = sorted(runs, key=lambda run: int(run["seed"]))
    return resampled([_accuracy(run) for run in ordered], ordered[0]["texts"], resamples, seed=0)


def _accuracy(run: Mapping[str, Any]) -> Weighted:
    bits = np.frombuffer(base64.b64decode(run["correct"]), dtype=np.uint8)
    right_X = np.unpackbits(bits, count=run["texts"]).astype(np.float64)

    def of(drawn_RX: Ints) -> Floats:
        found: Floats = 100 * (drawn_RX @ right_X) / drawn_RX.sum(1)
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
    method: str, other: str, of: Difference, p: float, how: str = "after Holm's correction"
) -> str:
    """What may be said of two methods; `how` is said of p."""
    numbers = f"{interval(of)} points; p {p:.3g} {how}"
    if p >= LEVEL:
        return f"no significant difference between {method} and {other}: {numbers}"
    return f"{method} is {word(of, p)} than {other}: {numbers}"


def within(of: Difference, margin: float = MARGIN) -> str:
    """Whether a method is at most `margin` worse, by the interval's lower end."""
    if of.low > -margin:
        return f"at most {margin} points worse: shown"
    return f"at most {margin} points worse: " + ("not so" if of.high < -margin else "not shown")

"""From the scores of a whole evaluation to figures, and to the panels of the report."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from models.trip.history import Grouping
from recipes.ctr.metrics import (
    Floats,
    Ints,
    auc,
    calibration,
    grouped_auc,
    log_loss,
    relative_improvement,
)
from recipes.ctr.negatives import KINDS, REAL
from recipes.ctr.targets import Targets

AGES = (60, 3_600, 86_400, 7 * 86_400, 30 * 86_400)
"""Seconds since the newest interaction at which rows of a table begin."""
LENGTHS = (1, 5, 10, 20, 50)
"""And lengths of the history."""


def by_part(
    parts: Mapping[str, Targets], scored: Floats, logits: Floats, users: Ints, popularity: Floats
) -> dict[str, float]:
    """Figures of parts that follow each other in the arrays, each name ending as its part says.

    Only rows that were scored count: an evaluation may have ended before the last part, or in it.
    """
    found: dict[str, float] = {}
    begin = 0
    for end, part in parts.items():
        rows = begin + np.flatnonzero(scored[begin : begin + len(part)])
        if len(rows):
            of_part = figures(logits[rows], part.of(rows - begin), users[rows], popularity[rows])
            found |= {f"{name}{end}": value for name, value in of_part.items()}
        begin += len(part)
    return found


def figures(logits: Floats, targets: Targets, users: Ints, popularity: Floats) -> dict[str, float]:
    """Those of one part. What is not defined, such as the AUC of one class, is left out."""
    labels = targets.labels_T
    found = {
        "auc": auc(logits, labels),
        "gauc": grouped_auc(logits, labels, users),
        "logloss": log_loss(logits, labels),
        "auc_of_popularity": auc(popularity, labels),
    }
    found["calibration"], found["calibration_error"] = calibration(logits, labels)
    for name, kind in KINDS.items():
        rows = (labels == 1) | (targets.kinds_T == kind)
        if (targets.kinds_T == kind).any():
            found[f"auc_{name}"] = auc(logits[rows], labels[rows])
    return {name: value for name, value in found.items() if math.isfinite(value)}


def popularity(train: Targets, items: Ints, num_items: int, prior: float = 10.0) -> Floats:
    """A score without a model: each item's share of clicks in training, drawn to that of all.

    Where what is no click was drawn, the share would be that of the draw; there it is the number of
    clicks.
    """
    labels_T = train.labels_T.astype(np.float64)
    clicks_I = np.bincount(train.items_T, weights=labels_T, minlength=num_items).astype(np.float64)
    if (train.kinds_T != REAL).any():
        return clicks_I[items]
    shown_I = np.bincount(train.items_T, minlength=num_items)
    share_I: Floats = (clicks_I + prior * labels_T.mean()) / (shown_I + prior)
    return share_I[items]


def auc_by(bins: Ints, names: Sequence[str], logits: Floats, labels: Ints) -> list[list[Any]]:
    """Rows of bin, targets and AUC; None where a bin has one class only."""
    rows = []
    for number, name in enumerate(names):
        here = bins == number
        value = auc(logits[here], labels[here])
        rows.append([name, int(here.sum()), None if math.isnan(value) else value])
    return rows


def age_bins(newest_ages: Ints) -> tuple[Ints, list[str]]:
    """The bin of each history by its newest interaction's age (-1: it is empty), and their names."""
    names = ["no history", *intervals([0, *AGES], seconds)]
    return np.searchsorted(np.array([0, *AGES]), newest_ages, side="right"), names


def length_bins(lengths: Ints) -> tuple[Ints, list[str]]:
    """The bin of each history by its length, and their names."""
    return np.searchsorted(np.array(LENGTHS), lengths, side="right"), intervals([0, *LENGTHS], str)


def intervals(starts: Sequence[int], form: Any) -> list[str]:
    """`0 to 1 h`, ..., `30 d or more`."""
    names = [f"{form(a)} to {form(b)}" for a, b in pairwise(starts)]
    return [*names, f"{form(starts[-1])} or more"]


def group_names(grouping: Grouping) -> list[str]:
    """Of temporal groups, the newest first."""
    if not grouping.gap:
        return intervals([0, *grouping.edges], seconds)
    names = ["newest session", *(f"session {n} before it" for n in range(1, grouping.sessions))]
    return [*names[:-1], f"{names[-1]} and older"] if grouping.sessions > 1 else ["all"]


def seconds(value: float) -> str:
    """A time span in its largest whole unit."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} s"


def comparison(found: Mapping[str, float]) -> list[list[Any]]:
    """Rows of part, AUC, popularity's, and the relative improvement."""
    rows: list[list[Any]] = []
    for part, end in (("validation", ""), ("test", "_test")):
        value, base = found.get(f"auc{end}"), found.get(f"auc_of_popularity{end}")
        if value is not None and base is not None and base > 0.5:
            rows.append([part, value, base, relative_improvement(value, base)])
    return rows

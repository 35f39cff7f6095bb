"""Goodput: how much of the time since a run folder's first start went into steps that count.

Everything else is lost: starting, compiling, saving, evaluating, being stopped, steps that were skipped
or had to be done again. Worked out of the rows of `metrics.jsonl`, which hold each step that counts in
exactly one row.
"""

from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]


def productive_seconds(rows: Iterable[Row]) -> float:
    """Time of the steps that `rows` report, without skipped ones; from the first start on."""
    total, last, skipped = 0.0, None, 0
    for row in rows:
        if row["kind"] == "start":
            last, skipped = row["step"], row["skipped"]
        elif row["kind"] == "train" and last is not None:
            steps = row["step"] - last - (row["skipped"] - skipped)
            total += max(steps, 0) * row["step_seconds"]
            last, skipped = row["step"], row["skipped"]
    return total


def goodput(productive: float, before: float, seconds: float) -> float:
    """`productive` as a share of what has gone by: `before` this start, and `seconds` since.

    The first is by clocks that may have been set in between; the share is at most 1 all the same.
    """
    return productive / max(max(before, 0.0) + seconds, productive, 1e-9)


def first_start(rows: Iterable[Row], now: float) -> float:
    """When the run folder was first started (seconds since 1970); `now` if no row says it."""
    return min((row["started"] for row in rows if row["kind"] == "start"), default=now)

"""From times to whole numbers, on the host: ages, time buckets and temporal groups.

    N items in the history, oldest first, padded on the left (item 0 is padding)

All of it is integer arithmetic and tables of integer edges, so that an age on an edge falls on the
same side on every machine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
PADDING, UNSEEN = 0, 1
"""Rows of the item table that are no items: nothing, and any item that training never saw.

Both stay zero: no training sample has them, and reconstruction leaves them out.
"""


def ages(times_N: Ints, target_time: int) -> Ints:
    """Seconds from each event of a history to its target.

    Raises `ValueError` unless the times ascend and all lie before the target: an event at the
    target's own time may be the target itself.
    """
    if np.any(np.diff(times_N) < 0):
        at = int(np.argmax(np.diff(times_N) < 0)) + 1
        raise ValueError(
            f"the times of a history do not ascend: {times_N[at]} follows {times_N[at - 1]}: "
            "sort it, oldest first"
        )
    if len(times_N) and times_N[-1] >= target_time:
        raise ValueError(
            f"a history has an event at {times_N[-1]}, and its target is at {target_time}: keep only "
            "events before the target"
        )
    return target_time - times_N


def time_edges(unit: int, octaves: int, fine: int) -> Ints:
    """The ages at which the time buckets begin: bucket `c * fine + f` at unit * (2^(c + f/fine) - 1).

    Rounded up to whole seconds, which decides the same for whole ages.
    """
    starts = [2.0 ** (c + f / fine) - 1 for c in range(octaves) for f in range(fine)]
    return np.array([math.ceil(unit * start) for start in starts], dtype=np.int64)


def bucket(ages_N: Ints, edges: Ints) -> Ints:
    """The bucket of each age, given where buckets begin; the first begins at 0, the last never ends."""
    return np.searchsorted(edges, ages_N, side="right").astype(np.int64) - 1


def group(ages_N: Ints, edges: Sequence[int]) -> Ints:
    """The temporal group of each age: 0 is the newest, and group n begins at `edges[n - 1]`."""
    return np.searchsorted(np.array(edges, dtype=np.int64), ages_N, side="right").astype(np.int64)


def session(ages_N: Ints, gap: int, groups: int) -> Ints:
    """The session of each interaction, 0 the newest: one ends where more than `gap` seconds pass.

    Ages descend along the last dimension; the oldest sessions share number `groups - 1`.
    """
    breaks = ages_N[..., :-1] - ages_N[..., 1:] > gap
    newer_N = np.zeros(ages_N.shape, dtype=np.int64)
    newer_N[..., :-1] = np.cumsum(breaks[..., ::-1], axis=-1)[..., ::-1]
    return newer_N.clip(max=groups - 1)


@dataclass(frozen=True)
class Grouping:
    """Where temporal groups begin: at certain ages, or after a pause."""

    edges: tuple[int, ...] = ()
    gap: int = 0
    """Seconds that end a session; 0: groups by age."""
    sessions: int = 0

    @property
    def count(self) -> int:
        """How many there are."""
        return self.sessions if self.gap else len(self.edges) + 1

    def __call__(self, ages_N: Ints) -> Ints:
        """The group of each age; where groups are sessions, ages are those of whole histories."""
        return session(ages_N, self.gap, self.sessions) if self.gap else group(ages_N, self.edges)


def quantile_edges(ages_E: Ints, groups: int) -> tuple[int, ...]:
    """Edges that split these ages into `groups` groups of about equal size; fewer where ages repeat."""
    if not len(ages_E):
        return ()
    shares = np.arange(1, groups) / groups
    cuts = np.quantile(ages_E, shares, method="higher").astype(np.int64)
    return tuple(int(cut) for cut in np.unique(cuts) if cut > ages_E.min())

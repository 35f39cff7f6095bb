"""The parent solver: which samples share a parent, given the parents' widths.

Samples are first placed by the lower bound of `groups.py`, longest first, so that a giant gets the
companions without which its parent's children cannot be balanced. Then single samples are moved or
swapped out of the slowest parent, first by the bound, and for good if the true child solver agrees.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from parallel.repacking.cost import CostModel, Work
from parallel.repacking.groups import (
    Groups,
    Membership,
    longest_of,
    place,
    sums_of,
)
from parallel.repacking.layout import Floats, Ints

MOVABLE = 48
"""So many of the longest samples may be moved or swapped."""
TRIES = 6
"""Changes that the bound proposes, tried with the child solver before giving up."""
LARGE = 128
"""Samples of a parent that take about as long to solve as a parent by itself."""
MANY = 1024
"""With more samples than that, pouring leaves nothing to improve by moving single ones."""
ROUNDS = 32
"""Changes of one search at most."""
CLOSE = 1e-3
"""A step this close to its bound is not searched further."""


@dataclass
class Limit:
    """When a search ends: after some solved parents, or, if `seconds` is given, by the clock.

    By the clock, ranks would come to different plans: one plans and sends it to the others
    (`agree.broadcast_plan`).
    """

    parents: int = 32
    """Each counts once more for every `LARGE` samples; those that are not repacked cost nothing."""
    seconds: float | None = None
    clock: Callable[[], float] = time.monotonic
    _spent: int = 0
    _begin: float = field(init=False)

    def __post_init__(self) -> None:
        self._begin = self.clock()

    def fresh(self) -> "Limit":
        """For another search of the same plan: by count it begins anew, the clock runs on."""
        return self if self.seconds is not None else Limit(self.parents)

    def count(self, samples: int) -> None:
        """One more parent was solved, with so many samples."""
        self._spent += 1 + samples // LARGE

    @property
    def reached(self) -> bool:
        """Stop searching, with what there is."""
        if self.seconds is not None:
            return self.clock() - self._begin >= self.seconds
        return self._spent >= self.parents


def rebalance(work: Work, widths: Ints, cost: CostModel, above: float) -> Membership | None:
    """Samples placed by the bound, over parents of these widths; None: memory does not hold them."""
    owner = place(work, Groups(widths, cost, above))
    return None if owner is None else Membership(widths, owner)


def refine(
    work: Work,
    start: Membership,
    cost: CostModel,
    solve: Callable[[Work, int], float],
    limit: Limit,
    above: float = np.inf,
) -> Membership:
    """Moves and swaps out of the slowest parent, if samples are few.

    `solve` gives the true seconds of a parent. What it returns is never slower than `start`. Parents
    wider than `above` may be repacked; without any it improves a baseline, by the same search, so that
    what a parent solver gains is not what any search would.
    """
    widths, owner = start.widths, start.owner.copy()
    m = len(widths)
    if m < 2 or not 0 < len(work.ids) <= MANY:
        return start
    groups, brought, alone_n2 = Groups(widths, cost, above), work.quantities, work.alone
    limits = groups.row_limits

    def solved(k: int, trial: Ints) -> float:
        mine = trial == k
        if groups.wide[k]:
            limit.count(int(mine.sum()))
        return solve(work.take(mine), int(widths[k]))

    seconds = np.array([solved(k, owner) for k in range(m)])
    sums, longest = sums_of(brought, owner, m), longest_of(alone_n2, owner, m)
    bound = float(groups.seconds(sums, longest).mean())
    for _ in range(ROUNDS):
        if limit.reached or seconds.max() <= bound * (1 + CLOSE):
            break
        slowest = int(seconds.argmax())
        proposals = _proposals(groups, brought, alone_n2, owner, slowest, seconds, limits)
        for change in proposals[:TRIES]:
            trial = owner.copy()
            for sample, goal in change:
                trial[sample] = goal
            touched = {slowest, *(goal for _, goal in change)}
            after = {k: solved(k, trial) for k in sorted(touched)}
            if max(after.values()) < seconds[slowest] * (1 - 1e-9):
                owner = trial
                for k, value in after.items():
                    seconds[k] = value
                break
            if limit.reached:
                break
        else:
            break
    return Membership(widths, owner)


def _proposals(
    groups: Groups, brought: Floats, alone_n2: Floats, owner: Ints, slowest: int, seconds: Floats,
    limits: Floats,
) -> list[list[tuple[int, int]]]:  # fmt: skip
    """Changes that would help by the bound, best first: pairs of a sample and its new group."""
    m, movable = len(groups.widths), min(len(owner), MOVABLE)
    sums = sums_of(brought, owner, m)
    mine = np.flatnonzero(owner[:movable] == slowest)
    others = np.flatnonzero(owner[:movable] != slowest)
    goals = np.concatenate([np.delete(np.arange(m), slowest), owner[others]])
    back = np.concatenate([np.full(m - 1, -1), others])
    if not len(mine) or not len(goals):
        return []
    came = np.where(back[:, None] >= 0, brought[back], 0.0)
    out = brought[mine][:, None, :] - came
    here = sums[slowest] - out
    there = sums[goals] + out
    # The longest sample of each group that is left when one leaves, and with the one that comes.
    tops = _two_longest(owner, m)
    padded = np.concatenate([alone_n2, np.zeros((1, 2))])
    left = padded[np.where(mine == tops[slowest, 0], tops[slowest, 1], tops[slowest, 0])]
    here_most = np.maximum(left[:, None], padded[back])
    stays = padded[np.where(back == tops[goals, 0], tops[goals, 1], tops[goals, 0])]
    there_most = np.maximum(alone_n2[mine][:, None], stays)
    shape = here.shape[:2]
    source = np.full(shape, slowest)
    target = np.broadcast_to(goals, shape)
    value = np.maximum(
        groups.seconds_of(source, here, here_most), groups.seconds_of(target, there, there_most)
    )
    fits = (here[..., 0] <= limits[slowest]) & (there[..., 0] <= limits[goals])
    value = np.where(fits, value, np.inf)
    found = []
    for at in np.argsort(value, axis=None, kind="stable")[:TRIES]:
        row, column = divmod(int(at), shape[1])
        if value[row, column] >= seconds[slowest]:
            break
        change = [(int(mine[row]), int(goals[column]))]
        if back[column] >= 0:
            change.append((int(back[column]), slowest))
        found.append(change)
    return found


def _two_longest(owner: Ints, m: int) -> Ints:
    """(m, 2) the two longest samples of each group, which are its first; -1 where there is none."""
    found = np.full((m, 2), -1, np.int64)
    order = np.argsort(owner, kind="stable")
    first = np.searchsorted(owner[order], np.arange(m))
    count = np.bincount(owner, minlength=m)
    for place_ in range(2):
        has = count > place_
        found[has, place_] = order[first[has] + place_]
    return found

"""What sequence parallelism does without repacking: every sample keeps one group in all layers.

Homogeneous: all groups of a step are as wide as its longest sample needs (FlexSP calls its form of this
adaptive; Wang et al. 2024, arXiv 2412.01523). Mixed: each sample gets the narrowest group that keeps up
with the others (the idea of FlexSP, and of Megatron's hybrid context parallelism).
"""

import numpy as np

from parallel.repacking.children import powers
from parallel.repacking.cost import CostModel, Work
from parallel.repacking.groups import (
    Groups,
    Membership,
    longest_of,
    place,
    sums_of,
)
from parallel.repacking.layout import Floats, Ints

BISECTIONS = 12
FEW = 2
"""With fewer samples for each rank, packings are tried with the samples themselves."""
CLOSE = 2e-3
"""Bisection ends when a target is known to this part."""


def width_for(length: int, rows_per_rank: int, widest: int) -> int:
    """The narrowest power of two on which a sample has at most `rows_per_rank` rows a rank."""
    needed = -(-length // rows_per_rank)
    return min(1 << max(needed - 1, 0).bit_length(), widest)


def homogeneous(
    work: Work,
    num_ranks: int,
    cost: CostModel,
    *,
    rows_per_rank: int,
    widest: int,
    narrowest: int = 1,
    fit: str = "time",
) -> Membership | None:
    """All groups as wide as the longest sample needs; each sample where it fits best.

    `fit`: "time", the group that stays fastest, by predicted time; "rows", the fullest group that still
    has room for an even share of the rows (best fit decreasing). None: memory does not hold the step.
    """
    longest = int(work.lengths[0]) if len(work.ids) else 1
    width = max(width_for(longest, rows_per_rank, widest), narrowest)
    while True:
        widths = np.full(num_ranks // width, width, np.int64)
        if fit == "rows":
            owner: Ints | None = _best_fit(work, widths)
        else:
            groups = Groups(widths, cost)
            owner = place(work, groups)
        if owner is not None:
            return Membership(widths, owner)
        if width >= widest:
            return None
        width *= 2


def _best_fit(work: Work, widths: Ints) -> Ints:
    room = np.full(len(widths), max(work.lengths.sum() / len(widths), 1.0))
    owner = np.zeros(len(work.ids), np.int64)
    for i, length in enumerate(work.lengths):
        fits = np.where(room >= length, room, np.inf)
        j = int(fits.argmin()) if np.isfinite(fits).any() else int(room.argmax())
        owner[i] = j
        room[j] -= length
    return owner


def mixed(
    work: Work, num_ranks: int, cost: CostModel, *, widest: int, above: float = np.inf
) -> Membership | None:
    """Groups of several widths, so that the slowest is as fast as can be.

    For a target time, each sample needs some width; long samples open groups of theirs or join open
    ones, what ranks are left are single, and short samples fill up all of them. The target is found by
    bisection (MULTIFIT, Coffman et al. 1978, with bins of several sizes). `repacked`: wide groups will
    be repacked, so only their full attention crosses nodes. None: memory does not hold the step.
    """
    if not len(work.ids):
        return Membership(np.ones(num_ranks, np.int64), np.zeros(0, np.int64))
    few = len(work.ids) <= FEW * num_ranks
    found = []
    # Few samples leave gaps on single ranks; then wider groups may be better for all of them.
    for narrowest in powers(min(widest, cost.node_size)) if few else (1,):
        packing = _Packing(work, num_ranks, cost, widest, narrowest, above, few)
        best = _bisected(packing)
        if best is not None:
            m = len(best.widths)
            sums = sums_of(work.quantities, best.owner, m)
            groups = Groups(best.widths, cost, above)
            slowest = groups.seconds(sums, longest_of(work.alone, best.owner, m)).max()
            found.append((float(slowest), narrowest, best))
    return min(found, key=lambda each: each[:2])[2] if found else None


def _bisected(packing: "_Packing") -> Membership | None:
    low = packing.least
    if not np.isfinite(low):
        return None
    high, best = 1.5 * low, None
    for _ in range(BISECTIONS):
        target = high if best is None else 0.5 * (low + high)
        found = packing.fits(target)
        if found is not None:
            best, high = found, target
        elif best is None:
            low, high = high, 2 * high
        else:
            low = target
        if best is not None and high <= low * (1 + CLOSE):
            break
    return None if best is None else packing.filled(best)


class _Packing:
    """Whether the samples of a step can end at a target time."""

    def __init__(
        self, work: Work, num_ranks: int, cost: CostModel, widest: int, narrowest: int,
        above: float, exactly: bool,
    ):  # fmt: skip
        self.work, self.num_ranks, self.cost, self.above = work, num_ranks, cost, above
        self.exactly = exactly
        """Place all samples to see whether they fit, instead of pouring them."""
        self.sizes = np.array([size for size in powers(widest) if size >= narrowest])
        self.groups = Groups(self.sizes, cost, above)
        """One of each size."""
        self.limits = self.groups.row_limits
        self.brought, self.alone = work.quantities, work.alone
        self.total = self.brought.sum(0)
        even = float(cost.linear * self.total[0] + self.total[1] + self.total[2]) / num_ranks
        # The time of long samples by themselves, by width; all others fit any group. No more samples
        # than ranks can take longer than an even share, but for what every group takes to start.
        first = slice(0, 2 * num_ranks)
        single = self.groups.seconds_of(
            np.zeros(len(self.brought[first]), np.int64), self.brought[first], self.alone[first]
        )
        long = np.flatnonzero((single > even) | (work.lengths[first] > self.limits[0]))
        every = np.broadcast_to(np.arange(len(self.sizes)), (len(long), len(self.sizes)))
        self.by_width = self.groups.seconds_of(
            every, self.brought[long][:, None, :], self.alone[long][:, None, :]
        )
        self.by_width[work.lengths[long][:, None] > self.limits] = np.inf
        self.least = max(even, float(self.by_width.min(1).max(initial=0.0)))
        """No packing ends earlier."""

    def fits(self, target: float) -> Membership | None:
        """Widths, and the groups of the samples that need several ranks; None: it cannot be met."""
        fast = self.by_width <= target
        if not fast.any(1).all():
            return None
        needs = self.sizes[fast.argmax(1)]
        long = int(np.flatnonzero(needs > self.sizes[0]).max(initial=-1)) + 1
        kind = np.zeros(self.num_ranks, np.int64)  # of each open group, its place in `sizes`
        sums, longest = np.zeros((self.num_ranks, 3)), np.zeros((self.num_ranks, 2))
        opened, left = 0, self.num_ranks
        owner = np.zeros(long, np.int64)
        for i in range(long):
            kinds = kind[:opened]
            after = sums[:opened] + self.brought[i]
            level = self.groups.seconds_of(
                kinds, after, np.maximum(longest[:opened], self.alone[i])
            )
            joins = (level <= target) & (after[:, 0] <= self.limits[kinds])
            if joins.any():  # best fit: the one that is then the fullest
                j = int(np.where(joins, level, -np.inf).argmax())
            else:
                j, width = opened, int(needs[i])
                if width > left:
                    return None
                opened, left = opened + 1, left - width
                kind[j] = int(np.searchsorted(self.sizes, width))
            owner[i] = j
            sums[j] += self.brought[i]
            longest[j] = np.maximum(longest[j], self.alone[i])
        return self._with_rest(kind[:opened], sums[:opened], longest[:opened], owner, left, target)

    def filled(self, packing: Membership) -> Membership | None:
        """The packing with all samples; None: memory does not hold them."""
        if len(packing.owner) == len(self.work.ids):
            return packing
        owner = place(self.work, Groups(packing.widths, self.cost, self.above), packing.owner)
        return None if owner is None else Membership(packing.widths, owner)

    def _with_rest(
        self, kind: Ints, sums: Floats, longest: Floats, owner: Ints, left: int, target: float
    ) -> Membership | None:
        """With `left` ranks as narrow as can be, if the short samples then fit below the target."""
        left //= int(self.sizes[0])
        widths = np.concatenate([self.sizes[kind], np.full(left, self.sizes[0])])
        order = np.argsort(-widths, kind="stable")
        groups = Groups(widths[order], self.cost, self.above)
        sums = np.concatenate([sums, np.zeros((left, 3))])[order]
        longest = np.concatenate([longest, np.zeros((left, 2))])[order]
        rest = self.total - sums.sum(0)
        with np.errstate(divide="ignore", invalid="ignore"):
            levels, rates = groups.levels(sums, longest, rest)
            room = (target - levels) / (rates * rest).sum(2)
        room = np.where(np.isnan(room), np.inf, room).min(0)
        if rest[0] > 0 and np.clip(room, 0, 1).sum() < 1:
            return None
        m = len(widths)
        rank_of = np.empty(m, np.int64)
        rank_of[order] = np.arange(m)
        found: Membership | None = Membership(widths[order], rank_of[owner])
        if self.exactly and found is not None:
            found = self.filled(found)
            if found is not None:
                ends = groups.seconds(
                    sums_of(self.brought, found.owner, m), longest_of(self.alone, found.owner, m)
                )
                found = found if ends.max() <= target else None
        return found

"""Groups of ranks and what they are predicted to take, from sums over their samples.

The level of a group is the largest of a few linear functions, its pieces, of the rows, the full and the
sparse attention of its samples. For a group that keeps its layout in all layers that is exactly the cost
model. A wide group may also be repacked, whatever is faster; for that its
pieces are a lower bound: the children's compute spread evenly, or the longest sample with the best child
to itself.

Legend: m groups, K pieces, n samples, W ways (kept, repacked); the quantities of a sample are rows, full
attention, sparse attention.
"""

from dataclasses import dataclass

import numpy as np

from parallel.repacking.cost import CostModel, Work
from parallel.repacking.layout import Floats, Ints
from parallel.repacking.spread import one_by_one, pour, summed

ONE_BY_ONE = 1 / 16
"""Samples of at least this part of a typical group's level are placed one by one."""
GIANT = 1 / 8
"""Samples of at least this part may be what a wide group waits for."""


@dataclass(frozen=True, eq=False)
class Membership:
    """Groups side by side, in descending widths, and the group of each sample."""

    widths: Ints
    owner: Ints
    """(n,) in the order of the samples given."""


class Groups:
    """The pieces of groups of these widths; those wider than `above` may be repacked."""

    def __init__(self, widths: Ints, cost: CostModel, above: float = np.inf):
        self.widths, self.cost = widths, cost
        self.wide = widths > above
        """Groups that may be repacked."""
        # A part of a layer takes what it computes and does not hide (0), or its communication (1).
        # Pieces are (part of full attention, part of the rest, whether the longest sample stands for
        # the rest).
        parts = range(2 if cost.overlap else 1)
        pieces = [(f, c, False) for f in parts for c in parts]
        ways = 1
        if self.wide.any():
            pieces += [(f, 0, True) for f in parts]
            ways = 2
        shape = (ways, len(pieces), len(widths))
        self.start, self.rates = np.zeros(shape), np.zeros((*shape, 3))
        self.longest = np.zeros((*shape, 2))
        """Seconds for each of the two numbers of the longest sample (`Work.alone`)."""
        for width in sorted(set(widths.tolist())):
            at = widths == width
            for way in range(ways):
                repack = way == 1 and width > above
                for piece, (f, c, by_longest) in enumerate(pieces):
                    start, rates, longest = _piece(cost, width, repack, f, c, by_longest)
                    self.start[way, piece, at] = start
                    self.rates[way, piece, at] = rates
                    self.longest[way, piece, at] = longest

    def levels(self, sums_m3: Floats, longest_m2: Floats, rest_3: Floats) -> tuple[Floats, Floats]:
        """(K, m) levels and (K, m, 3) rates of each group's pieces, in the way that suits it.

        That is the one that is faster once `rest_3` has been spread over all groups.
        """
        levels = self.start + (self.rates * sums_m3).sum(-1) + (self.longest * longest_m2).sum(-1)
        if len(levels) == 1:
            return levels[0], self.rates[0]
        after = (levels + (self.rates * rest_3).sum(-1) / len(self.widths)).max(1)
        repack = after[1] < after[0]
        return (
            np.where(repack, levels[1], levels[0]),
            np.where(repack[:, None], self.rates[1], self.rates[0]),
        )

    def seconds_of(self, groups: Ints, sums: Floats, longest: Floats) -> Floats:
        """Predicted seconds for `groups` (any shape, the sums with one more axis), one by one."""
        levels = self.start[:, :, groups] + (self.rates[:, :, groups] * sums).sum(-1)
        levels = levels + (self.longest[:, :, groups] * longest).sum(-1)
        return np.where(sums[..., 0] > 0, levels.max(1).min(0), 0.0)

    def seconds(self, sums_m3: Floats, longest_m2: Floats) -> Floats:
        """(m,) predicted; 0 for a group without samples."""
        return self.seconds_of(np.arange(len(self.widths)), sums_m3, longest_m2)

    @property
    def row_limits(self) -> Floats:
        """(m,) rows that each group may hold."""
        limits = {int(w): self.cost.parent_limit(int(w)) for w in set(self.widths.tolist())}
        return np.array([limits[int(w)] for w in self.widths])


def _piece(
    cost: CostModel, width: int, repack: bool, f: int, c: int, by_longest: bool
) -> tuple[float, list[float], list[float]]:
    """Start, rates by quantity, and seconds for the longest sample's numbers, of one piece."""
    full, side = cost.full_side(width), cost.sparse_side(width)
    exposed = 1 - cost.overlap
    seen = 1.0 if f else exposed  # of the full layers' communication
    start, share = seen * full.start_comm, 0.0 if f else full.share
    if not repack:
        side_seen = 1.0 if c else exposed
        start += side_seen * side.start_comm + (0 if c else side.start)
        row = seen * full.row_comm + side_seen * side.row_comm + (0 if c else side.row)
        return start, [row, share, 0 if c else side.share], [0, 0]
    if by_longest:
        return start, [0, share, 0], [1, seen * full.row_comm * width]
    row = seen * full.row_comm + cost.linear / width
    return start + side.start, [row, share, 1 / width], [0, 0]


def sums_of(quantities_n3: Floats, owner: Ints, m: int) -> Floats:
    """(m, 3) the quantities summed by group."""
    return np.stack(
        [np.bincount(owner, quantities_n3[:, k], minlength=m) for k in range(3)], axis=1
    )


def longest_of(alone_n2: Floats, owner: Ints, m: int) -> Floats:
    """(m, 2) the `alone` of each group's longest sample."""
    found = np.zeros((m, 2))
    found[owner[::-1]] = alone_n2[
        ::-1
    ]  # samples are in order: the first of a group is written last
    return found


def place(work: Work, groups: Groups, placed: Ints | None = None) -> Ints | None:
    """(n,) each sample in the group that stays fastest, longest first; the small ones are poured.

    `placed` gives the groups of the first samples. None: memory does not hold them all.
    """
    brought, alone_n2 = work.quantities, work.alone
    m, n = len(groups.widths), len(work.ids)
    owner = np.zeros(n, np.int64)
    sums, longest, begin = np.zeros((m, 3)), np.zeros((m, 2)), 0
    if placed is not None and len(placed):
        begin = len(placed)
        owner[:begin] = placed
        sums, longest = sums_of(brought[:begin], placed, m), longest_of(alone_n2[:begin], placed, m)
    weight = (brought * groups.rates[0].max(0).mean(0)).sum(1)
    end = int(np.searchsorted(-weight, -ONE_BY_ONE * weight.sum() / m))
    end = min(max(begin, end), n)
    limits = groups.row_limits
    if placed is None and groups.wide.any():
        every = np.arange(m)
        giants = int(np.searchsorted(-weight, -GIANT * weight.sum() / m))
        end = max(end, giants)
        for i in range(giants):
            grown = np.maximum(longest, alone_n2[i])
            after = groups.seconds_of(every, sums + brought[i], grown)
            after = np.where(sums[:, 0] + brought[i, 0] > limits, np.inf, after)
            j = int(after.argmin())
            if not np.isfinite(after[j]):
                return None
            owner[i], longest[j] = j, grown[j]
            sums[j] += brought[i]
        begin = giants
    levels, rates = groups.levels(sums, longest, brought[begin:].sum(0))
    # From here on no sample decides by its own length how fast a wide group is.
    owner[begin:end], levels = one_by_one(levels, rates, brought[begin:end])
    if end < n:
        owner[end:] = pour(levels, rates, brought[end:])
    if np.isfinite(limits).any():
        rows = summed(owner, brought[:, 0], m)
        if np.any(rows > limits) and not _relieve(work, owner, rows, limits):
            return None
    return owner


def _relieve(work: Work, owner: Ints, rows: Floats, limits: Floats) -> bool:
    """Move samples, shortest first, out of groups whose memory they exceed; False where it fails."""
    for group in np.flatnonzero(rows > limits):
        for i in np.flatnonzero(owner == group)[::-1]:
            if rows[group] <= limits[group]:
                break
            free = limits - rows
            free[group] = -np.inf
            goal = int(free.argmax())
            if free[goal] < work.lengths[i]:
                return False
            owner[i] = goal
            rows[goal] += work.lengths[i]
            rows[group] -= work.lengths[i]
    return bool(np.all(rows <= limits))

"""The child solver: split a parent into children, and give each sample to one of them.

Exact problem: over all sets of widths that fill the parent's ranks and all assignments, minimise

    full attention at the fullest rank's rows  +  the slowest child

(`exact.py` states it as a mixed-integer model.) Here: every set of widths is tried at once, its samples
placed longest first, each in the child that stays fastest; small samples are poured. The most promising
sets are then completed and improved by moves and swaps. Powers of two in descending order are aligned
wherever they begin, so any set of widths up to the node's size fits into nodes.

Legend: n samples, C sets of widths, m children (padded with absent ones), P ranks of the parent.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from parallel.repacking.cost import CostModel, Work
from parallel.repacking.layout import Floats, Ints
from parallel.repacking.spread import pour, summed, water_level

HEADS = 2
"""So many of the longest samples for each rank are placed one by one in every set of widths; half as
many where there are many samples."""
FINALISTS = 8
"""Sets of widths that are completed and improved where there are few samples; 2 where many."""
MOVES = 60
"""Improving moves and swaps for each finalist."""


@dataclass(frozen=True, eq=False)
class Children:
    """A solution: widths in descending order, the child of each sample, and what it costs."""

    widths: Ints
    owner: Ints
    """(n,) in the order of the samples given."""
    seconds: float
    """Of the parent: full attention and the slowest child."""


@lru_cache(maxsize=64)
def width_sets(width: int, allowed: tuple[int, ...]) -> Ints:
    """(C, m) all sets of `allowed` powers of two that add up to `width`; 0: absent."""
    found: list[list[int]] = []

    def extend(chosen: list[int], left: int, largest: int) -> None:
        if not left:
            found.append(chosen)
        for size in sorted(allowed, reverse=True):
            if size <= min(largest, left):
                extend([*chosen, size], left - size, size)

    extend([], width, width)
    most = max(map(len, found))
    return np.array([sizes + [0] * (most - len(sizes)) for sizes in found], np.int64)


class _Rates:
    """What one more row and one more second of attention add to a child, by its width.

    A child's time is the larger of two linear functions (`CostModel.visible`): compute and what of the
    communication cannot hide, or communication alone. Rows also slow the parent's full attention down,
    which waits for the fullest rank: `toll` seconds for each row of a rank.
    """

    def __init__(self, cost: CostModel, parent: int, work: Work):
        rows = float(work.lengths.sum())
        full = float(work.full.sum())
        even = rows / parent
        self.toll = cost.full_seconds(parent, even + 1, full) - cost.full_seconds(
            parent, even, full
        )
        self.cost, self.parent, self.full, self.rows = cost, parent, full, rows
        self.limit = cost.row_limit(rows, parent)
        size = max(parent, cost.node_size) + 1
        table = np.zeros((6, size))
        width = 1
        while width < size:
            side, exposed = cost.sparse_side(width), 1 - cost.overlap
            table[:, width] = (
                side.start + exposed * side.start_comm, side.row + exposed * side.row_comm, side.share,
                side.start_comm, side.row_comm, 1 / width,
            )  # fmt: skip
            width *= 2
        self.a0, self.a1, self.a2, self.b0, self.b1, self.inverse = table

    def child(self, widths: Ints, rows: Floats, sparse: Floats) -> Floats:
        """Seconds of children."""
        a = self.a0[widths] + self.a1[widths] * rows + self.a2[widths] * sparse
        return np.where(rows > 0, np.maximum(a, self.b0[widths] + self.b1[widths] * rows), 0.0)

    def parent_seconds(self, slowest: Floats | np.float64, fullest: Floats | np.float64) -> Floats:
        """Of the parent whose slowest child and fullest rank these are."""
        side = self.cost.full_side(self.parent)
        even = np.asarray(fullest) * self.parent
        return slowest + side.seconds(self.cost.visible, even, np.asarray(self.full))


def solve_children(
    work: Work, parent: int, cost: CostModel, widths: tuple[int, ...] | None = None
) -> Children | None:
    """The best children found for these samples on `parent` ranks; None: memory holds none.

    `widths` restricts the children's widths; by default all powers of two up to the node's size. The
    result depends on `work` alone, never on the clock.
    """
    rates = _Rates(cost, parent, work)
    allowed = widths or powers(cost.node_size)
    allowed = tuple(c for c in allowed if c <= parent)
    if not allowed:
        return None
    sets = width_sets(parent, allowed)
    n = len(work.ids)
    heads = min(n, max(HEADS * parent, 16))
    heads = heads if n <= 2 * heads else max(heads // 2, 16)
    owner_Cn, score_C = _try_all(work, heads, sets, rates)
    few = n == heads
    best: Children | None = None
    for choice in np.argsort(score_C, kind="stable")[: FINALISTS if few else 2]:
        if not np.isfinite(score_C[choice]):
            break
        if best is not None and score_C[choice] > 1.1 * best.seconds:
            break
        chosen = sets[choice][sets[choice] > 0]
        owner = _complete(work, heads, chosen, owner_Cn[choice], rates)
        owner, seconds = _improve(work, heads, chosen, owner, rates)
        if np.isfinite(seconds) and (best is None or seconds < best.seconds):
            best = Children(chosen, owner, seconds)
    return best


def powers(largest: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to `largest`."""
    return tuple(1 << k for k in range(largest.bit_length()))


def lower_bound(work: Work, parent: int, cost: CostModel) -> float:
    """No children of these samples can be faster.

    The compute is spread over all ranks without a remainder and without communication, or the costliest
    sample has the best child to itself.
    """
    rates = _Rates(cost, parent, work)
    if not len(work.ids):
        return 0.0
    sizes = np.array(powers(min(parent, cost.node_size)))
    longest = np.ones(len(sizes)) * work.lengths[0]
    alone = rates.child(sizes, longest, np.full(len(sizes), work.sparse[0])).min()
    even = (cost.linear * rates.rows + float(work.sparse.sum())) / parent + rates.a0[1]
    fullest = max(rates.rows / parent, work.lengths[0] / sizes[-1])
    return float(rates.parent_seconds(np.float64(max(even, alone)), np.float64(fullest)))


def _try_all(work: Work, heads: int, sets_Cm: Ints, rates: _Rates) -> tuple[Ints, Floats]:
    """Place the longest samples in every set of widths; the rest is poured, to a level only."""
    C, m = sets_Cm.shape
    per_row = rates.toll * rates.inverse[sets_Cm]
    absent = sets_Cm == 0
    a = np.where(absent, np.inf, rates.a0[sets_Cm])
    b = rates.b0[sets_Cm].copy()
    a1, a2, b1 = rates.a1[sets_Cm] + per_row, rates.a2[sets_Cm], rates.b1[sets_Cm] + per_row
    inverse = np.where(absent, np.inf, rates.inverse[sets_Cm])
    limited, hides = np.isfinite(rates.limit), rates.cost.overlap > 0
    rows = np.zeros((C, m))
    owner_Cn = np.zeros((C, heads), np.int64)
    every = np.arange(C)
    lost = np.zeros(C, bool)
    for i in range(heads):
        length, sparse = float(work.lengths[i]), float(work.sparse[i])
        after = a + (a1 * length + a2 * sparse)
        if hides:
            after = np.maximum(after, b + b1 * length)
        if limited:
            after = np.where((rows + length) * inverse > rates.limit, np.inf, after)
        j = after.argmin(1)
        if limited:
            lost |= ~np.isfinite(after[every, j])
        owner_Cn[:, i] = j
        rows[every, j] += length
        a[every, j] += a1[every, j] * length + a2[every, j] * sparse
        b[every, j] += b1[every, j] * length
    level = np.maximum(a, b) if hides else a
    if heads < len(work.ids):
        length = float(work.lengths[heads:].sum())
        sparse = float(work.sparse[heads:].sum())
        rise = a1 * length + a2 * sparse
        if hides:
            rise = np.maximum(rise, b1 * length)
        water = water_level(level, rise)
        with np.errstate(invalid="ignore"):
            risen = np.where(absent, 0, np.clip(water[:, None] - level, 0, None) / rise)
        rows = rows + risen * length
        level = np.maximum(level, water[:, None])
    level = np.where((rows > 0) & ~absent, level, 0)
    fullest = (rows * rates.inverse[sets_Cm]).max(1)
    slowest = (level - per_row * rows).max(1)
    score = rates.parent_seconds(slowest, fullest)
    return owner_Cn, np.where(lost | (fullest > rates.limit), np.inf, score)


def _complete(work: Work, heads: int, widths_m: Ints, owner_h: Ints, rates: _Rates) -> Ints:
    """The whole assignment, given that of the longest samples."""
    if heads == len(work.ids):
        return owner_h
    m = len(widths_m)
    per_row = rates.toll * rates.inverse[widths_m]
    rows = summed(owner_h, work.lengths[:heads], m)
    sparse = summed(owner_h, work.sparse[:heads], m)
    a = rates.a0[widths_m] + rates.a1[widths_m] * rows + rates.a2[widths_m] * sparse
    levels = [a + per_row * rows]
    slopes = [np.stack([rates.a1[widths_m] + per_row, rates.a2[widths_m]], 1)]
    if rates.cost.overlap:
        levels.append(rates.b0[widths_m] + (rates.b1[widths_m] + per_row) * rows)
        slopes.append(np.stack([rates.b1[widths_m] + per_row, np.zeros(m)], 1))
    small = np.stack([work.lengths[heads:].astype(np.float64), work.sparse[heads:]], axis=1)
    tail = pour(np.stack(levels), np.stack(slopes), small)
    return np.concatenate([owner_h, tail])


def _improve(
    work: Work, heads: int, widths_m: Ints, owner_n: Ints, rates: _Rates
) -> tuple[Ints, float]:
    """Move or swap one of the longest samples at a time while that makes the parent faster."""
    m, owner = len(widths_m), owner_n.copy()
    lengths, sparse = work.lengths[:heads].astype(np.float64), work.sparse[:heads]
    rows = summed(owner, work.lengths, m)
    attention = summed(owner, work.sparse, m)
    inverse = rates.inverse[widths_m]
    seconds = rates.child(widths_m, rows, attention)
    best = float(rates.parent_seconds(seconds.max(initial=0), (rows * inverse).max(initial=0)))
    for _ in range(MOVES if m > 1 else 0):
        found: tuple[float, int, int] | None = None
        for source in {int(seconds.argmax()), int((rows * inverse).argmax())}:
            mine = np.flatnonzero(owner[:heads] == source)
            if not len(mine):
                continue
            # Partners: each child as it is (a move), then each of the other samples (a swap).
            others = np.flatnonzero(owner[:heads] != source)
            target = np.concatenate([np.arange(m), owner[others]])
            back_rows = np.concatenate([np.zeros(m), lengths[others]])
            back_sparse = np.concatenate([np.zeros(m), sparse[others]])
            d_rows = lengths[mine][:, None] - back_rows
            d_sparse = sparse[mine][:, None] - back_sparse
            here = rates.child(
                np.full(1, widths_m[source]), rows[source] - d_rows, attention[source] - d_sparse
            )
            there = rates.child(
                widths_m[target], rows[target] + d_rows, attention[target] + d_sparse
            )
            slowest = np.maximum(np.maximum(here, there), _others_max(seconds, source)[target])
            full = np.maximum((rows[source] - d_rows) * inverse[source],
                              (rows[target] + d_rows) * inverse[target])  # fmt: skip
            full = np.maximum(full, _others_max(rows * inverse, source)[target])
            value = rates.parent_seconds(slowest, full)
            value = np.where((full > rates.limit) | (target == source), np.inf, value)
            at = int(value.argmin())
            row, column = divmod(at, value.shape[1])
            if value.flat[at] < (best if found is None else found[0]) * (1 - 1e-9):
                partner = -1 if column < m else int(others[column - m])
                found = float(value.flat[at]), int(mine[row]), partner
                goal = int(target[column])
        if found is None:
            break
        best, moved, partner = found
        source = int(owner[moved])
        owner[moved] = goal
        if partner >= 0:
            owner[partner] = source
        rows = summed(owner, work.lengths, m)
        attention = summed(owner, work.sparse, m)
        seconds = rates.child(widths_m, rows, attention)
    fullest = float((rows * inverse).max(initial=0))
    if fullest > rates.limit:
        return owner, float("inf")
    return owner, float(rates.parent_seconds(seconds.max(initial=0), np.float64(fullest)))


def _others_max(values_m: Floats, source: int) -> Floats:
    """(m,) the largest value among all but `source` and each one; 0 where there is none."""
    rest = values_m.copy()
    rest[source] = -np.inf
    top = int(rest.argmax())
    largest = rest[top]
    result = np.full(len(values_m), largest)
    rest[top] = -np.inf
    result[top] = rest.max()
    return np.maximum(result, 0.0)


def split(work: Work, children: Children) -> list[Ints]:
    """Ids of each child's samples, longest first."""
    order = np.argsort(children.owner, kind="stable")
    counts = np.bincount(children.owner, minlength=len(children.widths))
    return np.split(work.ids[order], np.cumsum(counts)[:-1])

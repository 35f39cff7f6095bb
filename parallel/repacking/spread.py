"""Spreading many small samples over bins so that the fullest bin is as empty as can be.

The level of a bin (seconds) is the largest of a few linear functions, its *pieces*, of what its samples
bring (rows, attention). Large samples go one by one to the bin that stays lowest (longest processing
time first, Graham 1969). The many small ones are poured like water: how far each bin rises is found by
bisection, so they are cut into runs of about that size at once, and some that were kept back even out
what is left. All of it is decided by the order of the samples alone.

Legend: n samples, m bins, q quantities that a sample brings, K pieces, C configurations side by side.
"""

import heapq
from operator import mul

import numpy as np

from parallel.repacking.layout import Floats, Ints

GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, fill [0, 1) evenly: any run of a sorted list in that order is typical."""
BISECTIONS = 30


def summed(owner: Ints, values: Floats | Ints, m: int) -> Floats:
    """(m,) values summed by owner."""
    return np.bincount(owner, values, minlength=m).astype(np.float64, copy=False)


def water_level(levels_Cm: Floats, rises_Cm: Floats) -> Floats:
    """(C,) how high the water stands where a bin with all of it would rise by `rises`: one piece a bin.

    A bin with an infinite level gets nothing. Solves `sum_j max(z - level_j, 0) / rise_j = 1`: any of
    the lowest bins taken for the wet ones give too large a z, and the right ones the right z.
    """
    order = np.argsort(levels_Cm, axis=-1, kind="stable")
    levels = np.take_along_axis(levels_Cm, order, -1)
    rises = np.take_along_axis(rises_Cm, order, -1)
    with np.errstate(invalid="ignore", divide="ignore"):
        candidates = (1 + np.cumsum(levels / rises, -1)) / np.cumsum(1 / rises, -1)
    return np.where(np.isnan(candidates), np.inf, candidates).min(-1)


def shares(levels_Km: Floats, rises_Km: Floats) -> Floats:
    """(m,) the share of the water that each bin takes, if pieces rise by `rises` where it takes all."""
    if len(levels_Km) == 1:
        level = water_level(levels_Km, rises_Km)
        return np.clip((level - levels_Km[0]) / rises_Km[0], 0, None)
    low, high = levels_Km.max(0).min(), (levels_Km + rises_Km).max(0).min()
    slopes = 1 / np.maximum(rises_Km, 1e-200)  # a piece that does not rise has all the room
    room = np.zeros(levels_Km.shape[1])
    for _ in range(BISECTIONS):
        level = 0.5 * (low + high)
        room = ((level - levels_Km) * slopes).min(0).clip(0, 1)
        low, high = (level, high) if room.sum() < 1 else (low, level)
    return room


def pour(levels_Km: Floats, rates_Kmq: Floats, small_nq: Floats) -> Ints:
    """(n,) bins for small samples, longest first."""
    n, m = len(small_nq), levels_Km.shape[1]
    owner = np.zeros(n, np.int64)
    stride = max(n // max(8 * m, 64), 1)
    back = np.zeros(n, bool)
    back[stride // 2 :: stride] = True
    levels_Km = levels_Km.copy()
    if not back.all():
        poured = np.flatnonzero(~back)
        poured = poured[np.argsort((np.arange(len(poured)) * GOLDEN) % 1.0, kind="stable")]
        brought = small_nq[poured]
        weight = np.cumsum((brought * rates_Kmq.max(0).mean(0)).sum(1))
        edges = np.cumsum(shares(levels_Km, (rates_Kmq * brought.sum(0)).sum(2)))
        middle = (weight - 0.5 * np.diff(weight, prepend=0.0)) * (edges[-1] / weight[-1])
        bins = np.minimum(np.searchsorted(edges, middle), m - 1)
        owner[poured] = bins
        for column in range(brought.shape[1]):
            levels_Km += rates_Kmq[:, :, column] * summed(bins, brought[:, column], m)
    kept = np.flatnonzero(back)
    owner[kept], _ = one_by_one(levels_Km, rates_Kmq, small_nq[kept])
    return owner


def one_by_one(levels_Km: Floats, rates_Kmq: Floats, samples_nq: Floats) -> tuple[Ints, Floats]:
    """Each sample to the bin that is lowest before it comes; also returns the new levels."""
    pieces = levels_Km.T.tolist()
    rates = rates_Kmq.transpose(1, 0, 2).tolist()
    heap = [(max(piece), bin_) for bin_, piece in enumerate(pieces)]
    heapq.heapify(heap)
    owner = []
    for sample in samples_nq.tolist():
        bin_ = heap[0][1]
        owner.append(bin_)
        raised = [
            piece + sum(map(mul, rate, sample))
            for piece, rate in zip(pieces[bin_], rates[bin_], strict=True)
        ]
        pieces[bin_] = raised
        heapq.heapreplace(heap, (max(raised), bin_))
    return np.array(owner, np.int64), np.array(pieces).T

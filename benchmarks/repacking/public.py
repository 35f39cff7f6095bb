"""Published schedulers for samples of different lengths, written afresh, timed by our cost model.

They decide; the cost model says how long the slowest rank takes. Where a publication leaves a choice
open it is made in its favour, and said here.
"""

from dataclasses import dataclass, field

import highspy
import numpy as np

from parallel.repacking.baselines import homogeneous
from parallel.repacking.children import powers
from parallel.repacking.cost import CostModel, Work
from parallel.repacking.groups import Membership
from parallel.repacking.layout import Floats, Ints, stream

# FlexSP (Wang et al., ASPLOS 2025, arXiv 2412.01523): groups of several widths from a mixed-integer
# model over buckets of lengths.

BUCKETS = 16


@dataclass(frozen=True)
class Schedule:
    """Seconds of the slowest rank, and whether the solver ran out of time."""

    seconds: float
    limited: bool = False


def flexsp(
    work: Work, ranks: int, cost: CostModel, rows_per_rank: int, widest: int, seconds: float
) -> Schedule:
    """Groups of widths 1, 2, 4, ...; how many samples of each bucket go to each group; the least
    maximum.

    The published model, solved by HiGHS instead of SCIP for at most `seconds`; it knows of the best
    homogeneous groups, which are its answer where it finds nothing better in time. One micro-batch,
    which memory allows here, so that its search over the number of micro-batches ends at one.
    """
    start = homogeneous(work, ranks, cost, rows_per_rank=rows_per_rank, widest=widest)
    assert start is not None
    best, limited = membership_seconds(work, start, cost), True
    bucket = _buckets(work.lengths, BUCKETS)
    found = _flexsp_model(work, bucket, ranks, cost, widest, seconds, best)
    if found is not None:
        membership, limited = found
        best = min(best, membership_seconds(work, membership, cost))
    return Schedule(best, limited)


def _buckets(lengths: Ints, most: int) -> Ints:
    """(n,) the bucket of each sample, longest first: the fewest tokens overestimated.

    A bucket counts all of its samples as long as its longest. Dynamic programming over distinct lengths;
    of very many, only a few hundred are candidates for where a bucket begins.
    """
    values, counts = np.unique(lengths, return_counts=True)
    values, counts = values[::-1], counts[::-1]  # longest first
    m = len(values)
    starts = np.unique(
        np.concatenate([np.arange(min(m, 64)), np.linspace(0, m - 1, min(m, 300)).astype(int)])
    )
    number = np.concatenate([[0], np.cumsum(counts)])
    tokens = np.concatenate([[0], np.cumsum(counts * values)])
    ends = np.concatenate([starts[1:], [m]])
    k = len(starts)
    # waste[i, j]: of one bucket from candidate i to the end of candidate j.
    waste = (number[ends][None, :] - number[starts][:, None]) * values[starts][:, None]
    waste = (waste - (tokens[ends][None, :] - tokens[starts][:, None])).astype(np.float64)
    waste[np.tril_indices(k, -1)] = np.inf
    best = waste[0].copy()
    choice = []
    for _ in range(min(most, k) - 1):
        total = best[:-1, None] + waste[1:, :]  # the last bucket begins at candidate i + 1
        pick = total.argmin(0)
        better = total[pick, np.arange(k)]
        choice.append(np.where(better < best, pick, -1))
        best = np.minimum(best, better)
    cuts, j = [], k - 1
    for pick in reversed(choice):
        if pick[j] >= 0:
            cuts.append(int(starts[pick[j] + 1]))
            j = int(pick[j])
    shortest_first = (
        np.sort(values[np.array(sorted(cuts), np.int64)]) if cuts else np.zeros(0, np.int64)
    )
    # A sample is in the first bucket whose longest is at least its length.
    tops = np.concatenate([[values[0]], shortest_first[::-1]])
    return (len(tops) - 1 - np.searchsorted(tops[::-1], lengths)).astype(np.int64)


def _flexsp_model(
    work: Work, bucket: Ints, ranks: int, cost: CostModel, widest: int, seconds: float, first: float
) -> tuple[Membership, bool] | None:
    Q = int(bucket.max()) + 1
    count = np.bincount(bucket, minlength=Q)
    top = np.array([np.flatnonzero(bucket == b)[0] for b in range(Q)])  # the longest of each
    groups = [w for w in powers(widest)[::-1] for _ in range(ranks // w)]
    G = len(groups)
    # Columns: z, then whether each group exists, then the samples of bucket b in group g.
    solver = highspy.Highs()
    for option, value in (
        ("output_flag", False), ("threads", 1), ("time_limit", seconds), ("mip_rel_gap", 0.005),
    ):  # fmt: skip
        solver.setOptionValue(option, value)
    inf = highspy.kHighsInf
    columns = 1 + G + G * Q
    upper = np.concatenate([[first], np.ones(G), np.tile(count, G).astype(np.float64)])
    solver.addVars(columns, np.zeros(columns), upper)
    solver.changeColCost(0, 1.0)
    kind = np.full(columns - 1, int(highspy.HighsVarType.kInteger.value), np.uint8)
    solver.changeColsIntegrality(columns - 1, np.arange(1, columns, dtype=np.int32), kind)

    def row(low: float, high: float, index: Ints | list[int], value: Floats | list[float]) -> None:
        solver.addRow(low, high, len(index), np.array(index, np.int32), np.array(value, np.float64))

    samples = 1 + G + np.arange(G * Q).reshape(G, Q)
    for g, w in enumerate(groups):
        full, side = cost.full_side(w), cost.sparse_side(w)
        row_seconds = full.row_comm + side.row + side.row_comm
        each = (
            row_seconds * work.lengths[top]
            + full.share * work.full[top]
            + side.share * work.sparse[top]
        )
        start = full.start_comm + side.start_comm + side.start
        row(0, inf, [0, 1 + g, *samples[g]], [1, -start, *-each])
        row(0, inf, [1 + g, *samples[g]], [min(cost.parent_limit(w), 1e12), *-work.lengths[top]])
        for b in range(Q):
            row(0, inf, [1 + g, int(samples[g, b])], [count[b], -1])
        if g and groups[g - 1] == w:  # groups of one width exist in order
            row(0, inf, [g, 1 + g], [1, -1])
    row(-inf, ranks, list(range(1, 1 + G)), [float(w) for w in groups])
    for b in range(Q):
        row(count[b], count[b], samples[:, b], np.ones(G))
    solver.run()
    info = solver.getInfo()
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None
    solution = np.array(solver.getSolution().col_value)
    taken = np.rint(solution[1 + G :]).astype(np.int64).reshape(G, Q)
    owner = np.empty(len(work.ids), np.int64)
    for b in range(Q):
        owner[bucket == b] = np.repeat(np.arange(G), taken[:, b])
    limited = solver.getModelStatus() != highspy.HighsModelStatus.kOptimal
    return Membership(np.array(groups), owner), limited


def membership_seconds(work: Work, membership: Membership, cost: CostModel) -> float:
    """The slowest group, all layers in its own layout."""
    slowest = 0.0
    for group, width in enumerate(membership.widths.tolist()):
        mine = membership.owner == group
        if mine.any():
            slowest = max(slowest, cost.wide_seconds(width, work.take(mine)))
    return slowest


# Megatron-LM's BalancedCPScheduler (core/pipeline_parallel/hybrid_cp_schedule.py, as of 2025): context-
# parallel groups of powers of two, filled by work L^2 / width; what does not fit begins a new
# micro-batch.

BALANCED = 0.05
"""Ranks whose times differ by less than this part count as balanced."""


@dataclass
class _CpGroup:
    width: int
    samples: list[int] = field(default_factory=list)
    load: float = 0.0


def megatron(work: Work, ranks: int, cost: CostModel, rows_per_rank: int) -> Schedule:
    """Its groups, run with our all-to-alls; the samples of a group run as one pack, not one by one."""
    needed = [_needed(int(length), rows_per_rank, ranks) for length in work.lengths]
    left, total = list(range(len(work.ids))), 0.0
    while left:
        groups, left = _micro_batch(work, needed, left, ranks)
        slowest = 0.0
        for group in groups:
            if group.samples:
                some = work.take(np.array(group.samples, np.int64))
                slowest = max(slowest, cost.wide_seconds(group.width, some))
        total += slowest
    return Schedule(total)


def _needed(length: int, rows_per_rank: int, ranks: int) -> int:
    return min(1 << max(-(-length // rows_per_rank) - 1, 0).bit_length(), ranks)


def _micro_batch(
    work: Work, needed: list[int], left: list[int], ranks: int
) -> tuple[list[_CpGroup], list[int]]:
    load = {i: float(work.lengths[i]) ** 2 / needed[i] for i in left}
    buckets = _equal_buckets(left, load, len({needed[i] for i in left}))
    groups: list[_CpGroup] = []
    free, previous, narrower = ranks, 0, False
    while True:
        choice = None
        for bucket in buckets:
            if not bucket:
                continue
            same = [g for g in groups if g.width == needed[bucket[0]]]
            if same or free >= needed[bucket[0]]:
                choice = (bucket, same)
                break
        if choice is None:
            break
        bucket, same = choice
        sample = bucket.pop(0)
        width = needed[sample]
        if free >= width:  # an empty group is always the least loaded
            groups.append(_CpGroup(width))
            free -= width
            target = groups[-1]
        else:
            target = min(same, key=lambda g: g.load)
        target.samples.append(sample)
        target.load += load[sample]
        buckets = [b for b in buckets if b]
        narrower = narrower or width < (previous or width)
        previous = previous or width
        loads = [g.load for g in groups] + [0.0] * (free > 0)
        if narrower and buckets and max(loads) - min(loads) <= BALANCED * max(loads):
            break
    rest = [sample for bucket in buckets for sample in bucket]
    rest += _trim(groups, load, free)
    _widen(groups, ranks)
    return groups, sorted(rest)


def _equal_buckets(samples: list[int], load: dict[int, float], k: int) -> list[list[int]]:
    """Runs of about equal work, longest samples first."""
    target = sum(load[i] for i in samples) / k
    buckets: list[list[int]] = []
    current: list[int] = []
    filled = 0.0
    for at, sample in enumerate(samples):
        if current and (
            filled + load[sample] > 1.1 * target or len(samples) - at <= k - 2 * len(buckets)
        ):
            buckets.append(current)
            current, filled = [], 0.0
        current.append(sample)
        filled += load[sample]
    return [*buckets, current] if current else buckets


def _trim(groups: list[_CpGroup], load: dict[int, float], free: int) -> list[int]:
    """Give back the last sample of the most loaded group while that evens the groups out."""
    returned: list[int] = []
    while groups and not free:
        loads = [g.load for g in groups]
        slack = max(loads) - min(loads)
        most = groups[loads.index(max(loads))]
        if slack <= BALANCED * max(loads) or len(most.samples) <= 1:
            break
        last = most.samples[-1]
        after = [g.load - (load[last] if g is most else 0.0) for g in groups]
        if max(after) - min(after) >= slack:
            break
        most.samples.pop()
        most.load -= load[last]
        returned.append(last)
    return returned


def _widen(groups: list[_CpGroup], ranks: int) -> None:
    """Double the first of the narrowest groups until no rank is empty."""
    while groups:
        free = ranks - sum(g.width for g in groups)
        narrowest = min(groups, key=lambda g: g.width)
        if free < narrowest.width or narrowest.width * 2 > ranks:
            return
        narrowest.width *= 2


# MagiAttention's dispatch solver (meta/solver/dispatch_solver.py, min-heap): chunks of equal length over
# the ranks of one context-parallel group, as many for each rank, so that attention areas are even.

CHUNKS = 16
"""Of each rank."""


def magi(work: Work, ranks: int, cost: CostModel, widest: int) -> Schedule:
    """Samples to groups by predicted time, then chunks to ranks; the best of all group widths.

    A rank computes all heads of its rows. It receives keys and values of the earlier rows of its samples
    that it does not hold, once for each layer and pass; of a window only those that it sees.
    """
    best = float("inf")
    for width in powers(ranks):
        if width < min(cost.node_size, ranks):
            continue
        start = homogeneous(work, ranks, cost, rows_per_rank=1 << 62, widest=width, narrowest=width)
        if start is None:
            continue
        slowest = 0.0
        for group in range(len(start.widths)):
            some = work.take(start.owner == group)
            if len(some.ids):
                slowest = max(slowest, _magi_group(some, width, cost))
        best = min(best, slowest)
    return Schedule(best)


def _magi_group(work: Work, width: int, cost: CostModel) -> float:
    shape = cost.shape
    chunks = stream([np.arange(len(work.ids))], [work.lengths], [CHUNKS * width])
    table = chunks.segments()
    begin, end = table.begin.astype(np.float64), table.end.astype(np.float64)
    area = (end * (end + 1) - begin * (begin + 1)) / 2
    of_chunk = np.bincount(table.rank, area, minlength=chunks.width)
    owner = np.empty(chunks.width, np.int64)
    loads, held = np.zeros(width), np.zeros(width, np.int64)
    for chunk in np.argsort(-of_chunk, kind="stable"):
        j = int(np.where(held < CHUNKS, loads, np.inf).argmin())
        owner[chunk] = j
        loads[j] += of_chunk[chunk]
        held[j] += 1
    rank = owner[table.rank]
    sample_area = np.bincount(table.sample, area)
    full = np.bincount(
        rank, work.full[table.sample] * area / sample_area[table.sample], minlength=width
    )
    share = (table.end - table.begin) / work.lengths[table.sample]
    sparse = np.bincount(rank, work.sparse[table.sample] * share, minlength=width)
    rows = np.bincount(rank, table.end - table.begin, minlength=width)
    # Of each rank and sample: the last row that is seen, less the rows at hand.
    last = np.zeros((width, len(work.ids)))
    np.maximum.at(last, (rank, table.sample), end)
    own = np.zeros_like(last)
    np.add.at(own, (rank, table.sample), end - begin)
    arriving = (last - own).sum(1)
    seen = arriving
    if shape.sparse == "window":
        seen = np.minimum(arriving, np.bincount(rank, minlength=width) * (shape.window - 1.0))
    start, rate = cost.link(width)
    row_bytes = 2 * shape.head_dim * shape.dtype_bytes
    nbytes = shape.full_layers * shape.kv_heads * arriving
    nbytes = row_bytes * (nbytes + shape.sparse_layers * shape.sparse_heads[1] * seen)
    comm = cost.calls * (shape.layers * start + nbytes / rate) * (width > 1)
    start_compute = shape.layers * cost.calibration.layer_seconds
    compute = full + sparse + cost.linear * rows + start_compute
    return float(cost.visible(compute, comm).max())

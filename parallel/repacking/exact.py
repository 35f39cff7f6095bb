"""The child problem, and small parent problems, as mixed-integer models: what the solvers are held to.

Needs HiGHS (`pip install springtide[exact]`); nothing that trains does. Every child that could exist
is a machine: of each width as many as fit. With x[i, j] = 1 where sample i lives in machine j and y[j]
= 1 where machine j exists,

    minimise z  subject to, for each parent k of width P,
    z      >= visible(full attention of k, exchange of its fullest rank) + tau_k
    tau_k  >= visible(compute, communication) of each machine j of k
    most_k >= rows(j) / width(j), which memory limits
    P      >= sum of width(j) y[j]
    each sample in one machine; x[i, j] <= y[j]

`visible` is the larger of two linear functions, so all of it is linear. Machines of one width are alike:
they exist in order, and the i-th sample may use only the first i of them. Seconds are scaled to about 1.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import highspy
import numpy as np

from parallel.repacking.children import powers
from parallel.repacking.cost import CostModel, Work

Terms = list[tuple[int, float]]
"""A linear expression: columns and their coefficients."""


@dataclass(frozen=True)
class Optimum:
    """What the solver proved."""

    seconds: float
    """Of the best solution it found."""
    bound: float
    """No solution is faster."""


@dataclass
class _Model:
    """Columns and rows of a model, collected for HiGHS."""

    binaries: list[bool] = field(default_factory=list)
    rows: list[Terms] = field(default_factory=list)
    lowers: list[float] = field(default_factory=list)

    def column(self, binary: bool = False) -> int:
        self.binaries.append(binary)
        return len(self.binaries) - 1

    def at_least(self, low: float, terms: Iterable[tuple[int, float]]) -> None:
        """The sum of `terms` is at least `low`."""
        self.rows.append(list(terms))
        self.lowers.append(low)

    def minimise(self, column: int, seconds: float, gap: float) -> tuple[float, float]:
        solver = highspy.Highs()
        for option, value in (
            ("output_flag", False), ("mip_rel_gap", gap), ("time_limit", seconds), ("threads", 1),
        ):  # fmt: skip
            solver.setOptionValue(option, value)
        for at, binary in enumerate(self.binaries):
            solver.addVar(0.0, 1.0 if binary else highspy.kHighsInf)
            if binary:
                solver.changeColIntegrality(at, highspy.HighsVarType.kInteger)
        solver.changeColCost(column, 1.0)
        for low, terms in zip(self.lowers, self.rows, strict=True):
            columns = np.array([c for c, _ in terms], np.int32)
            values = np.array([v for _, v in terms], np.float64)
            solver.addRow(low, highspy.kHighsInf, len(terms), columns, values)
        solver.run()
        info = solver.getInfo()
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            status = solver.modelStatusToString(solver.getModelStatus())
            raise RuntimeError(f"HiGHS found no assignment: {status}")
        return info.objective_function_value, info.mip_dual_bound


def solve_exactly(
    work: Work, parents: list[int], cost: CostModel, *, may_stay_wide: bool = False,
    seconds: float = 60.0, gap: float = 1e-4,
) -> Optimum:  # fmt: skip
    """The best assignment of the samples to parents of these widths, and to children in them.

    `may_stay_wide`: a parent may also keep its own layout, as a plan's fallback does. Stops at a
    relative `gap` or after some `seconds`; what is proven by then is in the result. Raises
    `RuntimeError` where no assignment is found, or fits into memory.
    """
    if not len(work.ids):
        return Optimum(0.0, 0.0)
    unit = float((cost.linear * work.lengths + work.sparse + work.full).sum()) / sum(parents)
    model = _Model()
    z = model.column()
    homes: list[Terms] = [[] for _ in work.ids]
    before: int | None = None
    for at, width in enumerate(parents):
        started = model.column(binary=True)
        if before is not None and parents[at - 1] == width:
            model.at_least(0, [(before, 1), (started, -1)])
        before = started
        limit = cost.row_limit(float(work.lengths.sum()), width) if len(parents) == 1 else np.inf
        _add_parent(model, z, started, width, work, cost, unit, may_stay_wide, limit, homes)
    for home in homes:
        model.at_least(1, home)
        model.at_least(-1, [(c, -v) for c, v in home])
    found, bound = model.minimise(z, seconds, gap)
    return Optimum(found * unit, bound * unit)


def _add_parent(
    model: _Model, z: int, started: int, width: int, work: Work, cost: CostModel, unit: float,
    may_stay_wide: bool, limit: float, homes: list[Terms],
) -> None:  # fmt: skip
    n, exposed = len(work.ids), 1 - cost.overlap
    share = width / max(float(work.lengths.sum()), 1.0)  # `most` counts in even shares of all rows
    tau, most = model.column(), model.column()
    mine: list[list[int]] = [[] for _ in range(n)]
    used: Terms = []
    sizes = powers(min(width, cost.node_size))
    for c in (*sizes, width) if may_stay_wide and width > cost.node_size else sizes:
        side, previous = cost.sparse_side(c), None
        for number in range(min(width // c, n)):
            y = model.column(binary=True)
            used.append((y, float(-c)))
            if previous is not None:
                model.at_least(0, [(previous, 1), (y, -1)])
            previous = y
            x = {i: model.column(binary=True) for i in range(number, n)}
            for i, column in x.items():
                model.at_least(0, [(y, 1), (column, -1)])
                mine[i].append(column)
            rows = [(v, -float(work.lengths[i])) for i, v in x.items()]
            compute = [
                (
                    v,
                    (side.row + exposed * side.row_comm) * r / unit
                    - side.share * work.sparse[i] / unit,
                )
                for (i, v), (_, r) in zip(x.items(), rows, strict=True)
            ]
            start = (side.start + exposed * side.start_comm) / unit
            model.at_least(0, [(tau, 1), (y, -start), *compute])
            if cost.overlap:
                comm = [(v, side.row_comm * r / unit) for v, r in rows]
                model.at_least(0, [(tau, 1), (y, -side.start_comm / unit), *comm])
            model.at_least(0, [(most, 1), *((v, r * share / c) for v, r in rows)])
            if np.isfinite(limit):
                model.at_least(-limit * share, [(v, r * share / c) for v, r in rows])
    model.at_least(-width, used)
    everything = [(v, i) for i in range(n) for v in mine[i]]
    # These two follow from the others, and make the relaxation tight.
    model.at_least(0, [(most, 1), *((v, -work.lengths[i] * share / width) for v, i in everything)])
    even = [
        (v, -(cost.linear * work.lengths[i] + work.sparse[i]) / width / unit) for v, i in everything
    ]
    model.at_least(0, [(tau, 1), *even])
    side = cost.full_side(width)
    row_comm, start_comm = side.row_comm * width / share / unit, side.start_comm / unit
    full = [(v, -side.share * work.full[i] / unit) for v, i in everything]
    model.at_least(
        0, [(z, 1), (tau, -1), (most, -exposed * row_comm), (started, -exposed * start_comm), *full]
    )
    if cost.overlap:
        model.at_least(0, [(z, 1), (tau, -1), (most, -row_comm), (started, -start_comm)])
    for i in range(n):
        model.at_least(0, [(started, 1), *((v, -1) for v in mine[i])])
        homes[i] += [(v, 1.0) for v in mine[i]]

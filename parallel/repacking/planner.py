"""From the lengths of a step's samples to its plan.

    baseline membership  ->  repack wide parents       -> never worse than the baseline, parent by parent
    parent solver: other memberships, other widths     -> never worse than that, for the whole step

The plan depends on lengths, ids and configuration alone: the same on every rank, whatever the order of
the input. Only a time limit makes it depend on the clock; then one rank plans for all (`agree.py`).
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from parallel.repacking.baselines import homogeneous, mixed
from parallel.repacking.children import Children, powers, solve_children, split
from parallel.repacking.config import RepackingConfig
from parallel.repacking.cost import CostModel, Work
from parallel.repacking.groups import (
    Groups,
    Membership,
    longest_of,
    sums_of,
)
from parallel.repacking.heads import HeadMap
from parallel.repacking.layout import Floats, Ints
from parallel.repacking.parents import Limit, rebalance, refine
from parallel.repacking.plan import MEMORY, NARROW, NO_GAIN, Child, Parent, Plan


@dataclass(frozen=True)
class Planner:
    """Plans steps for `num_ranks` ranks; picklable, so that data workers can hold one."""

    cost: CostModel
    num_ranks: int
    max_parent: int = 32
    config: RepackingConfig = field(default_factory=RepackingConfig)

    def __post_init__(self) -> None:
        widest = self.max_parent
        if widest < 1 or widest & (widest - 1) or self.num_ranks % widest:
            raise ValueError(
                f"parallel.sequence.max_parent={widest} must be a power of two that divides the "
                f"{self.num_ranks} ranks: set parallel.sequence.max_parent to "
                f"{self.num_ranks & -self.num_ranks} or a smaller one"
            )
        if not self.child_widths:
            raise ValueError(
                f"no child is {self.config.min_child} to {self.config.max_child} ranks wide on nodes of "
                f"{self.cost.node_size}: set parallel.repacking.min_child to at most "
                "parallel.node_size"
            )

    @cached_property
    def child_widths(self) -> tuple[int, ...]:
        """Widths that children of wide parents may have."""
        most = min(self.config.max_child or self.cost.node_size, self.cost.node_size)
        return tuple(c for c in powers(most) if c >= self.config.min_child)

    @property
    def above(self) -> float:
        """Parents wider than this may be repacked."""
        if not self.config.enabled:
            return float("inf")
        return 1 if self.config.inside_nodes else self.cost.node_size

    def plan(self, lengths: ArrayLike, ids: ArrayLike | None = None) -> Plan:
        """The plan for samples of these lengths; `ids` name them, by default by their places.

        Raises `ValueError` for lengths below 1, ids that are not unique, and steps that no memory holds.
        """
        sizes, names = _checked(lengths, ids)
        work = self.cost.work(names, sizes)
        limit = Limit(self.config.search_parents, self.config.search_seconds)
        start = self.baseline(work, limit)
        seconds, parents = float("inf"), list[Parent]()
        offers = self._memberships(work, start, limit)
        for _, membership in sorted(offers, key=lambda found: found[0]):
            found, solved = self._solve(work, membership, seconds)
            if found < seconds:
                seconds, parents = found, solved
        order = np.argsort(names, kind="stable")
        total = seconds + self.cost.fixed
        return Plan(
            self.num_ranks, self.cost.node_size, names[order], sizes[order], tuple(parents), total
        )

    def baseline(self, work: Work, limit: Limit | None = None) -> Membership:
        """The groups to begin with."""
        found: Membership | None
        if self.config.baseline == "homogeneous":
            found = homogeneous(
                work, self.num_ranks, self.cost, rows_per_rank=self.config.rows_per_rank,
                widest=self.max_parent, fit=self.config.fit,
            )  # fmt: skip
        else:
            found = mixed(work, self.num_ranks, self.cost, widest=self.max_parent)
        if found is None:
            raise ValueError(
                f"{int(work.lengths.sum()):,} tokens, the longest sample {int(work.lengths[0]):,}, do "
                f"not fit into the memory of {self.num_ranks} ranks in groups of up to "
                f"{self.max_parent}: set trainer.micro_batch_size lower, or "
                "parallel.sequence.max_parent" + self._limit_words + " higher"
            )
        limit = limit or Limit(self.config.search_parents)
        return refine(work, found, self.cost, self._wide_seconds, limit.fresh())

    @property
    def _limit_words(self) -> str:
        limit = self.config.max_rows
        return "" if limit is None else f" or parallel.repacking.max_rows={limit}"

    def _wide_seconds(self, work: Work, width: int) -> float:
        return self.cost.wide_seconds(width, work)

    def step_bound(self, work: Work) -> float:
        """No plan of the step is faster: its compute without communication, evenly over all ranks."""
        total = self.cost.linear * float(work.lengths.sum())
        return (total + float(work.full.sum()) + float(work.sparse.sum())) / self.num_ranks

    def _memberships(
        self, work: Work, start: Membership, limit: Limit
    ) -> list[tuple[float, Membership]]:
        """The baseline and what the parent solver has to offer, each with a bound on its seconds."""
        cost = self.cost
        found: list[Membership | None] = []
        if self.config.enabled and self.config.parent_solver:
            found.append(rebalance(work, start.widths, cost, self.above))
            if self.config.several_widths:
                several = mixed(
                    work, self.num_ranks, cost, widest=self.max_parent, above=self.above
                )
                found.append(several)
                # Wide groups may turn out faster if they are filled to stay as they are.
                if several is None or several.widths[0] > self.above:
                    found.append(mixed(work, self.num_ranks, cost, widest=self.max_parent))
        bounded = [(self._bound(work, start), start)]
        offered = [(self._bound(work, m), m) for m in found if m is not None]
        for bound, membership in sorted(offered, key=lambda each: each[0]):
            better = refine(work, membership, cost, self._true_seconds, limit.fresh(), self.above)
            if better is not membership:
                bound = self._bound(work, better)
            bounded.append((bound, better))
        return bounded

    def _bound(self, work: Work, membership: Membership) -> float:
        groups = Groups(membership.widths, self.cost, self.above)
        return float(self._levels(work, membership, groups).max(initial=0.0))

    def _levels(self, work: Work, membership: Membership, groups: Groups) -> Floats:
        m = len(membership.widths)
        sums = sums_of(work.quantities, membership.owner, m)
        return groups.seconds(sums, longest_of(work.alone, membership.owner, m))

    def _true_seconds(self, work: Work, width: int) -> float:
        wide = self.cost.wide_seconds(width, work)
        if width <= self.above or not len(work.ids):
            return wide
        children = solve_children(work, width, self.cost, self.child_widths)
        return wide if children is None else min(wide, children.seconds)

    def _solve(
        self, work: Work, membership: Membership, give_up: float
    ) -> tuple[float, list[Parent]]:
        """Seconds of the slowest parent and all of them, or infinity once one reaches `give_up`."""
        if self._bound(work, membership) >= give_up:
            return float("inf"), []
        wide = self._levels(work, membership, Groups(membership.widths, self.cost))
        order = np.argsort(membership.owner, kind="stable")
        counts = np.bincount(membership.owner, minlength=len(membership.widths))
        members = np.split(order, np.cumsum(counts)[:-1])
        first, slowest, parents = 0, 0.0, []
        for width, mine, kept in zip(
            membership.widths.tolist(), members, wide.tolist(), strict=True
        ):
            seconds, parent = self._parent(work, mine, width, first, kept)
            slowest = max(slowest, seconds)
            if slowest >= give_up:
                return float("inf"), []
            parents.append(parent)
            first += width
        return slowest, parents

    def _parent(
        self, work: Work, mine: Ints, width: int, first: int, wide: float
    ) -> tuple[float, Parent]:
        """One parent with these samples, repacked if that is faster than its `wide` seconds."""
        reason = NARROW if width <= self.cost.node_size else NO_GAIN
        if width > self.above and len(mine):
            some = work.take(mine)
            children = solve_children(some, width, self.cost, self.child_widths)
            if children is None:
                reason = MEMORY if width > self.cost.node_size else NARROW
            elif children.seconds < wide:
                return children.seconds, Parent(first, width, _children(first, some, children))
        return wide, Parent(first, width, (Child(first, width, work.ids[mine]),), reason)

    def seconds(self, plan: Plan) -> float:
        """What the cost model predicts for a plan, worked out from the plan alone."""
        slowest = 0.0
        for parent in plan.parents:
            slowest = max(slowest, parent_seconds(self.cost, plan, parent))
        return slowest + self.cost.fixed


def parent_seconds(cost: CostModel, plan: Plan, parent: Parent) -> float:
    """Full attention at the fullest rank's rows, and the slowest child."""
    work = cost.work(parent.samples, plan.lengths_of(parent.samples))
    fullest, slowest = 0.0, 0.0
    for child in parent.children:
        mine = cost.work(child.samples, plan.lengths_of(child.samples))
        rows = float(mine.lengths.sum())
        fullest = max(fullest, rows / child.width)
        slowest = max(slowest, cost.child_seconds(child.width, rows, float(mine.sparse.sum())))
    return cost.full_seconds(parent.width, fullest, float(work.full.sum())) + slowest


def rank_seconds(cost: CostModel, plan: Plan) -> Floats:
    """(ranks,) what each rank does by itself, with the heads that it has: without waiting for others."""
    found, (q, kv) = [], cost.shape.heads
    sparse_q, sparse_kv = cost.shape.sparse_heads
    for parent in plan.parents:
        layout = plan.layout(parent)
        full = float(cost.full(plan.lengths_of(parent.samples)).sum())
        of_heads = _relative(HeadMap(q, kv, parent.width))
        for child in parent.children:
            lengths = plan.lengths_of(child.samples)
            rows, sparse = float(lengths.sum()), float(cost.sparse(lengths).sum())
            for rank, own in enumerate(_relative(HeadMap(sparse_q, sparse_kv, child.width))):
                at = child.first_rank - parent.first_rank + rank
                held = float(layout.rows_per_rank[at])
                wide = cost.full_seconds(parent.width, held, full * of_heads[at])
                found.append(wide + cost.child_seconds(child.width, rows, sparse * own))
    return np.array(found)


def _relative(heads: HeadMap) -> Floats:
    """(P,) query heads of each rank, over those of the rank that has most."""
    return heads.q_per_rank / heads.q_per_rank.max()


def _children(first: int, work: Work, solution: Children) -> tuple[Child, ...]:
    ranks = first + np.cumsum(solution.widths) - solution.widths
    return tuple(
        Child(rank, width, ids)
        for rank, width, ids in zip(
            ranks.tolist(), solution.widths.tolist(), split(work, solution), strict=True
        )
    )


def _checked(lengths: ArrayLike, ids: ArrayLike | None) -> tuple[Ints, Ints]:
    sizes = np.asarray(lengths, np.int64).reshape(-1)
    names = np.arange(len(sizes)) if ids is None else np.asarray(ids, np.int64).reshape(-1)
    if len(names) != len(sizes):
        raise ValueError(f"{len(names)} ids for {len(sizes)} lengths")
    if len(sizes) and sizes.min() < 1:
        raise ValueError(f"a sample has length {sizes.min()}: samples need at least one token")
    if len(np.unique(names)) != len(names):
        raise ValueError("two samples of a step have the same id")
    return sizes, names

"""Steps replayed by the cost model, for each way to arrange their samples.

All ways see the same lengths and the same cost model, and start from the same homogeneous groups:

    baseline      every sample keeps its group in all layers
    repack        wide groups are parents, their samples are repacked into children for sparse layers
    parent        and the parent solver chooses which samples share a parent
    inside        parent, and parents inside one node are repacked, too
    sp8           repack, but all children as wide as a node
    pass          repack, with a redistribution pass before and after each full layer, not inside its
                  all-to-alls
    halo          baseline, but sliding-window layers exchange keys and values at the edges of each
    rank's
                  rows; only where the sparse attention is a window
    oracle        a bound for groups of this width: perfect balance, and no communication in sparse
    layers

two that fill the homogeneous groups otherwise, by best fit of rows instead of predicted time:

    rows          without repacking
    rows_repack   with it

and three that leave the homogeneous groups:

    mixed         groups of several widths, no repacking
    widths        the parent solver chooses widths, too
    bound         no communication at all
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.repacking.workloads import planner_of
from parallel.repacking.cost import CostModel
from parallel.repacking.layout import Floats, Ints
from parallel.repacking.plan import Parent, Plan

HOMOGENEOUS = ("baseline", "repack", "parent", "inside", "sp8", "pass", "halo", "oracle")
BY_ROWS = ("rows", "rows_repack")
FREE = ("mixed", "widths", "bound")

CONFIGS: dict[str, dict[str, Any]] = {
    "baseline": {"enabled": False},
    "repack": {"parent_solver": False},
    "parent": {"several_widths": False},
    "sp8": {"parent_solver": False, "min_child": 8},
    "rows": {"enabled": False, "fit": "rows"},
    "rows_repack": {"parent_solver": False, "fit": "rows"},
    "mixed": {"enabled": False, "baseline": "mixed"},
    "inside": {"several_widths": False, "inside_nodes": True},
    "widths": {"several_widths": True},
}  # fmt: skip
"""Settings of the planner; the other ways are derived from these plans."""


@dataclass(frozen=True)
class Times:
    """Of one parent, in seconds: full attention, and each of its children."""

    full: float
    children: list[float]

    @property
    def total(self) -> float:
        """The parent waits for its slowest child."""
        return self.full + max(self.children, default=0.0)


def parent_times(cost: CostModel, plan: Plan, parent: Parent) -> Times:
    """What the model predicts for one parent of a plan."""
    rows_of, full = [], 0.0
    children = []
    for child in parent.children:
        work = cost.work(child.samples, plan.lengths_of(child.samples))
        rows = float(work.lengths.sum())
        rows_of.append(rows / child.width)
        full += float(work.full.sum())
        children.append(cost.child_seconds(child.width, rows, float(work.sparse.sum())))
    return Times(cost.full_seconds(parent.width, max(rows_of, default=0.0), full), children)


def step_seconds(cost: CostModel, plan: Plan, barrier: str = "step") -> float:
    """A step of this plan. `barrier`: parents wait for each other at its end, or at every layer."""
    times = [parent_times(cost, plan, parent) for parent in plan.parents]
    if barrier == "step":
        return max(t.total for t in times) + cost.fixed
    slowest = max((max(t.children, default=0.0) for t in times), default=0.0)
    return max(t.full for t in times) + slowest + cost.fixed


def with_passes(cost: CostModel, plan: Plan) -> float:
    """The same plan, if hidden states moved to the wide layout and back around each full layer.

    A parent that is then slower than without repacking stays without.
    """
    slowest = 0.0
    for parent in plan.parents:
        times, wide = parent_times(cost, plan, parent), _wide(cost, plan, parent)
        if parent.fallback:
            slowest = max(slowest, times.total)
            continue
        layout = plan.layout(parent)
        start, rate = cost.link(parent.width)
        most = float(layout.rows_per_rank.max())
        row = cost.shape.hidden * cost.shape.dtype_bytes * (parent.width - 1) / parent.width / rate
        calls = 2 * cost.calls * cost.shape.full_layers
        full = cost.full_seconds(
            parent.width, layout.num_rows / parent.width, float(_full(cost, plan, parent))
        )
        moved = (1 - cost.overlap) * calls * (start + most * row)
        slowest = max(slowest, min(wide, full + moved + max(times.children)))
    return slowest + cost.fixed


def with_halo(cost: CostModel, plan: Plan) -> float:
    """The baseline's plan, if window layers sent the edge of their rows to the next rank.

    Keys and values of the window, forwards, and their gradients back; sequences stay sharded, so the
    sparse layers' work is even and heads are not split.
    """
    shape, slowest = cost.shape, 0.0
    for parent in plan.parents:
        width = parent.width
        work = cost.work(parent.samples, plan.lengths_of(parent.samples))
        rows = float(work.lengths.sum())
        start, rate = cost.link(width)
        edge = min(shape.window - 1, rows / width)
        nbytes = edge * 2 * shape.sparse_heads[1] * shape.head_dim * shape.dtype_bytes
        side = cost.sparse_side(width)
        compute = side.start + side.row * rows + float(work.sparse.sum()) / width
        comm = cost.calls * shape.sparse_layers * (start + nbytes / rate) if width > 1 else 0.0
        sparse = float(cost.visible(np.asarray(compute), np.asarray(comm))) if rows else 0.0
        full = cost.full_seconds(width, rows / width, float(work.full.sum()))
        slowest = max(slowest, full + sparse)
    return slowest + cost.fixed


def oracle(cost: CostModel, ranks: int, width: int, lengths: Ints) -> float:
    """Perfect balance over all ranks in groups of `width`, sparse layers free of communication."""
    work = cost.work(np.arange(len(lengths)), lengths)
    rows = float(lengths.sum())
    full = cost.full_seconds(width, rows / ranks, float(work.full.sum()) * width / ranks)
    return full + (cost.linear * rows + float(work.sparse.sum())) / ranks + cost.fixed


def _full(cost: CostModel, plan: Plan, parent: Parent) -> float:
    return float(cost.full(plan.lengths_of(parent.samples)).sum())


def _wide(cost: CostModel, plan: Plan, parent: Parent) -> float:
    return cost.wide_seconds(
        parent.width, cost.work(parent.samples, plan.lengths_of(parent.samples))
    )


def simulate_step(
    constants: dict[str, Any], cost: CostModel, lengths: Ints, ways: tuple[str, ...]
) -> dict[str, Any]:
    """One row of the results: seconds of each way, and what the step is like."""
    plans = {
        way: planner_of(constants, cost, **settings).plan(lengths)
        for way, settings in CONFIGS.items()
        if way in ways or way == "baseline" or (way == "repack" and "pass" in ways)
    }
    width = plans["baseline"].parents[0].width
    row: dict[str, Any] = {
        "tokens": int(lengths.sum()), "longest": int(lengths.max()), "width": width,
        "wide": width > cost.node_size, "flops": cost.shape.flops(lengths),
    }  # fmt: skip
    row["seconds"] = {way: plan.seconds for way, plan in plans.items()}
    if "pass" in ways:
        row["seconds"]["pass"] = with_passes(cost, plans["repack"])
    if "halo" in ways:
        row["seconds"]["halo"] = with_halo(cost, plans["baseline"])
    if "oracle" in ways:
        row["seconds"]["oracle"] = oracle(cost, constants["ranks"], width, lengths)
    if "bound" in ways:
        planner = planner_of(constants, cost)
        work = cost.work(np.arange(len(lengths)), lengths)
        row["seconds"]["bound"] = planner.step_bound(work) + cost.fixed
    row["per_layer"] = {
        way: step_seconds(cost, plan, "layer") for way, plan in plans.items() if way in HOMOGENEOUS
    }
    row["fallbacks"] = {
        way: [p.fallback for p in plan.parents if p.fallback and p.width > cost.node_size]
        for way, plan in plans.items()
        if way in ("repack", "parent", "sp8", "widths")
    }
    row["parents"] = {
        way: sum(p.width > cost.node_size for p in plan.parents) for way, plan in plans.items()
    }
    return row


@dataclass(frozen=True)
class Gain:
    """Of a way over the baseline, with a 95 % interval from resampling steps."""

    steps: int
    time: float
    """Part of the mean time of a step that is saved."""
    time_low: float
    time_high: float
    mfu: float
    """Points of MFU that the mean over steps rises by."""
    mfu_low: float
    mfu_high: float
    baseline_mfu: float
    """In percent."""


def gain(
    rows: list[dict[str, Any]], way: str, rate: float, resamples: int, key: str = "seconds"
) -> Gain | None:
    """The gain of `way` over these steps; `rate`: operations per second of all devices at their peak.

    None without steps.
    """
    if not rows:
        return None
    before = np.array([row[key]["baseline"] for row in rows])
    after = np.array([row[key][way] for row in rows])
    flops = np.array([row["flops"] for row in rows])
    rng = np.random.default_rng(0)
    picked = rng.integers(0, len(rows), (resamples, len(rows)))
    time = _saved(before[picked], after[picked])
    points = _points(flops[picked], before[picked], after[picked], rate)
    low, high = (np.quantile(time, q) for q in (0.025, 0.975))
    mfu_low, mfu_high = (np.quantile(points, q) for q in (0.025, 0.975))
    return Gain(
        len(rows), float(_saved(before, after)), float(low), float(high),
        float(_points(flops, before, after, rate)), float(mfu_low), float(mfu_high),
        float(100 * (flops / before / rate).mean()),
    )  # fmt: skip


def _saved(before: Floats, after: Floats) -> Floats:
    return np.asarray(1 - after.mean(-1) / before.mean(-1))


def _points(flops: Floats, before: Floats, after: Floats, rate: float) -> Floats:
    return np.asarray(100 * (flops / after / rate - flops / before / rate).mean(-1))

"""The solvers of repacking: how good, how fast, never worse, and beside published ones.

    python -m benchmarks.repacking.solvers [--quick] [--only PART...] [--json FILE]

| part | what it does |
|---|---|
| child | the child solver against the proven optimum of the mixed-integer model |
| parent | the parent solver with two parents against the same |
| time | seconds of a whole plan, with all split sizes and one rank's index maps, on one core |
| worse | random steps, with and without repacking, by the cost model |
| public | FlexSP, Megatron's balanced context parallelism, MagiAttention's dispatch: same lengths and
costs |

A result file that exists keeps its other parts when only some are measured again. Lengths and costs are
those of `constants.json`, unless a row says otherwise.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.repacking.public import flexsp, magi, megatron, membership_seconds
from benchmarks.repacking.workloads import (
    CONSTANTS,
    cost_model,
    planner_of,
    read_constants,
    rounded,
    steps_of,
    wikipedia,
)
from benchmarks.results import write
from parallel.repacking.baselines import mixed
from parallel.repacking.children import lower_bound, solve_children
from parallel.repacking.config import RepackingConfig
from parallel.repacking.cost import CostModel
from parallel.repacking.exact import solve_exactly
from parallel.repacking.heads import HeadMap
from parallel.repacking.layout import Ints
from parallel.repacking.plan import Plan
from parallel.repacking.planner import Planner
from parallel.repacking.sizes import exchange_sizes, site1_counts, site2_counts

Row = dict[str, Any]
Constants = dict[str, Any]


EXACT_SECONDS = 30.0
"""For each optimum; what is not proven by then counts by its bound."""


def random_lengths(
    rng: np.random.Generator, n: int, typical: float, longest: int = 600_000
) -> Ints:
    """Log-normal lengths with a wide spread, so that giants and dwarfs meet."""
    return np.minimum(typical * np.exp(1.2 * rng.normal(size=n)), longest).astype(np.int64) + 1


def child(constants: Constants, cases: int) -> list[Row]:
    """Random parents of 8, 16 and 32 ranks with up to 14 samples."""
    rows = []
    for case in range(cases):
        rng = np.random.default_rng([1, case])
        parent, n = (8, 16, 32)[case % 3], int(rng.integers(1, 15))
        cost = cost_model(constants, overlap=(0.0, 0.5, 1.0)[case // 3 % 3])
        work = cost.work(np.arange(n), random_lengths(rng, n, 6000))
        found = solve_children(work, parent, cost)
        assert found is not None
        optimum = solve_exactly(work, [parent], cost, seconds=EXACT_SECONDS)
        bound = lower_bound(work, parent, cost)
        rows.append({
            "part": "child", "case": case, "ranks": parent, "samples": n, "overlap": cost.overlap,
            "seconds": found.seconds, "optimum": optimum.seconds, "proven": optimum.bound,
            "bound": bound,
            "gap": found.seconds / optimum.bound - 1,
        })  # fmt: skip
    return rows


def parent(constants: Constants, cases: int) -> list[Row]:
    """Two parents of 16 ranks with up to 10 samples; each may also stay wide."""
    rows = []
    for case in range(cases):
        rng = np.random.default_rng([2, case])
        n = int(rng.integers(2, 11))
        cost = cost_model(constants)
        lengths = random_lengths(rng, n, 13_000)
        config = RepackingConfig(several_widths=False, rows_per_rank=1)
        plan = Planner(cost, 32, 16, config).plan(lengths)
        off = RepackingConfig(parent_solver=False, rows_per_rank=1)
        without = Planner(cost, 32, 16, off).plan(lengths)
        work = cost.work(np.arange(n), lengths)
        optimum = solve_exactly(work, [16, 16], cost, may_stay_wide=True, seconds=EXACT_SECONDS)
        rows.append({
            "part": "parent", "case": case, "samples": n, "seconds": plan.seconds - cost.fixed,
            "optimum": optimum.seconds, "proven": optimum.bound,
            "gap": (plan.seconds - cost.fixed) / optimum.bound - 1,
            "gap_without": (without.seconds - cost.fixed) / optimum.bound - 1,
        })  # fmt: skip
    return rows


def everything_that_a_rank_needs(
    planner: Planner, lengths: Ints, heads: tuple[int, int], rank: int
) -> Plan:
    """The plan, split sizes of every parent, and the index maps of one rank."""
    plan = planner.plan(lengths)
    for group in plan.parents:
        layout, map_ = plan.layout(group), HeadMap(*heads, group.width)
        site1_counts(layout, map_)
        site2_counts(layout, map_)
    group, child_ = plan.parent_of(rank), plan.child_of(rank)
    layout = plan.layout(group)
    at = rank - group.first_rank
    layout.positions(at)
    layout.segments(at)
    exchange_sizes(layout, HeadMap(*heads, group.width), at)
    first = child_.first_rank - group.first_rank
    inside = layout.part(first, first + child_.width)
    exchange_sizes(inside, HeadMap(*heads, child_.width), rank - child_.first_rank)
    return plan


def times(constants: Constants, cases: int) -> list[Row]:
    """Wall-clock and processor seconds, with every solver on; Wikipedia's lengths."""
    rows = []
    sizes = [(64, 5_000, cases), (1024, 100_000, max(cases // 10, 2))]
    for ranks, samples, steps in sizes:
        cost = cost_model(constants)
        # As many tokens a rank as there are: memory is no part of this question.
        cost = CostModel(cost.shape, cost.calibration, node_size=cost.node_size)
        config = RepackingConfig(rows_per_rank=constants["rows_per_rank"])
        planner = Planner(cost, ranks, constants["max_parent"], config)
        heads = cost.shape.heads
        for step in range(-2, steps):
            lengths = wikipedia(np.random.default_rng([3, step + 2]), samples)
            wall, cpu = time.perf_counter(), time.process_time()
            plan = everything_that_a_rank_needs(planner, lengths, heads, step % ranks)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if step >= 0:
                rows.append({
                    "part": "time", "ranks": ranks, "samples": samples, "step": step, "seconds": wall,
                    "cpu_seconds": cpu, "load": os.getloadavg()[0],
                    "wide_parents": sum(p.width > cost.node_size for p in plan.parents),
                })  # fmt: skip
    return rows


def worse(constants: Constants, cases: int) -> list[Row]:
    """Random steps of every kind, on clusters of every kind: how often a plan is slower than without."""
    rows = []
    settings: list[tuple[int, int, int, Row, Row]] = [
        (64, 32, 8, {}, {}), (32, 16, 8, {"overlap": 0.5}, {"several_widths": False}),
        (32, 32, 4, {}, {"baseline": "mixed"}), (16, 16, 2, {"overlap": 1.0}, {"inside_nodes": True}),
        (64, 16, 8, {"sparse": "window"}, {"parent_solver": False}),
        (32, 16, 8, {"across_ratio": 2}, {"fit": "rows", "min_child": 2}),
    ]  # fmt: skip
    planners = []
    for ranks, widest, node, changes, config in settings:
        cost = cost_model({**constants, "node_size": node}, **changes)
        fixed: Row = {"rows_per_rank": 1 if ranks == 16 else 4096, **config}
        without = {
            "enabled": False,
            **{k: v for k, v in fixed.items() if k in ("baseline", "fit", "rows_per_rank")},
        }
        planners.append(
            [Planner(cost, ranks, widest, RepackingConfig(**each)) for each in (fixed, without)]
        )
    gains: list[list[float]] = [[] for _ in settings]
    for case in range(cases):
        rng = np.random.default_rng([4, case])
        repacked, plain = planners[case % len(planners)]
        n = int(rng.integers(0, 120))
        typical = float(np.exp(rng.uniform(np.log(50), np.log(20_000))))
        lengths = random_lengths(rng, n, typical, 400_000)
        lengths = lengths[lengths.cumsum() <= 40_000 * repacked.num_ranks]  # what memory holds
        seconds, before = repacked.plan(lengths).seconds, plain.plan(lengths).seconds
        gains[case % len(planners)].append(1 - seconds / before if before else 0.0)
    for (ranks, widest, node, changes, config), found in zip(settings, gains, strict=True):
        rows.append({
            "part": "worse", "ranks": ranks, "max_parent": widest, "node_size": node, **changes,
            **config, "gains": found,
        })  # fmt: skip
    return rows


FLEXSP_SECONDS = 0.5
"""For its mixed-integer model, each step."""


def public(constants: Constants, cases: int) -> list[Row]:
    """The slowest rank of each scheduler: the headline workload, and some steps of the others."""
    rows = []
    counts = dict.fromkeys(constants["workloads"], max(cases // 10, 1))
    counts["wikipedia"] = cases
    cost = cost_model(constants)
    planner = planner_of(constants, cost)
    ranks, widest = constants["ranks"], constants["max_parent"]
    for name, steps in counts.items():
        for step, lengths in enumerate(steps_of(name, {**constants, "seed": 5}, steps)):
            work = cost.work(np.arange(len(lengths)), lengths)
            ours = planner.plan(lengths).seconds - cost.fixed
            flex = flexsp(work, ranks, cost, constants["rows_per_rank"], widest, FLEXSP_SECONDS)
            several = mixed(work, ranks, cost, widest=widest)
            assert several is not None
            rows.append({
                "part": "public", "workload": name, "step": step, "ours": ours,
                "flexsp": flex.seconds, "flexsp_limited": flex.limited,
                "flexsp_with_mixed": min(flex.seconds, membership_seconds(work, several, cost)),
                "megatron": megatron(work, ranks, cost, constants["rows_per_rank"]).seconds,
                "magi": magi(work, ranks, cost, widest).seconds,
                "bound": planner.step_bound(work),
            })  # fmt: skip
            if step % 100 == 99:
                print(f"public, {name}: {step + 1}", file=sys.stderr, flush=True)
    return rows


PARTS: dict[str, Callable[[Constants, int], list[Row]]] = {
    "child": child, "parent": parent, "time": times, "worse": worse, "public": public,
}  # fmt: skip
CASES = {"child": 500, "parent": 200, "time": 200, "worse": 10_000, "public": 1000}
QUICK_CASES = {"child": 30, "parent": 8, "time": 20, "worse": 120, "public": 12}
RIVALS = ("flexsp", "megatron", "magi")
TIE = 1 + 1e-9


def summarize(rows: list[Row]) -> dict[str, Any]:
    """The figures, of the parts that there are."""
    summary: dict[str, Any] = {}
    part = {name: [row for row in rows if row["part"] == name] for name in PARTS}
    if part["child"]:
        gaps = np.array([row["gap"] for row in part["child"]])
        summary |= {
            "child_gap_mean": float(gaps.mean()), "child_gap_max": float(gaps.max()),
            "child_proven": sum(row["optimum"] / row["proven"] < 1.0002 for row in part["child"]),
            "child_below_bound": sum(
                row["seconds"] < row["bound"] * (1 - 1e-9) for row in part["child"]
            ),
        }  # fmt: skip
    if part["parent"]:
        gaps = np.array([row["gap"] for row in part["parent"]])
        summary |= {
            "parent_gap_mean": float(gaps.mean()), "parent_gap_max": float(gaps.max()),
            "parent_gap_mean_without": float(np.mean([row["gap_without"] for row in part["parent"]])),
            "parent_proven": sum(row["optimum"] / row["proven"] < 1.0002 for row in part["parent"]),
        }  # fmt: skip
    for ranks, name in ((64, "plan_ms_{}_64r_5000"), (1024, "plan_ms_{}_1024r_100000")):
        mine = [row for row in part["time"] if row["ranks"] == ranks]
        # Processor time: a plan waits for nothing, and the machine may be shared.
        for key, label in (("cpu_seconds", ""), ("seconds", "wall_")):
            for quantile in (50, 95):
                if mine:
                    values = 1000 * np.quantile([row[key] for row in mine], quantile / 100)
                    summary[name.format(f"{label}p{quantile}")] = round(float(values), 2)
        if mine:
            summary[f"load_{ranks}r"] = round(float(np.median([row["load"] for row in mine])), 2)
    if part["time"]:
        summary["plan_s_1024r_100000"] = round(summary["plan_ms_p50_1024r_100000"] / 1000, 4)
    if part["worse"]:
        gains = np.concatenate([row["gains"] for row in part["worse"]])
        summary |= {
            "random_steps": len(gains), "worse_than_baseline": int((gains < -1e-9).sum()),
            "random_gain_mean": float(gains.mean()),
        }  # fmt: skip
    if part["public"]:
        by_workload = {}
        for name in dict.fromkeys(row["workload"] for row in part["public"]):
            mine = [row for row in part["public"] if row["workload"] == name]
            by_workload[name] = _against(mine)
        summary["win_rate_vs_public"] = by_workload["wikipedia"]["lowest"]
        summary["public"] = by_workload
    return summary


def _against(rows: list[Row]) -> dict[str, Any]:
    """How often ours is the lowest, and the mean of each over the bound."""
    ours = np.array([row["ours"] for row in rows])
    bound = np.array([row["bound"] for row in rows])
    rivals = {
        name: np.array([row[name] for row in rows]) for name in (*RIVALS, "flexsp_with_mixed")
    }
    best = np.min([rivals[name] for name in RIVALS], axis=0)
    handed = np.minimum(best, rivals["flexsp_with_mixed"])
    found: dict[str, Any] = {
        "steps": len(rows), "lowest": float((ours <= best * TIE).mean()),
        "strictly_lowest": float((ours * TIE < best).mean()),
        "lowest_with_mixed": float((ours <= handed * TIE).mean()),
        "flexsp_limited": float(np.mean([row["flexsp_limited"] for row in rows])),
        "over_bound": {"ours": float((ours / bound).mean() - 1)},
        "lower_than": {},
    }  # fmt: skip
    for name, seconds in rivals.items():
        found["over_bound"][name] = float((seconds / bound).mean() - 1)
        found["lower_than"][name] = float((ours * TIE < seconds).mean())
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--cases", type=int, help="of each part, instead of its own number")
    parser.add_argument("--constants", type=Path, default=CONSTANTS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    constants = read_constants(options.constants)
    rows: list[Row] = []
    if options.json and options.json.is_file() and set(options.only) != set(PARTS):
        kept = json.loads(options.json.read_text())["rows"]
        rows = [row for row in kept if row["part"] not in options.only]
    for name in options.only:
        cases = options.cases or (QUICK_CASES if options.quick else CASES)[name]
        rows += PARTS[name](constants, cases)
        print(f"{name}: done", file=sys.stderr, flush=True)
        if options.json:
            summary = summarize(rows)
            write(options.json, "repacking.solvers", "cpu", constants, rounded(rows), summary)
    print(json.dumps(summarize(rows), indent=1))


if __name__ == "__main__":
    main()

"""Replays steps of a length distribution for each way to arrange their samples, by the cost model.

    python -m benchmarks.repacking [--quick] [--json FILE] [--workload NAME | --lengths FILE]
    python -m benchmarks.repacking --step 17 [--picture FILE]     # one step: its ranks, before and after

Everything here is predicted by the model of `parallel/repacking/cost.py` with the constants of
`constants.json`; nothing is measured. The workloads are described in `workloads.py`, the ways in
`simulate.py`.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.repacking.simulate import BY_ROWS, FREE, HOMOGENEOUS, Gain, gain, simulate_step
from benchmarks.repacking.workloads import (
    CONSTANTS,
    cost_model,
    planner_of,
    read_constants,
    rounded,
    steps_of,
    steps_of_file,
)
from benchmarks.results import write
from parallel.repacking.calibration import load
from parallel.repacking.drawing import draw
from parallel.repacking.layout import Ints

HEADLINE = "wikipedia"
QUICK_STEPS = 24


def main() -> None:
    """Simulate, print tables and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("--workload", help="one of those of the constants; default: all")
    parser.add_argument("--lengths", type=Path, help="a file of lengths, one on each line")
    parser.add_argument("--samples", type=int, default=2378, help="a step, with --lengths")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--constants", type=Path, default=CONSTANTS)
    parser.add_argument("--calibration", help="a name or a file, instead of the constants'")
    parser.add_argument("--step", type=int, help="draw this step's ranks and end")
    parser.add_argument("--picture", type=Path, help="of that step, as SVG or PNG")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    constants = read_constants(options.constants)
    if options.calibration:
        constants["calibration"] = options.calibration
    if options.workload and options.workload not in constants["workloads"]:
        known = ", ".join(constants["workloads"])
        raise SystemExit(f"--workload {options.workload} is not one of {known}")
    steps = options.steps or (QUICK_STEPS if options.quick else constants["steps"])
    if options.step is not None:
        show_step(options, constants)
        return
    names = [options.workload] if options.workload else list(constants["workloads"])
    if options.lengths:
        names = [str(options.lengths)]
    rows = []
    for name in names:
        rows += replay(name, options, constants, steps, {})
        if name in constants["workloads"]:
            rows += replay(name, options, constants, steps, {"sparse": "window"})
    sensitive = sensitivity(options, constants, steps, names)
    summary = summarize(rows, sensitive, constants, names)
    print(report(summary))
    if options.json:
        write(options.json, "repacking-sim", "cpu", constants, rounded(rows + sensitive), summary)


def lengths_of(
    name: str, options: argparse.Namespace, constants: dict[str, Any], steps: int
) -> Iterator[Ints]:
    """Steps of a workload, or of the user's file."""
    if options.lengths:
        return steps_of_file(options.lengths, options.samples, steps, constants["seed"])
    return steps_of(name, constants, steps)


def replay(
    name: str,
    options: argparse.Namespace,
    constants: dict[str, Any],
    steps: int,
    changes: dict[str, Any],
) -> list[dict[str, Any]]:
    """Every step of a workload in every way."""
    cost = cost_model(constants, **changes)
    ways = tuple(
        w for w in (*HOMOGENEOUS, *BY_ROWS, *FREE) if w != "halo" or cost.shape.sparse == "window"
    )
    rows = []
    for step, lengths in enumerate(lengths_of(name, options, constants, steps)):
        row = {"workload": name, "sparse": cost.shape.sparse, "step": step}
        rows.append(row | simulate_step(constants, cost, lengths, ways))
    wide = sum(bool(row["wide"]) for row in rows)
    print(
        f"{name}, {cost.shape.sparse}: {wide} of {steps} steps are wide",
        file=sys.stderr,
        flush=True,
    )
    return rows


def sensitivity(
    options: argparse.Namespace, constants: dict[str, Any], steps: int, names: list[str]
) -> list[dict[str, Any]]:
    """The wide steps of the headline workload, by the ratio between nodes and by overlap."""
    name = HEADLINE if HEADLINE in names else names[0]
    grid = constants["sensitivity"]
    overlaps = grid["overlap"][::2] if options.quick else grid["overlap"]
    rows = []
    for ratio in grid["across_ratio"]:
        for overlap in overlaps:
            cost = cost_model(constants, across_ratio=ratio, overlap=overlap)
            for step, lengths in enumerate(lengths_of(name, options, constants, steps)):
                planner = planner_of(constants, cost)
                first = planner.baseline(cost.work(np.arange(len(lengths)), lengths)).widths[0]
                if first > cost.node_size:
                    row = {"workload": name, "sparse": cost.shape.sparse, "step": step,
                           "across_ratio": ratio, "overlap": overlap}  # fmt: skip
                    rows.append(row | simulate_step(constants, cost, lengths, ("repack", "parent")))
        print(f"ratio {ratio}", file=sys.stderr, flush=True)
    return rows


def summarize(
    rows: list[dict[str, Any]],
    sensitive: list[dict[str, Any]],
    constants: dict[str, Any],
    names: list[str],
) -> dict[str, Any]:
    """Gains over the baseline by workload, kind of sparse layer and way.

    The headline's by short names.
    """
    peak = load(constants["calibration"]).peak_flops * constants["ranks"]
    resamples = constants["bootstrap"]

    def table(some: list[dict[str, Any]], key: str = "seconds") -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part, chosen in (("wide", [r for r in some if r["wide"]]), ("all", some)):
            for way in sorted({w for r in chosen for w in r[key]} - {"baseline"}):
                result = gain(chosen, way, peak, resamples, key)
                if result:
                    found.setdefault(way, {})[part] = vars(result)
        return found

    workloads: dict[str, Any] = {}
    for name, sparse in dict.fromkeys((r["workload"], r["sparse"]) for r in rows):
        mine = [r for r in rows if (r["workload"], r["sparse"]) == (name, sparse)]
        fallbacks = {
            way: sum(len(r["fallbacks"][way]) for r in mine) for way in ("repack", "parent", "sp8")
        }
        workloads[f"{name}, {sparse}"] = {
            "steps": len(mine), "wide_steps": sum(r["wide"] for r in mine),
            "wide_parents": {way: sum(r["parents"][way] for r in mine if r["wide"])
                             for way in ("repack", "parent")},
            "wide_parents_kept": fallbacks,
            "gains": table(mine), "gains_with_a_barrier_at_every_layer": table(mine, "per_layer"),
        }  # fmt: skip
    by_link = []
    for ratio, overlap in dict.fromkeys((r["across_ratio"], r["overlap"]) for r in sensitive):
        mine = [r for r in sensitive if (r["across_ratio"], r["overlap"]) == (ratio, overlap)]
        by_link.append({"across_ratio": ratio, "overlap": overlap, "gains": table(mine)})
    first = HEADLINE if HEADLINE in names else names[0]
    headline = workloads[f"{first}, {constants['shape']['sparse']}"]
    gains = headline["gains"]

    def of(way: str, part: str, key: str) -> float:
        return float(gains[way].get(part, {}).get(key, 0.0))

    return {
        "wide_steps": headline["wide_steps"],
        "time_gain_wide_repack": of("repack", "wide", "time"),
        "time_gain_wide_parent": of("parent", "wide", "time"),
        "time_gain_all_parent": of("parent", "all", "time"),
        "mfu_gain_wide_repack": of("repack", "wide", "mfu"),
        "mfu_gain_wide_parent": of("parent", "wide", "mfu"),
        "workloads": workloads,
        "by_link": by_link,
    }


def report(summary: dict[str, Any]) -> str:
    """Tables in Markdown."""
    lines = []
    for name, each in summary["workloads"].items():
        lines += [
            "",
            f"{name}: {each['wide_steps']} of {each['steps']} steps have wide parents",
            "",
        ]
        lines += gains_table(each["gains"])
    lines += ["", *links_table(summary["by_link"])]
    return "\n".join(lines)


def gains_table(gains: dict[str, Any]) -> list[str]:
    """Time and MFU saved by each way, on wide steps and on all."""
    lines = [
        "| | time, wide steps | MFU points | time, all steps | MFU points |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for way in (*HOMOGENEOUS, *BY_ROWS, *FREE):
        if way in gains:
            cells = [_cells(gains[way].get(part)) for part in ("wide", "all")]
            lines.append(f"| {way} | {' | '.join(cells)} |")
    return lines


def _cells(found: dict[str, Any] | None) -> str:
    if found is None:
        return "- | -"
    g = Gain(**found)
    return (
        f"{-100 * g.time:+.2f} % ({-100 * g.time_high:+.2f} to {-100 * g.time_low:+.2f}) "
        f"| {g.mfu:+.2f} ({g.mfu_low:+.2f} to {g.mfu_high:+.2f})"
    )


def links_table(by_link: list[dict[str, Any]]) -> list[str]:
    """Time on wide steps, repacked and with the parent solver, by ratio and overlap."""
    overlaps = list(dict.fromkeys(each["overlap"] for each in by_link))
    lines = [
        "| rate inside a node / across | " + " | ".join(f"{100 * o:.0f} % overlap" for o in overlaps) +
        " |", "|---" * (len(overlaps) + 1) + "|",
    ]  # fmt: skip
    for ratio in dict.fromkeys(each["across_ratio"] for each in by_link):
        cells = []
        for overlap in overlaps:
            mine = [e for e in by_link if (e["across_ratio"], e["overlap"]) == (ratio, overlap)]
            gains = mine[0]["gains"]
            times = [
                gains.get(w, {}).get("wide", {}).get("time", 0.0) for w in ("repack", "parent")
            ]
            cells.append(" / ".join(f"{-100 * t:+.2f} %" for t in times))
        lines.append(f"| {ratio} | " + " | ".join(cells) + " |")
    return lines


def show_step(options: argparse.Namespace, constants: dict[str, Any]) -> None:
    """Text, and a picture, of one step."""
    name = options.workload or HEADLINE
    lengths = list(lengths_of(name, options, constants, options.step + 1))[options.step]
    cost = cost_model(constants)
    plan = planner_of(constants, cost, several_widths=False).plan(lengths)
    print(draw(plan))
    if options.picture:
        from benchmarks.repacking.pictures import balance

        balance(cost, plan, options.picture)


if __name__ == "__main__":
    main()

"""Draws the pictures of `docs/repacking.md` and writes its tables, from the result files: no figure is
typed.

    python -m benchmarks.repacking.page

A table stands between `<!-- NAME -->` and `<!-- end -->`; everything else on the page is written by
hand.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.pages import filled
from benchmarks.repacking.__main__ import gains_table, links_table
from benchmarks.repacking.workloads import cost_model, planner_of, read_constants, steps_of
from parallel.repacking.drawing import draw

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "repacking.md"
PICTURES = ROOT / "docs" / "repacking"
RESULTS = ROOT / "benchmarks" / "results"

EXAMPLE_STEP = 9
"""Of the headline workload: the first of its wide steps."""


def percent(value: float, digits: int = 2) -> str:
    """Of a part of one."""
    return f"{100 * value:.{digits}f} %"


def where(result: dict[str, Any]) -> str:
    """What made a result file."""
    return f"`{result['command']}`, {result['date']}, {result['machine']['cpu']}"


def targets(planner: dict[str, Any], sim: dict[str, Any]) -> list[str]:
    """What was aimed at, and what came out."""
    s, uniform = planner["summary"], sim["summary"]["workloads"]["uniform, topk"]["gains"]
    rows = planner["rows"]
    cases = {part: sum(r["part"] == part for r in rows) for part in ("child", "parent")}
    public = s["public"]["wikipedia"]
    lines = ["| what | aimed at | found |", "|---|---|---|"]
    found = [
        (f"child solver over the optimum, {cases['child']} random parents of 8, 16, 32 ranks, up to 14 "
         "samples", "mean 1 %, worst 6 %, never below the bound",
         f"mean {percent(s['child_gap_mean'])}, worst {percent(s['child_gap_max'])}, "
         f"{s['child_below_bound']} below the bound; {s['child_proven']} optima proven"),
        (f"parent solver over the optimum, {cases['parent']} times two parents, up to 10 samples",
         "mean 2 %",
         f"mean {percent(s['parent_gap_mean'])}, worst {percent(s['parent_gap_max'])} (without a parent "
         f"solver {percent(s['parent_gap_mean_without'])}); {s['parent_proven']} optima proven"),
        ("plan for 64 ranks, 5,000 samples, one core", "95 % within 30 ms",
         f"processor time: 95 % within {s['plan_ms_p95_64r_5000']:.1f} ms, median "
         f"{s['plan_ms_p50_64r_5000']:.1f} ms; by the clock, on a shared machine with a load of "
         f"{s['load_64r']}: {s['plan_ms_wall_p95_64r_5000']:.0f} and "
         f"{s['plan_ms_wall_p50_64r_5000']:.0f} ms"),
        ("plan for 1,024 ranks, 100,000 samples", "1 s",
         f"processor time: median {s['plan_s_1024r_100000']:.2f} s, "
         f"95 % within {s['plan_ms_p95_1024r_100000'] / 1000:.2f} s; by the clock: "
         f"{s['plan_ms_wall_p50_1024r_100000'] / 1000:.2f} and "
         f"{s['plan_ms_wall_p95_1024r_100000'] / 1000:.2f} s (load {s['load_1024r']})"),
        (f"slower than the baseline by the model's count, {s['random_steps']:,} random steps", "never",
         f"{s['worse_than_baseline']} times; {percent(s['random_gain_mean'], 1)} faster on average"),
        ("uniform lengths", "within 0.5 % of zero, never slower",
         f"repacked {percent(uniform['repack']['all']['time'])}, with the parent solver "
         f"{percent(uniform['parent']['all']['time'])}, which also chooses widths "
         f"{percent(uniform['widths']['all']['time'])}"),
        ("lowest slowest rank beside published schedulers, 1,000 steps of wikipedia", "90 % of steps",
         f"{percent(public['lowest'], 1)} of {public['steps']:,}"),
    ]  # fmt: skip
    return lines + [f"| {a} | {b} | {c} |" for a, b, c in found] + ["", where(planner)]


def public(planner: dict[str, Any]) -> list[str]:
    """Beside published schedulers."""
    lines = [
        "| steps | ours the lowest | ours | FlexSP | MagiAttention | Megatron | our mixed widths |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, each in planner["summary"]["public"].items():
        over = each["over_bound"]
        cells = [
            percent(over[k], 1) for k in ("ours", "flexsp", "magi", "megatron", "flexsp_with_mixed")
        ]
        lines.append(
            f"| {name}, {each['steps']:,} | {percent(each['lowest'], 1)} | +"
            + " | +".join(cells)
            + " |"
        )
    return lines


def paper(sim: dict[str, Any]) -> list[str]:
    """The abstract's figures beside ours."""
    s = sim["summary"]
    headline = s["workloads"]["wikipedia, topk"]
    gains, steps = headline["gains"], headline["steps"]
    base = gains["repack"]["wide"]["baseline_mfu"]
    window = s["workloads"]["wikipedia, window"]["gains"]
    half = next(e for e in s["by_link"] if e["across_ratio"] == 7 and e["overlap"] == 0.5)["gains"]
    return [
        "| | abstract | simulated |", "|---|---|---|",
        f"| steps with wide parents | 22 of 200 | {headline['wide_steps']} of {steps} |",
        f"| time of these, repacked | -5.95 % | {percent(-gains['repack']['wide']['time'])} |",
        f"| and with the parent solver | -7.61 % | {percent(-gains['parent']['wide']['time'])} |",
        f"| points of MFU, repacked | +3.75 | {gains['repack']['wide']['mfu']:+.2f} |",
        f"| and with the parent solver | +4.83 | {gains['parent']['wide']['mfu']:+.2f} |",
        f"| MFU of the baseline (from both figures) | about 59 % | {base:.1f} % |",
        f"| half of the communication hidden | - | {percent(-half['repack']['wide']['time'])}, "
        f"{percent(-half['parent']['wide']['time'])} |",
        f"| sparse layers with a window | - | {percent(-window['repack']['wide']['time'])}, "
        f"{percent(-window['parent']['wide']['time'])} |",
        f"| all 200 steps, with the parent solver | - | {percent(-gains['parent']['all']['time'])} |",
    ]  # fmt: skip


def gains_of(sim: dict[str, Any], name: str) -> list[str]:
    """The gains of one workload."""
    each = sim["summary"]["workloads"][name]
    kept, parents = each["wide_parents_kept"], each["wide_parents"]
    return [
        f"{each['wide_steps']} of {each['steps']} steps are wide; of their {parents['repack']} wide "
        f"parents {kept['repack']} keep their layout, with the parent solver {kept['parent']} of "
        f"{parents['parent']}.",
        "",
        *gains_table(each["gains"]),
    ]


def barriers(sim: dict[str, Any]) -> list[str]:
    """Parents that wait for each other at every layer."""
    each = sim["summary"]["workloads"]["wikipedia, topk"]["gains_with_a_barrier_at_every_layer"]
    return gains_table({way: each[way] for way in ("repack", "parent", "sp8") if way in each})


def measured(frozen: dict[str, Any], sim: dict[str, Any]) -> list[str]:
    """Time saved on wide steps with the frozen coefficients and with measured ones."""
    ways = ("repack", "parent", "mixed", "widths", "bound")
    lines = [f"| sparse layers, coefficients | {' | '.join(ways)} |", "|---" * 6 + "|"]
    for kind in ("topk", "window"):
        for name, each in (("frozen", frozen), ("measured", sim)):
            gains = each["summary"]["workloads"][f"wikipedia, {kind}"]["gains"]
            cells = [percent(-gains[way]["wide"]["time"], 1) for way in ways]
            lines.append(f"| {kind}, {name} | {' | '.join(cells)} |")
    return [*lines, "", f"Simulated by {where(sim)}."]


def exchange(result: dict[str, Any]) -> list[str]:
    """The exchange and a model on GPUs, beside the usual Ulysses and the prediction."""
    moved, packed, model = result["rows"]
    seconds, machine, versions = moved["seconds"], result["machine"], result["versions"]
    lengths = ", ".join(f"{length:,}" for length in result["config"]["lengths"])
    return [
        f"| a rank's documents: {lengths} tokens | |", "|---|---|",
        f"| the exchange of a full layer, forward and backward | {1e3 * seconds['ours']:.2f} ms |",
        f"| four all-to-alls of the same rows | {1e3 * seconds['separate']:.2f} ms |",
        f"| four of documents padded to the longest, as with a batch dimension "
        f"| {1e3 * seconds['padded']:.2f} ms, {moved['padded_over_ours']:.2f} times ours |",
        f"| packing and unpacking of a full layer | {1e3 * packed['seconds']:.2f} ms, "
        f"{percent(packed['share'], 1)} of the layer's {1e3 * packed['layer_seconds']:.1f} ms |",
        f"| passes of a model of {model['parameters'] / 1e9:.1f} billion parameters (`model=hybrid2b`), "
        f"one-rank children | {1e3 * model['seconds']:.0f} ms |",
        f"| predicted | {1e3 * model['predicted_seconds']:.0f} ms, "
        f"{100 * (model['predicted_over_measured'] - 1):+.1f} % |",
        f"| MFU | {percent(model['mfu'], 1)} |",
        "",
        f"{machine['count']} {machine['device']}, torch {versions['torch']}, {result['date']}, "
        f"`{result['command']}`.",
    ]  # fmt: skip


def example() -> str:
    """The plan of one step as text, its first parents."""
    constants = read_constants()
    lengths = list(steps_of("wikipedia", constants, EXAMPLE_STEP + 1))[EXAMPLE_STEP]
    cost = cost_model(constants)
    plan = planner_of(constants, cost, several_widths=False).plan(lengths)
    return draw(plan, parents=1)


def tables() -> dict[str, list[str]]:
    """Every generated part of the page."""
    planner = json.loads((RESULTS / "repacking-planner.json").read_text())
    sim = json.loads((RESULTS / "repacking-sim.json").read_text())
    return {
        "targets": targets(planner, sim),
        "public": public(planner),
        "paper": paper(sim),
        "wikipedia": gains_of(sim, "wikipedia, topk"),
        "window": gains_of(sim, "wikipedia, window"),
        "lognormal": gains_of(sim, "lognormal, topk"),
        "pareto": gains_of(sim, "pareto, topk"),
        "uniform": gains_of(sim, "uniform, topk"),
        "links": links_table(sim["summary"]["by_link"]),
        "barriers": barriers(sim),
        "example": ["```text", *example().splitlines(), "```"],
        "measured": measured(
            sim, json.loads((RESULTS / "repacking-sim-measured.json").read_text())
        ),
        "exchange": exchange(json.loads((RESULTS / "repacking-exchange-2xH200.json").read_text())),
        "made": [f"Simulated by {where(sim)}."],
    }


def page(text: str) -> str:
    """The page with its tables written anew."""
    return filled(text, tables())


def pictures() -> None:
    """All pictures of the page."""
    from benchmarks.repacking import pictures as draw_

    planner = json.loads((RESULTS / "repacking-planner.json").read_text())
    sim = json.loads((RESULTS / "repacking-sim.json").read_text())
    constants = read_constants()
    cost = cost_model(constants)
    lengths = list(steps_of("wikipedia", constants, EXAMPLE_STEP + 1))[EXAMPLE_STEP]
    plan = planner_of(constants, cost, several_widths=False).plan(lengths)
    draw_.balance(cost, plan, PICTURES / "balance.svg")
    draw_.links(sim["summary"], PICTURES / "links.svg")
    draw_.ways(sim["summary"], PICTURES / "ways.svg")
    draw_.steps(sim["rows"], PICTURES / "steps.svg")
    draw_.rivals(planner["rows"], PICTURES / "public.svg")
    draw_.gaps(planner["rows"], PICTURES / "solvers.svg")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    pictures()

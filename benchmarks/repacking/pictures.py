"""Pictures of plans and of the result files, as SVG or PNG; needs matplotlib (`springtide[plots]`)."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.repacking.simulate import parent_times
from parallel.repacking.cost import CostModel
from parallel.repacking.layout import Layout
from parallel.repacking.plan import Plan

mpl.rcParams |= {
    "svg.hashsalt": "springtide", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False,
    "axes.spines.right": False, "figure.constrained_layout.use": True, "font.family": "sans-serif",
}  # fmt: skip

NAMES = {
    "repack": "repacked", "parent": "repacked, parent solver", "inside": "also inside nodes",
    "sp8": "children of 8 only", "pass": "redistribution passes", "halo": "K/V halo",
    "oracle": "oracle for this width", "mixed": "mixed widths, no repacking",
    "widths": "parent solver chooses widths", "bound": "no communication",
    "rows": "filled by rows", "rows_repack": "filled by rows, repacked",
}  # fmt: skip
"""What the ways of `simulate.py` are called."""


def save(figure: Figure, path: Path) -> None:
    """Without a date, so that the same figures give the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, metadata=metadata, dpi=130)
    plt.close(figure)
    if path.suffix == ".svg":
        lines = path.read_text().splitlines()
        path.write_text("\n".join(line.rstrip() for line in lines) + "\n")


def balance(cost: CostModel, plan: Plan, path: Path) -> None:
    """Ranks by samples: rows before and after repacking, and the seconds of each rank's group.

    The longest samples have colours of their own, the others are grey by length.
    """
    figure, axes = plt.subplots(3, 1, figsize=(9, 6.6), sharex=True, height_ratios=[2, 2, 1.2])
    longest = plan.ids[np.argsort(-plan.lengths, kind="stable")][:10]
    colours = {sample: f"C{place}" for place, sample in enumerate(longest.tolist())}
    for axis, title, is_after in (
        (axes[0], "without repacking", False),
        (axes[1], "repacked", True),
    ):
        for parent in plan.parents:
            layout = plan.layout(parent) if is_after else plan.wide_layout(parent)
            _stack(axis, layout, parent.first_rank, plan, colours)
        axis.set_ylabel("rows of the rank")
        axis.set_title(title, loc="left", fontsize=9)
    before, after = np.zeros(plan.num_ranks), np.zeros(plan.num_ranks)
    for parent in plan.parents:
        ranks = slice(parent.first_rank, parent.first_rank + parent.width)
        samples = cost.work(parent.samples, plan.lengths_of(parent.samples))
        before[ranks] = cost.wide_seconds(parent.width, samples)
        times = parent_times(cost, plan, parent)
        for child, seconds in zip(parent.children, times.children, strict=True):
            after[child.first_rank : child.first_rank + child.width] = times.full + seconds
    where = np.arange(plan.num_ranks + 1) - 0.5
    axes[2].stairs(before, where, label="without repacking", color="tab:red")
    axes[2].stairs(after, where, label="repacked", color="tab:blue")
    axes[2].set_ylim(0, 1.35 * max(before.max(), after.max(), 1e-9))
    axes[2].set_ylabel("seconds, predicted")
    axes[2].set_xlabel("rank (lines: nodes; dark lines: parents)")
    axes[2].legend(ncols=2, loc="upper left", frameon=False)
    starts = {parent.first_rank for parent in plan.parents}
    for axis in axes:
        for rank in range(0, plan.num_ranks + 1, plan.node_size):
            is_parent = rank in starts or rank == plan.num_ranks
            axis.axvline(rank - 0.5, color="k" if is_parent else "0.75", lw=1 if is_parent else 0.6)
        axis.set_xlim(-0.5, plan.num_ranks - 0.5)
    save(figure, path)


def _stack(axis: Axes, layout: Layout, first: int, plan: Plan, colours: dict[int, str]) -> None:
    """One bar a rank, a piece for each of its longest segments, and one for all the short ones."""
    table = layout.segments()
    lengths = plan.lengths_of(layout.samples)
    for rank in range(layout.width):
        mine = np.flatnonzero(table.rank == rank)
        bottom, rest = 0, 0
        order = mine[np.argsort(-lengths[table.sample[mine]], kind="stable")]
        for at in order.tolist():
            sample = int(layout.samples[table.sample[at]])
            size = int(table.end[at] - table.begin[at])
            if sample in colours:
                axis.bar(first + rank, size, 1, bottom, color=colours[sample], ec="w", lw=0.4)
                bottom += size
            else:
                rest += size
        axis.bar(first + rank, rest, 1, bottom, color="0.8", ec="w", lw=0.4)


def links(summary: dict[str, Any], path: Path) -> None:
    """Time saved on wide steps by the ratio between nodes, for each overlap."""
    figure, axis = plt.subplots(figsize=(5.2, 3.2))
    rows = summary["by_link"]
    for colour, overlap in zip(("tab:blue", "tab:orange", "tab:green"),
                               dict.fromkeys(r["overlap"] for r in rows), strict=False):  # fmt: skip
        for way, style in (("repack", "--"), ("parent", "-")):
            mine = [r for r in rows if r["overlap"] == overlap and way in r["gains"]]
            gains = [r["gains"][way]["wide"] for r in mine]
            ratio = [r["across_ratio"] for r in mine]
            time, low, high = (
                [100 * g[k] for g in gains] for k in ("time", "time_low", "time_high")
            )
            label = f"{100 * overlap:.0f} % overlap{', parent solver' if way == 'parent' else ''}"
            axis.plot(ratio, time, style, marker="o", ms=3, color=colour, label=label)
            if way == "parent":
                axis.fill_between(ratio, low, high, color=colour, alpha=0.15, lw=0)
    axis.set_xscale("log", base=2)
    axis.set_xticks([1, 2, 4, 7, 14], ["1", "2", "4", "7", "14"])
    axis.set_xlabel("rate inside a node / across nodes")
    axis.set_ylabel("time saved on wide steps, %")
    axis.axhline(0, color="0.6", lw=0.8)
    axis.legend(frameon=False, fontsize=8)
    save(figure, path)


def ways(summary: dict[str, Any], path: Path) -> None:
    """Time saved by each way, on wide steps and on all, with 95 % intervals."""
    names = list(summary["workloads"])[:2]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharex=True, sharey=True)
    shown = [w for w in NAMES if any(w in summary["workloads"][n]["gains"] for n in names)]
    shown = [w for w in shown if not w.startswith("rows")]
    for axis, name in zip(axes, names, strict=False):
        each = summary["workloads"][name]
        for offset, part, colour in ((-0.2, "wide", "tab:blue"), (0.2, "all", "tab:orange")):
            for y, way in enumerate(shown):
                found = each["gains"].get(way, {}).get(part)
                if found is None:
                    continue
                time, low, high = (100 * found[k] for k in ("time", "time_low", "time_high"))
                label = {"wide": "wide steps", "all": "all steps"}[part] if y == 0 else None
                axis.barh(y + offset, time, 0.38, color=colour, label=label,
                          xerr=[[time - low], [high - time]], error_kw={"lw": 0.8})  # fmt: skip
        axis.set_title(f"{name}: {each['wide_steps']} of {each['steps']} steps wide", fontsize=9)
        axis.set_yticks(range(len(shown)), [NAMES[way] for way in shown])
        axis.set_xlabel("time saved over the homogeneous baseline, %")
        axis.axvline(0, color="0.4", lw=0.8)
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, fontsize=8, ncols=2,
                  loc="outside lower center")  # fmt: skip
    save(figure, path)


def steps(rows: list[dict[str, Any]], path: Path) -> None:
    """Every wide step of the headline workload: baseline, repacked, with the parent solver, the
    oracle."""
    mine = [r for r in rows if r["workload"] == "wikipedia" and r["sparse"] == "topk" and r["wide"]]
    mine = [r for r in mine if "across_ratio" not in r]
    mine.sort(key=lambda r: r["longest"])
    figure, axis = plt.subplots(figsize=(9, 3))
    styles = {"baseline": ("o", "tab:red"), "repack": ("s", "tab:cyan"), "parent": ("D", "tab:blue"),
              "widths": ("^", "tab:green"), "oracle": ("_", "k")}  # fmt: skip
    for way, (marker, colour) in styles.items():
        axis.plot([r["seconds"][way] for r in mine], marker, color=colour, ms=4,
                  label=NAMES.get(way, "homogeneous baseline"))  # fmt: skip
    axis.set_ylim(0)
    axis.set_xticks(range(len(mine)), [f"{r['longest'] // 1000}K" for r in mine], rotation=60)
    axis.set_xlabel("wide steps of wikipedia, by the length of their longest sample")
    axis.set_ylabel("seconds, predicted")
    axis.legend(frameon=False, fontsize=8, loc="lower right", ncols=2)
    save(figure, path)


def rivals(rows: list[dict[str, Any]], path: Path) -> None:
    """The share of steps whose slowest rank is within so much of the bound, for each scheduler."""
    figure, axes = plt.subplots(1, 4, figsize=(10, 3.1), sharey=True)
    mine = [row for row in rows if row["part"] == "public"]
    shown = {"ours": "ours", "flexsp": "FlexSP", "magi": "MagiAttention", "megatron": "Megatron",
             "flexsp_with_mixed": "our mixed widths"}  # fmt: skip
    styles = {"ours": "-", "flexsp_with_mixed": ":"}
    for axis, workload in zip(axes, dict.fromkeys(r["workload"] for r in mine), strict=False):
        some = [row for row in mine if row["workload"] == workload]
        for name, label in shown.items():
            over = np.sort([100 * (row[name] / row["bound"] - 1) for row in some])
            axis.step(over, np.arange(1, len(over) + 1) / len(over), styles.get(name, "--"),
                      where="post", label=label)  # fmt: skip
        axis.set_xscale("symlog", linthresh=1)
        axis.set_xlim(0, 400)
        axis.set_title(f"{workload}, {len(some)} steps", fontsize=9)
        axis.set_xlabel("slowest rank over the bound, %")
    axes[0].set_ylabel("share of steps")
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, fontsize=8, ncols=5,
                  loc="outside lower center")  # fmt: skip
    save(figure, path)


def gaps(rows: list[dict[str, Any]], path: Path) -> None:
    """Gaps to the proven optimum, and times of plans."""
    figure, axes = plt.subplots(1, 3, figsize=(10, 2.8))
    for axis, part, title in (
        (axes[0], "child", "child solver"),
        (axes[1], "parent", "parent solver"),
    ):
        gap = np.array([100 * row["gap"] for row in rows if row["part"] == part])
        axis.hist(gap, bins=np.linspace(0, max(gap.max(initial=1), 1), 30))
        axis.set_yscale("log")
        axis.set_ylim(0.8, None)
        axis.set_title(f"{title}: mean {gap.mean():.2f} %, {len(gap)} cases", fontsize=9)
        axis.set_xlabel("over the proven optimum, %")
    for ranks, label in ((64, "64 ranks"), (1024, "1,024 ranks")):
        mine = [
            1000 * r["cpu_seconds"] for r in rows if r["part"] == "time" and r["ranks"] == ranks
        ]
        seconds = np.sort(mine)
        axes[2].step(seconds, np.arange(1, len(seconds) + 1) / max(len(seconds), 1), label=label)
    axes[2].set_xscale("log")
    axes[2].set_xlim(5, 2000)
    axes[2].set_xticks([10, 30, 100, 300, 1000], ["10", "30", "100", "300", "1,000"], minor=False)
    axes[2].minorticks_off()
    axes[2].set_xlabel("milliseconds of a core for a plan")
    axes[2].set_ylabel("share of steps")
    axes[2].legend(frameon=False, fontsize=8, loc="center right")
    save(figure, path)

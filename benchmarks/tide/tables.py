"""What the rows of `benchmarks.tide` say: medians by kind, single figures, tables in Markdown."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.tide.copies import LAYOUT, ORDER


def summarize(rows: list[dict[str, Any]], model: str) -> dict[str, Any]:
    """Medians and spread of all rounds, memory, bytes or kernels of each kind (and length), under
    `kinds`; beside it single figures that others read, with `model` in their names."""
    kinds = by_kind(rows)
    return {**single_figures(kinds, model), "kinds": kinds}


def by_kind(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The part of the summary that names every kind."""
    summary: dict[str, Any] = {}
    several = any("kernels" in row for row in rows)
    for kind, length in dict.fromkeys((row["kind"], row["length"]) for row in rows):
        mine = [row for row in rows if (row["kind"], row["length"]) == (kind, length)]
        each: dict[str, Any] = {"memory": mine[-1]["memory"]}
        for key in ("step", "passes", "host"):
            seconds = sorted(s for row in mine for s in row.get(key, ()))
            if seconds:
                low, high = (seconds[int(share * (len(seconds) - 1))] for share in (0.1, 0.9))
                each[f"{key}_ms"] = [
                    round(1000 * s, 2) for s in (statistics.median(seconds), low, high)
                ]
        each |= {key: mine[-1][key] for key in KEPT if key in mine[-1]}
        summary[f"{kind}, {length} tokens" if several else kind] = each
    return summary


def single_figures(kinds: dict[str, Any], model: str) -> dict[str, float]:
    """Ratios to torch's collectives by length, where both were measured on a GPU.

    `passes`: forward and backward; `step`: with clipping and the optimizer; `vs_symm`: of FSDP2 with
    symmetric memory instead.
    """
    found: dict[str, float] = {}
    for name, tide in kinds.items():
        kind, _, length = name.rpartition(", ")
        if kind != "tide" or "kernels" not in tide:
            continue
        short = f"{model}_{int(length.split()[0]) // 1024}k"
        for other, key in (("stock", ""), ("stock, symmetric memory", "_vs_symm")):
            beside = kinds.get(f"{other}, {length}")
            if beside is None:
                continue
            for what in ("step", "passes"):
                ratio = tide[f"{what}_ms"][0] / beside[f"{what}_ms"][0]
                found[f"{what}_ratio{key}_{short}"] = round(ratio, 4)
            label = "symm" if key else "stock"
            found[f"peak_gib_{label}_{short}"] = _gib(beside)
            if not key:
                found |= _kernel_figures(beside, tide, short)
        found[f"peak_gib_tide_{short}"] = _gib(tide)
    return found


def losses_apart(rows: list[dict[str, Any]]) -> dict[str, tuple[float, int]]:
    """How far the losses of each kind are from those of torch's collectives in the first round, as the
    largest share of a loss, and over how many steps. Torch's own later rounds show what is noise."""
    first = {row["length"]: row["losses"] for row in reversed(rows) if row["kind"] == "stock"}
    found: dict[str, tuple[float, int]] = {}
    for row in rows:
        if row["kind"] == "stock" and row["round"] == 0:
            continue
        apart, steps = found.get(row["kind"], (0.0, 0))
        pairs = zip(row["losses"], first[row["length"]], strict=True)
        apart = max(apart, *(abs(own - other) / abs(other) for own, other in pairs))
        found[row["kind"]] = apart, steps + len(row["losses"])
    return found


def _kernel_figures(stock: dict[str, Any], tide: dict[str, Any], short: str) -> dict[str, float]:
    """What kernels of collectives cost: shares of the step, and ratios torch / TIDE."""
    layout, plain, weighted = {}, {}, {}
    for name, each in (("stock", stock), ("tide", tide)):
        layout[name] = spent(each["kernels"], LAYOUT_KERNELS)[0] / each["step_ms"][0]
        plain[name], weighted[name] = spent(each["kernels"], REDUCE_KERNELS)
    found = {f"layout_share_{name}_{short}": round(share, 4) for name, share in layout.items()}
    for key, figures in (("rs_kernel_time_ratio", plain), ("rs_sm_time_ratio", weighted)):
        found[f"{key}_{short}"] = round(figures["stock"] / max(figures["tide"], 1e-9), 2)
    return found


def _gib(each: dict[str, Any]) -> float:
    return round(each["memory"]["device"] / 2**30, 2)


KEPT = ("bytes", "kernels", "copies", "losses")
"""Of the last round."""
LAYOUT_KERNELS = ("chunk_cat", "split_with_sizes_copy", "all_gather_copy_in")
REDUCE_KERNELS = ("ReduceScatter", "chunk_cat", "_add_up_kernel")


def spent(kernels: dict[str, list[float]], words: Sequence[str]) -> tuple[float, float]:
    """Milliseconds of the kernels with one of `words` in their names: summed, and weighted."""
    found = [ms for key, ms in kernels.items() if any(word in key for word in words)]
    return sum(ms[0] for ms in found), sum(ms[1] for ms in found)


def times(summary: dict[str, Any]) -> str:
    """GPU figures in Markdown: ms, and GiB of the device's memory as the driver sees it."""
    head = (
        "", "step", "forward and backward", "layout kernels",
        "reduce-scatter kernels (by share of the SMs)", "device memory", "of it slots and staging",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, each in summary.items():
        kernels = each.get("kernels", {})
        layout, reduce = (spent(kernels, words) for words in (LAYOUT_KERNELS, REDUCE_KERNELS))
        memory = each["memory"]
        own = memory.get("slots", 0) + memory.get("staging", 0)
        step, low, high = each["step_ms"]
        lines.append(
            f"| {name} | {step:.1f} ({low:.1f}-{high:.1f}) ms | {each['passes_ms'][0]:.1f} ms "
            f"| {layout[0]:.1f} ms | {reduce[0]:.1f} ({reduce[1]:.1f}) ms "
            f"| {memory['device'] / 2**30:.1f} GiB | {own / 2**30:.1f} GiB |"
        )
    return "\n".join(lines)


def table(summary: dict[str, Any]) -> str:
    """In Markdown, MB = 10^6 bytes, of one rank."""
    kinds = list(summary)
    lines = [
        "| of one rank in a step | " + " | ".join(kinds) + " |",
        "|---" * (len(kinds) + 1) + "|",
    ]

    def line(name: str, values: list[int | None]) -> str:
        shown = ["-" if value is None else f"{value / 1e6:.2f} MB" for value in values]
        return f"| {name} | " + " | ".join(shown) + " |"

    for cause in ORDER:
        lines.append(line(cause, [summary[k]["bytes"].get(cause, 0) for k in kinds]))
    total = [sum(summary[k]["bytes"].get(c, 0) for c in LAYOUT) for k in kinds]
    lines.append(line("**to change the layout, all told**", list(total)))
    for part in ("slots", "staging"):
        lines.append(line(f"memory of {part}", [summary[k]["memory"].get(part) for k in kinds]))
    times = [f"{summary[k]['step_ms'][0]:.0f} ms" for k in kinds]
    lines.append("| step (no evidence for GPUs) | " + " | ".join(times) + " |")
    return "\n".join(lines)

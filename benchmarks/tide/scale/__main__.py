"""Predicts the passes of a step: first what was measured on two GPUs, then what was not.

    python -m benchmarks.tide.scale [--rates FILE] [--json FILE]

Inputs are the kernels of each model, as traced on two GPUs, and the rates of `h200.json`, which says
where each is from, and what was changed after they were compared with the measurements.
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.results import write
from benchmarks.tide.scale.rates import Rates, load
from benchmarks.tide.scale.step import Cluster, passes
from benchmarks.tide.scale.workloads import SHAPES, Measured, groups_of, measurements

RATES = Path(__file__).with_name("h200.json")
RANKS = (8, 16, 32, 64)
NODE = 8


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("--rates", type=Path, default=RATES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rates = load(options.rates)
    every = [found for shape in SHAPES for found in measurements(shape)]
    rows = [row for found in every for row in (*compare(found, rates), *predict(found, rates))]
    print("\n\n".join(tables(rows)))
    if options.json:
        write(options.json, "tide.scale", "cpu", {"rates": options.rates.name}, rows, summary(rows))


def compare(found: Measured, rates: Rates) -> list[dict[str, Any]]:
    """Predicted and measured passes on two GPUs, by kind."""
    groups = groups_of(found)
    return [
        {
            "what": "measured", "model": found.shape.title, "tokens": found.tokens, "kind": kind,
            "predicted_ms": round(1000 * (said := passes(kind, groups, Cluster(2, 2), rates)), 1),
            "measured_ms": round(1000 * seconds, 1), "error": round(said / seconds - 1, 4),
        }
        for kind, seconds in found.passes.items()
    ]  # fmt: skip


def predict(found: Measured, rates: Rates) -> list[dict[str, Any]]:
    """Steps of the whole model on nodes of eight: passes, norm and optimizer."""
    groups = groups_of(found, found.shape.layers)
    measured = sum(group.numel for group in groups_of(found)) / 2
    rows = []
    for ranks in RANKS:
        shard = sum(group.numel for group in groups) / ranks
        update = found.optimizer * shard / measured
        steps = {
            kind: passes(kind, groups, Cluster(ranks, min(NODE, ranks)), rates) + update
            for kind in ("stock", "symmetric", "tide")
        }
        rows.append(
            {
                "what": "predicted", "model": found.shape.title, "tokens": found.tokens,
                "ranks": ranks, **{f"{k}_ms": round(1000 * s, 1) for k, s in steps.items()},
                "of_stock": round(steps["tide"] / steps["stock"], 4),
                "of_symmetric": round(steps["tide"] / steps["symmetric"], 4),
            }
        )  # fmt: skip
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The largest errors, by kind."""
    compared = [row for row in rows if row["what"] == "measured"]
    return {
        f"largest_error_{kind}": max(abs(r["error"]) for r in compared if r["kind"] == kind)
        for kind in sorted({row["kind"] for row in compared})
    }


def tables(rows: list[dict[str, Any]]) -> tuple[str, str]:
    """What was measured and what was not, in Markdown."""
    lines = ["| model | tokens a GPU | | predicted | measured | |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {r['model']} | {r['tokens']:,} | {r['kind']} | {r['predicted_ms']:,} ms | "
        f"{r['measured_ms']:,} ms | {100 * r['error']:+.1f} % |"
        for r in rows if r["what"] == "measured"
    ]  # fmt: skip
    further = [
        "| model | tokens a GPU | GPUs | stock | symmetric memory | TIDE | of stock | of the other |",
        "|---|---|---|---|---|---|---|---|",
    ]
    further += [
        f"| {r['model']} | {r['tokens']:,} | {r['ranks']} | {r['stock_ms']:,} ms | "
        f"{r['symmetric_ms']:,} ms | {r['tide_ms']:,} ms | {r['of_stock']:.3f} | "
        f"{r['of_symmetric']:.3f} |"
        for r in rows if r["what"] == "predicted"
    ]  # fmt: skip
    return "\n".join(lines), "\n".join(further)


if __name__ == "__main__":
    main()

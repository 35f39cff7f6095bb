"""Tables of docs/trip.md from the results of studies, of the comparison with FuxiCTR, and of throughput.

    python -m benchmarks.trip.page benchmarks/results/trip-*.json [--into docs/trip.md]

Prints Markdown; with `--into`, puts it between the page's two marks. No figure is typed by hand.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.trip.grid import ENCODINGS, MASKS
from benchmarks.trip.throughput import BASE
from benchmarks.trip.verdict import LEVEL, bins, sentence, table
from recipes.ctr.significance import Difference

ORDER = (
    "baselines",
    "chosen",
    "levers",
    "parts",
    "together",
    "encodings",
    "planted",
    "throughput",
    "fuxictr",
)
"""Of the sections, by what their files are named after."""
NAMES = {"movielens": "MovieLens", "fuxictr": "Beside FuxiCTR"}
"""Of sets and benchmarks, where they are not just capitalized."""
TABLES = "trip.tables"
"""Of divided tables: that is on the page in words."""
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def main() -> None:
    """Print, or write into a page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--into", type=Path)
    options = parser.parse_args()
    found = [(file, json.loads(file.read_text())) for file in sorted(options.results, key=place)]
    text = "\n\n".join(section(file, result) for file, result in found if result["name"] != TABLES)
    if options.into is None:
        print(text)
        return
    before, mark, rest = options.into.read_text().partition(BEGIN)
    _, other, after = rest.partition(END)
    if not mark or not other:
        parser.error(f"{options.into} lacks the marks {BEGIN} and {END}")
    options.into.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def place(file: Path) -> tuple[int, str]:
    """Where its section comes: by kind, then by name."""
    kinds = [n for n, kind in enumerate(ORDER) if kind in file.stem]
    return (*kinds, len(ORDER))[0], file.stem


def section(file: Path, result: dict[str, Any]) -> str:
    """Heading, what was run on what, and tables."""
    if result["name"] == "trip.throughput":
        device, lines = result["machine"]["device"], throughput(result)
    elif result["name"] == "trip.fuxictr":
        device, lines = result["machine"]["device"], beside(result)
    else:
        trainings = (t for row in result["rows"] for t in row["trainings"])
        device = ", ".join(sorted({t["device"] for t in trainings if "device" in t}))
        lines = study(result)
    title = file.stem.removeprefix("trip-").removesuffix("-1xH200").replace("-", ": ", 1)
    name, colon, of = title.partition(":")
    head = [
        f"### {NAMES.get(name, name.capitalize())}{colon}{of}",
        "",
        f"{device}; {result['date']}; `{file.name}`",
        "",
    ]
    return "\n".join([*head, *lines]).rstrip()


def study(result: dict[str, Any]) -> list[str]:
    """The models, the grid if there is one, and what may be said of the candidate."""
    rows, summary = {row["model"]: row for row in result["rows"]}, result["summary"]
    spread = {
        model: float(np.std(row["by_seed"]["auc"], ddof=1))
        for model, row in rows.items()
        if len(row["by_seed"].get("auc", [])) > 1
    }
    lines = [f"{result['config']['targets']}; {result['config']['seeds']} seeds.", ""]
    lines += [*table({model: row["figures"] for model, row in rows.items()}, spread), ""]
    lines += grid(rows, summary["candidate"], summary["metric"])
    for model, row in rows.items():
        if (of := row["against"].get(summary["metric"])) is not None:
            p, found = of["p_holm"], {k: v for k, v in of.items() if k != "p_holm"}
            words = sentence(summary["candidate"], model, summary["metric"], Difference(**found), p)
            lines.append(f"- {words}")
    if "verdict" in summary:
        lines += ["", summary["verdict"], ""]
        shown = (summary["candidate"], summary["strongest"])
        for way in rows[shown[0]]["by_bin"]:
            lines += [*bins(way, {model: rows[model]["by_bin"][way] for model in shown}), ""]
    return lines


def grid(rows: dict[str, Any], candidate: str, metric: str) -> list[str]:
    """Encodings by masks, each less the candidate; a star where it differs after Holm's correction."""
    lines = [f"| {metric}, less `{candidate}` | " + " | ".join(MASKS) + " |", "|---" * 4 + "|"]
    some = False
    for name, words in ENCODINGS.items():
        cells = []
        for mask in MASKS:
            row = rows.get(" ".join(f"transformer model.mask={mask} {words}".split()))
            of = row["against"].get(metric) if row else None
            some |= of is not None
            star = "*" if of and of["p_holm"] < LEVEL else ""
            cells.append(
                f"{-of['mean']:+.4f}{star} ({-of['high']:+.4f} to {-of['low']:+.4f})" if of else ""
            )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, ""] if some else []


def beside(result: dict[str, Any]) -> list[str]:
    """FuxiCTR's models and ours on the same rows."""
    config = result["config"]
    lines = [
        f"{config['targets']}; items only, histories of {config['max_history']}, embeddings of "
        f"{config['hidden_size']}, {config['epochs']} epochs of batches of {config['batch_size']}, rate "
        f"{config['lr']:g}, {config['seeds']} seeds.",
        "",
        "| model | test AUC (sd) | by seed |",
        "|---" * 3 + "|",
    ]
    for row in result["rows"]:
        of = np.array(row["auc"])
        spread = f" ({of.std(ddof=1):.4f})" if len(of) > 1 else ""
        seeds = ", ".join(f"{value:.4f}" for value in of)
        lines.append(f"| {row['model']} | {of.mean():.4f}{spread} | {seeds} |")
    aucs, summary = {row["model"]: row["auc"] for row in result["rows"]}, result["summary"]
    less = []
    for name, value in summary.items():
        if name not in ("near", "paired", "interval"):
            theirs = aucs[f"FuxiCTR {name.partition(',')[0]}"]
            less.append(f"{name} {value:+.4f} ({chance(aucs[f'ours, {name}'], theirs)})")
    lines += ["", f"Ours less theirs: {'; '.join(less)}."] if less else []
    if "paired" in summary:
        each = ", ".join(f"{value:+.5f}" for value in summary["paired"])
        mean = sum(summary["paired"]) / len(summary["paired"])
        lines += ["", f"From the same start, over the same batches: {each}; mean {mean:+.5f}."]
        if "interval" in summary:
            low, high = summary["interval"]
            lines[-1] = f"{lines[-1][:-1]} (95 % interval {low:+.5f} to {high:+.5f})."
    return lines


def chance(own: list[float], other: list[float]) -> str:
    """The standard error of a difference of means over seeds that have nothing in common."""
    if min(len(own), len(other)) < 2:
        return "one seed"
    error = sum(np.var(of, ddof=1) / len(of) for of in (own, other)) ** 0.5
    return f"standard error {error:.4f}"


def throughput(result: dict[str, Any]) -> list[str]:
    """Milliseconds and memory, and how many times the transformer's they are."""
    lines = [
        "| history x batch | model | training | inference | memory, training | inference |",
        "|---" * 6 + "|",
    ]
    base = {row["length"]: row for row in result["rows"] if row["model"] == BASE}
    for row in result["rows"]:
        cells = []
        for key, unit in (("train_ms", "ms"), ("infer_ms", "ms"), ("train_GiB", "GiB"),
                          ("infer_GiB", "GiB")):  # fmt: skip
            times = base[row["length"]][key] / row[key] if row[key] else 0.0
            less = f" ({times:.2f}x)" if times and row["model"] != BASE else ""
            cells.append(f"{row[key]:.2f} {unit}{less}")
        lines.append(
            f"| {row['length']} x {row['batch']} | {row['model']} | " + " | ".join(cells) + " |"
        )
    return lines


if __name__ == "__main__":
    main()

"""Draws `docs/pictures/tide-*.svg` from the files under `benchmarks/results/`.

    python -m benchmarks.plots

Needs matplotlib (`pip install springtide[plots]`).
"""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PICTURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "pictures"
STYLE: Any = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "axes.grid.axis": "y", "grid.color": "#dddddd", "axes.axisbelow": True, "svg.fonttype": "none",
    "svg.hashsalt": "springtide", "figure.facecolor": "white",
}  # fmt: skip
COLORS = {
    "stock": "#8c8c8c", "stock, symmetric memory": "#c9a227", "tide, all-gather only": "#9ecae1",
    "tide, reduce-scatter only": "#6baed6", "tide": "#08519c",
}  # fmt: skip
MODELS = {
    "tide-2xH200": "70B shape,\n4 layers",
    "tide-8b-2xH200": "8B shape,\nrecomputed",
    "tide-qwen3_30b_a3b-2xH200": "Qwen3 30B-A3B\nshape, 6 layers",
    "tide-wan22-2xH200": "Wan 2.2 shape,\n8 layers",
}


def main() -> None:
    """Draw everything."""
    PICTURES.mkdir(exist_ok=True)
    with plt.rc_context(STYLE):
        save(passes(), "tide-passes")
        save(models(), "tide-models")
        save(alone(), "tide-alone")
        save(scale(), "tide-scale")


def passes() -> Any:
    """Milliseconds of the passes by kind, a group of bars for each number of tokens."""
    kinds = _kinds("tide-2xH200")
    lengths = sorted({_length(name) for name in kinds})
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    width = 0.8 / len(COLORS)
    for number, (kind, color) in enumerate(COLORS.items()):
        ratios, errors = [], []
        for length in lengths:
            base = kinds[f"stock, {length} tokens"]["passes_ms"][0]
            middle, low, high = (ms / base for ms in kinds[f"{kind}, {length} tokens"]["passes_ms"])
            ratios.append(middle)
            errors.append((middle - low, high - middle))
        places = [at + number * width for at in range(len(lengths))]
        bars = axes.bar(places, ratios, width * 0.92, color=color, label=kind,
                        yerr=list(zip(*errors, strict=True)), error_kw={"lw": 0.8})  # fmt: skip
        if kind in ("tide", "stock, symmetric memory"):
            axes.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], fontsize=7, padding=2)
    axes.set_xticks([at + 0.4 - width / 2 for at in range(len(lengths))],
                    [f"{length:,} tokens" for length in lengths])  # fmt: skip
    axes.set_ylabel("forward and backward, torch = 1")
    axes.set_title("70B shape, 4 layers, 2 x H200: medians, 10 % to 90 %", loc="left", fontsize=9)
    axes.legend(ncols=3, frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    return figure


def scale() -> Any:
    """Predicted over measured passes, a point for each model, number of tokens and kind."""
    rows = json.loads((RESULTS / "tide-scale.json").read_text())["rows"]
    rows = [row for row in rows if row["what"] == "measured"]
    names = list(dict.fromkeys(f"{row['model']}, {row['tokens'] // 1024}K" for row in rows))
    colors = {
        "stock": COLORS["stock"], "symmetric": COLORS["stock, symmetric memory"],
        "tide": COLORS["tide"],
    }  # fmt: skip
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for kind, color in colors.items():
        mine = [row for row in rows if row["kind"] == kind]
        places = [names.index(f"{row['model']}, {row['tokens'] // 1024}K") for row in mine]
        errors = [100 * row["error"] for row in mine]
        axes.plot(errors, places, "o", color=color, label=kind)
    axes.axvspan(-8, 8, color="0.5", alpha=0.12, lw=0)
    axes.axvline(0, color="0.5", lw=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("predicted passes over measured ones, %; the band is 8 %")
    axes.legend(frameon=False, fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.4, 1.12))
    return figure


def models() -> Any:
    """The ratio TIDE / torch for every model and number of tokens."""
    bars: list[tuple[str, float]] = []
    for file, title in MODELS.items():
        kinds = _kinds(file)
        for name, each in kinds.items():
            if name.startswith("tide, ") and name.removeprefix("tide, ")[0].isdigit():
                stock = kinds[f"stock, {_length(name)} tokens"]
                ratio = each["passes_ms"][0] / stock["passes_ms"][0]
                bars.append((f"{title}, {_length(name) // 1024}K", ratio))
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    drawn = axes.barh([name.replace("\n", " ") for name, _ in bars][::-1],
                      [ratio for _, ratio in bars][::-1], color=COLORS["tide"])  # fmt: skip
    axes.bar_label(drawn, fmt="%.2f", fontsize=7, padding=2)
    axes.axvline(1, color=COLORS["stock"])
    axes.grid(visible=False)
    axes.set_xlim(0, 1.1)
    axes.set_xlabel("forward and backward with TIDE, torch's collectives = 1")
    return figure


def alone() -> Any:
    """Bandwidth by size, for nine tensors, of gathers and scatters."""
    rows = json.loads((RESULTS / "tide-alone-2xH200.json").read_text())["rows"]
    figure, both = plt.subplots(1, 2, figsize=(7, 2.8), sharex=True, layout="constrained")
    for axes, what in zip(both, ("gather", "scatter"), strict=True):
        for who, color in (("torch", COLORS["stock"]), ("tide", COLORS["tide"])):
            mine = [r for r in rows if r["what"] == f"{what}, {who}" and r["tensors"] == 9]
            mine.sort(key=lambda row: row["nbytes"])
            axes.plot([r["nbytes"] / 2**20 for r in mine], [r["GB/s"] for r in mine],
                      "o-", ms=3, color=color, label=who)  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_title(f"{what} of nine tensors", loc="left", fontsize=9)
        axes.set_xlabel("MiB")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
    both[0].set_ylabel("GB/s, casts and sums included")
    return figure


def save(figure: Any, name: str) -> None:
    """Write the picture, equal for equal data."""
    figure.savefig(PICTURES / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def _kinds(file: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{file}.json").read_text())["summary"]["kinds"])


def _length(name: str) -> int:
    return int(name.rpartition(", ")[2].split()[0])


if __name__ == "__main__":
    main()

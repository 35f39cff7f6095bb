"""The findings of a study in words and tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from recipes.ctr.significance import Difference

NAMES = {"auc": "AUC", "gauc": "GAUC", "logloss": "log loss"}
LEVEL = 0.05
"""Below it, after correction, a difference is called one."""
TOO_SMALL = 0.001
"""Differences of AUC or GAUC below this are called too small to matter, whatever their p."""


def sentence(candidate: str, other: str, metric: str, found: Difference, p: float) -> str:
    """What may be said of two models; `p` is the corrected one."""
    name = NAMES[metric]
    numbers = (
        f"{found.mean:+.4f} {name} (95 % interval {found.low:+.4f} to {found.high:+.4f}; "
        f"p {p:.3g} after Holm's correction)"
    )
    if p >= LEVEL:
        return f"no significant difference between {candidate} and {other}: {numbers}"
    better = (found.mean < 0) == (metric == "logloss")
    word = "better" if better else "worse"
    if metric != "logloss" and abs(found.mean) < TOO_SMALL:
        word += ", but by too little to matter"
        return f"{candidate} is significantly {word} (than {other}): {numbers}"
    return f"{candidate} is significantly {word} than {other}: {numbers}"


def conclusion(
    candidate: str,
    strongest: str,
    metric: str,
    found: Difference,
    p: float,
    beaten: int,
    others: int,
) -> str:
    """The answer to the question that the study asked."""
    return (
        f"The strongest of the others on the validation part is {strongest}: "
        f"{sentence(candidate, strongest, metric, found, p)}. {candidate} is significantly better in "
        f"{NAMES[metric]} than {beaten} of the {others} others."
    )


COLUMNS = {
    "validation": "validation",
    "auc": "test AUC",
    "gauc": "GAUC",
    "logloss": "log loss",
    "calibration": "predicted / actual",
    "calibration_error": "calibration error",
}


def table(figures: Mapping[str, Mapping[str, float]], spread: Mapping[str, float]) -> list[str]:
    """Lines of Markdown, a row for each model; `spread`: the AUC's standard deviation over seeds."""
    drawn = ("auc_uniform", "auc_popular", "auc_near")
    kinds = [kind for kind in drawn if any(kind in row for row in figures.values())]
    columns = {**COLUMNS, **{kind: kind.replace("auc_", "AUC, ") for kind in kinds}}
    lines = [
        "| model | " + " | ".join([*columns.values(), "sd of AUC"]) + " |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for model, row in figures.items():
        values = [f"{row[name]:.4f}" if name in row else "" for name in columns]
        sd = f"{spread[model]:.4f}" if model in spread else ""
        lines.append(f"| `{model}` | " + " | ".join([*values, sd]) + " |")
    return lines


def bins(way: str, found: Mapping[str, Sequence[Sequence[Any]]]) -> list[str]:
    """Lines of Markdown: AUC by bin, a column for each model."""
    models = list(found)
    lines = [f"| {way} | targets | " + " | ".join(f"`{m}`" for m in models) + " |"]
    lines.append("|---" * (len(models) + 2) + "|")
    for n, (name, count, _) in enumerate(found[models[0]]):
        if not count:
            continue
        values = (found[m][n][2] for m in models)
        shown = ["" if v is None else f"{v:.4f}" for v in values]
        lines.append(f"| {name} | {count:,} | " + " | ".join(shown) + " |")
    return lines

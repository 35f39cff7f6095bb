"""The panels of a task (`docs/writing-a-task.md`) as tables, for what draws no panels."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.watch.page.runs import PANELS

Table = tuple[list[str], list[list[Any]]]
"""Names of the columns, and rows."""


def read_tables(run_dir: Path) -> dict[str, Table]:
    """By title, what the panels of a run hold; texts and what cannot be read are left out."""
    try:
        panels = json.loads((run_dir / PANELS).read_text())
    except (OSError, ValueError):
        return {}
    found = {}
    for panel in panels if isinstance(panels, list) else []:
        try:
            table = as_table(panel)
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
        if table is not None:
            found[str(panel.get("title", "Panel"))] = table
    return found


def as_table(panel: Mapping[str, Any]) -> Table | None:
    """Lines as a row for each point, heatmaps and tables as they are; None for other kinds."""
    kind = panel["kind"]
    if kind == "lines":
        rows = [[name, *point] for name, points in panel["series"].items() for point in points]
        return ["series", str(panel.get("x", "step")), "value"], rows
    if kind == "heatmap":
        named = zip(panel["rows"], panel["values"], strict=True)
        return ["", *map(str, panel["columns"])], [[name, *values] for name, values in named]
    if kind == "table":
        return list(map(str, panel["columns"])), [list(row) for row in panel["rows"]]
    return None

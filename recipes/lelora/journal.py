"""`decisions.jsonl`: what was decided, why, and what came of it; and the report's panels of it."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from models.lelora.features import QUANTILES
from models.lelora.inject import Target

SHOWN = 48
"""A heat map has at most so many rows; more matrices are shown by layer and kind, every so many."""

REPORTED = ("reward", "reliability", "entropy", "switched")


class Journal:
    """One line a decision, written by rank 0. A run that is resumed drops what it will do again."""

    def __init__(self, run_dir: Path, names: Sequence[str]) -> None:
        self.path, self.names = run_dir / "decisions.jsonl", list(names)
        self.rows: list[dict[str, Any]] = []

    def open(self, step: int) -> None:
        """Go on after `step`."""
        if not self.path.is_file():
            return
        lines = [json.loads(line) for line in self.path.read_text().splitlines() if line]
        self.rows = [row for row in lines if row["step"] <= step]
        if _rank() == 0:
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
            os.replace(temporary, self.path)

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a line; it is in the file when this returns."""
        kept = {"modules": self.names, **row} if not self.rows else dict(row)
        self.rows.append(kept)
        if _rank() == 0:
            with self.path.open("a") as file:
                file.write(json.dumps(kept) + "\n")

    def figures(self, after: int, step: int) -> dict[str, Any]:
        """The newest decision after step `after`, up to `step`: for metrics, and so for wandb."""
        rows = [row for row in self.rows if after < row["step"] <= step]
        if not rows:
            return {}
        wanted = ("widths", "scales", "cost", "budget", *REPORTED)
        return {f"lelora_{key}": rows[-1][key] for key in wanted if rows[-1].get(key) is not None}

    def panels(self) -> list[dict[str, Any]]:
        """Widths and scales over time by matrix, and how deciding went."""
        if not self.rows:
            return []
        every = -(-len(self.names) // SHOWN)
        shown = range(0, len(self.names), every)
        columns = [f"step {row['step']}" for row in self.rows]
        found: list[dict[str, Any]] = []
        for key, title in (("widths", "Rows that train"), ("scales", "Scale of their learning"),
                           ("starts", "Place of the window")):  # fmt: skip
            values = [[row[key][matrix] for row in self.rows] for matrix in shown]
            if all(value == values[0][0] for line in values for value in line):
                continue
            found.append(
                {"title": title, "kind": "heatmap", "rows": [self.names[m] for m in shown],
                 "columns": columns, "values": values, "form": "number"}
            )  # fmt: skip
        for title, keys in (
            ("Reward of decisions", ("reward", "reliability")),
            ("Entropy of the policy", ("entropy",)),
            ("Trainable parameters of adapters", ("cost", "budget")),
            ("Matrices switched", ("switched",)),
        ):
            series = {key: [[row["step"], row[key]] for row in self.rows if row.get(key) is not None]
                      for key in keys}  # fmt: skip
            if any(series.values()):
                found.append({"title": title, "kind": "lines", "x": "step", "series": series})
        return found


def spectrum_panel(targets: Sequence[Target], spectra: Sequence[Tensor]) -> dict[str, Any]:
    """Singular values over the largest, by kind of matrix: means over its matrices."""
    series: dict[str, list[list[float]]] = {}
    for kind in dict.fromkeys(target.kind for target in targets):
        of = [s for target, s in zip(targets, spectra, strict=True) if target.kind == kind]
        series[kind] = [
            [q, sum(float(s[int(q * (len(s) - 1))] / s[0].clamp(min=1e-30)) for s in of) / len(of)]
            for q in QUANTILES
        ]
    return {"title": "Singular values of the base model, over the largest", "kind": "lines",
            "x": "place in the spectrum", "series": series}  # fmt: skip


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0

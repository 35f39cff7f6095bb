"""A run folder as data: rows, configuration, panels, checkpoints."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.checkpoint.folder import Checkpoints
from trainer.errors import CheckpointError
from trainer.watch.metrics import read

PANELS = "panels.json"
"""What the task adds to the report."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """One that is complete, as far as its folder tells."""

    name: str
    gib: float
    written: float
    """Seconds since 1970."""
    newest: bool
    best: bool = False
    """As the newest knows it (`checkpoint.highest`, `checkpoint.lowest`)."""


@dataclass(frozen=True)
class Run:
    """Everything that the page shows of a run."""

    name: str
    rows: list[Row] = field(default_factory=list)
    config: str = ""
    """As YAML, without secrets."""
    panels: list[Any] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)

    def of(self, kind: str) -> list[Row]:
        """The rows of one kind, in the order they were written."""
        return [row for row in self.rows if row.get("kind") == kind]


def load_run(folder: Path) -> Run:
    """Read a run folder. Raises `ValueError` if it is none."""
    if not (folder / "metrics.jsonl").is_file():
        raise ValueError(f"{folder} is no run folder: it has no metrics.jsonl")
    config = folder / "config.yaml"
    return Run(
        name=folder.resolve().name,
        rows=[row for row in read(folder / "metrics.jsonl") if _is_row(row)],
        config=config.read_text(errors="replace") if config.is_file() else "",
        panels=_panels(folder / PANELS),
        checkpoints=_checkpoints(folder / "checkpoints"),
    )


def _is_row(row: Any) -> bool:
    """Whether it has what every row has."""
    known = isinstance(row, dict) and isinstance(row.get("kind"), str)
    return known and isinstance(row.get("step"), int)


def _panels(file: Path) -> list[Any]:
    try:
        panels = json.loads(file.read_text())
    except (OSError, ValueError):
        return []
    return panels if isinstance(panels, list) else [panels]


def _checkpoints(folder: Path) -> list[Checkpoint]:
    """Those whose last file is there; one may be deleted while we look."""
    found = []
    try:
        newest = (folder / "latest").read_text().strip()
    except OSError:
        newest = ""
    try:
        best = Checkpoints(folder).best()
    except (CheckpointError, OSError):
        best = None
    for path in sorted(folder.glob("step-*")):
        try:
            written = (path / "manifest.json").stat().st_mtime
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        except OSError:
            continue
        marks = path.name == newest, path == best
        found.append(Checkpoint(path.name, size / 2**30, written, *marks))
    return found

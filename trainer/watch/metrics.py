"""`metrics.jsonl`: every figure of a run, one JSON object a line. Other views are made from it."""

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

EVENTS = ("start", "end", "stall")
"""Kinds of rows about the run, not about a step: they stay, whatever is done again."""


class Metrics:
    """Appends rows; a resumed run first drops the rows of steps that it will do again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def open(self, step: int, without: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Begin after `step` (0: a new run); returns the rows that stay, all but `without`."""
        rows = [row for row in read(self.path) if row != without]
        kept = [row for row in rows if row["step"] <= step or row["kind"] in EVENTS]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(temporary, self.path)
        self._file = self.path.open("a", buffering=1)
        return kept

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row; it is in the file when this returns. NaN and infinity become null."""
        if self._file is not None:
            self._file.write(_line(row))

    def close(self) -> None:
        """No more rows."""
        if self._file is not None:
            self._file.close()
            self._file = None


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row from another thread or rank than the one that has the file open, which may hang."""
    with path.open("a") as file:
        file.write(_line(row))


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(_plain(row), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """Without what JSON has no number for."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; a last line that a crash cut off is left out."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line, object_pairs_hook=_shared))
        except ValueError:
            break
    return rows


def _shared(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """One string for a key in all rows: long runs have many, and half of their memory would be keys."""
    return {sys.intern(key): value for key, value in pairs}

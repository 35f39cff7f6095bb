"""Results of several files side by side: each row's figures over seeds, and tests over users.

X users, S seeds, R resamples
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.slide.scored import read
from recipes.ctr.metrics import Floats, Ints
from recipes.ctr.significance import CHUNK, Difference, Values, difference, draws
from recipes.slide.metrics import gains

CUT = 10
RESAMPLES = 1000
OTHERS = ("slide-latency", "slide-trials", "slide-student-trials", "slide-rl-trials")
"""Files that are not of studies."""


@dataclass
class SetStudies:
    """All that is known of one set."""

    name: str
    users: int
    files: list[dict[str, Any]] = field(default_factory=list)
    """Of studies, by seed."""
    counts: dict[str, Any] | None = None

    def rows(self, text: str) -> list[dict[str, Any]]:
        """A row by seed; of what nothing trains, one. Empty if there is none."""
        files = [self.counts] if self.counts is not None else []
        return [row for file in [*files, *self.files] for row in file["rows"] if row["row"] == text]

    def seeds(self, text: str) -> list[int]:
        """Those that have the row; -1 for what nothing trains."""
        found = [-1] if self.counts and any(r["row"] == text for r in self.counts["rows"]) else []
        return found + [
            file["config"]["seed"]
            for file in self.files
            if any(r["row"] == text for r in file["rows"])
        ]

    def figures(self, text: str, kind: str, name: str) -> list[float]:
        """One figure by seed."""
        return [
            row["figures"][kind][name] for row in self.rows(text) if name in row["figures"][kind]
        ]

    def gains(self, text: str, kind: str, name: str, only: str | None = None) -> list[Floats]:
        """What each user gives (X), by seed; of the users of a stratum only, if one is named."""
        found = []
        for row in self.rows(text):
            gain_X = gains(read(row["places"][kind]), CUT)[name]
            found.append(gain_X if only is None else gain_X[self.stratum(only)])
        return found

    def stratum(self, name: str) -> Ints:
        """The users of a stratum."""
        assert self.counts is not None
        letters = self.counts["summary"]["strata"][name]
        return np.flatnonzero(np.array([c == "1" for c in letters]))


def load(folder: Path) -> dict[str, SetStudies]:
    """Every set that has a file in the folder, in the order of the names."""
    found: dict[str, SetStudies] = {}
    for path in sorted(folder.glob("slide-*.json")):
        file = json.loads(path.read_text())
        if "set" not in file["config"] or path.stem in OTHERS:
            continue
        name = file["config"]["set"]
        of = found.setdefault(name, SetStudies(name, file["config"]["users"]))
        if path.stem.endswith("-counts"):
            of.counts = file
        else:
            of.files.append(file)
    return found


@lru_cache(maxsize=4)
def _drawn(users: int) -> NDArray[np.uint16]:
    """How often each user is drawn (R, X), the same for all rows: drawing takes long."""
    return np.concatenate([part.astype(np.uint16) for part in draws(users, RESAMPLES, seed=0)])


def _values(gains_S: Sequence[Floats]) -> Values:
    gains_XS = np.stack(gains_S, axis=1)
    drawn_RX = _drawn(len(gains_XS))
    parts = np.array_split(drawn_RX, max(1, RESAMPLES // CHUNK))
    sums_RS = np.concatenate([part.astype(np.float64) @ gains_XS for part in parts])
    return Values(gains_XS.mean(0), sums_RS / len(gains_XS))


def against(
    of: SetStudies, first: str, second: str, kind: str, name: str, only: str | None = None
) -> tuple[Difference, int] | None:
    """How much better the first row is, over the seeds that both have (and how many); None: nothing.

    Users are drawn anew, the same for both, and so are seeds if there are several.
    """
    own, other = of.seeds(first), of.seeds(second)
    shared = [s for s in own if s in other]
    if own == [-1] or other == [-1]:  # counts are the same for all seeds
        shared = [s for s in own if s >= 0] + [s for s in other if s >= 0]
    if not shared:
        return None
    pairs = []
    for text, seeds in ((first, own), (second, other)):
        gains_S = of.gains(text, kind, name, only)
        chosen = [gains_S[0 if seeds == [-1] else seeds.index(seed)] for seed in shared]
        pairs.append(chosen)
    users = len(pairs[0][0])
    if not users:
        return None
    return difference(_values(pairs[0]), _values(pairs[1])), len(shared)

"""From the lists of all rows to figures, and to the panels of the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from models.slide.history import NOTHING
from recipes.interactions.tables import Ints
from recipes.slide.metrics import (
    CUTS,
    by_stratum,
    exposure,
    gains,
    kendall,
    overlap,
    paired,
    places,
    repeats,
)
from recipes.slide.split import Split

Lists = Mapping[str, Mapping[str, Ints]]
"""`raw`, `new` and perhaps `free` lists (X, K) of each row."""


def compare(lists: Lists, reference: str, split: Split, part: str) -> dict[str, Any]:
    """All figures of all rows, as plain data.

    For raw and new lists: recall, NDCG and reciprocal rank, over all users and each stratum; the share
    of users whose target is at each place; coverage and Gini index; overlap and order against the
    reference; and the mean difference to it with its standard error over users.
    """
    targets_X = split.sequences.items_E[split.targets(part)]
    strata = split.strata(part)
    result: dict[str, Any] = {
        "part": part,
        "users": len(targets_X),
        "reference": reference,
        "strata": {name: int(rows.sum()) for name, rows in strata.items()},
        "rows": {},
    }
    for name, of_row in lists.items():
        found: dict[str, Any] = {}
        for kind in ("raw", "new"):
            items_XK, theirs_XK = of_row[kind], lists[reference][kind]
            K = items_XK.shape[1]
            cuts = tuple(cut for cut in CUTS if cut <= K) or (K,)
            place_X, their_place_X = (places(x, targets_X) for x in (items_XK, theirs_XK))
            found[kind] = {
                **by_stratum(place_X, strata, cuts),
                **exposure(items_XK, split.sequences.num_items),
                "by_position": [float((place_X == k).mean()) for k in range(K)],
                "repeats": repeats(items_XK),
                "missing": float((items_XK == NOTHING).mean()),
                "overlap": overlap(items_XK, theirs_XK),
                "kendall": kendall(items_XK, theirs_XK),
            }
            cut = 10 if 10 in cuts else cuts[-1]
            own, their = gains(place_X, cut), gains(their_place_X, cut)
            for figure in (f"recall@{cut}", f"ndcg@{cut}"):
                mean, error = paired(own[figure], their[figure])
                found[kind][f"{figure}_minus_reference"] = mean
                found[kind][f"{figure}_minus_reference_se"] = error
        if "free" in of_row:
            found["without_trie"] = {
                "invalid": float((of_row["free"] == NOTHING).mean()),
                "repeats": repeats(of_row["free"]),
            }
        result["rows"][name] = found
    return result


@dataclass
class EvalPanels:
    """What the report shows of a comparison."""

    reference: str
    result: dict[str, Any] = field(default_factory=dict)

    def panels(self) -> list[dict[str, Any]]:
        """Tables of raw and new lists, their position curves, and recall against latency."""
        if not self.result:
            return []
        rows = self.result["rows"]
        panels = [self._table(kind, about) for kind, about in (
            ("raw", "Items that the user has met may be in the lists."),
            ("new", "They may not: removed while searching, for every row alike."),
        )]  # fmt: skip
        panels += [
            {
                "title": f"Recall by length of the {kind} list",
                "kind": "lines",
                "about": f"What each further place of a {kind} list adds.",
                "x": "places",
                "series": {name: _curve(row[kind]["by_position"]) for name, row in rows.items()},
            }
            for kind in ("raw", "new")
        ]
        timed = {name: row["latency"] for name, row in rows.items() if "latency" in row}
        if timed:
            panels += [*self._plots(timed), self._latency(timed)]
        return panels

    def _table(self, kind: str, about: str) -> dict[str, Any]:
        first = next(iter(self.result["rows"].values()))[kind]
        cut = 10 if "recall@10" in first else max(c for c in (*CUTS, 1) if f"recall@{c}" in first)
        names = [f"{f}@{cut}" for f in ("recall", "ndcg")]
        columns = [*names, *(f"recall@{cut}_{s}" for s in self.result["strata"])]
        difference = f"recall@{cut}_minus_reference"
        more = [difference, f"{difference}_se", "overlap", "kendall", "coverage", "gini"]
        return {
            "title": f"{kind} lists, {self.result['part']}, {self.result['users']:,} users",
            "kind": "table",
            "about": f"{about} Differences and overlap are with {self.reference}.",
            "columns": ["row", *columns, *more],
            "rows": [
                [name, *(row[kind].get(c) for c in (*columns, *more))]
                for name, row in self.result["rows"].items()
            ],
        }

    def _found(self, name: str) -> float:
        return sum(self.result["rows"][name]["raw"]["by_position"])

    def _plots(self, timed: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """For each size of batches: a point for each row."""
        sizes = sorted({one["batch"] for of_row in timed.values() for one in of_row})
        return [
            {
                "title": f"Recall against latency, batch {size}",
                "kind": "lines",
                "about": "Raw lists; to the left and up is better.",
                "x": "ms",
                "series": {
                    name: [[one["ms"], self._found(name)] for one in of_row if one["batch"] == size]
                    for name, of_row in timed.items()
                },
            }
            for size in sizes
        ]

    def _latency(self, timed: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
        columns = ["batch", "ms", "ms_95", "users_per_second", "steps", "row_steps"]
        if any("peak_mib" in one for of_row in timed.values() for one in of_row):
            columns.append("peak_mib")
        return {
            "title": "Latency",
            "kind": "table",
            "about": "Milliseconds of a batch from histories to lists, on one device.",
            "columns": ["row", "recall", *columns],
            "rows": [
                [
                    name,
                    self._found(name),
                    *(one.get(c) for c in columns),
                ]
                for name, all_of_row in timed.items()
                for one in all_of_row
            ],
        }


def _curve(by_position: Sequence[float]) -> list[list[float]]:
    """Recall of the first places, one more for each."""
    return [[k, share] for k, share in enumerate(np.cumsum(by_position).tolist(), start=1)]

"""What the report shows of a click model: AUC by time and by length, and where its head looks.

B histories, N items, G temporal groups, L bins of the history's length
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipes.ctr import figures
from recipes.ctr.metrics import Floats, Ints
from recipes.ctr.samples import Clicks


def looks(
    weights_BN: Tensor,
    valid_BN: Tensor,
    groups_BN: Tensor,
    octaves_BN: Tensor,
    G: int,
    octaves: int,
) -> dict[str, Tensor]:
    """Sums of the head's weights by length and group (L, G) and by octave of the age.

    Each beside the sum that it would be if every item of a history weighed the same.
    """
    length_B = valid_BN.sum(1)
    starts = torch.tensor(figures.LENGTHS, device=weights_BN.device)
    bins_BN = torch.bucketize(length_B, starts, right=True)[:, None].expand_as(groups_BN)
    even_BN = valid_BN / length_B.clamp(min=1)[:, None]
    sums = {}
    for name, w_BN in (("looks", weights_BN), ("even", even_BN)):
        by_group = _sum_by(bins_BN * G + groups_BN, w_BN, (len(starts) + 1) * G)
        sums[f"{name}/group"] = by_group.view(-1, G)
        sums[f"{name}/octave"] = _sum_by(octaves_BN, w_BN, octaves)
    return sums


def _sum_by(numbers: Tensor, values: Tensor, size: int) -> Tensor:
    """Values added up by number."""
    zeros = torch.zeros(size, dtype=torch.float64, device=values.device)
    return zeros.index_add(0, numbers.flatten(), values.flatten().double())


def over_even(looks: Floats, even: Floats) -> list[list[float | None]]:
    """How much more is looked at each column than if all items were alike, row by row: 1 is even."""
    rows: list[list[float | None]] = []
    for look, flat in zip(looks, even, strict=True):
        if not (look.sum() > 0 and flat.sum() > 0):
            rows.append([None] * len(flat))
            continue
        share, due = look / look.sum(), flat / flat.sum()
        rows.append([float(s / d) if d > 0 else None for s, d in zip(share, due, strict=True)])
    return rows


@dataclass
class ClickPanels:
    """Keeps what each evaluation found; a resumed run begins anew."""

    group_names: Sequence[str]
    time_unit: int
    evaluations: list[dict[str, list[list[Any]]]] = field(default_factory=list)
    """AUC by bin, for each way to make bins."""
    figures: Mapping[str, float] = field(default_factory=dict)
    sums: Mapping[str, Any] = field(default_factory=dict)

    def keep(
        self, found: Mapping[str, float], clicks: Clicks, rows: Ints, logits: Floats,
        sums: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Note an evaluation: its figures, and the scores of the rows that it had."""
        labels = clicks.targets.labels_T[rows]
        ways = {
            "time since the newest interaction": figures.age_bins(clicks.newest_ages()[rows]),
            "length of the history": figures.length_bins(clicks.lengths()[rows]),
        }
        self.evaluations.append(
            {
                name: figures.auc_by(bins, names, logits[rows], labels)
                for name, (bins, names) in ways.items()
            }
        )
        self.figures, self.sums = found, sums

    def panels(self) -> list[dict[str, Any]]:
        """See `docs/writing-a-task.md` for the kinds."""
        if not self.evaluations:
            return []
        return [
            {
                "title": "AUC against popularity",
                "kind": "table",
                "about": "RelaImpr: how much of what popularity has above 0.5 was added.",
                "columns": ["part", "AUC", "of popularity", "RelaImpr"],
                "rows": figures.comparison(self.figures),
            },
            *(self._auc_by(name) for name in self.evaluations[-1]),
            {
                "title": "Attention by temporal group",
                "kind": "heatmap",
                "about": "What the head looks at, by the history's length; 1: as if all were alike.",
                "rows": figures.intervals([0, *figures.LENGTHS], str),
                "columns": list(self.group_names),
                "values": over_even(*self._looks("group")),
            },
            {
                "title": "Attention by age",
                "kind": "lines",
                "about": "The time curve that the head has learnt; 1: as if all items were alike. "
                f"Octave n begins at {self.time_unit} s x (2^n - 1).",
                "x": "octave of the age",
                "series": {"head": self._curve()},
            },
        ]

    def _auc_by(self, name: str) -> dict[str, Any]:
        newest = self.evaluations[-1][name]
        return {
            "title": f"AUC by {name}",
            "kind": "heatmap",
            "about": "Validation and test together; targets of each row in brackets.",
            "rows": [f"{bin_name} ({count:,})" for bin_name, count, _ in newest],
            "columns": [f"evaluation {n + 1}" for n in range(len(self.evaluations))],
            "values": [[past[name][n][2] for past in self.evaluations] for n in range(len(newest))],
        }

    def _looks(self, by: str) -> tuple[Floats, Floats]:
        looks, even = self.sums[f"looks/{by}"].numpy(), self.sums[f"even/{by}"].numpy()
        return np.atleast_2d(looks), np.atleast_2d(even)

    def _curve(self) -> list[list[float]]:
        (values,) = over_even(*self._looks("octave"))
        return [[n, value] for n, value in enumerate(values) if value is not None]

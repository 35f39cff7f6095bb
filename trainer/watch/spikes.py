"""Steps whose loss or gradient stands out, with the samples that did it, so that one can look at them.

A figure stands out if it lies further above the median of the last `WINDOW` steps than `factor` times
their usual scatter (the median distance from it), or is not finite. Nothing waits for the device before
a report. All ranks see the same figures, so all come to the same steps, and then say whose part of the
batch had the highest loss.
"""

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, isnan
from typing import Any

import torch

from collectives.host import gather_objects
from recipes.abilities import Locates
from trainer.data import Step
from trainer.watch.interval import Outcome

WINDOW = 100
"""Steps that tell what is usual."""
ENOUGH = 20
"""Steps before anything is; those of a resumed run are counted anew."""
LEAST = 0.01
"""Of the median: no scatter counts for less, or the first change after a standstill would stand out."""
SHOWN = 4
"""Samples of a batch that are named on the console, with their origins in the row; the row has all."""

Samples = Callable[[], list[int]]


@dataclass
class Usual:
    """What a figure was in the last steps."""

    values: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def median(self) -> float | None:
        """None before there are enough."""
        return statistics.median(self.values) if len(self.values) >= ENOUGH else None

    def stands_out(self, value: float, factor: float) -> bool:
        """Whether `value` does, which then counts as one of them; what is not finite does not count."""
        if not isfinite(value):
            return True
        usual, found = self.median(), False
        if usual is not None:
            scatter = statistics.median(abs(other - usual) for other in self.values)
            found = value - usual > factor * max(scatter, LEAST * abs(usual))
        self.values.append(value)
        return found


class Spikes:
    """Looks at every step; `factor` 0: at none."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._loss, self._norm = Usual(), Usual()
        self._noted: list[tuple[int, Samples, Samples]] = []

    def note(self, number: int, step: Step) -> None:
        """A step has been done; only which samples it has is kept."""
        if self._factor:
            self._noted.append((number, step.samples, step.own))

    def read(self, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
        """Rows on steps noted since the last call that stand out. Collective; waits for the device."""
        noted, self._noted = self._noted, []
        if not noted:
            return []
        figures = torch.stack([torch.stack([o.loss, o.norm]).double() for o in outcomes]).tolist()
        rows = []
        for (number, samples, own), outcome, (loss, norm) in zip(
            noted, outcomes, figures, strict=True
        ):
            usual = {"usual_loss": self._loss.median(), "usual_grad_norm": self._norm.median()}
            odd_loss = self._loss.stands_out(loss, self._factor)
            if self._norm.stands_out(norm, self._factor) or odd_loss:
                row = {"kind": "spike", "step": number, "loss": loss, "grad_norm": norm, **usual}
                rows.append({**row, "samples": samples(), **_highest(outcome, own())})
        return rows


def _highest(outcome: Outcome, own: Sequence[int]) -> dict[str, Any]:
    """The rank whose part of the batch had the highest mean loss, and its samples."""
    mean = outcome.own_loss.item() / outcome.own_count if outcome.own_count else -inf
    by_rank = gather_objects((mean, list(own)))
    means = [inf if isnan(mean) else mean for mean, _ in by_rank]
    rank = means.index(max(means))
    return {"rank": rank, "rank_loss": by_rank[rank][0], "rank_samples": by_rank[rank][1]}


def origins(task: Any, samples: Sequence[int]) -> dict[str, list[str]]:
    """What the first samples are made of, if the task can tell: see `recipes.abilities.Locates`."""
    if not isinstance(task, Locates):
        return {}
    return {str(sample): list(task.where(sample)) for sample in samples[:SHOWN]}


def in_words(row: dict[str, Any]) -> str:
    """A line for the console."""
    parts = [
        f"{name} {row[key]:.4g}" + (f" instead of {usual:.4g}" if usual is not None else "")
        for key, name in (("loss", "loss"), ("grad_norm", "norm"))
        for usual in [row[f"usual_{key}"]]
    ]
    mine = row["rank_samples"]
    shown = " ".join(f"--sample {sample}" for sample in mine[:SHOWN])
    more = f" and {len(mine) - SHOWN} more" if len(mine) > SHOWN else ""
    return (
        f"step {row['step']} stands out: {', '.join(parts)}; highest on rank {row['rank']}: "
        f"python -m trainer.inspect_data {shown}{more}"
    )

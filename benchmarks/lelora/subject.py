"""What a study wants to know of a model and a task."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.lelora.ground import Ground
from benchmarks.lelora.training import Plan, Run, Together
from models.lelora.stacked import Form


@dataclass(frozen=True)
class Scored:
    """Of one run, on one part."""

    loss: float
    accuracy: float
    """Share of what it has right."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """What intervals are made of."""


@dataclass(frozen=True)
class Tuning:
    """How learning rates are chosen."""

    middle: Mapping[str, float]
    """Of those that are tried, by method."""
    other: float
    """Of other methods."""
    tried: int = 5
    """By factors of 2 around the middle, at first."""
    seeds: Sequence[int] = (1000, 1001, 1002, 1003)
    """None of those that count."""
    by_loss: bool = False
    """The least loss is best, whatever is right."""

    def rates(self, method: str) -> list[float]:
        """Those that are tried at first."""
        middle = self.middle.get(method, self.other)
        return [middle * 2.0 ** (n - self.tried // 2) for n in range(self.tried)]


class Subject(Protocol):
    """One task of one model, on a device."""

    ground: Ground

    def together(
        self, plan: Plan, forms: Sequence[Form], runs: Sequence[Run], dtype: torch.dtype, *,
        judged: bool = False,
    ) -> Together:  # fmt: skip
        """Runs side by side, on all training texts, or without those that judge them."""

    def scored(self, together: Together, part: str) -> list[Scored]:
        """Each run, on `validation` or `test`."""

    def judged(self, together: Together, check: bool) -> Tensor:
        """Each run's loss on the training texts that judge rounds of a population, (P, X).

        With `check`: on those that judge what came of all rounds.
        """

"""From the steps between two reports to one row: what each rank measured, then what it says of all.

Steps only leave tensors behind. A report waits for the device, gathers a few numbers of each rank on
the host, and works the row out of them (`summarize`, plain arithmetic).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from math import isfinite, nan
from typing import Any

import torch
from torch import Tensor

from trainer.watch.clock import PHASES
from trainer.watch.peak import Memory

PAUSES = ("saving", "evaluation")
"""What training waits for between steps."""


@dataclass(frozen=True)
class Outcome:
    """What a step came to. Nobody has waited for the device yet."""

    loss: Tensor
    """Mean over all labels of the step."""
    norm: Tensor
    """Of the gradient, before clipping."""
    own_loss: Tensor
    """Summed over this rank's labels."""
    own_count: int
    """This rank's labels."""


@dataclass
class Interval:
    """The steps since the last report, as one rank sees them."""

    since: float = field(default_factory=time.monotonic)
    outcomes: list[Outcome] = field(default_factory=list)
    tokens: float = 0.0
    flops: float = 0.0
    pauses: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PAUSES, 0.0))

    @property
    def steps(self) -> int:
        """How many."""
        return len(self.outcomes)

    def mean_loss(self) -> float:
        """Over the steps that have one, equal on all ranks; waits for the device."""
        return torch.stack([o.loss for o in self.outcomes]).double().nanmean().item()

    def own_mean_loss(self) -> float:
        """Over this rank's labels of the same steps; NaN if there are none."""
        sums = torch.stack([o.own_loss for o in self.outcomes]).double()
        counts = sums.new_tensor([o.own_count for o in self.outcomes])
        counted = torch.isfinite(sums) & (counts > 0)
        total, count = torch.stack([sums[counted].sum(), counts[counted].sum()]).tolist()
        return total / count if count else nan


def measured(interval: Interval, phases: Mapping[str, float], memory: Memory) -> list[float]:
    """One rank's part of a report, as numbers that `summarize` understands."""
    steps = interval.steps
    seconds = [phases[name] / steps for name in PHASES]
    seconds += [interval.pauses[name] / steps for name in PAUSES]
    return [interval.own_mean_loss(), *seconds, *astuple(memory)]


def compute_seconds(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Each rank's forward and backward pass, a step, of what `measured` has found."""
    places = [1 + PHASES.index(name) for name in ("forward", "backward")]
    return [sum(row[place] for place in places) for row in by_rank]


def summarize(by_rank: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The keys of a row that all ranks have a part in."""
    names = [*PHASES, *PAUSES]
    losses = [row[0] for row in by_rank if isfinite(row[0])]
    seconds = [dict(zip(names, row[1:], strict=False)) for row in by_rank]
    compute = compute_seconds(by_rank)
    memory = [Memory(*row[1 + len(names) :]) for row in by_rank]
    mean_compute = sum(compute) / len(compute)
    return {
        "loss_max": max(losses, default=nan),
        **{f"{name}_seconds": sum(part[name] for part in seconds) / len(seconds) for name in names},
        "imbalance": max(compute) / mean_compute if mean_compute else nan,
        "memory_gib": max(m.peak_gib for m in memory),
        "memory_allocated_gib": max(m.allocated_gib for m in memory),
        "memory_symmetric_gib": max(m.symmetric_gib for m in memory),
        "alloc_retries": round(sum(m.retries for m in memory)),
        "ooms": round(sum(m.ooms for m in memory)),
    }

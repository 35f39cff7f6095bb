"""Plans of coming steps, made in the data workers while the step before them runs.

    plans = plans_ahead(PlannedSteps(planner, lengths, steps), steps_ahead=2)
    for plan in plans: ...

The lengths of all samples are known before training, or cheap to find; a plan needs nothing else. Each
rank's worker plans the whole step for itself, and all come to the same plan, since searches end by
iterations. With a limit in seconds one rank makes the plans and sends them (`agree.broadcast_plan`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from parallel.repacking.layout import Ints
from parallel.repacking.plan import Plan
from parallel.repacking.planner import Planner


@dataclass
class PlannedSteps(Dataset[Plan]):
    """The plan of each step, worked out when asked for."""

    planner: Planner
    lengths: Ints
    """Of every sample of the dataset, by its index there."""
    steps: Sequence[Sequence[int]]
    """The indices of each step's samples, over all ranks; they become the plan's ids."""

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, step: int) -> Plan:
        ids = np.asarray(self.steps[step], np.int64)
        return self.planner.plan(self.lengths[ids], ids)


def plans_ahead(steps: PlannedSteps, steps_ahead: int = 2, **options: Any) -> Iterator[Plan]:
    """Plans in the order of the steps, up to `steps_ahead` made ahead of use by a worker process.

    `options` go to the `DataLoader`. With `steps_ahead=0` each is made when it is asked for.
    """
    if steps_ahead == 0:
        return map(steps.__getitem__, range(len(steps)))
    loader = DataLoader(
        steps, batch_size=None, num_workers=1, prefetch_factor=steps_ahead,
        collate_fn=_as_it_is, generator=torch.Generator(), **options,
    )  # fmt: skip
    return iter(loader)


def _as_it_is(plan: Any) -> Any:
    return plan

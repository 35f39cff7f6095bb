"""A policy learns before training, from whole short runs side by side.

    P runs, M matrices

One run has a dozen noisy decisions to learn from; a population has as many whole runs as fit beside each
other. In every round the policy chooses for each run once, all see the same batches, and what a run is
worth (its meta loss at the end) is compared with its group. Ranks share the runs of a round out, on
copies of the base model of their own; rank 0 learns.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives.host import broadcast, gather_objects
from models.lelora.inject import Target
from models.lelora.population import Member, Population, losses
from models.lelora.switch import Directions
from recipes.lelora.brain import Brain, Decision, Setting
from recipes.lelora.exploration import spread_of
from recipes.task import Batch

WARMUP = 0.1
"""Share of a short run in which its learning rates rise; then they fall to 0."""


@dataclass(frozen=True)
class School:
    """What a population learns on, the same on every rank."""

    base: Callable[[], nn.Module]
    """A whole base model with its weights, without adapters, on this rank's device."""
    heads: Sequence[str]
    each: Callable[[nn.Module, Mapping[str, Any]], Tensor]
    """One loss a sample."""
    batch: Callable[[int], Batch]
    """The training batch of a number."""
    meta: Sequence[Batch]
    device: torch.device
    head_lr: float | None = None
    """Of the heads; None: that of the run's adapters."""


@dataclass(frozen=True)
class Round:
    """What came of one."""

    mean: float
    best: float
    """Meta loss of the best run."""
    spread: float
    """Standard deviation over runs."""
    entropy: float
    seconds: float


def teach(
    brain: Brain,
    targets: Sequence[Target],
    directions: Sequence[Directions],
    school: School,
    features_MF: Tensor,
    *,
    runs: int,
    rounds: int,
    steps: int,
    lr: float,
    max_norm: float,
) -> list[Round]:
    """Have `brain` learn from `rounds` of `runs` runs of `steps` steps. Collective."""

    def judge(number: int, own: Sequence[Decision]) -> list[float]:
        return _run(own, brain, targets, directions, school, number * steps, steps, lr, max_norm)

    return teach_by(judge, brain, features_MF, runs=runs, rounds=rounds)


def teach_by(
    judge: Callable[[int, Sequence[Decision]], list[float]],
    brain: Brain,
    features_MF: Tensor,
    *,
    runs: int,
    rounds: int,
) -> list[Round]:
    """The same, where `judge` gives the loss in the end of each decision's run, in a round. Collective.

    A loss that is not finite counts as twice the worst of the others.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    found = []
    for number in range(rounds):
        begin = time.monotonic()
        made: list[Decision] = []
        if rank == 0:
            spread = spread_of(number / max(rounds - 1, 1))
            made = [brain.decide_afresh(features_MF, brain.generator, spread) for _ in range(runs)]
        made = broadcast(made)
        loss_p = judge(number, made[rank::ranks])
        by_rank = gather_objects(loss_p)
        loss_P = [by_rank[n % ranks][n // ranks] for n in range(runs)]
        worst = max((x for x in loss_P if x == x and x < float("inf")), default=0.0)
        rewards = [-x if x == x and x < float("inf") else -2 * worst for x in loss_P]
        learnt = None
        if rank == 0:
            learnt = brain.imitate(features_MF, made, rewards, number / max(rounds, 1))
        brain.load(broadcast(brain.state()))
        told = torch.tensor(rewards)
        found.append(
            Round(
                float(-told.mean()), float(-told.max()), float(told.std(unbiased=False)),
                broadcast(learnt.entropy if learnt is not None else 0.0), time.monotonic() - begin,
            )
        )  # fmt: skip
    return found


def _run(
    decisions: Sequence[Decision],
    brain: Brain,
    targets: Sequence[Target],
    directions: Sequence[Directions],
    school: School,
    first: int,
    steps: int,
    lr: float,
    max_norm: float,
) -> list[float]:
    """Meta loss of each decision's run, after `steps` on the batches from number `first` on."""
    if not decisions:
        return []
    members = [member(brain, decision.setting, lr) for decision in decisions]
    population = Population(
        school.base(), targets, directions, members, school.heads, head_lr=school.head_lr,
        max_norm=max_norm,
    )  # fmt: skip
    for number in range(steps):
        batch = population.repeated(_moved(school.batch(first + number), school.device))
        loss_PB = population.by_run(school.each(population.model, batch))
        warm = min((number + 1) / max(WARMUP * steps, 1), 1.0)
        population.step(loss_PB.mean(1).sum(), warm * (1 - number / steps))
    meta = [_moved(batch, school.device) for batch in school.meta]
    return list(losses(population, meta, school.each).tolist())


def member(brain: Brain, setting: Setting, lr: float) -> Member:
    """A run that trains what `setting` says."""
    matrices = range(len(setting.widths))
    components = [brain.components(m, setting.widths[m], setting.starts[m]) for m in matrices]
    return Member(components, list(setting.scales), lr)


def _moved(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {n: v.to(device) if isinstance(v, Tensor) else v for n, v in batch.items()}

"""A policy learns before training, from whole short runs side by side.

    P runs, M matrices

One run has a dozen noisy decisions to learn from; a population has as many whole runs as fit beside each
other. In every round the policy chooses for each run once, all see the same batches, and what a run is
worth (its meta loss at the end) is compared with its group. In the end, what the policy would choose has
to be better than what it chose before (`recipes.lelora.contest`). Ranks share the runs of a round out,
on copies of the base model of their own; rank 0 learns.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives.host import broadcast
from models.lelora.inject import Target
from models.lelora.population import Member, Population, losses
from models.lelora.switch import Directions
from recipes.lelora.brain import Brain, Decision, Setting
from recipes.lelora.contest import Contest, Judge, by_all, contest
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
    batch: Callable[[Sequence[int]], Batch]
    """The training batches of these numbers, one after the other."""
    meta: Sequence[Batch]
    """Samples that judge rounds."""
    check: Sequence[Batch]
    """Others, which judge what came of them."""
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


@dataclass(frozen=True)
class Course:
    """All of it."""

    rounds: list[Round]
    contest: Contest

    def words(self) -> str:
        """For the console."""
        losses = " ".join(f"{each.mean:.4f}" for each in self.rounds)
        return f"populations' mean meta loss {losses}; what they chose: {self.contest.words()}"


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
) -> Course:
    """Have `brain` learn from `rounds` of `runs` runs of `steps` steps. Collective."""

    def judge(numbers: Sequence[int], settings: Sequence[Setting], check: bool) -> Tensor:
        members = [member(brain, setting, lr) for setting in settings]
        return _run(members, targets, directions, school, numbers, steps, max_norm, check)

    return teach_by(judge, brain, features_MF, runs=runs, rounds=rounds)


def teach_by(judge: Judge, brain: Brain, features_MF: Tensor, *, runs: int, rounds: int) -> Course:
    """The same, where `judge` trains runs and says what they are worth. Collective.

    A loss that is not finite counts as twice the worst of the others. Where what the policy chooses in
    the end is not clearly better than what it began with, `brain` is what it was.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    before, start = brain.state(), brain.begin(features_MF)
    found = []
    for number in range(rounds):
        begin = time.monotonic()
        made: list[Decision] = []
        if rank == 0:
            spread = spread_of(number / max(rounds - 1, 1))
            made = [brain.decide_afresh(features_MF, brain.generator, spread) for _ in range(runs)]
        made = broadcast(made)
        settings = [decision.setting for decision in made]
        loss_P = by_all(judge, [number] * runs, settings, False).mean(1).tolist()
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
    won = contest(judge, brain.begin(features_MF), start, rounds, max(runs // 2, 2))
    if not won.better:
        brain.load(before)
    return Course(found, won)


def _run(
    members: Sequence[Member],
    targets: Sequence[Target],
    directions: Sequence[Directions],
    school: School,
    numbers: Sequence[int],
    steps: int,
    max_norm: float,
    check: bool,
) -> Tensor:
    """Loss of each sample that judges, (P, X), after `steps` on the stretch of each run's number."""
    if not members:
        return torch.zeros(0, 1)
    population = Population(
        school.base(), targets, directions, members, school.heads, head_lr=school.head_lr,
        max_norm=max_norm,
    )  # fmt: skip
    for number in range(steps):
        at = [stretch * steps + number for stretch in numbers]
        if len(set(at)) == 1:
            batch = population.repeated(_moved(school.batch(at[:1]), school.device))
        else:
            batch = _moved(school.batch(at), school.device)
        loss_PB = population.by_run(school.each(population.model, batch))
        warm = min((number + 1) / max(WARMUP * steps, 1), 1.0)
        population.step(loss_PB.mean(1).sum(), warm * (1 - number / steps))
    judges = school.check if check else school.meta
    return losses(population, [_moved(batch, school.device) for batch in judges], school.each)


def member(brain: Brain, setting: Setting, lr: float) -> Member:
    """A run that trains what `setting` says."""
    matrices = range(len(setting.widths))
    components = [brain.components(m, setting.widths[m], setting.starts[m]) for m in matrices]
    return Member(components, list(setting.scales), lr)


def _moved(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {n: v.to(device) if isinstance(v, Tensor) else v for n, v in batch.items()}

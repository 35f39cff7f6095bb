"""grpo: candidates for one decision, each tried for a few steps on the same batches.

The honest counterfactual: everything that trains is copied before, and put back after each. What a
candidate is worth is compared with its group, on the same meta samples.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from collectives.host import all_sum
from parallel.fsdp import set_last_micro_batch
from parallel.norm import clip, global_norm
from recipes.abilities import Training
from recipes.lelora.brain import Decision
from recipes.lelora.credit import Measures
from recipes.lelora.path_credit import PathCredit
from recipes.lelora.shards import Snapshot
from recipes.lelora.switching import Adapters
from recipes.task import Batch


@dataclass(frozen=True)
class Lessons:
    """What a task gives to judge and to try decisions on."""

    loss: Callable[[nn.Module, Batch], Tensor]
    """Summed over the labels."""
    count: Callable[[Batch], int]
    practice: Callable[[int], Batch]
    """A batch of training samples that its number decides, on this rank."""


def try_each(
    decisions: Sequence[Decision],
    adapters: Adapters,
    training: Training,
    lessons: Lessons,
    meter: Measures,
    first: int,
    horizon: int,
    budget: int,
) -> list[float]:
    """The share of the meta loss that each decision takes away within `horizon` steps.

    Batches number `first` and on are practised on. Afterwards everything is as it was before.
    """
    before = Snapshot(training.model, training.optimizer)
    setting, ages, moved = adapters.setting, adapters.ages_M.clone(), adapters.moved_M.clone()
    start = meter.loss()
    rewards = []
    for decision in decisions:
        adapters.apply(decision.setting, budget)
        for number in range(first, first + horizon):
            practise(training, lessons, number)
        reward = (start - meter.loss()) / (abs(start) + 1e-8)
        rewards.append(reward if math.isfinite(reward) else -1.0)
        before.give_back()
        adapters.go_on(setting)
        adapters.ages_M, adapters.moved_M = ages.clone(), moved.clone()
    return rewards


def practise(training: Training, lessons: Lessons, number: int) -> None:
    """One optimizer step, as the trainer's loop would do it, outside the run's own count."""
    model, optimizer = training.model, training.optimizer
    host = lessons.practice(number)
    batch = {n: v.to(training.device) if isinstance(v, Tensor) else v for n, v in host.items()}
    labels = all_sum([float(lessons.count(batch))])[0]
    set_last_micro_batch(model, last=True, every=True)
    (lessons.loss(model, batch) * (training.ranks / max(labels, 1))).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm, _ = global_norm(grads, extra=torch.zeros(1, device=training.device))
    if training.max_norm:
        clip(grads, norm, training.max_norm)
    optimizer.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad()


class paused:  # noqa: N801
    """Steps in here are none that the path credit sees."""

    def __init__(self, path: PathCredit | None) -> None:
        self.path = path

    def __enter__(self) -> None:
        if self.path is not None:
            self.path.on = False

    def __exit__(self, *_: object) -> None:
        if self.path is not None:
            self.path.on = True

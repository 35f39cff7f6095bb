"""Trains one model with several seeds at once: all data on the device, the best of the evaluations kept.

The trainer would do the same; but a study trains hundreds of small models, and there its start, its
data workers and its checkpoints would take longer than the training.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.trip.stack import Stack
from recipes.ctr.metrics import Floats, auc, grouped_auc, log_loss
from recipes.ctr.samples import Clicks
from recipes.ctr.targets import Targets
from recipes.trip import TripTask
from trainer.config import Config

EVAL_BATCH = 4096
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Plan:
    """How each model of a study is trained; the same for all but the learning rate."""

    epochs: float = 3.0
    evaluations: int = 6
    """Evenly over the epochs; the best one by `metric` on the validation part counts."""
    batch_size: int = 256
    metric: str = "auc"
    dtype: str = "float32"
    """What training computes in; evaluations are always of 32 bits."""


@dataclass(frozen=True)
class Trained:
    """What is kept of a training."""

    logits_T: Floats
    """Of the test targets, at the best evaluation."""
    best: float
    """Its metric on the validation part."""
    epoch: float
    parameters: int
    losses: list[float]
    """Mean loss of training between evaluations."""


def good(metric: str, logits: Floats, part: Targets, task: TripTask) -> float:
    """The metric of one part, so that more is better."""
    labels = part.labels_T
    if metric == "logloss":
        return -log_loss(logits, labels)
    if metric == "gauc":
        return grouped_auc(logits, labels, task.table.users_E[part.events_T])
    return auc(logits, labels)


class Batches:
    """All samples on the device, as numbers of 32 bits, and any batch of them."""

    def __init__(self, task: TripTask, clicks: Clicks, device: torch.device) -> None:
        whole = task.at_once(clicks, np.arange(len(clicks)))
        self.size = whole.pop("count")
        self.columns: dict[str, Tensor] = {
            name: x.to(device, torch.float32 if x.is_floating_point() else torch.int32)
            for name, x in whole.items()
        }

    def __getitem__(self, rows: Tensor) -> dict[str, Any]:
        columns = {name: x[rows] for name, x in self.columns.items()}
        long = {n: x if x.is_floating_point() else x.long() for n, x in columns.items()}
        return {**long, "count": len(rows)}


@dataclass(frozen=True)
class Data:
    """What every model with the same view of histories trains and is judged on."""

    train: Batches
    validation: Batches
    test: Batches

    @classmethod
    def of(cls, task: TripTask, device: torch.device) -> "Data":
        """The three parts."""
        clicks = task.train_samples(), *map(task.clicks, (task.parts.validation, task.parts.test))
        return cls(*(Batches(task, part, device) for part in clicks))


def train(
    task: TripTask,
    config: Config,
    plan: Plan,
    members: Sequence[tuple[float, int]],
    data: Data,
    device: torch.device,
    graphs: bool = True,
) -> list[Trained]:
    """Train from the start, one member for each learning rate and seed.

    The seed decides weights and the order of samples. What is left out and hidden is drawn for all
    members together.
    """
    steps = max(plan.evaluations, round(plan.epochs * data.train.size / plan.batch_size))
    orders = [sample_order(data.train.size, steps, plan.batch_size, seed) for _, seed in members]
    torch.manual_seed(members[0][1])
    stack = Stack(
        task, config, members, torch.stack(orders, dim=1), data.train.__getitem__, device,
        DTYPES[plan.dtype], graphs,
    )  # fmt: skip
    count = sum(p[0].numel() for p in stack.parameters.values())
    best: list[Trained | None] = [None] * len(members)
    losses: list[list[float]] = [[] for _ in members]
    for number in range(1, plan.evaluations + 1):
        until = number * steps // plan.evaluations
        begun = stack.done
        stack.run(until - begun)
        for of, loss in zip(losses, stack.losses_S.tolist(), strict=True):
            of.append(loss / (until - begun))
        stack.losses_S.zero_()
        values = [
            good(plan.metric, logits, task.parts.validation, task)
            for logits in scores(stack, data.validation)
        ]
        better = [b is None or v > b.best for b, v in zip(best, values, strict=True)]
        if any(better):
            tested, epoch = scores(stack, data.test), until * plan.batch_size / data.train.size
            for m in np.flatnonzero(better):
                best[m] = Trained(tested[m], values[m], epoch, count, losses[m])
    for (lr, _), of in zip(members, losses, strict=True):
        if not math.isfinite(of[-1]):
            raise RuntimeError(
                f"the loss of {config.model} is {of[-1]} at a learning rate of {lr:g}"
            )
    return [trained for trained in best if trained is not None]


def sample_order(size: int, steps: int, batch_size: int, seed: int) -> Tensor:
    """The samples of each step (T, B): one permutation after another, epochs run into each other."""
    generator = torch.Generator().manual_seed(seed)
    epochs = -(-steps * batch_size // size)
    order = torch.cat([torch.randperm(size, generator=generator) for _ in range(epochs)])
    return order[: steps * batch_size].view(steps, batch_size).int()


def scores(stack: Stack, data: Batches) -> Floats:
    """Log-odds of all samples, (S, T)."""
    rows = torch.arange(data.size, device=stack.now.device).split(EVAL_BATCH)
    logits = torch.cat([stack.logits(data[part]) for part in rows], dim=1)
    return logits.double().cpu().numpy()

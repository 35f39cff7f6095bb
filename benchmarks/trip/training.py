"""Trains one model with one seed: all data on the device, the best of several evaluations kept.

The trainer would do the same; but a study trains hundreds of small models, and there its start, its
data workers and its checkpoints would take longer than the training.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from parallel.weights import materialize
from recipes.ctr.metrics import Floats, auc, grouped_auc, log_loss
from recipes.ctr.samples import Clicks
from recipes.trip import TripTask
from trainer.config import Config
from trainer.optim import build_optimizer, learning_rate

EVAL_BATCH = 2048


@dataclass(frozen=True)
class Plan:
    """How each model of a study is trained; the same for all but the learning rate."""

    epochs: float = 3.0
    evaluations: int = 6
    """Evenly over the epochs; the best one by `metric` on the validation part counts."""
    batch_size: int = 256
    metric: str = "auc"


@dataclass(frozen=True)
class Trained:
    """What is kept of a model."""

    logits_T: Floats
    """Of the best evaluation: validation targets, then test targets."""
    best: float
    """Its metric on the validation part."""
    epoch: float
    parameters: int
    losses: list[float]
    """Mean loss of training between evaluations."""


def good(metric: str, logits: Floats, task: TripTask) -> float:
    """The metric on the validation part, where more is better."""
    part = task.parts.validation
    logits, labels = logits[: len(part)], part.labels_T
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


def train(
    task: TripTask, config: Config, plan: Plan, lr: float, seed: int, device: torch.device
) -> Trained:
    """Train from the start. The seed decides weights, the order of samples, and what is left out."""
    model = task.build_model()
    materialize(model, device, task.init_weights, seed)
    config.optim.lr = lr
    optimizer = build_optimizer(model.parameters(), config.optim)
    data = Batches(task, task.train_samples(), device)
    held_out = Batches(task, task.evaluated, device)
    steps = max(plan.evaluations, round(plan.epochs * data.size / plan.batch_size))
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    order = torch.empty(0, dtype=torch.long)
    best: tuple[float, float, Floats] | None = None
    losses: list[float] = []
    since = torch.zeros((), device=device)
    for step in range(1, steps + 1):
        if len(order) < plan.batch_size:  # epochs run into each other
            order = torch.cat([order, torch.randperm(data.size, generator=generator)])
        rows, order = order[: plan.batch_size], order[plan.batch_size :]
        batch = data[rows.to(device)]
        loss = task.loss(model, batch) / len(rows)
        loss.backward()
        if config.optim.max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.optim, step, steps)
        optimizer.step()
        optimizer.zero_grad()
        since += loss.detach()
        if step * plan.evaluations // steps > (step - 1) * plan.evaluations // steps:
            logits = scores(task, model, held_out)
            value = good(plan.metric, logits, task)
            losses.append(since.item() / (steps / plan.evaluations))
            since.zero_()
            if best is None or value > best[0]:
                best = value, step * plan.batch_size / data.size, logits
    assert best is not None
    if not math.isfinite(losses[-1]):
        raise RuntimeError(
            f"the loss of {config.model} is {losses[-1]} at a learning rate of {lr:g}"
        )
    parameters = sum(p.numel() for p in model.parameters())
    return Trained(best[2], best[0], best[1], parameters, losses)


@torch.no_grad()
def scores(task: TripTask, model: nn.Module, data: Batches) -> Floats:
    """Log-odds of all samples."""
    model.eval()
    device = next(model.parameters()).device
    rows = torch.arange(data.size, device=device).split(EVAL_BATCH)
    logits = torch.cat([task.logits(model, data[part]) for part in rows])
    model.train()
    return logits.double().cpu().numpy()

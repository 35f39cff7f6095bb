"""The optimizer and the learning rate."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from configs.values import at_least, one_of


@dataclass(kw_only=True)
class OptimConfig:
    """The `optim` node: AdamW, its schedule and clipping."""

    lr: float = 3e-4
    """Peak learning rate."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1
    """On matrices only: vectors (norms, biases) never decay."""
    max_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0: never."""
    schedule: str = "cosine"
    """constant, cosine, linear or wsd (warmup, stable, decay)."""
    warmup: int = 100
    """Steps of linear warmup."""
    decay: float = 0.2
    """wsd: share of the steps in which the rate falls."""
    final: float = 0.1
    """The last learning rate, as a share of the peak."""

    def __post_init__(self) -> None:
        one_of("optim.schedule", self.schedule, SCHEDULES)
        for name in ("lr", "eps", "weight_decay", "max_norm", "warmup", "final"):
            at_least(f"optim.{name}", getattr(self, name), 0)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas={self.betas}: set optim.betas to two numbers in [0, 1)")
        if not 0 < self.decay <= 1:
            raise ValueError(
                f"optim.decay={self.decay}: set optim.decay to a share above 0, up to 1"
            )


SCHEDULES = ("constant", "cosine", "linear", "wsd")


def learning_rate(config: OptimConfig, step: int, steps: int, peak: float | None = None) -> float:
    """The rate of step `step` (the first is 1) out of `steps`; `peak` is `config.lr` unless given.

    A pure function: a resumed run needs no state, and one that is extended by a larger
    `trainer.steps` follows the longer schedule from the step where it stands.
    """
    peak = config.lr if peak is None else peak
    if step <= config.warmup:
        return peak * step / config.warmup
    progress = min((step - config.warmup) / max(steps - config.warmup, 1), 1.0)
    if config.schedule == "constant":
        share = 1.0
    elif config.schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * progress))
    elif config.schedule == "linear":
        share = 1 - progress
    else:
        share = min((1 - progress) / config.decay, 1.0)
    return peak * (config.final + (1 - config.final) * share)


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    config: OptimConfig,
    rates: Mapping[nn.Parameter, float] | None = None,
) -> torch.optim.AdamW:
    """Fused AdamW over the parameters that train, in groups with decay and without.

    `rates` has the peak learning rates of parameters that have their own; a group's is its `peak`.
    """
    trained = [p for p in parameters if p.requires_grad]
    rates = rates or {}
    peaks = list(dict.fromkeys([config.lr, *(rates[p] for p in trained if p in rates)]))
    groups = [
        {"params": [p for p in of if (p.ndim >= 2) == decays], "lr": peak, "peak": peak,
         "weight_decay": config.weight_decay if decays else 0.0}
        for peak in peaks
        for of in [[p for p in trained if rates.get(p, config.lr) == peak]]
        for decays in (True, False)
    ]  # fmt: skip
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=True,
    )

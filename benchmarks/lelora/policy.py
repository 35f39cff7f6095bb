"""Settings for the runs that a policy decides: taught by populations, or by chance at the same cost.

M matrices, F features
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.lelora.ground import Ground, in_order
from models.lelora.budget import Shape
from models.lelora.features import Faring, features, static_features
from models.lelora.inject import Target, matrix_kind
from recipes.lelora.brain import Brain, Setting
from recipes.lelora.config import LeloraConfig, PolicyConfig
from recipes.lelora.contest import Judge
from recipes.lelora.population import Course, teach_by


@dataclass(frozen=True)
class School:
    """How long a policy learns."""

    runs: int = 64
    rounds: int = 6
    steps: int = 150
    algo: str = "reinforce"
    lr: float = 1e-2


def targets_of(ground: Ground) -> list[Target]:
    """The matrices as the recipe finds them."""
    each = sum(map(len, ground.names)) // ground.base.layers
    shapes = {
        name: Shape(*w.shape[1:])
        for w, names in zip(ground.base.matrices, ground.names, strict=True)
        for name in names
    }
    return [
        Target(name, shapes[name], False, at // each, matrix_kind(name))
        for at, name in enumerate(in_order(ground))
    ]


def config_of(ground: Ground, school: School, share: float, method: str = "lelora") -> LeloraConfig:
    """The recipe's, for a budget of `share` of LoRA's."""
    lora = sum(len(w) * ground.rank * sum(w.shape[1:]) for w in ground.base.matrices)
    return LeloraConfig(
        method=method, rank=ground.rank, widths=sorted({0, 1, 2, 4, 8, 16, ground.rank}),
        budget=int(share * lora), population=school.runs if method == "lelora" else 0,
        policy=PolicyConfig(algo=school.algo, lr=school.lr, periods=school.runs),
    )  # fmt: skip


def brain_of(ground: Ground, config: LeloraConfig, seed: int) -> Brain:
    """All that decides."""
    targets = targets_of(ground)
    return Brain(config, [t.shape for t in targets], [t.name for t in targets], seed)


def seen_of(ground: Ground, brain: Brain) -> Tensor:
    """What a policy sees of a run that has not begun, (M, F)."""
    values = {
        name: s.values_LK[at].cpu()
        for names, s in zip(ground.names, ground.spectra, strict=True)
        for at, name in enumerate(names)
    }
    targets = targets_of(ground)
    static = static_features(targets, [values[t.name] for t in targets])
    zeros, ones = torch.zeros(len(targets)), torch.ones(len(targets))
    widest = max(brain.config.widths)
    return features(static, Faring(
        drift_M=zeros, gradient_M=zeros, credit_M=zeros, age_M=zeros,
        width_M=torch.tensor(brain.first.widths) / widest, scale_M=ones, start_M=zeros, moved_M=zeros,
        progress=0.0, loss=1.0, drop=0.0,
        budget_left=1 - brain.cost(brain.first) / max(brain.budget, 1), rate=0.0,
    ))  # fmt: skip


@dataclass(frozen=True)
class Taught:
    """What came of it."""

    whole: Setting
    """At LoRA's cost."""
    half: Setting
    course: Course


def teach(ground: Ground, school: School, judge: Judge) -> Taught:
    """What a policy chooses that has learnt from short runs, which `judge` trains."""
    brain = brain_of(ground, config_of(ground, school, 1.0), seed=0)
    seen = seen_of(ground, brain)
    course = teach_by(judge, brain, seen, runs=school.runs, rounds=school.rounds)
    whole = brain.begin(seen)
    brain.budget //= 2
    return Taught(whole, brain.begin(seen), course)


def by_chance(ground: Ground, seed: int) -> Setting:
    """The same choices, all as likely, cut to the same budget."""
    brain = brain_of(ground, config_of(ground, School(), 1.0, "random"), seed)
    return brain.decide_afresh(seen_of(ground, brain), brain.generator).setting

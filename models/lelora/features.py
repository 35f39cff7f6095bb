"""What the policy sees of each matrix: its spectrum, what it is for, how it fares, and the whole run.

    M matrices, F features, K components

Features that compare matrices are standardised over the matrices of the model, so that they mean the
same in a model of another size; the others are small numbers as they are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.lelora.inject import TYPES, Target

QUANTILES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
KINDS = (*TYPES, "other")
TOWERS = ("vision", "visual", "audio", "image")
TINY = 1e-12
DYNAMIC = 8
GLOBAL = 5
NUM_FEATURES = len(QUANTILES) + 9 + 3 + len(KINDS) + 3 + DYNAMIC + GLOBAL


def spectrum_features(values_K: Tensor, shape: tuple[int, int]) -> list[float]:
    """How the singular values of a matrix of this shape are spread; finite for zeros, too."""
    s = values_K.double().clamp(min=TINY)
    k, energy = len(s), s.square() / s.square().sum()
    share = s / s.sum()
    quantiles = [s[min(int(q * k), k - 1)] for q in QUANTILES]
    found = [math.log(value / s.mean()) for value in quantiles]
    found += [float(energy[:top].sum()) for top in (1, 8, 64)]
    found += [float(torch.exp(-(share * share.log()).sum())) / k]
    found += [float(s.square().sum() / s[0] ** 2) / k]
    found += [math.log(max(float(s[-1] / s[0]), 1e-6))]
    frobenius = float(s.square().sum().sqrt())
    return [
        *found,
        math.log(frobenius / math.sqrt(shape[0] * shape[1])),
        math.log(float(s[0])),
        math.log(float(s.sum()) / k),
    ]


def identity_features(target: Target, layers: int) -> list[float]:
    """Where the matrix stands and what it is for."""
    depth = (target.layer or 0) / max(layers - 1, 1)
    tower = any(name in target.name for name in TOWERS)
    return [
        depth, math.sin(math.pi * depth), math.cos(math.pi * depth),
        *(float(kind == target.kind) for kind in KINDS),
        math.log(target.shape.outputs) / 10, math.log(target.shape.inputs) / 10, float(tower),
    ]  # fmt: skip


def static_features(targets: Sequence[Target], spectra: Sequence[Tensor]) -> Tensor:
    """What does not change in a run, (M, F)."""
    layers = 1 + max((target.layer or 0 for target in targets), default=0)
    shapes = [(target.shape.outputs, target.shape.inputs) for target in targets]
    spectrum = torch.tensor(
        [spectrum_features(s, shape) for s, shape in zip(spectra, shapes, strict=True)]
    )
    identity = torch.tensor([identity_features(target, layers) for target in targets])
    return torch.cat([standardised(spectrum), identity], 1)


@dataclass(frozen=True)
class Faring:
    """How the matrices fare, each (M,), and how the run does, numbers."""

    drift_M: Tensor
    """Norm of the update over that of the matrix."""
    gradient_M: Tensor
    """Root of the mean square of the adapter's gradient."""
    credit_M: Tensor
    """What the matrix did for the loss in the last period, per parameter."""
    age_M: Tensor
    """Decisions since the last switch."""
    width_M: Tensor
    """Share of the rows that train."""
    scale_M: Tensor
    start_M: Tensor
    """The window's place, from 0 to 1."""
    moved_M: Tensor
    """1 where the last decision changed something."""
    progress: float
    """Share of the run."""
    loss: float
    """On the meta samples, as a share of that at the start."""
    drop: float
    """Share of it that the last period took away."""
    budget_left: float
    """Share of the budget that is not used."""
    rate: float
    """Learning rate, as a share of the peak."""


def features(static_MF: Tensor, faring: Faring) -> Tensor:
    """Everything the policy sees, (M, F)."""
    compared = torch.stack(
        [
            (faring.drift_M + TINY).log(),
            (faring.gradient_M + TINY).log(),
            faring.credit_M,
        ],
        1,
    )
    as_is = torch.stack(
        [
            torch.log1p(faring.age_M), faring.width_M, faring.scale_M.log2(), faring.start_M,
            faring.moved_M,
        ],
        1,
    )  # fmt: skip
    run = torch.tensor(
        [
            faring.progress,
            math.log(max(faring.loss, 1e-6)),
            faring.drop,
            faring.budget_left,
            faring.rate,
        ]
    )
    M = len(static_MF)
    found = torch.cat([static_MF, standardised(compared), as_is, run.expand(M, GLOBAL)], 1).float()
    assert found.shape[1] == NUM_FEATURES
    return found.nan_to_num(0.0, 10.0, -10.0).clamp(-10, 10)


def standardised(x_MF: Tensor) -> Tensor:
    """Mean 0 and deviation 1 over the matrices; what is equal in all of them becomes 0."""
    centred = x_MF - x_MF.mean(0)
    deviation = centred.square().mean(0).sqrt()
    return torch.where(deviation > 1e-9, centred / deviation.clamp(min=1e-9), 0.0)

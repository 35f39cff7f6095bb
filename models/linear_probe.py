"""A linear classifier on fixed features: where a new head begins that is to be trained with its encoder.

X samples, D features, C labels
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

DECAYS = (1e-3, 1e-2, 1e-1)
"""Weights of half the squared norm, for features of deviation 1; every fifth sample chooses one."""
ITERATIONS = 100


class Probe(NamedTuple):
    """Logits are W x + b."""

    weight_CD: Tensor
    bias_C: Tensor

    def loss(self, x_XD: Tensor, labels_X: Tensor) -> Tensor:
        """Mean cross-entropy."""
        logits_XC = torch.addmm(self.bias_C, x_XD, self.weight_CD.T)
        return nn.functional.cross_entropy(logits_XC, labels_X)


def fit_probe(x_XD: Tensor, labels_X: Tensor, labels: int) -> Probe:
    """Logistic regression by L-BFGS, in fp64; the result is in fp32, where the features are.

    The norm's weight is chosen on every fifth sample, and the classifier is then fitted to all.
    Depends on nothing but its arguments.
    """
    x_XD, labels_X = x_XD.double(), labels_X.long()
    held = torch.arange(len(x_XD), device=x_XD.device) % 5 == 4
    decay = DECAYS[1]
    if held.any():
        tried = {d: _fit(x_XD[~held], labels_X[~held], labels, d) for d in DECAYS}
        decay = min(DECAYS, key=lambda d: float(tried[d].loss(x_XD[held], labels_X[held])))
    return Probe(*(part.float() for part in _fit(x_XD, labels_X, labels, decay)))


def _fit(x_XD: Tensor, labels_X: Tensor, labels: int, decay: float) -> Probe:
    # Around the mean of the features, where a bias and weights do not get in each other's way.
    mean_D = x_XD.mean(0)
    scale = (x_XD - mean_D).square().mean().sqrt().clamp(min=1e-12)
    z_XD = (x_XD - mean_D) / scale
    weight_CD = x_XD.new_zeros(labels, x_XD.shape[1], requires_grad=True)
    bias_C = x_XD.new_zeros(labels, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight_CD, bias_C], max_iter=ITERATIONS, history_size=10, line_search_fn="strong_wolfe"
    )

    def objective() -> Tensor:
        optimizer.zero_grad()
        loss = Probe(weight_CD, bias_C).loss(z_XD, labels_X)
        loss = loss + decay / 2 * weight_CD.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(objective)
    weight_CD, bias_C = weight_CD.detach() / scale, bias_C.detach()
    return Probe(weight_CD, bias_C - weight_CD @ mean_D)

"""What a population tries: allocations that differ as a whole, at the same cost.

    M matrices, F features, W widths

If each matrix draws its width by itself, a run's matrices differ a little from the policy's opinion in
every direction, and what that is worth goes under in the noise of training. So each run has a tilt of
its own: a random direction in what the policy sees, along which widths grow at the expense of others.
A run may favour deep layers, or the feed-forward ones, or flat spectra, and the next one the contrary.
Scales are tilted along a direction of their own. In the mean over matrices there is no tilt: a scale
that all have is a learning rate, which is tuned elsewhere.
"""

import torch
from torch import Tensor

from models.lelora.actions import Logits, Space

FIRST, LAST = 2.0, 1.0
"""How far tilts go in the first and in the last round: nats for a doubling of width or scale."""


def spread_of(progress: float) -> float:
    """Of a round, from the share of rounds that are done."""
    return float(FIRST * (LAST / FIRST) ** progress)


def tilted(
    logits: Logits, space: Space, features_MF: Tensor, spread: float, generator: torch.Generator
) -> Logits:
    """The logits, with widths and scales favoured along random directions of the features."""
    seen_MF = features_MF - features_MF.mean(0)
    varied_F = seen_MF.square().mean(0).sqrt()
    seen_MF = seen_MF[:, varied_F > 1e-6] / varied_F[varied_F > 1e-6]
    octave_W = torch.tensor([max(width, 0.5) for width in space.widths]).log2()
    octave_C = torch.tensor(space.scales).log2()
    wider_M, stronger_M = (spread * _tilt(seen_MF, generator) for _ in range(2))
    return logits._replace(
        width_MW=logits.width_MW + wider_M[:, None] * (octave_W - octave_W.mean()),
        scale_MC=logits.scale_MC + stronger_M[:, None] * (octave_C - octave_C.mean()),
    )


def _tilt(seen_MF: Tensor, generator: torch.Generator) -> Tensor:
    """A random direction of the features, and half as much of each matrix's own; mean 0."""
    direction_F = torch.randn(seen_MF.shape[1], generator=generator)
    own_M = torch.randn(len(seen_MF), generator=generator)
    tilt_M = seen_MF @ direction_F
    if tilt_M.numel() > 1 and float(tilt_M.std(unbiased=False)) > 0:
        tilt_M = tilt_M / tilt_M.std(unbiased=False)
    return tilt_M + 0.5 * (own_M - own_M.mean())

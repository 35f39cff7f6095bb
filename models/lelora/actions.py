"""What the policy may do to a matrix, and with which probability it does it.

    M matrices, W widths, S starts, C scales

An action is four whole numbers: hold (1: keep what there is), then the numbers of width, start and
scale. Its probability is

    p(hold)   or   (1 - p(hold)) p(width) p(start | width) p(scale)

where start and scale count only if the width is not 0. What the configuration does not let the policy
choose has one choice, of probability 1.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from models.lelora.windows import STARTS

HOLD, WIDTH, START, SCALE = range(4)
SHARP = 2.9
"""How fast probabilities fall around the choice at the start: it has about nine in ten."""


@dataclass(frozen=True)
class Space:
    """The choices that there are."""

    widths: tuple[int, ...]
    """Ascending, with 0 first; or one."""
    scales: tuple[float, ...]
    windows: bool

    @property
    def starts(self) -> int:
        """Places where a window may begin."""
        return len(STARTS) if self.windows else 1


class Logits(NamedTuple):
    """What the network says; -inf is impossible."""

    hold_M: Tensor
    width_MW: Tensor
    start_MWS: Tensor
    scale_MC: Tensor


def allowed_widths(space: Space, components: list[int]) -> Tensor:
    """Which widths each matrix can have, (M, W) booleans: no more than it has components."""
    return torch.tensor([[width <= k for width in space.widths] for k in components])


def warm_logits(space: Space, width: int, hold: float, start: int | None) -> Logits:
    """What a policy that has learnt nothing says of any matrix (M = 1): `width` at scale 1.

    The probability of a width falls with the square of its distance in doublings, so that a cut of
    the budget narrows all matrices a little. `start` None: every place is as likely.
    """
    octave = [_octave(w) - _octave(width) for w in space.widths]
    widths = torch.tensor([[-SHARP * o * o for o in octave]])
    nearest = min(space.scales, key=lambda scale: abs(scale - 1))
    scales = torch.tensor([[SHARP if scale == nearest else 0.0 for scale in space.scales]])
    starts = torch.zeros(1, len(space.widths), space.starts)
    if start is not None:
        starts[:, :, start] = 2 * SHARP
    return Logits(torch.tensor([hold]).logit(), widths, starts, scales)


def _octave(width: int) -> float:
    return float(torch.tensor(max(width, 0.5)).log2())


def masked(logits: Logits, allowed_MW: Tensor) -> Logits:
    """Without the widths that a matrix cannot have."""
    return logits._replace(width_MW=logits.width_MW.masked_fill(~allowed_MW, -torch.inf))


def log_prob(logits: Logits, space: Space, actions_M4: Tensor) -> Tensor:
    """Log-probability of each matrix's action, (M,)."""
    hold_M, width_M, start_M, scale_M = actions_M4.unbind(1)
    matrices = torch.arange(len(actions_M4))
    chosen = logits.width_MW.log_softmax(1)[matrices, width_M]
    starts_MS = logits.start_MWS[matrices, width_M].log_softmax(1)
    finer = starts_MS[matrices, start_M] + logits.scale_MC.log_softmax(1)[matrices, scale_M]
    open_M = torch.tensor(space.widths)[width_M] > 0
    acted = chosen + torch.where(open_M, finer, 0.0)
    stay, go = (
        torch.nn.functional.logsigmoid(logits.hold_M),
        torch.nn.functional.logsigmoid(-logits.hold_M),
    )
    return torch.where(hold_M > 0, stay, go + acted)


def entropy(logits: Logits, space: Space) -> Tensor:
    """Entropy of each matrix's action in nats, (M,)."""
    hold_M = logits.hold_M.sigmoid()
    width_MW = logits.width_MW.softmax(1)
    open_W = (torch.tensor(space.widths) > 0).to(width_MW)
    finer_MW = _entropy(logits.start_MWS) + _entropy(logits.scale_MC)[:, None]
    acted_M = _entropy(logits.width_MW) + (width_MW * open_W * finer_MW).sum(1)
    held = torch.stack([logits.hold_M, torch.zeros_like(logits.hold_M)], 1)
    return _entropy(held) + (1 - hold_M) * acted_M


def _entropy(logits: Tensor) -> Tensor:
    """Along the last axis; impossible choices count for nothing."""
    logs = logits.log_softmax(-1)
    return -torch.where(logs == -torch.inf, 0.0, logs.exp() * logs.clamp(min=-1e30)).sum(-1)


def sample(logits: Logits, generator: torch.Generator) -> Tensor:
    """One action for each matrix, (M, 4). Takes four numbers a matrix from `generator`, always."""
    M = len(logits.hold_M)
    draws_M4 = torch.rand(M, 4, generator=generator, dtype=torch.float64)
    hold_M = (draws_M4[:, HOLD] < logits.hold_M.double().sigmoid()).long()
    width_M = _draw(logits.width_MW, draws_M4[:, WIDTH])
    start_M = _draw(logits.start_MWS[torch.arange(M), width_M], draws_M4[:, START])
    return torch.stack([hold_M, width_M, start_M, _draw(logits.scale_MC, draws_M4[:, SCALE])], 1)


def _draw(logits: Tensor, draw_M: Tensor) -> Tensor:
    """The choice in which each draw from [0, 1) lies."""
    edges = logits.double().softmax(1).cumsum(1)
    last = (logits > -torch.inf).long().mul(torch.arange(1, logits.shape[1] + 1)).argmax(1)
    return torch.minimum((edges <= draw_M[:, None]).sum(1), last)


def most_likely(logits: Logits) -> Tensor:
    """The likeliest action of each matrix that is no hold, (M, 4)."""
    width_M = logits.width_MW.argmax(1)
    start_M = logits.start_MWS[torch.arange(len(width_M)), width_M].argmax(1)
    scale_M = logits.scale_MC.argmax(1)
    return torch.stack([torch.zeros_like(width_M), width_M, start_M, scale_M], 1)

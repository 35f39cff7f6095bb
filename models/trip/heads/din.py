"""Deep Interest Network (Zhou et al. 2018): a small network weighs each item against the target."""

import torch
from torch import Tensor, nn

from models.trip.config import TripConfig
from models.trip.heads.verdict import Verdict

UNITS = (80, 40)
"""Of the network that weighs, with sigmoids, as in the published code."""


class DinHead(nn.Module):
    """The weighted *sum* of the history: weights are no shares, so a strong interest stays strong."""

    def __init__(self, config: TripConfig) -> None:
        super().__init__()
        first, second = UNITS
        self.first = nn.Linear(4 * config.hidden_size, first)
        self.second = nn.Linear(first, second)
        self.weight = nn.Linear(second, 1)
        self.verdict = Verdict(config)

    def forward(
        self, keys_BKD: Tensor, shown_BK: Tensor, target_BD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `models.trip.heads`."""
        targets_BKD = target_BD[:, None].expand_as(keys_BKD)
        pairs = [targets_BKD, keys_BKD, targets_BKD - keys_BKD, targets_BKD * keys_BKD]
        hidden = self.second(self.first(torch.cat(pairs, dim=2)).sigmoid()).sigmoid()
        weights_BK = torch.where(shown_BK, self.weight(hidden).squeeze(2), 0.0)
        seen_BD = (weights_BK[..., None] * keys_BKD).sum(1)
        return self.verdict(seen_BD, target_BD), weights_BK

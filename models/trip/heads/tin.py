"""Temporal Interest Network (Zhou et al. 2024): the target is in the attention *and* in the values.

Items and target carry their temporal encodings already (`model.time=tin`).
"""

import torch
from torch import Tensor, nn

from models.trip.config import TripConfig
from models.trip.heads.verdict import Verdict


class TinHead(nn.Module):
    """The sum over the history of attention (a softmax of scaled products) times key times target."""

    def __init__(self, config: TripConfig) -> None:
        super().__init__()
        self.verdict = Verdict(config)

    def forward(
        self, keys_BKD: Tensor, shown_BK: Tensor, target_BD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `models.trip.heads`."""
        products_BKD = keys_BKD * target_BD[:, None]
        scores_BK = products_BKD.sum(2) / target_BD.shape[1] ** 0.5
        # finite, so that an empty history has a softmax, which the next line takes to zero
        lowest = torch.finfo(scores_BK.dtype).min
        weights_BK = scores_BK.masked_fill(~shown_BK, lowest).softmax(1) * shown_BK
        seen_BD = (weights_BK[..., None] * products_BKD).sum(1)
        return self.verdict(seen_BD, target_BD), weights_BK

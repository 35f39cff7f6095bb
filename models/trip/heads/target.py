"""Attention by the target over the history; or its mean, with the same projections.

B histories, K keys, H heads, E head size, D = H * E
"""

import torch
from torch import Tensor, nn

from models.trip.config import TripConfig
from models.trip.encodings import EMBEDDING_STD
from models.trip.heads.verdict import Verdict


class Look(nn.Module):
    """What a target finds. One more key, learned, stands for nothing: a history may be empty."""

    def __init__(self, config: TripConfig) -> None:
        super().__init__()
        D = config.hidden_size
        self.num_heads = config.num_heads
        self.nothing_D = nn.Parameter(torch.empty(D))
        self.key_norm = nn.LayerNorm(D)
        self.query = nn.Linear(D, D) if config.pooling == "target" else None
        self.key_value = nn.Linear(D, 2 * D)

    def reset_parameters(self) -> None:
        """As for items."""
        nn.init.normal_(self.nothing_D, std=EMBEDDING_STD)

    def forward(
        self, keys_BKD: Tensor, shown_BK: Tensor, target_BD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What was seen (B, D), and the weights of the keys, averaged over heads (B, K)."""
        B, K, D = keys_BKD.shape
        keys_BKD = torch.cat([keys_BKD, self.nothing_D.expand(B, 1, D)], dim=1)
        shown_BK = torch.cat([shown_BK, shown_BK.new_ones(B, 1)], dim=1)
        # rows in one dimension: a linear layer of more gives a view (see `Trip.forward`)
        key_value = self.key_value(self.key_norm(keys_BKD).flatten(0, 1))
        key_BKHE, value_BKHE = key_value.view(B, K + 1, 2, self.num_heads, -1).unbind(2)
        if self.query is None:  # every key weighs the same
            scores_BKH = key_BKHE.new_zeros(key_BKHE.shape[:3])
        else:
            query_BHE = self.query(target_BD).unflatten(1, (self.num_heads, -1))
            scores_BKH = (key_BKHE * query_BHE[:, None]).sum(3) / query_BHE.shape[2] ** 0.5
        scores_BKH = scores_BKH.masked_fill(~shown_BK[..., None], float("-inf"))
        weights_BKH = scores_BKH.softmax(1)
        seen_BD = (weights_BKH[..., None] * value_BKHE).sum(1).flatten(1)
        return seen_BD, weights_BKH.mean(2)[:, :K]


class TargetHead(Look):
    """The verdict on one look at everything."""

    def __init__(self, config: TripConfig) -> None:
        super().__init__(config)
        self.target_norm = nn.LayerNorm(config.hidden_size)
        self.verdict = Verdict(config)

    def forward(
        self, keys_BKD: Tensor, shown_BK: Tensor, target_BD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `models.trip.heads`."""
        target_BD = self.target_norm(target_BD)
        seen_BD, weights_BK = super().forward(keys_BKD, shown_BK, target_BD)
        return self.verdict(seen_BD, target_BD), weights_BK

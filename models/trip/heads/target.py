"""Attention by the target over the history; or its mean, with the same projections.

B histories, K keys, H heads, E head size, D = H * E

One target asks, so no key is projected: q . (W x) is (W^T q) . x, and a sum of projected values is the
projection of their sum. Keys are many and targets one, which makes projections B of them instead of
B * K, with the same numbers but for rounding. Keys have no bias: what it adds to scores is the same for
all of them, and a softmax does not see it.
"""

import math

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
        asks = config.pooling == "target"
        self.query = nn.Linear(D, D) if asks else None
        # parameters of this module, not layers: they are read past any call, which FSDP2 would not see
        self.key_DD = nn.Parameter(torch.empty(D, D)) if asks else None
        self.value_DD = nn.Parameter(torch.empty(D, D))
        self.value_D = nn.Parameter(torch.empty(D))

    def reset_parameters(self) -> None:
        """Nothing as items are; projections as halves of one matrix, without a bias."""
        nn.init.normal_(self.nothing_D, std=EMBEDDING_STD)
        for projection_DD in (self.key_DD, self.value_DD):
            if projection_DD is not None:
                nn.init.xavier_uniform_(projection_DD, gain=math.sqrt(2 / 3))
        nn.init.zeros_(self.value_D)

    def forward(
        self, keys_BKD: Tensor, shown_BK: Tensor, target_BD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What was seen (B, D), and the weights of the keys, averaged over heads (B, K)."""
        B, K, D = keys_BKD.shape
        keys_BKD, nothing_D = self.key_norm(keys_BKD), self.key_norm(self.nothing_D)
        if self.query is None or self.key_DD is None:  # every key weighs the same
            scores_BHK = keys_BKD.new_zeros(B, self.num_heads, K)
            nothing_BH = keys_BKD.new_zeros(B, self.num_heads)
        else:
            query_BHE = self.query(target_BD).unflatten(1, (self.num_heads, -1))
            key_HED = self.key_DD.view(self.num_heads, -1, D)
            asked_BHD = torch.einsum("bhe,hed->bhd", query_BHE, key_HED) / query_BHE.shape[2] ** 0.5
            scores_BHK = asked_BHD @ keys_BKD.transpose(1, 2)
            nothing_BH = (asked_BHD * nothing_D).sum(2)
        scores_BHK = scores_BHK.masked_fill(~shown_BK[:, None], float("-inf"))
        weights_BHK, weights_BH1 = (
            torch.cat([scores_BHK, nothing_BH[..., None]], dim=2).softmax(2).split([K, 1], dim=2)
        )
        found_BHD = weights_BHK @ keys_BKD + weights_BH1 * nothing_D
        value_HED = self.value_DD.view(self.num_heads, -1, D)
        seen_BHE = torch.einsum("bhd,hed->bhe", found_BHD, value_HED)
        return seen_BHE.flatten(1) + self.value_D, weights_BHK.mean(1)


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

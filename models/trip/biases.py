"""What is added to attention scores: penalties for distance, learned biases, and learned masks.

    B histories, H heads, N items, P places apart, T time buckets

Each is a function of the numbers of history, head, query and key (`models.trip.attention.Score`), so
that the dense mask and flex attention read the same rule.
"""

import torch
from torch import Tensor, nn

from models.trip.attention import Score, Visibility
from models.trip.encodings import EMBEDDING_STD

HSTU_BUCKETS = 128
HSTU_BASE = 0.301
"""A time bucket spans so much of the natural logarithm, as in the published code."""


class AlibiBias(nn.Module):
    """A slope of the head's, times how far query and key are apart (Press et al. 2022)."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    def forward(self, sees: Visibility) -> Score:
        """Nothing of the batch but its device counts."""
        slopes_H = alibi_slopes(self.num_heads, sees.order_BN.device)
        return lambda b, h, q, k: -slopes_H[h] * (q - k).abs()


def alibi_slopes(H: int, device: torch.device) -> Tensor:
    """A geometric series from 2^(-8/H) down to 2^-8."""
    return 2.0 ** (-8.0 * torch.arange(1, H + 1, device=device) / H)


class HstuBias(nn.Module):
    """HSTU's relative bias (Zhai et al. 2024): a number for places apart, plus one for time apart.

    The time is from the key to the item *after* the query, which is what the query's state is to
    foresee; for the newest item, to the target.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.places_P = nn.Parameter(torch.empty(2 * length - 1))
        self.times_T = nn.Parameter(torch.empty(HSTU_BUCKETS + 1))

    def reset_parameters(self) -> None:
        """Small normal numbers, as published."""
        for table in (self.places_P, self.times_T):
            nn.init.normal_(table, std=EMBEDDING_STD)

    def forward(self, sees: Visibility) -> Score:
        """The same for all heads."""
        ages_BN = sees.ages_BN
        next_BN = torch.cat([ages_BN[:, 1:], torch.zeros_like(ages_BN[:, :1])], dim=1)
        # one table: flex attention's backward pass does not compile for two
        table_PT, middle = self.places_P[:, None] + self.times_T, self.length - 1

        def score(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            del h
            apart = (ages_BN[b, k] - next_BN[b, q]).abs().clamp(min=1).float()
            bucket = (apart.log() / HSTU_BASE).long().clamp(max=HSTU_BUCKETS)
            return table_PT[q - k + middle, bucket]

        return score


class LearnedMask(nn.Module):
    """Each head mixes group-causal, bidirectional and causal attention in shares that it learns.

    A key weighs as much as the share of the masks that show it: one that is not newer is in all three,
    a newer one of the query's own group in two, one of a newer group in one. Head 0 begins mostly
    group-causal, head 1 bidirectional, head 2 causal, and so on.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.shares_H3 = nn.Parameter(torch.empty(num_heads, 3))

    def reset_parameters(self) -> None:
        """About half for the head's own mask."""
        with torch.no_grad():
            heads = torch.arange(len(self.shares_H3))
            self.shares_H3.zero_()
            self.shares_H3[heads, heads % 3] = 1.0

    def forward(self, sees: Visibility) -> Score:
        """The logarithm of the share of the masks that show a key."""
        logs_H3 = self.shares_H3.log_softmax(1)
        own_H = torch.logaddexp(logs_H3[:, 0], logs_H3[:, 1])
        table_H2 = torch.stack([own_H, logs_H3[:, 1]], dim=1)
        groups_BN = sees.groups_BN

        def score(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            # a choice of two rather than a look-up: gradients of few rows looked up often are slow
            newer = groups_BN[b, k] < groups_BN[b, q]
            added = torch.where(newer, table_H2[h, 1], table_H2[h, 0])
            return torch.where(k > q, added, 0.0)

        return score

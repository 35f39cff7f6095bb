"""Summaries of temporal groups: a few vectors for each, for the layers above the items.

B histories, N items, G groups, S summaries a group, D hidden size
"""

import torch
from torch import Tensor, nn

from models.trip.encodings import EMBEDDING_STD


class GroupSummaries(nn.Module):
    """S vectors for each group: what S learned queries find among its items."""

    def __init__(self, groups: int, summaries: int, hidden_size: int) -> None:
        super().__init__()
        self.groups, self.summaries = groups, summaries
        self.queries_SD = nn.Parameter(torch.empty(summaries, hidden_size))
        self.ages_GD = nn.Parameter(torch.empty(groups, hidden_size))
        self.norm = nn.LayerNorm(hidden_size)

    def reset_parameters(self) -> None:
        """Small normal numbers."""
        for table in (self.queries_SD, self.ages_GD):
            nn.init.normal_(table, std=EMBEDDING_STD)

    def forward(self, x_BND: Tensor, groups_BN: Tensor, valid_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Summaries (B, G*S, D), newest group first, and which of them have items (B, G*S).

        Those of empty groups are the group's own vector, and nobody sees them.
        """
        G, S, D = self.groups, self.summaries, x_BND.shape[2]
        number_G = torch.arange(G, device=groups_BN.device)
        member_BGN = (groups_BN[:, None] == number_G[:, None]) & valid_BN[:, None]
        scores_BSN = self.queries_SD @ self.norm(x_BND).transpose(1, 2) / D**0.5
        scores_BGSN = scores_BSN[:, None].expand(-1, G, -1, -1)
        # finite, so that an empty group has a softmax, which the product below takes to zero
        low = torch.finfo(scores_BGSN.dtype).min
        weights_BGSN = scores_BGSN.masked_fill(~member_BGN[:, :, None], low).softmax(3)
        weights_BGSN = weights_BGSN * member_BGN[:, :, None]
        # one product for all groups: with a dimension of groups it would copy the items for each
        summary_BGSD = (weights_BGSN.flatten(1, 2) @ x_BND).unflatten(1, (G, S))
        summary_BGSD = summary_BGSD + self.ages_GD[:, None]
        there_BGS = member_BGN.any(2)[:, :, None].expand(-1, -1, S)
        return summary_BGSD.flatten(1, 2), there_BGS.flatten(1)

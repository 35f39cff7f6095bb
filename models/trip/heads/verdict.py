"""The last step of most heads: from what the target saw in the history to the log-odds of a click."""

import torch
from torch import Tensor, nn

from models.trip.config import TripConfig


class Verdict(nn.Module):
    """Two layers over what was seen, the target, and (unless plain) their product."""

    def __init__(self, config: TripConfig) -> None:
        super().__init__()
        D, self.plain = config.hidden_size, config.verdict == "plain"
        self.up = nn.Linear((2 if self.plain else 3) * D, 2 * D)
        self.down = nn.Linear(2 * D, 1)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, seen_BD: Tensor, target_BD: Tensor) -> Tensor:
        """(B,)."""
        parts = [seen_BD, target_BD]
        if self.plain:
            hidden = nn.functional.relu(self.up(torch.cat(parts, dim=1)))
        else:
            hidden = nn.functional.gelu(self.up(torch.cat([*parts, seen_BD * target_BD], dim=1)))
        # a sum over one column: FSDP2 warns of views among the results
        return self.down(self.dropout(hidden)).sum(1)

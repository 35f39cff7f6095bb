"""The last step of most heads: from what the target saw in the history to the log-odds of a click."""

import torch
from torch import Tensor, nn

from models.trip.config import TripConfig


class Verdict(nn.Module):
    """Two layers over what was seen, the target, and (unless plain) their product.

    There may be several findings, side by side: F times D numbers.
    """

    def __init__(self, config: TripConfig, findings: int = 1) -> None:
        super().__init__()
        D, self.plain, self.findings = config.hidden_size, config.verdict == "plain", findings
        self.up = nn.Linear((1 + (1 if self.plain else 2) * findings) * D, 2 * D)
        self.down = nn.Linear(2 * D, 1)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, seen_BX: Tensor, target_BD: Tensor) -> Tensor:
        """(B,), from (B, F * D) and (B, D)."""
        parts = [seen_BX, target_BD]
        if self.plain:
            hidden = nn.functional.relu(self.up(torch.cat(parts, dim=1)))
        else:
            parts.append(seen_BX * target_BD.repeat(1, self.findings))
            hidden = nn.functional.gelu(self.up(torch.cat(parts, dim=1)))
        # a sum over one column: FSDP2 warns of views among the results
        return self.down(self.dropout(hidden)).sum(1)

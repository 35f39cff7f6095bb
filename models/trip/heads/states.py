"""Heads that read the states of the token layers by their place: the last, the target's own, or all.

B histories, K states (oldest first; where the target is appended, it is the last), D hidden size
"""

import torch
from torch import Tensor, nn

from models.trip.config import TripConfig
from models.trip.heads.verdict import Verdict


class LastHead(nn.Module):
    """As SASRec (Kang and McAuley 2018) scores: the newest item's state, normalized, times the target.

    One learned number is added, since clicks need not be half of the targets.
    """

    def __init__(self, config: TripConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.offset = nn.Parameter(torch.empty(1))

    def reset_parameters(self) -> None:
        """Even odds."""
        nn.init.zeros_(self.offset)

    def forward(
        self, keys_BKD: Tensor, shown_BK: Tensor, target_BD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `models.trip.heads`; all weight is on the newest."""
        score_B = (self.norm(keys_BKD[:, -1]) * target_BD).sum(1)
        return torch.where(shown_BK[:, -1], score_B, 0.0) + self.offset, _newest(shown_BK)


class AppendedHead(nn.Module):
    """The target's own state, after layers in which it saw the history, as HSTU ranks."""

    def __init__(self, config: TripConfig) -> None:
        super().__init__()
        self.verdict = Verdict(config)

    def forward(
        self, keys_BKD: Tensor, shown_BK: Tensor, target_BD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `models.trip.heads`; where the layers look is not told."""
        return self.verdict(keys_BKD[:, -1], target_BD), torch.zeros_like(
            shown_BK, dtype=keys_BKD.dtype
        )


class FlatHead(nn.Module):
    """All states side by side, as BST (Chen et al. 2019) reads them; its layers are narrower here."""

    def __init__(self, config: TripConfig) -> None:
        super().__init__()
        D = config.hidden_size
        self.first = nn.Linear((config.max_history + 1) * D, 4 * D)
        self.second = nn.Linear(4 * D, 2 * D)
        self.third = nn.Linear(2 * D, 1)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, keys_BKD: Tensor, shown_BK: Tensor, target_BD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `models.trip.heads`; where the layers look is not told."""
        del target_BD
        flat = torch.where(shown_BK[..., None], keys_BKD, 0.0).flatten(1)
        short = self.first.in_features - flat.shape[1]  # a batch may be padded to less
        hidden = nn.functional.leaky_relu(self.first(nn.functional.pad(flat, (short, 0))))
        hidden = nn.functional.leaky_relu(self.second(self.dropout(hidden)))
        logits_B = self.third(self.dropout(hidden)).sum(1)
        return logits_B, torch.zeros_like(shown_BK, dtype=keys_BKD.dtype)


def _newest(shown_BK: Tensor) -> Tensor:
    """All weight on the last state, if it is there."""
    place_K = torch.arange(shown_BK.shape[1], device=shown_BK.device)
    return (shown_BK & (place_K == shown_BK.shape[1] - 1)).float()

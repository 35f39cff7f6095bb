"""Masked reconstruction: which items of a history are hidden, what they are guessed to be, and the loss.

B histories, N items, M hidden ones a history at most, V items of the catalogue, D hidden size
"""

import torch
from torch import Tensor, nn

from models.trip.encodings import EMBEDDING_STD
from models.trip.history import UNSEEN


def most_masked(N: int, share: float) -> int:
    """M: as many as can be hidden of a history of N items."""
    return max(1, round(share * N))


def choose_masked(groups_BN: Tensor, valid_BN: Tensor, share: float, priority_BN: Tensor) -> Tensor:
    """Places to hide (B, M), with -1 where there are fewer.

    Only items with company in their group are hidden, `share` of them (one at least), those of the
    highest `priority` (in [0, 1)) first. No shape depends on the data, so the host waits for nothing.
    """
    same_BNN = (groups_BN[:, :, None] == groups_BN[:, None, :]) & valid_BN[:, None, :]
    eligible_BN = valid_BN & (same_BNN.sum(2) >= 2)
    M = most_masked(groups_BN.shape[1], share)
    places_BM = torch.where(eligible_BN, priority_BN, -1.0).topk(M, dim=1).indices
    wanted_B = (eligible_BN.sum(1) * share).round().clamp(min=1) * eligible_BN.any(1)
    return torch.where(torch.arange(M, device=places_BM.device) < wanted_B[:, None], places_BM, -1)


def reconstruction_loss(
    logits_BMV: Tensor, items_BN: Tensor, masked_BM: Tensor, targets_B: Tensor
) -> Tensor:
    """Cross-entropy of each history's hidden items over the whole catalogue, averaged over them: (B,).

    The row's own target is no candidate, unless it is what was hidden: the loss must not teach that
    the item to be judged is absent from the history.
    """
    hidden_BM = items_BN.gather(1, masked_BM.clamp(min=0))
    counts_BM = masked_BM >= 0
    logits_BMV = logits_BMV.float()
    own_BM1 = targets_B[:, None, None].expand(-1, hidden_BM.shape[1], 1)
    kept_BM1 = torch.where(
        (hidden_BM[..., None] == own_BM1), logits_BMV.gather(2, own_BM1), -torch.inf
    )
    logits_BMV = logits_BMV.scatter(2, own_BM1, kept_BM1)
    nats_BM = nn.functional.cross_entropy(
        logits_BMV.flatten(0, 1), hidden_BM.flatten(), reduction="none"
    ).view_as(hidden_BM)
    # not a product: a row that does not count may hold an infinity
    nats_BM = torch.where(counts_BM, nats_BM, 0.0)
    return nats_BM.sum(1) / counts_BM.sum(1).clamp(min=1)


class Reconstruction(nn.Module):
    """Hides items, and scores all items for each hidden place, by the table they come from."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.mask_D = nn.Parameter(torch.empty(hidden_size))
        self.norm = nn.LayerNorm(hidden_size)
        self.project = nn.Linear(hidden_size, hidden_size)

    def reset_parameters(self) -> None:
        """As for items."""
        nn.init.normal_(self.mask_D, std=EMBEDDING_STD)

    def hide(self, items_BND: Tensor, masked_BM: Tensor) -> Tensor:
        """The same with one vector at all places of `masked_BM`, before places and times are added."""
        N = items_BND.shape[1]
        masked_BN = (masked_BM[:, :, None] == torch.arange(N, device=masked_BM.device)).any(1)
        return torch.where(masked_BN[..., None], self.mask_D, items_BND)

    def forward(self, x_BND: Tensor, masked_BM: Tensor, items_VD: Tensor) -> Tensor:
        """(B, M, V); what are no items cannot be guessed."""
        there_BMD = x_BND.take_along_dim(masked_BM.clamp(min=0)[..., None], dim=1)
        guessed_BMD = self.project(self.norm(there_BMD).flatten(0, 1)).view_as(there_BMD)
        logits_BMV = guessed_BMD @ items_VD.T
        none_V = torch.arange(len(items_VD), device=items_VD.device) <= UNSEEN
        return logits_BMV.masked_fill(none_V, torch.finfo(logits_BMV.dtype).min)

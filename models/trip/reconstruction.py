"""Masked reconstruction: which items of a history are hidden, what they are guessed to be, and the loss.

B histories, N items, M hidden ones a history at most, V items of the catalogue, D hidden size,
K candidates that hidden items are told from, R = B * M, U entries of an urn
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.precision import at_least_fp32
from models.trip.encodings import EMBEDDING_STD
from models.trip.history import UNSEEN

AT_ONCE = 2**26
"""So many scores are computed at a time: evaluation tells hidden items from the whole catalogue."""
PART = 2**16
"""Of the whole catalogue, the rows of so many items are looked up at a time."""


class Candidates(NamedTuple):
    """The items that the hidden ones of a batch are told from."""

    items_K: Tensor
    """Some may be there several times."""
    logs_K: Tensor
    """Logarithm of how often each is there on average."""


class Urn(NamedTuple):
    """Items to draw from: one that is in it more often is drawn more often."""

    items_U: Tensor
    logs_V: Tensor
    """Logarithm of each item's share."""

    @classmethod
    def of(cls, items_U: Tensor) -> "Urn":
        """Filled with these."""
        return cls(items_U, (items_U.bincount() / len(items_U)).log())

    def draw(self, K: int) -> Candidates:
        """K items, each put back."""
        draws_K = torch.randint(len(self.items_U), (K,), device=self.items_U.device)
        items_K = self.items_U[draws_K]
        return Candidates(items_K, self.logs_V[items_K] + math.log(K))


def everything(V: int, device: torch.device) -> Iterator[Candidates]:
    """The whole catalogue, each item once, in parts of nearly the same size.

    Each part is of items from everywhere: where ranks divide the table, all of them give some rows.
    """
    parts = max(1, math.ceil((V - UNSEEN - 1) / PART))
    for number in range(parts):
        items_K = torch.arange(UNSEEN + 1 + number, V, parts, device=device)
        yield Candidates(items_K, torch.zeros_like(items_K, dtype=torch.float32))


def most_masked(N: int, share: float) -> int:
    """M: as many as can be hidden of a history of N items."""
    return max(1, round(share * N))


def choose_masked(groups_BN: Tensor, valid_BN: Tensor, share: float, priority_BN: Tensor) -> Tensor:
    """Places to hide (B, M), with -1 where there are fewer.

    Only items with company in their group are hidden, `share` of them (one at least), those of the
    highest `priority` (in [0, 1)) first. Groups descend along a history, the newest is 0. No shape
    depends on the data, so the host waits for nothing.
    """
    # groups descend, so the nearest other items tell who has company: nothing of N * N is made
    low, high = groups_BN.max() + 1, -1
    before_BN = torch.where(valid_BN, groups_BN, low).cummin(1).values
    after_BN = torch.where(valid_BN, groups_BN, high).flip(1).cummax(1).values.flip(1)
    before_BN = torch.cat([torch.full_like(before_BN[:, :1], high), before_BN[:, :-1]], dim=1)
    after_BN = torch.cat([after_BN[:, 1:], torch.full_like(after_BN[:, :1], high)], dim=1)
    eligible_BN = valid_BN & ((before_BN == groups_BN) | (after_BN == groups_BN))
    M = most_masked(groups_BN.shape[1], share)
    places_BM = torch.where(eligible_BN, priority_BN, -1.0).topk(M, dim=1).indices
    wanted_B = (eligible_BN.sum(1) * share).round().clamp(min=1) * eligible_BN.any(1)
    return torch.where(torch.arange(M, device=places_BM.device) < wanted_B[:, None], places_BM, -1)


def reconstruction_loss(
    guesses_BMD: Tensor,
    rows_BMD: Tensor,
    hidden_BM: Tensor,
    counts_BM: Tensor,
    targets_B: Tensor,
    others: Iterable[tuple[Candidates, Tensor]],
) -> Tensor:
    """Cross-entropy of each history's hidden items among others, averaged over them: (B,).

    `rows` of what was `hidden`; `others`: candidates with their rows (K, D), in one part or several.

    Sampled softmax (Bengio and Senecal 2008; Jean et al. 2015): the scores of candidates are lowered by
    the logarithm of how often they are drawn, so the sum of exponentials is on average that over the
    catalogue. What was hidden is always among them, once. The row's own target never is, unless it was
    hidden: the loss must not teach that the item to be judged is absent from the history.
    """
    guesses_RD, hidden_R = guesses_BMD.flatten(0, 1), hidden_BM.flatten()
    own_R = targets_B[:, None].expand_as(hidden_BM).flatten()
    others_R: Tensor | None = None
    for candidates, candidates_KD in others:
        rows = max(1, AT_ONCE // len(candidates.items_K))
        parts = zip(guesses_RD.split(rows), hidden_R.split(rows), own_R.split(rows), strict=True)
        part_R = torch.cat([_sums(*part, candidates, candidates_KD) for part in parts])
        others_R = part_R if others_R is None else torch.logaddexp(others_R, part_R)
    assert others_R is not None, "there is nothing to tell hidden items from"
    right_R = (at_least_fp32(guesses_RD) * at_least_fp32(rows_BMD.flatten(0, 1))).sum(1)
    nats_R = torch.logaddexp(others_R, right_R) - right_R
    # not a product: a row that does not count may hold an infinity
    nats_BM = torch.where(counts_BM, nats_R.view_as(hidden_BM), 0.0)
    return nats_BM.sum(1) / counts_BM.sum(1).clamp(min=1)


def _sums(
    guesses_RD: Tensor,
    hidden_R: Tensor,
    own_R: Tensor,
    candidates: Candidates,
    candidates_KD: Tensor,
) -> Tensor:
    """Logarithms of the sums of exponentials over candidates."""
    items_K, logs_K = candidates
    others_RK = at_least_fp32(guesses_RD @ candidates_KD.T) - logs_K
    excluded_RK = (items_K == hidden_R[:, None]) | (items_K == own_R[:, None])
    return others_RK.masked_fill(excluded_RK, -torch.inf).logsumexp(1)


class Reconstruction(nn.Module):
    """Hides items, and guesses a vector for each hidden place, to be compared with those of items."""

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

    def forward(self, x_BND: Tensor, masked_BM: Tensor) -> Tensor:
        """(B, M, D)."""
        there_BMD = x_BND.take_along_dim(masked_BM.clamp(min=0)[..., None], dim=1)
        return self.project(self.norm(there_BMD).flatten(0, 1)).view_as(there_BMD)

"""Recommenders that only count: popularity, Markov, co-occurrence. Models must beat them.

I items, R rows, K candidates of a row, W last items of a history

A pair of items that a user met `n` interactions apart counts n ** -NEAR, and the last item of a history
votes with weight 1, the k-th last one with k ** -NEWEST.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.slide.history import NOTHING
from recipes.interactions.tables import Ints
from recipes.slide.sids.features import training_pairs
from recipes.slide.split import Split

Floats = NDArray[np.float64]
COOCCURRENCE = (3, 3)
"""Window and last items of the table that models are compared with, and their scores corrected by."""
NEAR, NEWEST = 0.5, 0.5
"""Chosen on the validation targets of four public sets (docs/slide.md)."""


@dataclass(frozen=True)
class Counts:
    """How often training has one item and then another, at most `window` later, for one user.

    Markov counts are those of window 1 and last 1, popularity of 0 and 0.
    """

    split: Split
    window: int
    last: int
    """So many items at the end of a history vote."""

    @cached_property
    def table(self) -> tuple[Ints, Floats]:
        """Pairs as first item times I plus second, sorted, and their counts."""
        first, second, apart, _ = training_pairs(self.split, self.window)
        return _added_up(first * self.split.sequences.num_items + second, _near(apart))

    @cached_property
    def table_of_users(self) -> tuple[Ints, Floats]:
        """The same for each user: user times I squared, plus the pair."""
        size = self.split.sequences.num_items
        first, second, apart, users = training_pairs(self.split, self.window)
        return _added_up((users * size + first) * size + second, _near(apart))

    @cached_property
    def shares(self) -> Floats:
        """Popularity, below every count."""
        popularity_I = self.split.popularity()
        most = max(self.window, 1) * max(self.last, 1)
        shares: Floats = popularity_I / (popularity_I.sum() + 1.0) / most
        return shares

    def scores(self, history: Sequence[int] | Ints) -> Floats:
        """For every item: its counts after the last items, or else its popularity."""
        size, (pairs, counts) = self.split.sequences.num_items, self.table
        found = self.shares.copy()
        newest_first = np.asarray(history, dtype=np.int64)[::-1][: self.last]
        for place, item in enumerate(newest_first, start=1):
            begin, end = np.searchsorted(pairs, [item * size, (item + 1) * size])
            found[pairs[begin:end] - item * size] += counts[begin:end] * place**-NEWEST
        return found

    def top(
        self, history: Sequence[int] | Ints, length: int, removed: Sequence[int] | Ints
    ) -> Ints:
        """The best items, ties by number, without those `removed`; NOTHING where no item is left."""
        scores = self.scores(history)
        scores[np.asarray(removed, dtype=np.int64)] = -1
        best = np.argsort(-scores, kind="stable")[:length]
        found = np.full(length, NOTHING, dtype=np.int64)
        found[: len(best)] = np.where(scores[best] >= 0, best, NOTHING)
        return found

    def after(
        self,
        lasts_RW: Ints,
        candidates_RK: Ints,
        users_R: Ints | None = None,
        device: torch.device | str = "cpu",
    ) -> Floats:
        """The counts of each candidate after a row's last items, oldest first (NOTHING: none).

        With `users`, pairs of the row's own user do not count: a training prefix would know its target.
        """
        size = self.split.sequences.num_items
        lasts = torch.from_numpy(lasts_RW).to(device)
        candidates = torch.from_numpy(candidates_RK).to(device)
        keys_RWK = lasts[:, :, None] * size + candidates[:, None]
        known_RWK = (lasts != NOTHING)[:, :, None] & (candidates != NOTHING)[:, None]
        found = _look_up(self.table, keys_RWK)
        if users_R is not None:
            users = torch.from_numpy(users_R).to(device)[:, None, None]
            found -= _look_up(self.table_of_users, users * size**2 + keys_RWK)
        votes_W = torch.arange(lasts_RW.shape[1], 0, -1, device=device).double() ** -NEWEST
        total = (found * known_RWK * votes_W[:, None]).sum(1)
        counted: Floats = total.clamp(min=0).cpu().numpy()
        return counted


def _near(apart: Ints) -> Floats:
    weights: Floats = apart.astype(np.float64) ** -NEAR
    return weights


def _added_up(keys: Ints, values: Floats) -> tuple[Ints, Floats]:
    known, number = np.unique(keys, return_inverse=True)
    return known, np.bincount(number, weights=values, minlength=len(known)).astype(np.float64)


def _look_up(table: tuple[Ints, Floats], wanted: Tensor) -> Tensor:
    keys, values = (torch.from_numpy(column).to(wanted.device) for column in table)
    if not len(keys):
        return torch.zeros(wanted.shape, dtype=torch.float64, device=wanted.device)
    at = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
    return torch.where(keys[at] == wanted, values[at], 0.0)

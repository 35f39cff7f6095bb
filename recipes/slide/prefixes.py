"""The histories that lists are made for: every training prefix, and copies of it with items left out.

R rows. A list needs no label, so a history that nobody had will do, too.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from models.slide.history import NOTHING
from recipes.interactions.tables import Ints
from recipes.slide.split import Split


@dataclass(frozen=True)
class Prefixes:
    """All rows, and which shard each is in; both are the same on any number of ranks."""

    split: Split
    max_history: int
    copies: int
    drop: float
    shards: int
    newest: int | None = None
    """Of each user, so many prefixes at most: the longest ones."""
    ends: bool = False
    """Also each user's whole training part, behind all prefixes. What follows it is held out."""

    @cached_property
    def rows(self) -> tuple[Ints, Ints, Ints]:
        """User, target's interaction, and copy (0: nothing is left out) of each."""
        users_R, targets_R = self.split.prefixes()
        if self.newest is not None:
            kept = self.split.train_ends[users_R] - targets_R <= self.newest
            users_R, targets_R = users_R[kept], targets_R[kept]
        if self.ends:
            ends_X = self.split.train_ends
            there = np.flatnonzero(ends_X > self.split.sequences.starts_X[:-1])
            users_R = np.concatenate([users_R, there])
            targets_R = np.concatenate([targets_R, ends_X[there]])
        copies = np.tile(np.arange(1 + self.copies), len(users_R))
        each = 1 + self.copies
        return np.repeat(users_R, each), np.repeat(targets_R, each), copies

    @cached_property
    def shard_of(self) -> Ints:
        """By a hash, so that shards are alike."""
        users, targets, copies = self.rows
        key = np.stack([users, targets, copies]).astype(np.uint64)
        mixed = _mix(_mix(_mix(key[0]) ^ key[1]) ^ key[2])
        return (mixed % np.uint64(self.shards)).astype(np.int64)

    def of_shard(self, shard: int) -> Ints:
        """Rows of one shard, in order."""
        return np.flatnonzero(self.shard_of == shard)

    def targets(self, rows: Ints) -> Ints:
        """The items that really followed; NOTHING where that is held out."""
        users, targets, _ = (column[rows] for column in self.rows)
        known = targets < self.split.train_ends[users]
        return np.where(known, self.split.sequences.items_E[targets], NOTHING)

    def history(self, row: int) -> Ints:
        """Oldest first. A copy lacks each item with a chance of `drop`, but the newest never."""
        user, target, copy = (int(column[row]) for column in self.rows)
        items = self.split.history(user, target)[-self.max_history :]
        if copy == 0:
            return items
        seed = np.array([user, target, copy], dtype=np.uint64)
        draws = np.random.default_rng(seed).random(len(items))
        kept: Ints = items[(draws >= self.drop) | (np.arange(len(items)) == len(items) - 1)]
        return kept


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer (Steele et al. 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

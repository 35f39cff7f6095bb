"""Which interaction is what: leave-last-out, the rules that keep the future out, and the strata.

Of a user's n interactions the last is tested, the one before it validated, and training sees the others
only. So does everything that counts or learns: popularity, co-occurrence, semantic IDs, the teacher, and
the lists that it is asked for. Validation and test see the user's interactions before theirs.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from recipes.interactions.tables import Ints
from recipes.slide.sequences import Sequences

HELD_OUT = {"validation": 2, "test": 1}
"""How far from its user's end each part's target is."""


@dataclass(frozen=True)
class Split:
    """The parts of all users. X users."""

    sequences: Sequences

    @property
    def train_ends(self) -> Ints:
        """Where each user's training part ends."""
        return self.sequences.starts_X[1:] - 2

    @cached_property
    def in_training(self) -> NDArray[np.bool_]:
        """Which interactions training sees."""
        users_E = np.repeat(np.arange(self.sequences.num_users), np.diff(self.sequences.starts_X))
        seen: NDArray[np.bool_] = np.arange(len(users_E)) < self.train_ends[users_E]
        return seen

    def targets(self, part: str) -> Ints:
        """The interaction of each user that `validation` or `test` predicts."""
        return self.sequences.starts_X[1:] - HELD_OUT[part]

    def strata(self, part: str) -> dict[str, NDArray[np.bool_]]:
        """Users whose target has the day of the last interaction before it, and the others.

        Empty where no times are known. On sets with days only, a count table does well on the first.
        """
        if self.sequences.times_E is None:
            return {}
        same_X = self.sequences.same_day(self.targets(part))
        return {"same_day": same_X, "later": ~same_X}

    def history(self, user: int, end: int) -> Ints:
        """The items of `user` before interaction `end`, oldest first."""
        return self.sequences.items_E[self.sequences.starts_X[user] : end]

    def prefixes(self) -> tuple[Ints, Ints]:
        """Users and targets of all training prefixes: each has an item before it and is one itself."""
        lengths_X = np.maximum(self.train_ends - self.sequences.starts_X[:-1] - 1, 0)
        users_R = np.repeat(np.arange(self.sequences.num_users), lengths_X)
        first_R = np.cumsum(lengths_X) - lengths_X
        within_R = np.arange(len(users_R)) - first_R[users_R]
        return users_R.astype(np.int64), self.sequences.starts_X[users_R] + 1 + within_R

    def popularity(self) -> Ints:
        """How often training has each item."""
        seen = self.sequences.items_E[self.in_training]
        return np.bincount(seen, minlength=self.sequences.num_items).astype(np.int64)

"""What users met, in order: one array of items, cut into users, with times where they are known.

E interactions, X users, I items
"""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.interactions.tables import Ints
from recipes.slide.config import SequencesConfig
from recipes.task import DataError

LEAST = 3
"""Interactions of a user: one to learn from, one to validate with, one to test with."""
DAY = 86_400


@dataclass(frozen=True)
class Sequences:
    """E interactions by user, each user's oldest first."""

    items_E: Ints
    """Numbers 0 ... I - 1, as users are; see the names."""
    times_E: Ints | None
    """Whole seconds, which never go back within a user; None: unknown."""
    starts_X: Ints
    """Where each user begins, and at the end E: one more than there are users."""
    user_names: NDArray[Any]
    item_names: NDArray[Any]

    @property
    def num_users(self) -> int:
        """X."""
        return len(self.user_names)

    @property
    def num_items(self) -> int:
        """I."""
        return len(self.item_names)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal sequences of equal names, on whatever machine."""
        digest = hashlib.sha256()
        for array in (self.items_E, self.times_E, self.starts_X):
            array = np.array([-1]) if array is None else array
            digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        for names in (self.user_names, self.item_names):
            digest.update("\n".join(map(str, names)).encode())
        return digest.hexdigest()[:16]

    def same_day(self, events: Ints) -> NDArray[np.bool_]:
        """Whether each of these interactions has the day of the one before; all False without times."""
        if self.times_E is None:
            return np.zeros(len(events), dtype=bool)
        days_E = self.times_E // DAY
        same: NDArray[np.bool_] = days_E[events] == days_E[events - 1]
        return same


def make_sequences(
    users: Any, items: Any, times: Ints | None, config: SequencesConfig, item_names: Any = None
) -> Sequences:
    """Number users and items, bring each user's rows together, and check. Raises `DataError`.

    `item_names` are the names of all items, sorted; without them, those that occur.
    """
    user_names, users_E = np.unique(np.asarray(users), return_inverse=True)
    items = np.asarray(items)
    if item_names is None:
        item_names, items_E = np.unique(items, return_inverse=True)
    else:
        items_E = np.searchsorted(item_names, items).clip(max=len(item_names) - 1)
        unknown = np.flatnonzero(item_names[items_E] != items)
        if len(unknown):
            raise DataError(
                f"item {items[unknown[0]]} of user {np.asarray(users)[unknown[0]]} is in no table of "
                "items: add its row, or set data.items=[] to do without"
            )
    order = np.argsort(users_E, kind="stable")
    if times is not None and config.sort:
        order = np.lexsort((times, users_E))
    users_E, items_E = users_E[order], items_E[order]
    times = times[order] if times is not None else None
    if times is not None:
        _check_ascending(users_E, times, user_names)
    counts_X = np.bincount(users_E, minlength=len(user_names))
    short_X = counts_X < LEAST
    if short_X.any():
        if config.short_users == "error":
            x = int(np.flatnonzero(short_X)[0])
            many = "one interaction" if counts_X[x] == 1 else f"{counts_X[x]} interactions"
            raise DataError(
                f"user {user_names[x]} has {many}, and {LEAST} are needed to train, validate and test "
                f"({short_X.sum():,} such users): set data.short_users=drop to leave them out"
            )
        kept_E = ~short_X[users_E]
        items_E, counts_X, user_names = items_E[kept_E], counts_X[~short_X], user_names[~short_X]
        times = times[kept_E] if times is not None else None
    if not len(user_names):
        raise DataError("no user is left: give users with three interactions or more")
    made = Sequences(
        items_E=items_E.astype(np.int64),
        times_E=None if times is None else times.astype(np.int64),
        starts_X=np.concatenate([[0], np.cumsum(counts_X)]).astype(np.int64),
        user_names=user_names,
        item_names=item_names,
    )
    if config.permute_ties is None:
        return made
    return permute_ties(made, config.permute_ties)


def _check_ascending(users_E: Ints, times_E: Ints, user_names: NDArray[Any]) -> None:
    back = np.flatnonzero((np.diff(times_E) < 0) & (np.diff(users_E) == 0))
    if len(back):
        at = back[0]
        raise DataError(
            f"times of user {user_names[users_E[at]]} go back: {times_E[at + 1]} follows {times_E[at]}: "
            "set data.sort=true to sort each user's rows, or data.time_key to another column"
        )


def permute_ties(sequences: Sequences, seed: int) -> Sequences:
    """The control: interactions of one user at the same time in a random order.

    Where only days are known, files often sort a day's items by name, which a model may learn.
    """
    if sequences.times_E is None:
        raise DataError("data.permute_ties needs times: set data.permute_ties=null")
    users_E = np.repeat(np.arange(sequences.num_users), np.diff(sequences.starts_X))
    draw_E = np.random.default_rng(seed).random(len(users_E))
    order = np.lexsort((draw_E, sequences.times_E, users_E))
    return replace(sequences, items_E=sequences.items_E[order])

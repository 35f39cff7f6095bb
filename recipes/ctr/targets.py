"""What is predicted: targets with labels, split by time, and items drawn as no clicks.

The rules that keep the future out (`docs/trip.md` lists them):
- the split is global, every training target before every validation target, and so on; or each user's
  last target tests and the one before it validates, which keeps out the user's future only;
- a history ends before its target's second;
- what counts items (the vocabulary, popularity, time groups) reads the training part only.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.trip.history import UNSEEN
from recipes.ctr.config import InteractionsConfig
from recipes.ctr.negatives import REAL, drawn_items, drawn_kinds
from recipes.ctr.table import CONTEXT, Interactions, counts_by
from recipes.interactions.tables import Ints
from recipes.task import DataError

TRAIN, VALIDATION, TEST = 0, 1, 2


@dataclass(frozen=True)
class Targets:
    """T targets: an item for the user and the time of an interaction."""

    events_T: Ints
    items_T: Ints
    labels_T: Ints
    kinds_T: Ints

    def __len__(self) -> int:
        return len(self.events_T)

    def of(self, rows: Ints) -> "Targets":
        """Some of them, in this order."""
        return Targets(*(getattr(self, name)[rows] for name in self.__annotations__))

    def followed_by(self, other: "Targets") -> "Targets":
        """These, then those."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in self.__annotations__)
        return Targets(*map(np.concatenate, pairs))


@dataclass(frozen=True)
class Split:
    """The three parts, and the items that training knows."""

    train: Targets
    validation: Targets
    test: Targets
    known_E: NDArray[np.bool_]
    """The interactions that training may count: none at or after what validates (of its user)."""
    vocabulary_I: Ints
    """The table row of the model for each item: UNSEEN, or from UNSEEN + 1 on."""

    @property
    def num_items(self) -> int:
        """Rows of the model's table."""
        return int(self.vocabulary_I.max(initial=UNSEEN)) + 1


def split(table: Interactions, config: InteractionsConfig) -> Split:
    """Targets of the three parts. Raises `DataError`."""
    events = _eligible(table, config)
    if len(events) < 3:
        raise DataError(f"{len(events)} targets are too few to split: give more data")
    part_T, known_E = (_last_of_users if config.split == "last" else _by_time)(
        table, events, config
    )
    vocabulary_I = _vocabulary(table, known_E)
    targets = Targets(
        events, table.items_E[events], table.labels_E[events], np.full(len(events), REAL)
    )
    if not config.labelled:
        targets, part_T = _with_drawn(table, targets, part_T, known_E, config)
    # by time, so that the first samples of an evaluation are not all of one user
    order = np.argsort(table.times_E[targets.events_T], kind="stable")
    targets, part_T = targets.of(order), part_T[order]
    train, validation, test = (
        targets.of(np.flatnonzero(part_T == n)) for n in (TRAIN, VALIDATION, TEST)
    )
    for name, part in (("training", train), ("validation", validation), ("test", test)):
        _check_labels(name, part, config)
    return Split(train, validation, test, known_E, vocabulary_I)


def _eligible(table: Interactions, config: InteractionsConfig) -> Ints:
    """Events that may be targets: labelled ones; or a user's first meetings with items.

    What is drawn as no click is nothing that the user ever had, so that a second meeting would be
    told by looking for the item in the history.
    """
    here_E = table.labels_E != CONTEXT
    if not config.labelled:
        pairs = table.users_E * len(table.item_names) + table.items_E
        first_E = np.zeros(len(pairs), dtype=bool)
        first_E[np.unique(pairs, return_index=True)[1]] = True
        here_E &= first_E
    return np.flatnonzero(here_E)


def _by_time(
    table: Interactions, events: Ints, config: InteractionsConfig
) -> tuple[Ints, NDArray[np.bool_]]:
    """The part of each target, and what training may count: all before the first that validates."""
    times_T = table.times_E[events]
    ascending = np.sort(times_T)
    first_test = int(len(events) * (1 - config.test))
    first_validation = int(len(events) * (1 - config.test - config.validation))
    t1, t2 = ascending[first_validation], ascending[first_test]
    return (times_T >= t1).astype(np.int64) + (times_T >= t2), table.times_E < t1


def _last_of_users(
    table: Interactions, events: Ints, config: InteractionsConfig
) -> tuple[Ints, NDArray[np.bool_]]:
    """The same where each user with three targets or more gives the last two of them."""
    del config
    users_T = table.users_E[events]
    counts_U = counts_by(users_T, len(table.user_names))
    ends_U = np.cumsum(counts_U)
    from_end_T = ends_U[users_T] - 1 - np.arange(len(events))  # 0: the user's last
    part_T = np.where(counts_U[users_T] >= 3, (2 - from_end_T).clip(0), TRAIN)
    # from the second that validates on
    first_U = np.full(len(table.user_names), np.iinfo(np.int64).max)
    np.minimum.at(first_U, users_T[part_T > TRAIN], table.times_E[events[part_T > TRAIN]])
    return part_T.astype(np.int64), table.times_E < first_U[table.users_E]


def _check_labels(name: str, part: Targets, config: InteractionsConfig) -> None:
    if not len(part):
        raise DataError(
            f"the {name} part has no target: set data.validation and data.test, or give data that "
            "spans more time"
        )
    if len(np.unique(part.labels_T)) == 1:
        what = "clicks" if part.labels_T[0] else "no clicks"
        key = (
            f"data.positive_from (now {config.positive_from:g})"
            if config.labelled
            else "data.uniform_negatives"
        )
        raise DataError(f"all {len(part)} targets of the {name} part are {what}: set {key}")


def _vocabulary(table: Interactions, known_E: NDArray[np.bool_]) -> Ints:
    seen_I = counts_by(table.items_E[known_E], len(table.item_names)) > 0
    return np.where(seen_I, UNSEEN + np.cumsum(seen_I), UNSEEN).astype(np.int64)


def _with_drawn(
    table: Interactions,
    clicks: Targets,
    part_T: Ints,
    known_E: NDArray[np.bool_],
    config: InteractionsConfig,
) -> tuple[Targets, Ints]:
    """Clicks on items that training has often enough, and what was drawn for each."""
    warm_I = counts_by(table.items_E[known_E], len(table.item_names)) >= config.min_count
    if warm_I.sum() < 2:
        raise DataError(
            f"{warm_I.sum()} items have {config.min_count} interactions in the training part: set "
            "data.min_count to less"
        )
    warm = np.flatnonzero(warm_I[clicks.items_T])
    clicks, part_T = clicks.of(warm), part_T[warm]
    kinds, drawn_TK = drawn_kinds(config), drawn_items(table, clicks.events_T, warm_I, config)
    targets = Targets(
        np.concatenate([clicks.events_T, np.repeat(clicks.events_T, len(kinds))]),
        np.concatenate([clicks.items_T, drawn_TK.ravel()]),
        np.concatenate([np.ones(len(clicks), np.int64), np.zeros(drawn_TK.size, np.int64)]),
        np.concatenate([np.full(len(clicks), REAL), np.tile(kinds, len(clicks))]).astype(np.int64),
    )
    return targets, np.concatenate([part_T, np.repeat(part_T, len(kinds))])

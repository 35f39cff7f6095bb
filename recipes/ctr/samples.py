"""Targets with their histories: what the trainer reads."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from models.trip.history import PADDING, ages
from recipes.ctr.table import Interactions, hash_of
from recipes.ctr.targets import Targets
from recipes.interactions.tables import Ints


class Sample(NamedTuple):
    """One target and the history before it, oldest first."""

    row: int
    """Its number among the samples."""
    items_n: Ints
    """Rows of the model's table."""
    behaviours_n: Ints
    ages_n: Ints
    """Seconds before the target."""
    features_nF: Ints
    """Of the items."""
    target: int
    target_features_F: Ints
    label: int


@dataclass(frozen=True)
class Clicks:
    """Targets of a table, each with the newest `max_history` interactions before it."""

    table: Interactions
    targets: Targets
    vocabulary_I: Ints
    max_history: int

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, row: int) -> Sample:
        event = int(self.targets.events_T[row])
        begin, end = self.span(event)
        return Sample(
            row,
            self.vocabulary_I[self.table.items_E[begin:end]],
            self.table.behaviours_E[begin:end],
            ages(self.table.times_E[begin:end], int(self.table.times_E[event])),
            self.table.features_IF[self.table.items_E[begin:end]],
            int(self.vocabulary_I[self.targets.items_T[row]]),
            self.table.features_IF[self.targets.items_T[row]],
            int(self.targets.labels_T[row]),
        )

    def span(self, event: int) -> tuple[int, int]:
        """Where the history of an interaction begins and ends in the table."""
        end = int(self.table.first_at_time[event])
        return max(int(self.table.first_of_user[event]), end - self.max_history), end

    def padded(self, rows: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Items, behaviours, ages and features of many histories at once, padded on the left.

        (B, N) each, features (B, N, F).
        """
        table, events = self.table, self.targets.events_T[rows][:, None]
        place = table.first_at_time[events] - self.max_history + np.arange(self.max_history)
        there = place >= table.first_of_user[events]
        place = np.where(there, place, 0)
        items = np.where(there, self.vocabulary_I[table.items_E[place]], PADDING)
        behaviours = np.where(there, table.behaviours_E[place], 0)
        ages = np.where(there, table.times_E[events] - table.times_E[place], 0)
        features = np.where(there[..., None], table.features_IF[table.items_E[place]], 0)
        return items, behaviours, ages, features

    def fingerprint(self) -> str:
        """Of the table, and of what was drawn."""
        drawn = hash_of(self.targets.items_T)
        return f"{self.table.fingerprint} {drawn} {len(self)} {self.max_history}"

    def lengths(self) -> Ints:
        """How many interactions each history has."""
        events_T = self.targets.events_T
        before_T = self.table.first_at_time[events_T] - self.table.first_of_user[events_T]
        return np.minimum(before_T, self.max_history)

    def newest_ages(self) -> Ints:
        """Seconds from the newest interaction of each history to its target; -1 where there is none."""
        events_T = self.targets.events_T
        last_T = self.table.first_at_time[events_T] - 1
        age_T = self.table.times_E[events_T] - self.table.times_E[last_T.clip(0)]
        return np.where(self.lengths() > 0, age_T, -1)

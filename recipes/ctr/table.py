"""Interactions in memory: arrays of whole numbers, sorted by user and time, and where they come from.

E interactions, I items, F features of an item
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.ctr.config import InteractionsConfig
from recipes.interactions.movielens import find
from recipes.interactions.tables import Ints, matching, read_columns
from recipes.task import DataError

NAMES = ("u.data", "ml-100k.inter")
"""MovieLens-100K's interactions, in its own layout or RecBole's."""
CONTEXT = -1
"""The label of an interaction that is history only."""


@dataclass(frozen=True)
class Interactions:
    """E interactions, by user, then by time; those of a user at one time keep the table's order."""

    users_E: Ints
    """0, 1, 2 ..., as all numbers here; see `user_names`."""
    items_E: Ints
    times_E: Ints
    """Whole seconds."""
    behaviours_E: Ints
    """1, 2 ...; all 0 where none are given."""
    labels_E: Ints
    """1 click, 0 none, CONTEXT."""
    user_names: NDArray[Any]
    item_names: NDArray[Any]
    behaviour_names: NDArray[Any]
    features_IF: Ints
    """What else is known of each item, such as its category: 1, 2 ... through all features, 0 where
    nothing is."""

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal tables, on whatever machine."""
        digest = hashlib.sha256()
        for array in (self.users_E, self.items_E, self.times_E, self.behaviours_E, self.labels_E):
            digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        if self.features_IF.size:
            digest.update(np.ascontiguousarray(self.features_IF, dtype="<i8").tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def first_of_user(self) -> Ints:
        """For each interaction, the number of the first one of its user."""
        return np.searchsorted(self.users_E, self.users_E).astype(np.int64)

    @cached_property
    def end_of_user(self) -> Ints:
        """For each interaction, one behind the last one of its user."""
        return np.searchsorted(self.users_E, self.users_E, side="right").astype(np.int64)

    @cached_property
    def first_at_time(self) -> Ints:
        """For each interaction, the first one of its user at the same time: where its history ends."""
        new_E = np.ones(len(self.users_E), dtype=bool)
        new_E[1:] = (np.diff(self.users_E) != 0) | (np.diff(self.times_E) != 0)
        starts = np.flatnonzero(new_E)
        return starts[np.cumsum(new_E) - 1]


def make_interactions(
    users: Any,
    items: Any,
    times: Ints,
    labels: Ints,
    behaviours: Any = None,
    features: Mapping[str, Any] | None = None,
) -> Interactions:
    """Number users, items, behaviours and features of items (by name), and sort."""
    user_names, users_E = np.unique(np.asarray(users), return_inverse=True)
    item_names, items_E = np.unique(np.asarray(items), return_inverse=True)
    if behaviours is None:
        behaviour_names, behaviours_E = np.array([], dtype=str), np.zeros(len(users_E), np.int64)
    else:
        behaviour_names, behaviours_E = np.unique(np.asarray(behaviours), return_inverse=True)
        behaviours_E = behaviours_E + 1
    order = np.lexsort((times, users_E))  # stable
    return Interactions(
        users_E=users_E[order].astype(np.int64),
        items_E=items_E[order].astype(np.int64),
        times_E=np.asarray(times, dtype=np.int64)[order],
        behaviours_E=behaviours_E[order].astype(np.int64),
        labels_E=np.asarray(labels, dtype=np.int64)[order],
        user_names=user_names,
        item_names=item_names,
        behaviour_names=behaviour_names,
        features_IF=_features(features or {}, items_E, item_names),
    )


def _features(columns: Mapping[str, Any], items_E: Ints, item_names: NDArray[Any]) -> Ints:
    """(I, F), numbers through all columns. Raises `DataError` where an item's rows disagree."""
    features_IF = np.zeros((len(item_names), len(columns)), dtype=np.int64)
    before = 0
    for f, (name, column_E) in enumerate(columns.items()):
        known_E = np.array([value not in (None, "") for value in column_E], dtype=bool)
        values, numbers = np.unique(column_E[known_E].astype(str), return_inverse=True)
        features_IF[items_E[known_E], f] = before + 1 + numbers
        wrong = features_IF[items_E[known_E], f] != before + 1 + numbers
        if wrong.any():
            item = item_names[items_E[known_E][wrong][0]]
            raise DataError(
                f"item {item} has several values of {name}: set data.item_feature_keys to columns that "
                "are the same in all of an item's rows"
            )
        before += len(values)
    return features_IF


def read_movielens(folder: str | None, positive_from: float) -> Interactions:
    """MovieLens-100K: a click is a rating of `positive_from` or more; earlier ratings are behaviours."""
    file = find(folder, NAMES)
    try:
        rows = np.loadtxt(file, skiprows=int(file.suffix == ".inter"), ndmin=2)
    except (ValueError, OSError) as error:
        raise DataError(f"cannot read {file}: {str(error).splitlines()[0]}") from error
    if rows.shape[1] != 4:
        raise DataError(
            f"{file} has {rows.shape[1]} columns, not user, item, rating and time: set data.folder"
        )
    users, items, ratings, times = rows.T
    return make_interactions(
        users.astype(np.int64),
        items.astype(np.int64),
        times.astype(np.int64),
        (ratings >= positive_from).astype(np.int64),
        ratings.astype(np.int64),
    )


def read_tables(config: InteractionsConfig) -> Interactions:
    """The rows of all `data.files`, in the files' sorted order."""
    where = Path(config.folder).expanduser() if config.folder else None
    files = matching("data.files", config.files, where)
    keys = {
        "user_key": config.user_key,
        "item_key": config.item_key,
        "time_key": config.time_key,
        "behaviour_key": config.behaviour_key,
        "label_key": config.label_key,
    }
    wanted = {key: name for key, name in keys.items() if name is not None}
    parts = [read_columns(file, wanted, seconds={"time_key"}, gaps={"label_key"}) for file in files]
    columns = {key: np.concatenate([part[key] for part in parts]) for key in wanted}
    for key in ("user_key", "item_key", "behaviour_key"):
        if key in columns:
            columns[key] = columns[key].astype(str)
    labels = np.ones(len(columns["user_key"]), dtype=np.int64)
    if "label_key" in columns:
        labels = _labels(columns["label_key"], config)
    behaviours = columns.get("behaviour_key")
    if behaviours is not None and config.target_behaviours:
        labels = np.where(_are_targets(behaviours, config), labels, CONTEXT)
    order = np.arange(len(labels))
    if (
        config.permute_ties
    ):  # sorting by user and time, later, keeps this order where they are equal
        order = np.random.default_rng(config.negatives_seed).permutation(order)
    features = {name: _feature(files, name)[order] for name in config.item_feature_keys}
    return make_interactions(
        columns["user_key"][order],
        columns["item_key"][order],
        columns["time_key"][order],
        labels[order],
        None if behaviours is None else behaviours[order],
        features,
    )


def _feature(files: Sequence[Path], name: str) -> NDArray[Any]:
    """A column of all files; rows may be empty."""
    key = "item_feature_keys"
    return np.concatenate([read_columns(file, {key: name}, gaps={key})[key] for file in files])


def _are_targets(behaviours: NDArray[Any], config: InteractionsConfig) -> NDArray[np.bool_]:
    known = np.unique(behaviours)
    for name in config.target_behaviours:
        if name not in known:
            raise DataError(
                f"no interaction is of kind {name}; there are {', '.join(known)}: set "
                "data.target_behaviours"
            )
    return np.isin(behaviours, config.target_behaviours)


def _labels(values: NDArray[Any], config: InteractionsConfig) -> Ints:
    try:
        numbers = np.array([np.nan if v is None else float(v) for v in values.tolist()])
    except ValueError as error:
        raise DataError(
            f"data.label_key={config.label_key} is no column of numbers ({error}): set data.label_key"
        ) from error
    clicks = (numbers >= config.positive_from).astype(np.int64)
    return np.where(np.isnan(numbers), CONTEXT, clicks)


def counts_by(values: Sequence[int] | Ints, length: int) -> Ints:
    """How often each of 0 ... length - 1 is there."""
    return np.bincount(np.asarray(values, dtype=np.int64), minlength=length).astype(np.int64)


def hash_of(array: Ints) -> str:
    """A short digest of whole numbers, equal on every machine."""
    return hashlib.sha256(np.ascontiguousarray(array, dtype="<i8").tobytes()).hexdigest()[:16]

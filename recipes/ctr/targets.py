"""What is predicted: targets with labels, split by time, and items drawn as no clicks.

The rules that keep the future out (`docs/trip.md` lists them):
- the split is global: every training target lies before every validation target, and so on;
- a history ends before its target's second;
- what counts items (the vocabulary, popularity, time groups) reads the training part only.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from models.trip.history import UNSEEN
from recipes.ctr.config import InteractionsConfig
from recipes.ctr.table import CONTEXT, Interactions, Ints, counts_by
from recipes.task import DataError

REAL, UNIFORM, POPULAR = 0, 1, 2
"""How a target came about: it is in the table, or its item was drawn."""
WINDOW = 0.01
"""Popular items are drawn from the interactions nearest in time: this share of all, on either side."""
ROUNDS = 20
"""After so many draws in vain the share is doubled: in a small table, all that is near may be known."""


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
    train_before: int
    """The first validation target's time."""
    vocabulary_I: Ints
    """The table row of the model for each item: UNSEEN, or from UNSEEN + 1 on."""

    @property
    def num_items(self) -> int:
        """Rows of the model's table."""
        return int(self.vocabulary_I.max(initial=UNSEEN)) + 1


def split(table: Interactions, config: InteractionsConfig) -> Split:
    """Targets of the three parts. Raises `DataError`."""
    events = np.flatnonzero(table.labels_E != CONTEXT)
    if len(events) < 3:
        raise DataError(f"{len(events)} targets are too few to split: give more data")
    times = np.sort(table.times_E[events])
    first_test = int(len(times) * (1 - config.test))
    first_validation = int(len(times) * (1 - config.test - config.validation))
    t1, t2 = int(times[first_validation]), int(times[first_test])
    vocabulary_I = _vocabulary(table, t1)
    targets = Targets(
        events, table.items_E[events], table.labels_E[events], np.full(len(events), REAL)
    )
    if not config.labelled:
        targets = _with_drawn(table, targets, t1, config)
    # by time, so that the first samples of an evaluation are not all of one user
    at_T = table.times_E[targets.events_T]
    targets, at_T = targets.of(order := np.argsort(at_T, kind="stable")), at_T[order]
    parts = {
        "training": targets.of(np.flatnonzero(at_T < t1)),
        "validation": targets.of(np.flatnonzero((at_T >= t1) & (at_T < t2))),
        "test": targets.of(np.flatnonzero(at_T >= t2)),
    }
    for name, part in parts.items():
        _check_labels(name, part, config)
    return Split(parts["training"], parts["validation"], parts["test"], t1, vocabulary_I)


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


def _vocabulary(table: Interactions, before: int) -> Ints:
    counts_I = counts_by(table.items_E[table.times_E < before], len(table.item_names))
    seen_I = counts_I > 0
    return np.where(seen_I, UNSEEN + np.cumsum(seen_I), UNSEEN).astype(np.int64)


def _with_drawn(
    table: Interactions, clicks: Targets, t1: int, config: InteractionsConfig
) -> Targets:
    """Clicks on items that training has often enough, and what was drawn for each: once, then read."""
    counts_I = counts_by(table.items_E[table.times_E < t1], len(table.item_names))
    warm_I = counts_I >= config.min_count
    if warm_I.sum() < 2:
        raise DataError(
            f"{warm_I.sum()} items have {config.min_count} interactions in the training part: set "
            "data.min_count to less"
        )
    clicks = clicks.of(np.flatnonzero(warm_I[clicks.items_T]))
    kinds = [UNIFORM] * config.uniform_negatives + [POPULAR] * config.popular_negatives
    key = json.dumps(
        [table.fingerprint, kinds, t1, config.min_count, config.negatives_seed, WINDOW]
    )
    file = (
        Path(config.cache_dir).expanduser()
        / f"negatives-{hashlib.sha256(key.encode()).hexdigest()[:16]}.safetensors"
    )
    if not file.exists():
        drawn = draw(table, clicks, warm_I, kinds, config.negatives_seed)
        _write(file, drawn, key)
    drawn_TK = _read(file, key, (len(clicks), len(kinds)))
    return Targets(
        np.concatenate([clicks.events_T, np.repeat(clicks.events_T, len(kinds))]),
        np.concatenate([clicks.items_T, drawn_TK.ravel()]),
        np.concatenate([np.ones(len(clicks), np.int64), np.zeros(drawn_TK.size, np.int64)]),
        np.concatenate([np.full(len(clicks), REAL), np.tile(kinds, len(clicks))]).astype(np.int64),
    )


def draw(
    table: Interactions, clicks: Targets, warm_I: np.ndarray, kinds: list[int], seed: int
) -> Ints:
    """An item for each click and kind (T, K): warm, and none that the user ever has in the table."""
    generator = np.random.default_rng(seed)
    num_items = len(table.item_names)
    had = np.unique(table.users_E * num_items + table.items_E)
    users_T = table.users_E[clicks.events_T]
    warm = np.flatnonzero(warm_I)
    by_time = np.argsort(table.times_E, kind="stable")
    place_E = np.empty_like(by_time)
    place_E[by_time] = np.arange(len(by_time))
    drawn_TK = np.full((len(clicks), len(kinds)), -1, dtype=np.int64)
    for column, kind in enumerate(kinds):
        left = np.arange(len(clicks))
        for turn in range(20 * ROUNDS):
            if not len(left):
                break
            if kind == UNIFORM:
                found = generator.choice(warm, len(left))
            else:
                share = min(WINDOW * 2 ** (turn // ROUNDS), 1.0)
                reach = max(1, int(share * len(by_time)))
                near = place_E[clicks.events_T[left]]
                near = near + generator.integers(-reach, reach + 1, len(left))
                found = table.items_E[by_time[near.clip(0, len(by_time) - 1)]]
            bad = ~warm_I[found] | np.isin(users_T[left] * num_items + found, had)
            drawn_TK[left[~bad], column] = found[~bad]
            left = left[bad]
        if len(left):
            raise DataError(
                f"user {table.user_names[users_T[left[0]]]} has nearly every item that could be drawn "
                "as no click: set data.label_key, or data.min_count to less"
            )
    return drawn_TK


def _digest(drawn_TK: Ints) -> str:
    return hashlib.sha256(np.ascontiguousarray(drawn_TK, dtype="<i8").tobytes()).hexdigest()


def _write(file: Path, drawn_TK: Ints, key: str) -> None:
    """Whole or not at all: several ranks may do it at once, and write the same."""
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({"items": drawn_TK}, temporary, {"key": key, "sha256": _digest(drawn_TK)})
        temporary.replace(file)
    except OSError as error:
        raise DataError(f"cannot write {file}: {error.strerror}: set data.cache_dir") from error


def _read(file: Path, key: str, shape: tuple[int, int]) -> Ints:
    try:
        with safe_open(file, "numpy") as stored:
            about, drawn_TK = stored.metadata(), stored.get_tensor("items")
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"cannot read {file} ({error}): delete it, or set data.cache_dir"
        ) from error
    good = about["key"] == key and about["sha256"] == _digest(drawn_TK) and drawn_TK.shape == shape
    if not good:
        raise DataError(f"{file} is not what was written: delete it, or set data.cache_dir")
    return np.asarray(drawn_TK, dtype=np.int64)

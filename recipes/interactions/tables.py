"""Columns of .parquet, .csv and .jsonl tables, with errors that name file, row and key."""

import glob
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.task import DataError

Ints = NDArray[np.int64]


def matching(key: str, globs: Sequence[str], folder: Path | None = None) -> list[Path]:
    """The files that match, sorted; globs begin in `folder`, if there is one.

    Raises `DataError` if there are none; `key` is the globs' own.
    """
    full = (str((folder or Path()) / Path(g).expanduser()) for g in globs)
    files = sorted({Path(f) for g in full for f in glob.glob(g, recursive=True)})
    if not files:
        inside = f" in data.folder={folder}" if folder else ""
        other = ", or data.folder to where they begin" if folder else ""
        raise DataError(
            f"{key}={list(globs)} match no file{inside}: set {key} to other globs{other}"
        )
    return files


def read_columns(
    file: Path,
    wanted: Mapping[str, str],
    seconds: Collection[str] = (),
    gaps: Collection[str] = (),
    group: str = "data",
) -> dict[str, NDArray[Any]]:
    """The wanted columns of one table, by the configuration key that names each.

    The keys are in `group`; without one, the names are no matter of configuration.

    Those of the keys in `seconds` are whole seconds; only those in `gaps` may have empty rows. Raises
    `DataError`.
    """
    table = read_table(file)
    columns = {}
    for key, name in wanted.items():
        remedy = f"set {group}.{key} to another column" if group else "mend the file"
        if name not in table.column_names:
            raise DataError(
                f"{file} has no column {name}; there are {', '.join(table.column_names)}: {remedy}"
            )
        column = table.column(name)
        if column.null_count and key not in gaps:
            at = column.is_null().to_pylist().index(True) + 1
            mend = f"mend the row, or {remedy}" if group else remedy
            raise DataError(f"{file}: row {at} has no {name}: {mend}")
        if key in seconds:
            columns[key] = _seconds(file, name, column, remedy)
        else:
            columns[key] = np.empty(len(column), dtype=object)
            columns[key][:] = column.to_pylist()
    return columns


def _seconds(file: Path, name: str, column: Any, remedy: str) -> Ints:
    import pyarrow

    if pyarrow.types.is_timestamp(column.type):
        column = column.cast(pyarrow.timestamp("s"), safe=False)
    try:
        return np.asarray(column.cast(pyarrow.int64()).to_numpy(), dtype=np.int64)
    except pyarrow.ArrowInvalid as error:
        raise DataError(
            f"{file}: {name} is no column of whole seconds ({str(error).splitlines()[0]}): {remedy}"
        ) from error


def read_table(file: Path) -> Any:
    """The whole table, as pyarrow has it. Raises `DataError`."""
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(
            f"{file}: tables need the package pyarrow: install it with: pip install 'springtide[data]'"
        ) from error
    try:
        return _read(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"cannot read {file}: {str(error).splitlines()[0]}") from error


def _read(file: Path) -> Any:
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

"""Sequences and items out of what there is: each source's files, read once."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recipes.interactions.movielens import find
from recipes.interactions.tables import Ints, matching, read_columns, read_table
from recipes.slide.config import SequencesConfig
from recipes.slide.items import Items, as_words, make_items
from recipes.slide.planted import plant
from recipes.slide.sequences import Sequences, make_sequences
from recipes.task import DataError


def read_source(config: SequencesConfig) -> tuple[Sequences, Items]:
    """What `config` names. Raises `DataError`."""
    readers = {
        "planted": plant,
        "movielens": _movielens,
        "sequences": _folder,
        "files": _tables,
        "algr": _algr,
    }
    return readers[config.source](config)


def _movielens(config: SequencesConfig) -> tuple[Sequences, Items]:
    """RecBole's two files; every rating is an interaction. The file is in no order, so it is sorted."""
    file = find(config.folder, ("ml-100k.inter",))
    rows: dict[Any, dict[str, Any]] = {}
    for words in _lines(file.with_suffix(".item"), "\t", 4, numbers=1):
        rows[int(words[0])] = {"title": words[1], "attributes": words[3].split()}
    try:
        users, items, _, times = np.loadtxt(file, skiprows=1).T.astype(np.int64)
    except (ValueError, OSError) as error:
        raise DataError(f"cannot read {file}: {str(error).splitlines()[0]}") from error
    order = np.argsort(times, kind="stable")
    made = make_items(rows, ["title"], "attributes")
    columns = (users[order], items[order], times[order])
    return make_sequences(*columns, config, made.names), made


def _lines(
    file: Path, separator: str | None, columns: int, numbers: int | None = None
) -> Iterator[list[str]]:
    """Rows of a text file, in UTF-8 or Latin 1, but for a head as RecBole's files have one.

    The first `numbers` words of each (None: all of them) are whole numbers.
    """
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = raw.decode("latin-1")
    for number, line in enumerate(text.splitlines()):
        words = line.split(separator)
        if number == 0 and words[0].endswith(":token"):
            continue
        if len(words) < columns:
            raise DataError(f"{file}: line {number + 1} has {len(words)} columns, not {columns}")
        for word in words[:numbers]:
            if not word.strip().removeprefix("-").isdecimal():
                raise DataError(
                    f"{file}: line {number + 1} has {word!r}, and a whole number is expected: mend it"
                )
        yield words


def _folder(config: SequencesConfig) -> tuple[Sequences, Items]:
    """`sequences.txt` has a line for each user: a name, then items; what else there is, is used."""
    folder = Path(config.folder or "").expanduser()
    users: list[int] = []
    items: list[int] = []
    file, seen = folder / "sequences.txt", set()
    for words in _lines(file, None, 2):
        if words[0] in seen:
            raise DataError(
                f"{file}: user {words[0]} has two lines: join them, or number them apart"
            )
        seen.add(words[0])
        users += [int(words[0])] * (len(words) - 1)
        items += map(int, words[1:])
    made = _items_of(folder, config, sorted(set(items)))
    times = _times_of(folder, users, items)
    return make_sequences(users, items, times, config, made.names), made


def _items_of(folder: Path, config: SequencesConfig, occurring: list[int]) -> Items:
    rows: dict[Any, dict[str, Any]] = {item: {} for item in occurring}
    if (folder / "items.jsonl").is_file():
        rows |= dict(_json_items(folder / "items.jsonl"))
    elif (folder / "movies.dat").is_file():
        for words in _lines(folder / "movies.dat", "::", 3, numbers=1):
            if int(words[0]) in rows:
                rows[int(words[0])] = {"title": words[1], "attributes": words[2].split("|")}
    for row in rows.values():  # where names are unknown, numbers say as much
        known = as_words(row.get("attributes"))
        if not known and row.get("attribute_ids"):
            row["attributes"] = [f"a{number}" for number in as_words(row["attribute_ids"])]
        elif "attributes" not in row and isinstance(row.get("categories"), str):
            row["attributes"] = row["categories"]
    return make_items(
        rows, config.text_keys, config.attributes_key, config.vector_key, config.ids_key
    )


def _json_items(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """By number, what the lines of a file say of items."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {file}: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            yield int(row["item"]), row
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{file}: line {number} is no JSON object with a whole number as item: {line[:60]!r}"
            ) from error


def _times_of(folder: Path, users: list[int], items: list[int]) -> Ints | None:
    """Seconds since each user's first interaction, from `events.parquet`; None without the file."""
    file = folder / "events.parquet"
    if not file.is_file():
        return None
    keys = {"user_key": "user", "pos": "pos", "item_key": "item", "time_key": "t_rel_s"}
    columns = read_columns(file, keys, seconds={"time_key"}, group="")
    order = np.lexsort((columns["pos"].astype(np.int64), columns["user_key"].astype(np.int64)))
    same = len(order) == len(items) and (
        np.array_equal(columns["user_key"][order].astype(np.int64), users)
        and np.array_equal(columns["item_key"][order].astype(np.int64), items)
    )
    if not same:
        raise DataError(f"{file} and sequences.txt have other interactions: mend one of them")
    times: Ints = columns["time_key"][order]
    return times


def _tables(config: SequencesConfig) -> tuple[Sequences, Items]:
    """A row for each interaction; items, if there are tables of them, a row for each."""
    files = matching("data.files", config.files)
    keys = {
        "user_key": config.user_key,
        "item_key": config.item_key,
        "time_key": config.time_key,
        "behaviour_key": config.behaviour_key,
    }
    wanted = {key: name for key, name in keys.items() if name is not None}
    parts = [_interactions(file, wanted) for file in files]
    columns = {key: np.concatenate([part[key] for part in parts]) for key in wanted}
    if config.behaviours:
        kinds = columns["behaviour_key"].astype(str)
        kept = np.isin(kinds, config.behaviours)
        if not kept.any():
            raise DataError(
                f"no interaction is one of {', '.join(config.behaviours)}; there are "
                f"{', '.join(np.unique(kinds))}: set data.behaviours"
            )
        columns = {key: column[kept] for key, column in columns.items()}
    users, items = (columns[key].astype(str) for key in ("user_key", "item_key"))
    if not config.items:
        made = Items(np.unique(items))
        return make_sequences(users, items, columns.get("time_key"), config), made
    rows: dict[Any, Mapping[str, Any]] = {}
    for file in matching("data.items", config.items):
        table = read_table(file)
        if config.item_key not in table.column_names:
            raise DataError(
                f"{file} has no column {config.item_key}; there are {', '.join(table.column_names)}: "
                "set data.item_key to what it is called in interactions and items"
            )
        for row in table.to_pylist():
            item = str(row[config.item_key])
            if item in rows:
                raise DataError(f"{file} has item {item} again: leave one of its rows")
            rows[item] = row
    made = make_items(
        rows, config.text_keys, config.attributes_key, config.vector_key, config.ids_key
    )
    return make_sequences(users, items, columns.get("time_key"), config, made.names), made


def _interactions(file: Path, wanted: Mapping[str, str]) -> dict[str, Any]:
    """One table's rows, each with a user and an item."""
    columns = read_columns(file, wanted, seconds={"time_key"})
    for key in ("user_key", "item_key"):
        empty = np.flatnonzero(columns[key] == "")
        if len(empty):
            raise DataError(
                f"{file}: row {empty[0] + 1} has no {wanted[key]}: mend the row, or set data.{key} to "
                "another column"
            )
    return columns


CODE = re.compile(r"C(\d+)")
ALGR_LEVELS, ALGR_CODES = 3, 8192
"""Of FORGE's sets (arXiv 2509.20904): a code's number is 8192 times its level, and more."""


def _algr(config: SequencesConfig) -> tuple[Sequences, Items]:
    """Rows `id, system, user, answer`: prompts whose items are semantic IDs, such as C17C8200C16390.

    Each row is a user: the history in `user`, then the answer. An item is its ID; its name is the codes.
    """
    users, items = [], []
    for file in matching("data.files", config.files):
        columns = read_columns(file, {"user": "user", "answer": "answer"}, group="")
        for number, (history, answer) in enumerate(zip(*columns.values(), strict=True)):
            for codes in (
                *_algr_items(file, number, str(history)),
                *_algr_items(file, number, str(answer)),
            ):
                users.append(f"{file.name}:{number}")
                items.append(codes)
    names = sorted(set(items))
    number_of = {codes: number for number, codes in enumerate(names)}
    rows = {number: {"ids": list(codes)} for codes, number in number_of.items()}
    made = make_items(rows, [], ids_key="ids")
    spelled = np.array(["-".join(map(str, codes)) for codes in names])
    sequences = make_sequences(users, [number_of[i] for i in items], None, config, made.names)
    return (
        Sequences(sequences.items_E, None, sequences.starts_X, sequences.user_names, spelled),
        Items(spelled, codes=made.codes),
    )


def _algr_items(file: Path, number: int, text: str) -> list[tuple[int, ...]]:
    codes = [int(word) for word in CODE.findall(text)]
    levels = [code // ALGR_CODES for code in codes]
    if (
        not codes
        or levels != [n % ALGR_LEVELS for n in range(len(codes))]
        or len(codes) % ALGR_LEVELS
    ):
        raise DataError(
            f"{file}: row {number + 1} has no whole semantic IDs of {ALGR_LEVELS} codes "
            f"(C0 to C{ALGR_LEVELS * ALGR_CODES - 1}, level by level): {text[:60]!r}"
        )
    plain = [code % ALGR_CODES for code in codes]
    return [tuple(plain[n : n + ALGR_LEVELS]) for n in range(0, len(plain), ALGR_LEVELS)]

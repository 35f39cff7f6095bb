"""Lists on disk: Parquet files that are absent or whole, each of which says what it was made from.

    lists/shard-00017.parquet    user, event, copy, history, target, items, scores, target_rank

`event` is the number of the target among all interactions; `target_rank` is its place in the list, from
0 on, or -1. Where nobody may know the target (`Prefixes.ends`), it is NOTHING.
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.slide.history import NOTHING
from recipes.interactions.tables import Ints, read_table
from recipes.slide.artefacts import write_atomically
from recipes.task import DataError

FOLDER = "lists"
ROW_GROUP = 8192


@dataclass(frozen=True)
class Rows:
    """R rows of one shard, or of all."""

    users_R: Ints
    events_R: Ints
    copies_R: Ints
    histories: Sequence[Ints]
    targets_R: Ints
    items_RK: Ints
    scores_RK: NDArray[np.float32]

    @property
    def target_ranks(self) -> Ints:
        """From 0 on; -1 where the target is not in the list."""
        hit_RK = (self.items_RK == self.targets_R[:, None]) & (self.items_RK != NOTHING)
        return np.where(hit_RK.any(1), hit_RK.argmax(1), -1)


def file_of(folder: Path, shard: int) -> Path:
    """Where a shard is."""
    return folder / FOLDER / f"shard-{shard:05d}.parquet"


def write_shard(folder: Path, shard: int, rows: Rows, made_from: Mapping[str, str]) -> None:
    """Whole or not at all."""
    import pyarrow as pa
    from pyarrow import parquet

    found = [items != NOTHING for items in rows.items_RK]
    columns = {
        "user": pa.array(rows.users_R, pa.int64()),
        "event": pa.array(rows.events_R, pa.int64()),
        "copy": pa.array(rows.copies_R, pa.int16()),
        "history": pa.array([list(h) for h in rows.histories], pa.list_(pa.int32())),
        "target": pa.array(rows.targets_R, pa.int32()),
        "items": pa.array(
            [i[f].tolist() for i, f in zip(rows.items_RK, found, strict=True)], pa.list_(pa.int32())
        ),
        "scores": pa.array(
            [s[f].tolist() for s, f in zip(rows.scores_RK, found, strict=True)],
            pa.list_(pa.float32()),
        ),
        "target_rank": pa.array(rows.target_ranks, pa.int16()),
    }
    footer = {**made_from, "rows": str(len(rows.users_R))}
    table = pa.table(columns).replace_schema_metadata(footer)
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, row_group_size=ROW_GROUP)
    file = file_of(folder, shard)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, buffer.getvalue())


def shard_is_there(folder: Path, shard: int, made_from: Mapping[str, str]) -> bool:
    """Whether a shard is done. Raises `DataError` for one that was made from something else."""
    from pyarrow import ArrowException, parquet

    file = file_of(folder, shard)
    if not file.is_file():
        return False
    try:
        footer = {
            k.decode(): v.decode() for k, v in (parquet.read_schema(file).metadata or {}).items()
        }
        rows = parquet.read_metadata(file).num_rows
    except (ArrowException, OSError, ValueError) as error:
        raise DataError(f"{file} is damaged ({str(error).splitlines()[0]}): delete it") from error
    for name, wanted in {**made_from, "rows": str(rows)}.items():
        if footer.get(name) != wanted:
            raise DataError(
                f"{file} was made with {name}={footer.get(name)}, and here it is {wanted}: set run.dir "
                "to another folder, or delete this one"
            )
    return True


def read_shards(folder: Path, shards: int, length: int) -> Rows:
    """All shards in order; lists are cut to `length`, shorter ones end in NOTHING."""
    parts: dict[str, list[Ints]] = {name: [] for name in ("user", "event", "copy", "target")}
    histories: list[Ints] = []
    items: list[Ints] = []
    scores: list[NDArray[np.float32]] = []
    for shard in range(shards):
        table = read_table(file_of(folder, shard))
        for name, found in parts.items():
            found.append(table.column(name).to_numpy().astype(np.int64))
        histories += [np.asarray(h.as_py(), dtype=np.int64) for h in table.column("history")]
        items.append(_padded(table.column("items"), length, NOTHING).astype(np.int64))
        scores.append(_padded(table.column("scores"), length, -np.inf).astype(np.float32))
    user, event, copy, target = (np.concatenate(found) for found in parts.values())
    return Rows(user, event, copy, histories, target, np.concatenate(items), np.concatenate(scores))


def _padded(column: object, length: int, filler: float) -> NDArray[np.float64]:
    """The first `length` of each row's values (R, length)."""
    array = column.combine_chunks()  # type: ignore[attr-defined]
    values = array.flatten().to_numpy(zero_copy_only=False)
    sizes = np.asarray(array.value_lengths().to_numpy(zero_copy_only=False), dtype=np.int64)
    out = np.full((len(sizes), length), filler, dtype=np.float64)
    starts = np.cumsum(sizes) - sizes
    row = np.repeat(np.arange(len(sizes)), sizes)
    place = np.arange(len(values)) - starts[row]
    kept = place < length
    out[row[kept], place[kept]] = values[kept]
    return out


def made_from_text(made_from: Mapping[str, object]) -> dict[str, str]:
    """As a footer has it."""
    return {name: v if isinstance(v, str) else json.dumps(v) for name, v in made_from.items()}

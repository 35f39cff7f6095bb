"""`sids.parquet`: each item's name, its codes, and its place among the items of the same ID."""

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.slide.ids import SemanticIds
from recipes.interactions.tables import read_table
from recipes.slide.artefacts import read_manifest, write_atomically
from recipes.task import DataError

NAME = "sids.parquet"
STAGE = "sid_build"


def write_ids(folder: Path, ids: SemanticIds, names: NDArray[np.generic]) -> None:
    """Whole or not at all."""
    import pyarrow as pa
    from pyarrow import parquet

    columns = {
        "item": pa.array([str(name) for name in names]),
        "codes": pa.array(ids.codes_IL.tolist(), pa.list_(pa.int32(), ids.levels)),
        "rank": pa.array(ids.ranks_I, pa.int64()),
    }
    table = pa.table(columns).replace_schema_metadata({"sizes": " ".join(map(str, ids.sizes))})
    buffer = io.BytesIO()
    parquet.write_table(table, buffer)
    write_atomically(folder / NAME, buffer.getvalue())


def read_ids(folder: Path, names: NDArray[np.generic], key: str = "task.sids") -> SemanticIds:
    """The IDs of these items. Raises `DataError` for what is no finished `sid_build` of them."""
    read_manifest(folder, key, STAGE)
    table = read_table(folder / NAME)
    stored = table.column("item").to_pylist()
    if stored != [str(name) for name in names]:
        raise DataError(
            f"{key}={folder} has semantic IDs of {len(stored):,} other items than the "
            f"{len(names):,} of data.*: set {key} to those made from this data"
        )
    sizes = tuple(map(int, table.schema.metadata[b"sizes"].split()))
    codes_IL = np.array(table.column("codes").to_pylist(), dtype=np.int64)
    return SemanticIds(codes_IL, sizes, table.column("rank").to_numpy().astype(np.int64))

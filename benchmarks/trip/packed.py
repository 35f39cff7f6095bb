"""A table with its split and drawn items as one file, for a machine that cannot read or draw them.

    python -m benchmarks.trip.packed FILE.npz [overrides of +recipe=trip]

A study with `--packed FILE.npz` reads it instead of the table; names of users and items are left out,
and the item table's start (`model.item_start=counts`) is rounded to 16 bits.
"""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.ctr.table import Interactions
from recipes.ctr.targets import Split, Targets
from recipes.trip import TripTask

PARTS = ("train", "validation", "test")
COLUMNS = ("users_E", "items_E", "times_E", "behaviours_E", "labels_E", "features_IF")
NAMES = ("user_names", "item_names", "behaviour_names")


def pack(task: TripTask, file: Path) -> None:
    """Write what a study needs of `task`."""
    table, parts = task.table, task.parts
    arrays: dict[str, NDArray[Any]] = {name: getattr(table, name) for name in COLUMNS}
    arrays |= {name: np.array(len(getattr(table, name))) for name in NAMES}
    for part in PARTS:
        targets = getattr(parts, part)
        arrays |= {f"{part}.{f.name}": getattr(targets, f.name) for f in fields(Targets)}
    arrays |= {"known_E": parts.known_E, "vocabulary_I": parts.vocabulary_I}
    if task.model_config.item_start == "counts":
        arrays["item_vectors"] = task.item_vectors.astype(np.float16)
    small = {name: array.astype(_smallest(array)) for name, array in arrays.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(file, **small)  # type: ignore[arg-type]


def _smallest(array: NDArray[Any]) -> Any:
    if array.dtype.kind != "i" or not array.size:
        return array.dtype
    return np.promote_types(np.min_scalar_type(array.min()), np.min_scalar_type(array.max()))


def unpack(file: Path, task: TripTask) -> None:
    """Give `task` what was packed, instead of what it would read."""
    with np.load(file) as stored:
        arrays = {
            name: stored[name].astype(np.int64) if stored[name].dtype.kind in "iu" else stored[name]
            for name in stored.files
        }
    names = {name: np.arange(int(arrays[name])) for name in NAMES}
    # files from before features of items have none
    arrays.setdefault("features_IF", np.zeros((len(names["item_names"]), 0), np.int64))
    task.table = Interactions(**{name: arrays[name] for name in COLUMNS}, **names)
    targets = {
        part: Targets(*(arrays[f"{part}.{f.name}"] for f in fields(Targets))) for part in PARTS
    }
    task.parts = Split(**targets, known_E=arrays["known_E"], vocabulary_I=arrays["vocabulary_I"])
    if "item_vectors" in arrays:
        task.item_vectors = arrays["item_vectors"].astype(np.float32)


def main() -> None:
    """Pack the data of one configuration."""
    from benchmarks.trip.study import compose, task_of

    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("file", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args()
    pack(task_of(compose("trip", options.overrides)), options.file)
    print(f"{options.file}: {options.file.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()

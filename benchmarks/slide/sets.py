"""A set as one small file, sequences and semantic IDs: a study needs neither text nor Parquet."""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from models.slide.ids import SemanticIds
from recipes.slide.config import SequencesConfig
from recipes.slide.data import Data
from recipes.slide.items import Items
from recipes.slide.sequences import Sequences


def prepare(folder: str, sids: str, out: Path, permute_ties: int | None = None) -> None:
    """Pack a folder with sequences.txt and the semantic IDs that `sid_build` made of it.

    `permute_ties` is that of `data`, the control; the IDs must have been made with the same.
    """
    config = SequencesConfig(
        source="sequences", folder=folder, short_users="drop", permute_ties=permute_ties
    )
    pack(Data(config, sids), out)


def pack(data: Data, out: Path) -> None:
    """One file out of what a stage reads."""
    s, ids = data.sequences, data.ids
    arrays: dict[str, Any] = {
        "items_E": s.items_E.astype(np.int32), "starts_X": s.starts_X, "user_names": s.user_names,
        "item_names": s.item_names, "codes_IL": ids.codes_IL.astype(np.int16),
        "ranks_I": ids.ranks_I, "sizes": np.array(ids.sizes),
    }  # fmt: skip
    if s.times_E is not None:
        arrays["times_E"] = s.times_E
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, **arrays)


class Prepared(Data):
    """What `prepare` packed; equal to what was read from the folder."""

    @classmethod
    def of(cls, file: Path) -> "Prepared":
        """The set in this file."""
        return cls(SequencesConfig(source="sequences", folder=str(file)), str(file))

    @cached_property
    def _source(self) -> tuple[Sequences, Items]:
        with np.load(str(self.config.folder)) as stored:
            sequences = Sequences(
                stored["items_E"].astype(np.int64),
                stored.get("times_E", None),
                stored["starts_X"],
                stored["user_names"],
                stored["item_names"],
            )
        return sequences, Items(sequences.item_names)

    @cached_property
    def ids(self) -> SemanticIds:
        """The items' semantic IDs."""
        with np.load(str(self.config.folder)) as stored:
            sizes = tuple(stored["sizes"].tolist())
            return SemanticIds(stored["codes_IL"].astype(np.int64), sizes, stored["ranks_I"])

"""Semantic IDs: each item is a short row of codes, and items that are alike share its beginning.

I items, L levels
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SemanticIds:
    """The codes of all items. Several items may have the same (collision policy `keep`)."""

    codes_IL: Ints
    """From 0 on at each level."""
    sizes: tuple[int, ...]
    """How many codes each level has."""
    ranks_I: Ints
    """The place of an item among those with the same codes: 0 comes first in a list."""

    def __post_init__(self) -> None:
        codes_IL, sizes = self.codes_IL, np.array(self.sizes)
        if codes_IL.ndim != 2 or codes_IL.shape[1] != len(sizes) or not len(codes_IL):
            raise ValueError(f"codes of shape {codes_IL.shape} are no rows of {len(sizes)} codes")
        wrong = (codes_IL < 0) | (codes_IL >= sizes)
        if wrong.any():
            item, level = np.argwhere(wrong)[0]
            raise ValueError(
                f"item number {item} has code {codes_IL[item, level]} at level {level}, which has "
                f"{sizes[level]} codes"
            )

    @property
    def num_items(self) -> int:
        """I."""
        return len(self.codes_IL)

    @property
    def levels(self) -> int:
        """L."""
        return len(self.sizes)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal IDs of equally many items in the same order."""
        digest = hashlib.sha256(np.array(self.sizes, dtype="<i8").tobytes())
        for array in (self.codes_IL, self.ranks_I):
            digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        return digest.hexdigest()[:16]


def make_ids(codes_IL: Ints, sizes: Sequence[int], popularity_I: Ints | None = None) -> SemanticIds:
    """IDs whose items with the same codes are ordered by popularity, then by number."""
    number_I = np.arange(len(codes_IL), dtype=np.int64)
    popularity_I = np.zeros_like(number_I) if popularity_I is None else popularity_I
    _, group_I, counts = np.unique(codes_IL, axis=0, return_inverse=True, return_counts=True)
    group_I = group_I.reshape(-1)
    order = np.lexsort((number_I, -popularity_I, group_I))
    ranks_I = np.empty_like(number_I)
    ranks_I[order] = number_I - (np.cumsum(counts) - counts)[group_I[order]]
    return SemanticIds(np.asarray(codes_IL, dtype=np.int64), tuple(map(int, sizes)), ranks_I)

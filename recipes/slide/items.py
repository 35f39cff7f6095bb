"""What is known of the items: text, attributes, vectors, ready semantic IDs."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.interactions.tables import Ints
from recipes.task import DataError


@dataclass(frozen=True)
class Items:
    """I items; what a source does not say is None."""

    names: NDArray[Any]
    """Sorted: an item's number is its place."""
    texts: Sequence[str] | None = None
    attributes: Sequence[Sequence[str]] | None = None
    vectors_ID: NDArray[np.float32] | None = None
    codes: Sequence[Sequence[Any]] | None = field(default=None, repr=False)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal items."""
        words = [list(map(str, self.names)), self.texts, self.attributes, self.codes]
        digest = hashlib.sha256(json.dumps(words, default=str).encode())
        if self.vectors_ID is not None:
            digest.update(self.vectors_ID.astype("<f4").tobytes())
        return digest.hexdigest()[:16]

    def given_codes(self) -> Ints:
        """Ready semantic IDs (I, L). Raises `DataError` for what is none."""
        if self.codes is None:
            raise DataError(
                "no item has a ready semantic ID: set data.ids_key to their column, or task.method to "
                "kmeans or rqvae"
            )
        rows = [_codes(name, row) for name, row in zip(self.names, self.codes, strict=True)]
        lengths = {len(row) for row in rows}
        if len(lengths) > 1:
            raise DataError(
                f"semantic IDs have {min(lengths)} to {max(lengths)} codes: data.ids_key must name a "
                "column whose rows are equally long"
            )
        return np.array(rows, dtype=np.int64)


def _codes(name: Any, row: Any) -> list[int]:
    """[183, 70] or ["<a_183>", "<b_70>"], or one text of such words."""
    if isinstance(row, str):
        row = re.findall(r"\d+", row)
    found = []
    for code in row if row is not None else ():
        digits = re.search(r"\d+", str(code))
        if digits is not None:
            found.append(int(digits[0]))
    if not found or (not isinstance(row, str) and len(found) != len(row)):
        raise DataError(f"item {name} has no semantic ID, but {row!r}: set data.ids_key")
    return found


def make_items(
    rows: Mapping[Any, Mapping[str, Any]],
    text_keys: Sequence[str],
    attributes_key: str | None = None,
    vector_key: str | None = None,
    ids_key: str | None = None,
) -> Items:
    """Items out of rows by name; keys that no row has are passed over, but for vectors and IDs."""
    names = np.unique(np.array(list(rows)))
    kept = [rows[name] for name in names.tolist()]
    present = {key for row in kept for key, value in row.items() if value is not None}
    for key, name in (("vector_key", vector_key), ("ids_key", ids_key)):
        if name is not None and name not in present:
            raise DataError(f"no item has {name}: set data.{key} to another column, or to null")
    used = [key for key in text_keys if key in present]
    texts = [" ".join(str(row.get(key) or "") for key in used).strip() for row in kept]
    attributes = None
    if attributes_key in present:
        attributes = [as_words(row.get(attributes_key)) for row in kept]
    return Items(
        names,
        texts if used else None,
        attributes,
        _vectors(names, [row.get(vector_key) for row in kept]) if vector_key else None,
        [row.get(ids_key) for row in kept] if ids_key else None,  # type: ignore[misc]
    )


def as_words(value: Any) -> list[str]:
    """What a row says, one thing or several, in a list or between commas or bars."""
    if value is None:
        return []
    if isinstance(value, str):
        return [word.strip() for word in re.split(r"[,|]", value) if word.strip()]
    several = value if isinstance(value, Iterable) else [value]
    return [str(word) for word in several if word is not None]


def _vectors(names: NDArray[Any], rows: Sequence[Any]) -> NDArray[np.float32]:
    vectors = [_vector(name, row) for name, row in zip(names, rows, strict=True)]
    sizes = {len(vector) for vector in vectors}
    if len(sizes) > 1 or 0 in sizes:
        odd = min(range(len(vectors)), key=lambda n: len(vectors[n]))
        raise DataError(
            f"item {names[odd]} has a vector of {len(vectors[odd])} numbers, and the longest has "
            f"{max(sizes)}: mend data.vector_key"
        )
    vectors_ID = np.stack(vectors)
    if not np.isfinite(vectors_ID).all():
        odd = int(np.argwhere(~np.isfinite(vectors_ID))[0, 0])
        raise DataError(f"item {names[odd]} has a vector that is not finite: mend data.vector_key")
    return vectors_ID


def _vector(name: Any, row: Any) -> NDArray[np.float32]:
    try:
        vector = np.asarray([] if row is None else row, dtype=np.float32)
    except (TypeError, ValueError):
        vector = np.zeros((), dtype=np.float32)
    if vector.ndim != 1:
        raise DataError(f"item {name} has {row!r} for a list of numbers: mend data.vector_key")
    return vector

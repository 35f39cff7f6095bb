"""A row's lists as a result file keeps them: figures, and each user's place in a letter.

X users, K items of a list
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.slide.history import NOTHING
from recipes.interactions.tables import Ints
from recipes.slide.metrics import MISSED, by_stratum, exposure, places, repeats
from recipes.slide.split import Split

Found = dict[str, Any]
LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
NOWHERE = "."


def scored(text: str, lists: Mapping[str, Ints], split: Split, part: str) -> Found:
    """Of lists (X, K), K up to 36, by kind: raw and new."""
    targets_X = split.sequences.items_E[split.targets(part)]
    strata = split.strata(part)
    found: Found = {"row": text, "part": part, "figures": {}, "places": {}}
    for kind, items_XK in lists.items():
        place_X = places(items_XK, targets_X)
        found["figures"][kind] = {
            **by_stratum(place_X, strata, (5, 10)),
            **exposure(items_XK, split.sequences.num_items),
            "repeats": repeats(items_XK),
            "missing": float((items_XK == NOTHING).mean()),
        }
        found["places"][kind] = written(place_X)
    return found


def written(place_X: Ints) -> str:
    """A letter for each user."""
    return "".join(LETTERS[p] if p < len(LETTERS) else NOWHERE for p in place_X.tolist())


def read(letters: str) -> Ints:
    """What was `written`."""
    return np.array([LETTERS.find(c) if c != NOWHERE else MISSED for c in letters], dtype=np.int64)


def flags(rows_X: NDArray[np.bool_]) -> str:
    """A stratum's users."""
    return "".join("1" if row else "0" for row in rows_X.tolist())

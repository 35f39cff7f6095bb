"""How good lists are: exact figures over whole arrays.

X users, K items of a list, n of a number of them
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from models.slide.history import NOTHING
from recipes.interactions.tables import Ints
from recipes.slide.sids.report import gini

Floats = NDArray[np.float64]
CUTS = (5, 10, 20)
MISSED = 2**40
"""In place of a place: beyond the end of any list."""


def places(lists_XK: Ints, targets_X: Ints) -> Ints:
    """Where each user's target is in the list, from 0 on; MISSED where it is not."""
    hit_XK = lists_XK == targets_X[:, None]
    return np.where(hit_XK.any(1), hit_XK.argmax(1), MISSED).astype(np.int64)


def gains(place_X: Ints, cut: int) -> dict[str, Floats]:
    """Recall@cut, NDCG@cut and the reciprocal rank of each user, who has one target."""
    hit_X = place_X < cut
    return {
        f"recall@{cut}": hit_X.astype(np.float64),
        f"ndcg@{cut}": np.where(hit_X, 1 / np.log2(place_X + 2.0), 0.0),
        f"mrr@{cut}": np.where(hit_X, 1 / (place_X + 1.0), 0.0),
    }


def by_stratum(
    place_X: Ints, strata: Mapping[str, NDArray[np.bool_]], cuts: tuple[int, ...] = CUTS
) -> dict[str, float]:
    """Means over all users, and with `_name` behind them over those of each stratum."""
    found: dict[str, float] = {}
    for cut in cuts:
        for name, gain_X in gains(place_X, cut).items():
            found[name] = float(gain_X.mean())
            for stratum, rows_X in strata.items():
                if rows_X.any():
                    found[f"{name}_{stratum}"] = float(gain_X[rows_X].mean())
    return found


def exposure(lists_XK: Ints, num_items: int) -> dict[str, float]:
    """`coverage`: the share of items that are in some list; `gini` of how often they are."""
    shown = lists_XK[lists_XK != NOTHING]
    loads = np.bincount(shown, minlength=num_items).astype(np.int64)
    return {"coverage": float((loads > 0).mean()), "gini": gini(loads)}


def repeats(lists_XK: Ints) -> float:
    """The share of places whose item is in the list before."""
    K = lists_XK.shape[1]
    same_XKK = (lists_XK[:, :, None] == lists_XK[:, None]) & (lists_XK != NOTHING)[:, :, None]
    earlier_XK = (same_XKK & np.tri(K, k=-1, dtype=bool)).any(2)
    return float(earlier_XK.mean())


def overlap(lists_XK: Ints, others_XK: Ints) -> float:
    """The share of items that two lists of a user have in common, in the mean."""
    common_XK = (lists_XK[:, :, None] == others_XK[:, None]).any(2) & (lists_XK != NOTHING)
    return float(common_XK.sum(1).mean() / lists_XK.shape[1])


def kendall(lists_XK: Ints, others_XK: Ints) -> float:
    """Kendall's tau of the order of the items that two lists have in common, over users with a pair."""
    at_XK = np.where(
        (found := lists_XK[:, :, None] == others_XK[:, None]).any(2) & (lists_XK != NOTHING),
        found.argmax(2),
        -1,
    )
    taus = []
    for at_K in at_XK:
        order = at_K[at_K >= 0]
        if len(order) > 1:
            signs = np.sign(order[None, :] - order[:, None])[np.triu_indices(len(order), 1)]
            taus.append(signs.mean())
    return float(np.mean(taus)) if taus else float("nan")


def without(lists_XK: Ints, removed: list[Ints], length: int) -> Ints:
    """The first `length` items of each list that are not among the user's `removed`."""
    out = np.full((len(lists_XK), length), NOTHING, dtype=np.int64)
    for row, (items_K, gone) in enumerate(zip(lists_XK, removed, strict=True)):
        left = items_K[(items_K != NOTHING) & ~np.isin(items_K, gone)][:length]
        out[row, : len(left)] = left
    return out


def paired(first_X: Floats, second_X: Floats) -> tuple[float, float]:
    """The mean difference of two figures of the same users, and its standard error."""
    difference_X = first_X - second_X
    error = (
        difference_X.std(ddof=1) / np.sqrt(len(difference_X)) if len(difference_X) > 1 else np.nan
    )
    return float(difference_X.mean()), float(error)

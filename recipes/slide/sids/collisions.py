"""What becomes of items with the same codes: another level, another last code, or nothing.

I items, L levels, C codes of the last level
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from recipes.interactions.tables import Ints
from recipes.slide.sids.kmeans import squared_distances
from recipes.task import DataError

POLICIES = ("suffix", "reassign", "keep")


def number_groups(codes_IL: Ints) -> tuple[Ints, Ints]:
    """For each item the number of its ID, and how many items each ID has."""
    _, group_I, counts = np.unique(codes_IL, axis=0, return_inverse=True, return_counts=True)
    return group_I.reshape(-1), counts


def check_distinct(codes_IL: Ints) -> None:
    """Raise `DataError` if all items are on one ID."""
    if len(codes_IL) > 1 and (codes_IL == codes_IL[0]).all():
        raise DataError(
            f"all {len(codes_IL):,} items have the same semantic ID {codes_IL[0].tolist()}: give items "
            "that differ in data.text_keys, data.vector_key or data.ids_key, or set task.cooccurrence "
            "above 0"
        )


def keep(codes_IL: Ints, cap: int) -> Ints:
    """The same codes, if no ID has more than `cap` items."""
    group_I, counts = number_groups(codes_IL)
    if counts.max() > cap:
        full = codes_IL[np.flatnonzero(group_I == counts.argmax())[0]].tolist()
        raise DataError(
            f"{counts.max()} items share the semantic ID {full}, more than task.cap={cap}: set task.cap "
            "to more, task.collisions to suffix or reassign, or task.codes to more"
        )
    return codes_IL


def suffix(codes_IL: Ints, popularity_I: Ints, cap: int) -> tuple[Ints, int]:
    """One more level, which numbers the items of an ID by popularity (as TIGER does), and its size."""
    keep(codes_IL, cap)
    group_I, counts = number_groups(codes_IL)
    order = np.lexsort((np.arange(len(codes_IL)), -popularity_I, group_I))
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    digit_I = np.empty(len(codes_IL), dtype=np.int64)
    digit_I[order] = np.arange(len(codes_IL)) - starts[group_I[order]]
    return np.concatenate([codes_IL, digit_I[:, None]], axis=1), int(counts.max())


def reassign(codes_IL: Ints, left_ID: Tensor, center_CD: Tensor, cap: int) -> Ints:
    """At most `cap` items an ID: the nearest to its center stay, others take the nearest last code left.

    As FORGE does, who let a random choice stay. Raises `DataError` where a prefix has too many items.
    """
    codes_IL = codes_IL.copy()
    group_I, counts = number_groups(codes_IL)
    _, prefix_I = np.unique(codes_IL[:, :-1], axis=0, return_inverse=True)
    prefix_I = prefix_I.reshape(-1)
    of_prefix = np.bincount(prefix_I)
    room = cap * len(center_CD)
    if of_prefix.max() > room:
        shared = codes_IL[np.flatnonzero(prefix_I == of_prefix.argmax())[0], :-1].tolist()
        raise DataError(
            f"{of_prefix.max()} items share the codes {shared}, and {len(center_CD)} last codes with "
            f"task.cap={cap} have room for {room}: set task.codes or task.cap to more, or "
            "task.collisions=suffix"
        )
    own_I = (left_ID - center_CD[torch.from_numpy(codes_IL[:, -1])]).square().sum(1).numpy()
    order = np.lexsort((np.arange(len(codes_IL)), own_I, group_I))
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    place = np.arange(len(codes_IL)) - starts[group_I[order]]
    moving = order[place >= cap]
    load = np.zeros((len(of_prefix), len(center_CD)), dtype=np.int64)
    staying = order[place < cap]
    np.add.at(load, (prefix_I[staying], codes_IL[staying, -1]), 1)
    near_MC = squared_distances(left_ID[torch.from_numpy(moving)], center_CD).argsort(
        dim=1, stable=True
    )
    for item, codes in zip(moving, near_MC.numpy(), strict=True):
        free = codes[load[prefix_I[item], codes] < cap]
        codes_IL[item, -1] = free[0]
        load[prefix_I[item], free[0]] += 1
    return codes_IL


def largest(codes_IL: Ints) -> int:
    """Items of the fullest ID."""
    return int(number_groups(codes_IL)[1].max())


def sizes_of(codes_IL: Ints) -> Sequence[int]:
    """The smallest sizes of levels that hold these codes."""
    return [int(most) + 1 for most in codes_IL.max(0)]

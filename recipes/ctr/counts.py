"""A score without learning: how often the users of a history's items also met the target.

The cosine of items i and j is c_ij / sqrt(c_i c_j), where c counts users who met an item, or both, in
the training part.
"""

from collections.abc import Sequence

import numpy as np

from recipes.ctr.metrics import Floats
from recipes.ctr.samples import Clicks
from recipes.ctr.table import counts_by
from recipes.ctr.targets import Split
from recipes.interactions.tables import Ints


def cosine_scores(clicks: Clicks, parts: Split) -> Floats:
    """The mean cosine of each target with the different items of its history; 0 without history."""
    table = clicks.table
    num_items = len(table.item_names)
    known = np.flatnonzero(parts.known_E)
    pairs = np.unique(table.users_E[known] * num_items + table.items_E[known])
    users, items = np.divmod(pairs, num_items)  # by user
    first_U = np.searchsorted(users, np.arange(len(table.user_names) + 1))
    counts_I = counts_by(items, num_items)
    by_item = np.argsort(items, kind="stable")
    first_I = np.searchsorted(items[by_item], np.arange(num_items + 1))
    root_I = np.sqrt(np.maximum(counts_I, 1))
    scores = np.zeros(len(clicks))
    for item, rows in _rows_by_item(clicks.targets.items_T):
        who = users[by_item[first_I[item] : first_I[item + 1]]]
        also = [items[first_U[user] : first_U[user + 1]] for user in who]
        both_I = counts_by(np.concatenate([*also, np.array([], np.int64)]), num_items)
        cosine_I = both_I / (root_I * root_I[item])
        for row in rows:
            begin, end = clicks.span(int(clicks.targets.events_T[row]))
            history = np.unique(table.items_E[begin:end])
            scores[row] = cosine_I[history].mean() if len(history) else 0.0
    return scores


def _rows_by_item(items_T: Ints) -> Sequence[tuple[int, Ints]]:
    order = np.argsort(items_T, kind="stable")
    values, starts = np.unique(items_T[order], return_index=True)
    return list(zip(values.tolist(), np.split(order, starts[1:]), strict=True))

"""Items drawn as no clicks: of three kinds, each of which asks something else of a model.

Uniform ones are mostly told by popularity; popular ones, as often met around the same time, are not;
near ones were met around the same time by someone who shares an item with the user, so that neither
popularity nor the user's town or taste gives them away.
"""

import json

import numpy as np
from numpy.typing import NDArray

from recipes.ctr.config import InteractionsConfig
from recipes.ctr.frozen import frozen
from recipes.ctr.table import Interactions, hash_of
from recipes.interactions.tables import Ints
from recipes.task import DataError

REAL, UNIFORM, POPULAR, NEAR = 0, 1, 2, 3
"""How a target came about: it is in the table, or its item was drawn."""
KINDS = {"uniform": UNIFORM, "popular": POPULAR, "near": NEAR}
ROUNDS = 20
"""After so many draws in vain the window is doubled: in a small table, all in it may be known."""


def drawn_kinds(config: InteractionsConfig) -> list[int]:
    """The kind of each item that is drawn for a click."""
    return [k for name, k in KINDS.items() for _ in range(getattr(config, f"{name}_negatives"))]


def drawn_items(
    table: Interactions, events_T: Ints, warm_I: NDArray[np.bool_], config: InteractionsConfig
) -> Ints:
    """Items for the clicks at these events, (T, K): drawn once, then read."""
    kinds, window = drawn_kinds(config), config.popular_window
    rules = [table.fingerprint, kinds, window, config.negatives_seed]
    key = json.dumps([*rules, hash_of(events_T), hash_of(np.flatnonzero(warm_I))])
    return frozen(
        config.cache_dir,
        "negatives",
        key,
        lambda: draw(table, events_T, warm_I, kinds, window, config.negatives_seed),
    )


def draw(
    table: Interactions,
    events_T: Ints,
    warm_I: NDArray[np.bool_],
    kinds: list[int],
    window: float,
    seed: int,
) -> Ints:
    """An item for each event and kind (T, K): warm, and none that the user ever has in the table."""
    generator = np.random.default_rng(seed)
    num_items, num_events = len(table.item_names), len(table.users_E)
    had = np.unique(table.users_E * num_items + table.items_E)
    users_T = table.users_E[events_T]
    warm = np.flatnonzero(warm_I)
    by_time = np.argsort(table.times_E, kind="stable")
    place_E = np.empty_like(by_time)
    place_E[by_time] = np.arange(num_events)
    by_item = np.argsort(table.items_E, kind="stable")
    drawn_TK = np.full((len(events_T), len(kinds)), -1, dtype=np.int64)
    for column, kind in enumerate(kinds):
        left = np.arange(len(events_T))
        for turn in range(20 * ROUNDS):
            if not len(left):
                break
            reach = max(1, int(min(window * 2 ** (turn // ROUNDS), 1.0) * num_events))
            place = place_E[events_T[left]]
            if kind == UNIFORM:
                found, bad = generator.choice(warm, len(left)), np.zeros(len(left), bool)
            elif kind == POPULAR:
                # not clipped after drawing, which would draw the first and the last too often
                low, high = (place - reach).clip(0), (place + reach).clip(max=num_events - 1)
                found = table.items_E[by_time[generator.integers(low, high + 1)]]
                bad = np.zeros(len(left), bool)
            else:
                events = _of_someone_near(table, by_item, events_T[left], generator)
                found = table.items_E[events]
                bad = np.abs(place_E[events] - place) > reach
            pair = users_T[left] * num_items + found
            known = had[np.searchsorted(had, pair).clip(max=len(had) - 1)] == pair
            bad |= ~warm_I[found] | known
            drawn_TK[left[~bad], column] = found[~bad]
            left = left[bad]
        if len(left):
            raise DataError(
                f"user {table.user_names[users_T[left[0]]]} has nearly every item that could be drawn "
                "as no click: set data.label_key, or data.min_count to less"
            )
    return drawn_TK


def _of_someone_near(
    table: Interactions, by_item: Ints, events: Ints, generator: np.random.Generator
) -> Ints:
    """For each event a step to one of its user's, to another with that item, to one of *its* user's."""
    own = _any_of(table.first_of_user, table.end_of_user, events, generator)
    sorted_items = table.items_E[by_item]
    low, high = (
        np.searchsorted(sorted_items, table.items_E[own], side) for side in ("left", "right")
    )
    shared = by_item[generator.integers(low, high)]
    return _any_of(table.first_of_user, table.end_of_user, shared, generator)


def _any_of(first_E: Ints, end_E: Ints, events: Ints, generator: np.random.Generator) -> Ints:
    """Any event of the same user."""
    return generator.integers(first_E[events], end_E[events])

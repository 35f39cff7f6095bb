"""Made-up interactions in which only time and company matter: what TRIP must find, and NoPE cannot.

Every item has a kind, and is a left, a right or a target of it. A user has four sessions of five items,
hours to months before the target: two recent ones, two old ones. Each history holds one left and one
right of the target's kind. Two fair coins decide whether both are in recent or in old sessions, and
whether they are in the same one or in the two of that age. The target is clicked if they are together
*and* recent; then 5 % of the labels are turned around. So which items there are says nothing.
"""

import numpy as np

from recipes.ctr.table import CONTEXT, Interactions, make_interactions

KINDS, EACH = 10, 5
"""Kinds, and items of a kind on each of its three sides."""
SESSIONS, LENGTH, RECENT = 4, 5, 2
NOISE = 0.05
SECONDS = (3_600, 86_400, 1_000_000, 8_000_000)
"""About how long before the target the sessions are, newest first."""


def item(kind: np.ndarray, side: int, generator: np.random.Generator) -> np.ndarray:
    """Any item of these kinds: side 0 left, 1 right, 2 target."""
    return (kind * 3 + side) * EACH + generator.integers(EACH, size=kind.shape)


def plant(users: int, seed: int) -> Interactions:
    """One target a user, spread over a year."""
    generator = np.random.default_rng(seed)
    kind_U = generator.integers(KINDS, size=users)
    # noise: lefts and rights of other kinds
    other = (
        kind_U[:, None, None] + generator.integers(1, KINDS, (users, SESSIONS, LENGTH))
    ) % KINDS
    sides = generator.integers(2, size=other.shape)
    items = (other * 3 + sides) * EACH + generator.integers(EACH, size=other.shape)
    left_U = generator.integers(SESSIONS, size=users)
    together_U = generator.random(users) < 0.5
    right_U = np.where(together_U, left_U, left_U ^ 1)
    every = np.arange(users)
    items[every, left_U, 0] = item(kind_U, 0, generator)
    items[every, right_U, 1] = item(kind_U, 1, generator)
    items = generator.permuted(items, axis=2)
    clicks_U = together_U & (left_U < RECENT)
    clicks_U ^= generator.random(users) < NOISE
    now_U = 1_600_000_000 + generator.integers(365 * 86_400, size=users)
    stretch = generator.uniform(0.7, 1.4, (users, SESSIONS))
    session = now_U[:, None] - (np.array(SECONDS) * stretch).astype(np.int64)
    times = session[:, :, None] + np.sort(generator.integers(600, size=items.shape), axis=2)
    history = users * SESSIONS * LENGTH
    return make_interactions(
        users=np.concatenate([np.repeat(every, SESSIONS * LENGTH), every]),
        items=np.concatenate([items.ravel(), item(kind_U, 2, generator)]),
        times=np.concatenate([times.ravel(), now_U]),
        labels=np.concatenate([np.full(history, CONTEXT), clicks_U.astype(np.int64)]),
    )

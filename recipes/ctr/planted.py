"""Made-up interactions in which only time and company matter: what TRIP is for.

Every item has a kind, and is the left, the right or the target of it. A user has four sessions, hours to
months before the target, of two items or more, twenty in all: two sessions are recent, two are old. Each
history holds one left and one right of the target's kind, among those of other kinds. Two fair coins
decide whether both are in recent or in old sessions, and whether in the same one or in the two of that
age. The target is clicked if they are together *and* recent; then 5 % of the labels are turned around.

So which items there are says nothing, and their places little: sessions differ in length.
"""

import numpy as np

from recipes.ctr.table import CONTEXT, Interactions, make_interactions
from recipes.interactions.tables import Ints

KINDS = 5
LENGTH = 20
"""Items of a history."""
AGES = (3_600, 86_400, 1_000_000, 8_000_000)
"""About how many seconds before the target the sessions are, newest first: two recent, two old."""
NOISE = 0.05


def item(kind: Ints, side: int | Ints) -> Ints:
    """The items of these kinds: side 0 left, 1 right, 2 target."""
    return kind * 3 + side


def plant(users: int, seed: int) -> Interactions:
    """One target a user, spread over a year."""
    generator = np.random.default_rng(seed)
    every = np.arange(users)
    # where the sessions begin in the history (oldest first), and end
    evens = np.tile(np.arange(2, LENGTH, 2), (users, 1))
    cuts_U3 = np.sort(generator.permuted(evens, axis=1)[:, : len(AGES) - 1], axis=1)
    starts_US = np.pad(cuts_U3, ((0, 0), (1, 0)))
    sizes_US = np.diff(np.pad(starts_US, ((0, 0), (0, 1)), constant_values=LENGTH), axis=1)
    session_UN = (np.arange(LENGTH) >= cuts_U3[:, :, None]).sum(1)  # 0 is the oldest

    kind_U = generator.integers(KINDS, size=users)
    others_UN = kind_U[:, None] + generator.integers(1, KINDS, (users, LENGTH))
    items_UN = item(others_UN % KINDS, generator.integers(2, size=(users, LENGTH)))
    left_U = generator.integers(len(AGES), size=users)
    together_U = generator.random(users) < 0.5
    right_U = np.where(together_U, left_U, left_U ^ 1)
    offset_U = generator.integers(sizes_US[every, left_U])
    beside_U = (offset_U + generator.integers(1, sizes_US[every, left_U])) % sizes_US[every, left_U]
    apart_U = generator.integers(sizes_US[every, right_U])
    items_UN[every, starts_US[every, left_U] + offset_U] = item(kind_U, 0)
    right_at_U = starts_US[every, right_U] + np.where(together_U, beside_U, apart_U)
    items_UN[every, right_at_U] = item(kind_U, 1)
    clicks_U = together_U & (left_U >= len(AGES) // 2)
    clicks_U ^= generator.random(users) < NOISE

    now_U = 1_600_000_000 + generator.integers(365 * 86_400, size=users)
    stretch_US = generator.uniform(0.7, 1.4, (users, len(AGES)))
    ages_US = (np.array(AGES[::-1]) * stretch_US).astype(np.int64)
    times_UN = now_U[:, None] - np.take_along_axis(ages_US, session_UN, axis=1)
    times_UN = np.sort(times_UN + generator.integers(600, size=times_UN.shape), axis=1)
    # within a session the order is random already: sorting times moves no item out of its session
    return make_interactions(
        users=np.concatenate([np.repeat(every, LENGTH), every]),
        items=np.concatenate([items_UN.ravel(), item(kind_U, 2)]),
        times=np.concatenate([times_UN.ravel(), now_U]),
        labels=np.concatenate([np.full(users * LENGTH, CONTEXT), clicks_U.astype(np.int64)]),
    )

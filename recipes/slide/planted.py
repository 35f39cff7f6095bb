"""Made-up sequences with a structure that a model can learn, and that says what the best list is.

Items belong to kinds, and those of a kind stand in a ring. A user likes one kind for a while. From an
item the next one is its successor in the ring with a chance of .5, the one after that with .25, then
.125, and so on along the ring; one in twenty is any item at all, where the taste changes. So the best
list after an item is the ring from there on. Texts name the kind, its quarter of the ring, and the item.
"""

import numpy as np

from recipes.interactions.tables import Ints
from recipes.slide.config import SequencesConfig
from recipes.slide.items import Items
from recipes.slide.sequences import DAY, Sequences, make_sequences

KINDS, RING = 8, 12
NOISE = 0.05


def name(item: Ints | int) -> str:
    """Item numbers as names that sort like them."""
    return f"i{item:03d}"


def plant(config: SequencesConfig, seed: int = 0) -> tuple[Sequences, Items]:
    """5 to 16 interactions for each user, three in ten on the day of the one before."""
    generator = np.random.default_rng(seed)
    users, items, times = [], [], []
    for user in range(config.planted_users):
        length = int(generator.integers(5, 17))
        item = int(generator.integers(KINDS * RING))
        now = 1_600_000_000 // DAY * DAY + int(generator.integers(365)) * DAY
        for _ in range(length):
            users.append(user)
            items.append(name(item))
            times.append(now)
            now += 60 if generator.random() < 0.3 else DAY * int(generator.integers(1, 9))
            item = successor(item, int(generator.geometric(0.5)))
            if generator.random() < NOISE:
                item = int(generator.integers(KINDS * RING))
    names = np.array([name(item) for item in range(KINDS * RING)])
    texts = [
        f"kind{item // RING} quarter{item // RING}{item % RING * 4 // RING} item{item}"
        for item in range(KINDS * RING)
    ]
    attributes = [[f"kind {item // RING}"] for item in range(KINDS * RING)]
    sequences = make_sequences(users, items, np.array(times, dtype=np.int64), config, names)
    return sequences, Items(names, texts, attributes)


def successor(item: int, steps: int) -> int:
    """So many places further in the item's ring."""
    kind, place = divmod(item, RING)
    return kind * RING + (place + steps) % RING

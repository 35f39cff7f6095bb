"""The weights of the co-occurrence table, chosen on validation: how fast votes fall with distance.

A pair of items `n` apart counts n ** -pairs, the k-th last item of a history votes with k ** -votes.
All settings are tried at once: what a setting changes are the weights of the same candidates.

X users, M candidates of all users together, N distances, W last items
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from recipes.interactions.tables import Ints
from recipes.slide.counts import COOCCURRENCE, Counts, Floats
from recipes.slide.metrics import MISSED, gains
from recipes.slide.sids.features import training_pairs
from recipes.slide.split import Split

EXPONENTS = (0.0, 0.5, 1.0, 2.0)


class Candidates:
    """For each user of a part: the items that training has after the last ones, and how often."""

    def __init__(self, split: Split, part: str, window: int, last: int) -> None:
        self.split, self.size = split, split.sequences.num_items
        self.targets_X = split.sequences.items_E[split.targets(part)]
        first, second, apart, _ = training_pairs(split, window)
        keys, number = np.unique(first * self.size + second, return_inverse=True)
        counts_PN = np.zeros((len(keys), window))
        np.add.at(counts_PN, (number, apart - 1), 1.0)
        histories = [split.history(x, int(e)) for x, e in enumerate(split.targets(part))]
        parts = []
        for place in range(last):
            users = np.array([x for x, h in enumerate(histories) if len(h) > place])
            items = np.array([histories[x][-1 - place] for x in users.tolist()])
            begin, end = np.searchsorted(keys, [items * self.size, (items + 1) * self.size])
            many = end - begin
            pairs = (
                np.repeat(begin, many)
                + np.arange(many.sum())
                - np.repeat(np.cumsum(many) - many, many)
            )
            where = np.repeat(users, many) * self.size + keys[pairs] % self.size
            parts.append((where, pairs, np.full(len(where), place)))
        where, pairs, places = (np.concatenate(column) for column in zip(*parts, strict=True))
        met = np.concatenate([x * self.size + np.unique(h) for x, h in enumerate(histories)])
        kept = ~np.isin(where, met)
        self.where_M, self.of = np.unique(where[kept], return_inverse=True)
        self.votes = np.zeros((last, window, len(self.where_M)))
        for place in range(last):
            rows = places[kept] == place
            for n in range(window):
                self.votes[place, n] = np.bincount(
                    self.of[rows], counts_PN[pairs[kept][rows], n], len(self.where_M)
                )

    def places(self, pairs: float, votes: float) -> Ints:
        """Where each user's target is among the new items (MISSED: it is no candidate)."""
        last, window = self.votes.shape[:2]
        weights = np.outer(np.arange(1, last + 1) ** -votes, np.arange(1, window + 1) ** -pairs)
        scores_M: Floats = np.einsum("kn,knm->m", weights, self.votes)
        scores_M = scores_M + Counts(self.split, window, last).shares[self.where_M % self.size]
        users_M = self.where_M // self.size
        wanted_X = np.arange(len(self.targets_X)) * self.size + self.targets_X
        at_X = np.searchsorted(self.where_M, wanted_X).clip(max=len(self.where_M) - 1)
        found_X = self.where_M[at_X] == wanted_X
        own_X = np.where(found_X, scores_M[at_X], np.inf)
        better_M = (scores_M > own_X[users_M]) | (
            (scores_M == own_X[users_M]) & (self.where_M < wanted_X[users_M])
        )
        before_X = np.bincount(users_M, better_M, len(self.targets_X)).astype(np.int64)
        return np.where(found_X, before_X, MISSED)


def choose(splits: Mapping[str, Split]) -> dict[str, Any]:
    """NDCG@10 on validation of every setting on every set, and the one with the best mean."""
    window, last = COOCCURRENCE
    rows: dict[tuple[float, float], dict[str, float]] = {}
    for name, split in splits.items():
        candidates = Candidates(split, "validation", window, last)
        for pairs in EXPONENTS:
            for votes in EXPONENTS:
                found = gains(candidates.places(pairs, votes), 10)
                rows.setdefault((pairs, votes), {})[name] = float(found["ndcg@10"].mean())
    # each set counts alike: as a share of its best
    best = {name: max(row[name] for row in rows.values()) for name in splits}
    shares = {
        setting: float(np.mean([value / best[name] for name, value in row.items()]))
        for setting, row in rows.items()
    }
    chosen = max(shares, key=lambda setting: shares[setting])
    return {
        "window": window,
        "last": last,
        "pairs": chosen[0],
        "votes": chosen[1],
        "tried": [
            {"pairs": p, "votes": v, "ndcg@10": row, "share": shares[p, v]}
            for (p, v), row in rows.items()
        ],
    }

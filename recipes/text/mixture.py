"""Several sources in one dataset, in the proportions that their weights give.

An epoch is the shortest pass in which every sequence of every source that has a weight is seen at
least once, and each source has its share of the sequences. So the source with the most sequences
for its weight is seen once, and the others as often as their weights say.

    sizes 6 and 2, weights 1 and 1:   a0 a1 a2 a3 a4 a5 | b0 b1 b0 b1 b0 b1

The trainer shuffles these numbers anew for every epoch, so every stretch of a run has about the
shares of the whole. The mixture has no state: which sequence has which number follows from sizes
and weights, so a run resumes exactly on any number of ranks and workers.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from recipes.text.packing import Sequence_S, Sequences

LARGEST = 2**48
"""An epoch of more sequences than this is a mistake in the weights."""


def epoch_counts(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """How many sequences of each source an epoch has.

    Raises `ValueError` if a source has a weight but no sequences, or the weights lie too far apart.
    """
    total = sum(weights)
    shares = [weight / total for weight in weights]
    for size, share in zip(sizes, shares, strict=True):
        if share and not size:
            raise ValueError("a source with a weight has no sequences")
    passes = [size / share for size, share in zip(sizes, shares, strict=True) if share]
    if max(passes) > LARGEST:
        raise ValueError(
            f"data.mixture's weights {', '.join(f'{w:g}' for w in weights)} lie so far apart that an "
            "epoch would never end: set data.mixture.NAME.weight to 0, or higher"
        )
    epoch = max(passes)
    return [
        max(size, round(share * epoch)) if share else 0
        for size, share in zip(sizes, shares, strict=True)
    ]


class Mixture:
    """A map-style dataset: each source's sequences one after the other, `counts` of each.

    A source that is seen several times is seen whole as often as it fits; the sequences of its last
    pass are spread evenly over the source.
    """

    def __init__(self, sources: Sequence[Sequences], counts: Sequence[int]) -> None:
        self.sources, self.counts = sources, counts
        self._ends = list(accumulate(counts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sequence_S:
        source, position = self.locate(index)
        return replace(self.sources[source][position], source=source)

    def locate(self, index: int) -> tuple[int, int]:
        """Which source has this number, and which of its sequences it is."""
        source = bisect_right(self._ends, index)
        within = index - (self._ends[source] - self.counts[source])
        size = len(self.sources[source])
        turn, position = divmod(within, size)
        left = self.counts[source] - turn * size
        return source, position if left >= size else position * size // left

    def fingerprint(self) -> str:
        """Equal for equal sequences at every index, on whatever machine."""
        parts = [
            f"{source.fingerprint()} {count}"
            for source, count in zip(self.sources, self.counts, strict=True)
        ]
        return hashlib.blake2b(" ".join(parts).encode(), digest_size=16).hexdigest()


class Interleaved:
    """Every sequence of every source once, mixed so that any beginning has all sources in it."""

    def __init__(self, sources: Sequence[Sequences]) -> None:
        self.sources = sources
        self._order_N2 = interleave([len(source) for source in sources])

    def __len__(self) -> int:
        return len(self._order_N2)

    def __getitem__(self, index: int) -> Sequence_S:
        source, position = self.locate(index)
        return replace(self.sources[source][position], source=source)

    def locate(self, index: int) -> tuple[int, int]:
        """Which source has this number, and which of its sequences it is."""
        source, position = (int(value) for value in self._order_N2[index])
        return source, position

    def fingerprint(self) -> str:
        """Equal for equal sequences at every index, on whatever machine."""
        return " ".join(source.fingerprint() for source in self.sources)


def interleave(sizes: Sequence[int]) -> NDArray[np.int64]:
    """Pairs of source and position: each source spread evenly, the first of each at the front."""
    places = [np.arange(size) / max(size, 1) for size in sizes]
    pairs = [np.stack([np.full(size, s), np.arange(size)], 1) for s, size in enumerate(sizes)]
    order = np.argsort(np.concatenate(places), kind="stable")
    return np.concatenate(pairs)[order]

"""Samples that training never sees, on which decisions are judged: the same ones before and after."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recipes.task import Batch, DataError, Samples


@dataclass(frozen=True)
class Part:
    """Some of a task's samples."""

    samples: Samples
    numbers: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        return self.samples[int(self.numbers[index])]

    def fingerprint(self) -> str:
        """Of all samples, and of which they are."""
        own = getattr(self.samples, "fingerprint", None)
        whole = str(own()) if callable(own) else f"{len(self.samples)} samples"
        return f"{len(self.numbers)} of {whole}, {int(self.numbers.sum())}"


def set_apart(samples: Samples, share: float, seed: int) -> tuple[Part, Part]:
    """What is trained on, and the meta samples: a share, at least two, that `seed` draws.

    Raises `DataError` if nothing would be left.
    """
    number = max(round(share * len(samples)), 2)
    if number >= len(samples):
        raise DataError(
            f"lelora.meta_share={share} of {len(samples)} samples leaves none to train on: give more "
            "data, or set lelora.method=frozen"
        )
    drawn = np.array(sorted(random.Random(seed).sample(range(len(samples)), number)))  # noqa: S311
    return Part(samples, np.delete(np.arange(len(samples)), drawn)), Part(samples, drawn)


@dataclass(frozen=True)
class MetaBatches:
    """What one rank reads of the meta samples, on the CPU, in two halves of equally many batches."""

    halves: tuple[list[tuple[Batch, bool]], list[tuple[Batch, bool]]]
    """With each batch, whether it counts: a rank without a sample left reads one for nothing."""
    own_count: float
    """Labels that count on this rank."""


def meta_batches(
    meta: Samples,
    limit: int,
    collate: Callable[[Sequence[Any]], Batch],
    count: Callable[[Batch], int],
    *,
    rank: int,
    ranks: int,
    size: int,
) -> MetaBatches:
    """The first `limit` of `meta`; which half a sample is in does not depend on the ranks."""
    total = min(len(meta), limit)
    halves = []
    own = 0.0
    for first in (0, 1):
        numbers = list(range(first, total, 2))
        rounds = -(-len(numbers) // (ranks * size))
        mine = numbers[rank::ranks]
        batches = []
        for turn in range(rounds):
            part = mine[turn * size : (turn + 1) * size]
            batch = collate([meta[number] for number in part or numbers[:1]])
            batches.append((batch, bool(part)))
            own += count(batch) if part else 0
        halves.append(batches)
    return MetaBatches((halves[0], halves[1]), own)

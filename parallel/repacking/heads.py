"""Which heads each rank of a group computes, for any number of query and key/value heads.

Legend: T rows of the group, t rows of one rank, P ranks, H query heads, K key/value heads, D head dim,
N heads that travel to one rank: its query heads, and the key/value heads that these use, twice.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from parallel.repacking.layout import Ints

Blocks = tuple[tuple[tuple[int, int], ...], ...]
"""For each rank, which heads of each tensor belong to it: from and to."""


@dataclass(frozen=True)
class HeadMap:
    """Heads over the ranks of a group: rank r has query heads `r * H // P` to `(r + 1) * H // P`.

    Query head h uses key/value head `h * K // H`. A key/value head that ranks share travels to each of
    them, once. With more ranks than query heads some ranks have none.
    """

    num_q: int
    num_kv: int
    width: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_kv <= self.num_q:
            raise ValueError(
                f"{self.num_q} query heads cannot share {self.num_kv} key/value heads: there must be at "
                "least one, and no more than query heads"
            )

    def q_range(self, rank: int) -> tuple[int, int]:
        """Query heads of `rank`: from, to."""
        return rank * self.num_q // self.width, (rank + 1) * self.num_q // self.width

    def kv_range(self, rank: int) -> tuple[int, int]:
        """Key/value heads that the query heads of `rank` use: from, to."""
        begin, end = self.q_range(rank)
        if begin == end:
            return 0, 0
        return begin * self.num_kv // self.num_q, (end - 1) * self.num_kv // self.num_q + 1

    @cached_property
    def qkv_blocks(self) -> Blocks:
        """Site 1: heads of queries, keys and values."""
        kv = [self.kv_range(rank) for rank in range(self.width)]
        return tuple((self.q_range(rank), kv[rank], kv[rank]) for rank in range(self.width))

    @cached_property
    def q_blocks(self) -> Blocks:
        """Site 2: heads of the attention's output."""
        return tuple((self.q_range(rank),) for rank in range(self.width))

    @property
    def q_per_rank(self) -> Ints:
        """(P,) query heads."""
        return np.diff(np.arange(self.width + 1) * self.num_q // self.width)

    @property
    def kv_per_rank(self) -> Ints:
        """(P,) key/value heads, those that are shared counted with each rank."""
        begin = np.arange(self.width) * self.num_q // self.width
        end = np.arange(1, self.width + 1) * self.num_q // self.width
        kv = (end - 1) * self.num_kv // self.num_q + 1 - begin * self.num_kv // self.num_q
        return np.where(end > begin, kv, 0)

    @property
    def qkv_per_rank(self) -> Ints:
        """(P,) heads that travel to each rank for one row, N."""
        return self.q_per_rank + 2 * self.kv_per_rank

    def sent(self) -> Ints:
        """Which heads go to which rank: places on the axis [H query | K key | K value], rank by rank.

        `qkv_tND.index_select(1, sent)` with the splits of `qkv_per_rank` is all the packing there is;
        its gradient adds up what the ranks that share a key/value head return.
        """
        parts = []
        for rank in range(self.width):
            kv = np.arange(*self.kv_range(rank))
            parts += [
                np.arange(*self.q_range(rank)),
                self.num_q + kv,
                self.num_q + self.num_kv + kv,
            ]
        return np.concatenate(parts)

    def kv_of_q(self, rank: int) -> Ints:
        """(query heads of the rank,) which of its own key/value heads each uses."""
        begin, end = self.q_range(rank)
        return np.arange(begin, end) * self.num_kv // self.num_q - self.kv_range(rank)[0]

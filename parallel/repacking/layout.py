"""Which rows each rank of a group holds: whole samples end to end, one stream, cut by rank.

    stream        [ sample 7              | sample 2  | sample 5 | sample 9 ]
    child layout  [ rank 0 | rank 1 | rank 2 | rank 3 |  rank 4  |  rank 5  ]
                    \\__ child of width 4: 7, 2 ____/    SP1: 5     SP1: 9
    wide layout   [ rank 0  |  rank 1  | rank 2  | rank 3  | rank 4  |rank 5]

The samples of a child follow each other, and so do the children, so that the rows of rank 0, then of
rank 1, and so on are the stream itself. This makes both exchanges of a full-attention layer free of
row permutations: what arrives from the ranks in their order is the stream, and what goes back to a rank
is a slice of it. A child's ranks share its part of the stream evenly to within one row, nothing is
padded, and a rank may hold nothing.

Legend: T rows of the group, P ranks of the group, n samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Segments(NamedTuple):
    """The segment table: rows `begin` to `end` of a sample, which `rank` holds, in stream order."""

    rank: Ints
    sample: Ints
    """Place of the sample in `Layout.samples`."""
    begin: Ints
    end: Ints


@dataclass(frozen=True, eq=False)
class Layout:
    """The stream of a group of ranks, and where it is cut."""

    samples: Ints
    """(n,) ids, in stream order."""
    offsets: Ints
    """(n + 1,) where each sample begins in the stream, and T: the `cu_seqlens` of the whole stream."""
    bounds: Ints
    """(P + 1,) where each rank's rows begin, and T."""

    @property
    def width(self) -> int:
        """Ranks, P."""
        return len(self.bounds) - 1

    @property
    def num_rows(self) -> int:
        """Rows of the group, T."""
        return int(self.offsets[-1])

    @property
    def rows_per_rank(self) -> Ints:
        """(P,) rows that each rank holds."""
        return np.diff(self.bounds)

    def segments(self, rank: int | None = None) -> Segments:
        """The segment table of the group, or of one rank of it: at most one segment a sample and
        rank."""
        first, last = (0, self.width) if rank is None else (rank, rank + 1)
        low, high = int(self.bounds[first]), int(self.bounds[last])
        inner = self.offsets[
            np.searchsorted(self.offsets, low) : np.searchsorted(self.offsets, high)
        ]
        cuts = np.unique(np.concatenate([self.bounds[first : last + 1], inner]))
        begin, end = cuts[:-1], cuts[1:]
        sample = np.searchsorted(self.offsets, begin, side="right") - 1
        owner = np.searchsorted(self.bounds, begin, side="right") - 1
        start = self.offsets[sample]
        return Segments(owner, sample, begin - start, end - start)

    def positions(self, rank: int) -> Ints:
        """(rows of the rank,) the position of each row in its sample, for rotary embeddings."""
        low, high = int(self.bounds[rank]), int(self.bounds[rank + 1])
        first, last = np.searchsorted(self.offsets, [low, high])
        row = np.arange(low, high)
        # Each row minus where its sample begins, written sample by sample.
        starts = self.offsets[max(int(first) - 1, 0) : int(last) + 1]
        inside = np.clip(starts, low, high)
        lengths = inside[1:] - inside[:-1]
        begins: Ints = starts[: len(lengths)]
        return row - np.repeat(begins, lengths)

    def part(self, first: int, last: int) -> "Layout":
        """The layout of ranks `first` to `last` by themselves; whole samples must be theirs: a child."""
        low, high = self.bounds[first], self.bounds[last]
        begin, end = np.searchsorted(self.offsets, [low, high])
        if self.offsets[begin] != low or self.offsets[end] != high:
            raise ValueError(f"ranks {first} to {last} share samples with others of their group")
        return Layout(
            self.samples[begin:end],
            self.offsets[begin : end + 1] - low,
            self.bounds[first : last + 1] - low,
        )


def stream(samples: Sequence[Ints], lengths: Sequence[Ints], widths: Sequence[int]) -> Layout:
    """The layout of children with these samples, lengths and widths, in the order of their ranks.

    Rank k of a child of width c with t rows holds rows `k * t // c` to `(k + 1) * t // c` of it. One
    child of the whole width is the wide layout.
    """
    order = np.concatenate([np.zeros(0, np.int64), *samples])
    sizes = np.concatenate([np.zeros(0, np.int64), *lengths])
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    bounds, begin = [np.zeros(1, np.int64)], 0
    for size, width in zip(lengths, widths, strict=True):
        total = int(size.sum())
        bounds.append(begin + np.arange(1, width + 1) * total // width)
        begin += total
    return Layout(order, offsets, np.concatenate(bounds))


def row_order(source: Layout, target: Layout, rank: int) -> Ints:
    """(rows of `rank` in `target`,) where each lies in the stream of `source`, of the same samples.

    Consecutive where the two have their samples in the same order; a layout that changes between blocks
    gathers by it.
    """
    place = np.argsort(source.samples, kind="stable")
    found = place[np.searchsorted(source.samples, target.samples, sorter=place)]
    table = target.segments(rank)
    first = source.offsets[found[table.sample]] + table.begin
    sizes = table.end - table.begin
    ends = np.cumsum(sizes)
    return np.arange(int(sizes.sum())) + np.repeat(first - (ends - sizes), sizes)

"""Batches whose samples a plan spreads over ranks: each rank reads its own rows, and no others.

A plan needs lengths only. So a sample is not read when it is chosen: it says where its documents lie
(`Unread`), all ranks plan for all of them, and then each reads what it holds. Labels are the tokens that
follow in the document, wherever these are.

    samples of a micro-batch      [a a a a a] [b b] [c c c c c c c c] [d]
    plan, the same on all ranks    rank 0: c c c c | rank 1: c c c c | rank 2: a a a a a | rank 3: b b d

Legend: T rows of this rank.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from parallel.repacking.layout import Ints, Layout
from parallel.repacking.plan import Plan
from parallel.repacking.ranks import PlannedRanks, one_parent
from recipes.text.mixture import Interleaved, Mixture
from recipes.text.packing import IGNORED, labels_of
from recipes.text.store import TokenFile


class Piece(NamedTuple):
    """A document, or a part of one: tokens [first, last) of a file."""

    file: TokenFile
    source: int
    """The file's number in a mixture."""
    first: int
    last: int
    limit: int
    """Where its document ends."""


class Unread:
    """Samples that say where their tokens lie instead of reading them."""

    def __init__(self, samples: Mixture | Interleaved) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> list[Piece]:
        number, position = self.samples.locate(index)
        source = self.samples.sources[number]
        return [Piece(source.part, number, *piece) for piece in source.pieces(position)]

    def fingerprint(self) -> str:
        """That of the samples."""
        return self.samples.fingerprint()


def planned_batch(
    samples: Sequence[Sequence[Piece]],
    plan_for: Callable[[Ints], Plan],
    ranks: PlannedRanks,
) -> dict[str, Any]:
    """This rank's rows of the samples' documents.

    `tokens_T`, `labels_T`, `positions_T` and `sources_T` are int64. `cu_seq_lens` (int32) bounds the
    documents of the rank's parent, `child_cu_seq_lens` those of its child. Besides: `plan`, whose ids
    are places among the documents of all samples, `plan_seconds` that it took, and the rank's `count`
    of labels.
    """
    pieces = [piece for sample in samples for piece in sample]
    begin = time.perf_counter()
    plan = plan_for(np.array([piece.last - piece.first for piece in pieces], np.int64))
    seconds = time.perf_counter() - begin
    parent, child = ranks.shards(plan)
    tokens, labels, sources = rows_of(pieces, parent.layout, parent.rank)
    return {
        "tokens_T": torch.from_numpy(tokens),
        "labels_T": torch.from_numpy(labels),
        "positions_T": torch.from_numpy(parent.layout.positions(parent.rank)),
        "sources_T": torch.from_numpy(sources),
        "cu_seq_lens": torch.from_numpy(parent.layout.offsets.astype(np.int32)),
        "child_cu_seq_lens": torch.from_numpy(child.layout.offsets.astype(np.int32)),
        "plan": plan,
        "plan_seconds": seconds,
        "count": int((labels != IGNORED).sum()),
    }


def full_batch(rows: int, width: int) -> dict[str, Any]:
    """A batch as `planned_batch` makes them of a rank with so many rows, as each of its parent has."""
    plan = one_parent([rows * width], width)
    cu_seq_lens = torch.tensor([0, rows * width], dtype=torch.int32)
    blank = torch.zeros(rows, dtype=torch.int64)
    return {
        "tokens_T": blank, "labels_T": blank, "positions_T": blank, "sources_T": blank,
        "cu_seq_lens": cu_seq_lens, "child_cu_seq_lens": cu_seq_lens, "plan": plan,
        "plan_seconds": 0.0, "count": rows,
    }  # fmt: skip


def rows_of(pieces: Sequence[Piece], layout: Layout, rank: int) -> tuple[Ints, Ints, Ints]:
    """Tokens, labels and sources of the rows that `rank` of the layout's group holds: (T,) each."""
    table = layout.segments(rank)
    found: list[tuple[Ints, Ints, Ints]] = []
    for sample, low, high in zip(layout.samples[table.sample], table.begin, table.end, strict=True):
        piece = pieces[int(sample)]
        first, last = piece.first + int(low), piece.first + int(high)
        limit = min(piece.last + 1, piece.limit)
        found.append(
            (
                piece.file.tokens[first:last].astype(np.int64),
                labels_of(piece.file, first, last, limit),
                np.full(last - first, piece.source),
            )
        )
    none = np.zeros(0, np.int64)
    tokens, labels, sources = (
        np.concatenate([none, *parts])
        for parts in (zip(*found, strict=True) if found else [[]] * 3)
    )
    return tokens, labels, sources

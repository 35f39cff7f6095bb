"""Documents laid out in sequences, with their boundaries kept.

Legend: B sequences in the batch, S tokens a sequence, P pieces (documents or parts of them).

    documents   [a a a a a] [b b] [c c c c c c c c] ...      shuffled once, by the seed

    stream      [a a a a a b b c c c] [c c c c c d ...]      no gaps, cut where a sequence ends
    whole       [c c c c c c c c b b] [a a a a a . . .]      what fits together, the rest is padding
    none        [a a a a a] [b b] [c c c c c c c c]          padded to the longest of the micro-batch

    positions    0 1 2 3 4 0 1 0 1 2   0 1 2 3 4 0           restart at every piece
    labels       a a a a - b - c c c   c c c c - d           the next token of the same document

A token attends to the earlier tokens of its own piece only. Padding is a piece of its own without
labels, so nothing attends to it. Documents end with a token that closes them, which is learnt as a
label and has no label itself.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recipes.text.origins import read_origins
from recipes.text.store import TokenFile

IGNORED = -100
"""The label that no loss counts."""


@dataclass(frozen=True)
class Layout:
    """Which tokens of a `TokenFile` each sequence holds."""

    first_P: NDArray[np.int64]
    last_P: NDArray[np.int64]
    """A piece is the tokens [first, last)."""
    limit_P: NDArray[np.int64]
    """Where the piece's document ends: a last token before it has a label, the one that follows."""
    offsets: NDArray[np.int64]
    """Sequence `i` has the pieces [offsets[i], offsets[i+1])."""


@dataclass(frozen=True)
class Spans:
    """The documents, or what `long_documents` leaves of them, as ranges of tokens."""

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    limit: NDArray[np.int64]
    longer: int
    """Documents that are longer than a sequence."""


def spans(starts: NDArray[np.int64], length: int, packing: str, long_documents: str) -> Spans:
    """Cut the documents that are longer than a sequence, as `long_documents` says.

    In a stream they stay whole here: the ends of sequences cut them, wherever they lie.
    """
    first, last = starts[:-1], starts[1:]
    sizes = last - first
    longer = int((sizes > length).sum())
    if long_documents == "drop":
        kept = sizes <= length
        return Spans(first[kept], last[kept], last[kept], longer)
    if long_documents == "truncate":
        last = np.minimum(last, first + length)
        return Spans(first, last, last, longer)
    if packing == "stream":
        return Spans(first, last, last, longer)
    parts = -(-sizes // length)
    within = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    first, limit = np.repeat(first, parts) + within * length, np.repeat(last, parts)
    return Spans(first, np.minimum(first + length, limit), limit, longer)


def stream(documents: Spans, length: int, order: NDArray[np.int64]) -> Layout:
    """One after the other in `order`, cut at every multiple of `length`."""
    first, limit = documents.first[order], documents.limit[order]
    sizes = documents.last[order] - first
    ends = np.cumsum(sizes)
    begins, total = ends - sizes, int(sizes.sum())
    cuts = np.arange(0, total, length)
    at = np.searchsorted(begins, cuts)  # both are sorted, so they are merged rather than sorted
    inside = begins[np.minimum(at, len(begins) - 1)] != cuts
    piece_begins = np.insert(begins, at[inside], cuts[inside])
    owner = np.searchsorted(begins, piece_begins, side="right") - 1
    piece_ends = np.append(piece_begins[1:], total)
    first_P = first[owner] + piece_begins - begins[owner]
    return Layout(
        first_P,
        first_P + piece_ends - piece_begins,
        limit[owner],
        np.append(np.searchsorted(piece_begins, cuts), len(piece_begins)),
    )


def whole(documents: Spans, length: int, order: NDArray[np.int64]) -> Layout:
    """Put together what fits, by `best_fit`; among equal lengths, `order` decides."""
    sizes = (documents.last - documents.first)[order]
    bins = best_fit(sizes, length)
    chosen = order[[item for members in bins for item in members]] if bins else order
    offsets = np.cumsum([0, *map(len, bins)])
    return Layout(documents.first[chosen], documents.last[chosen], documents.limit[chosen], offsets)


def alone(documents: Spans) -> Layout:
    """One document a sequence, in the corpus's order."""
    offsets = np.arange(len(documents.first) + 1)
    return Layout(documents.first, documents.last, documents.limit, offsets)


def best_fit(sizes: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Group items so that no group exceeds `capacity`: best fit, longest first.

    (Ding et al. 2024, "Fewer Truncations Improve Language Modeling".) `rooms` is a set of the
    amounts of room that some group has left, as the bits of a number: the smallest that is enough
    for an item is the lowest bit that is left after shifting by the item's size.
    """
    groups: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        enough = rooms >> size
        if enough:
            room = size + (enough & -enough).bit_length() - 1
            group = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, group = capacity, len(groups)
            groups.append([])
        groups[group].append(item)
        if room > size:
            by_room[room - size].append(group)
            rooms |= 1 << (room - size)
    return groups


def labels_of(part: TokenFile, first: int, last: int, limit: int) -> NDArray[np.int64]:
    """The label of each of the tokens [first, last): the token that follows, where it is learnt.

    Those from `limit` on are of another document, and no labels.
    """
    labels = np.full(last - first, IGNORED, dtype=np.int64)
    following = slice(first + 1, min(last + 1, limit))
    after = part.tokens[following].astype(np.int64)
    if part.learnt is not None:
        after[~part.learnt[following]] = IGNORED
    labels[: len(after)] = after
    return labels


@dataclass(frozen=True)
class Sequence_S:  # noqa: N801
    """One sequence; `pieces` are where its pieces start, `0` first, the padding last."""

    tokens_S: NDArray[np.int64]
    labels_S: NDArray[np.int64]
    positions_S: NDArray[np.int64]
    pieces: list[int]
    padding: int = 0
    """How many tokens at the end are padding."""
    source: int = 0
    """Which source of a mixture it is from."""


class Sequences:
    """A map-style dataset over a `TokenFile`."""

    def __init__(
        self,
        part: TokenFile,
        length: int,
        end: int,
        seed: int | None,
        packing: str = "stream",
        long_documents: str = "split",
    ) -> None:
        self.part, self.length, self.end, self.seed = part, length, end, seed
        self.packing, self.long_documents = packing, long_documents
        self._lay_out()

    def _lay_out(self) -> None:
        documents = spans(self.part.starts, self.length, self.packing, self.long_documents)
        number = len(documents.first)
        order = np.arange(number)
        if self.seed is not None:
            order = np.random.default_rng(self.seed).permutation(number)
        self.longer = documents.longer
        if self.packing == "stream":
            self.layout = stream(documents, self.length, order)
        elif self.packing == "whole":
            self.layout = whole(documents, self.length, order)
        else:
            self.layout = alone(documents)

    def __getstate__(self) -> dict[str, Any]:
        """A process that is started afresh works the layout out again, rather than getting it."""
        return {name: value for name, value in self.__dict__.items() if name != "layout"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._lay_out()

    def __len__(self) -> int:
        return len(self.layout.offsets) - 1

    def __getitem__(self, index: int) -> Sequence_S:
        layout, part = self.layout, self.part
        pieces = range(int(layout.offsets[index]), int(layout.offsets[index + 1]))
        used = sum(int(layout.last_P[p] - layout.first_P[p]) for p in pieces)
        size = used if self.packing == "none" else self.length
        tokens = np.full(size, self.end, dtype=np.int64)
        labels = np.full(size, IGNORED, dtype=np.int64)
        positions = np.arange(size)
        starts, at = [], 0
        for piece in pieces:
            first, last = int(layout.first_P[piece]), int(layout.last_P[piece])
            n = last - first
            tokens[at : at + n] = part.tokens[first:last]
            labels[at : at + n] = labels_of(part, first, last, int(layout.limit_P[piece]))
            positions[at : at + n] = np.arange(n)
            starts.append(at)
            at += n
        if at < size:
            positions[at:] = np.arange(size - at)
            starts.append(at)
        return Sequence_S(tokens, labels, positions, starts, size - at)

    def pieces(self, index: int) -> list[tuple[int, int, int]]:
        """First token, last (not included), and the end of the document, of each piece of a sequence."""
        layout = self.layout
        chosen = slice(int(layout.offsets[index]), int(layout.offsets[index + 1]))
        columns = layout.first_P[chosen], layout.last_P[chosen], layout.limit_P[chosen]
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def where(self, index: int) -> Iterator[str]:
        """Which tokens of which documents a sequence has, and where those came from."""
        origins = read_origins(self.part.folder)
        for first, last, _ in self.pieces(index):
            document = int(np.searchsorted(self.part.starts, first, side="right")) - 1
            begin = first - int(self.part.starts[document])
            origin = f" of {origins.of(document)}" if origins else ""
            yield f"tokens {begin}-{begin + last - first - 1} of document {document}{origin}"

    def fingerprint(self) -> str:
        """Equal for equal sequences at every index, on whatever machine."""
        how = (self.length, self.end, self.seed, self.packing, self.long_documents)
        return hashlib.blake2b(f"{self.part.digest} {how}".encode(), digest_size=16).hexdigest()

    def labels(self) -> NDArray[np.int64]:
        """How many labels each sequence has."""
        layout = self.layout
        first, last = layout.first_P + 1, np.minimum(layout.last_P + 1, layout.limit_P)
        counts = np.maximum(last - first, 0)
        if self.part.learnt is not None and len(counts):
            # Sums over [first, last) and over the gaps between, of which every other one is wanted.
            order = np.argsort(first, kind="stable")
            bounds = np.stack([first[order], np.maximum(last, first)[order]], axis=1).ravel()
            padded = np.append(np.asarray(self.part.learnt, dtype=np.uint8), [0, 0])
            sums = np.add.reduceat(padded, bounds, dtype=np.int64)[::2]
            counts[order] = np.where(counts[order] > 0, sums, 0)
        totals = np.append(0, np.cumsum(counts))
        return totals[layout.offsets[1:]] - totals[layout.offsets[:-1]]


def collate(sequences: Sequence[Sequence_S], end: int) -> dict[str, Any]:
    """Join sequences into a batch; those that are shorter than the longest are padded with `end`.

    `tokens_BS`, `labels_BS`, `positions_BS` are int64; `cu_seq_lens` is int32 and bounds the pieces
    in the flattened B*S tokens; `sources_BS`, here (B, 1), numbers the sources. Plain numbers:
    `max_length` of a piece, `count` of labels, `padding` tokens, and, without padding, `pairs` of a
    query with a key that it may see.
    """
    length = max(len(s.tokens_S) for s in sequences)
    sequences = [_padded(s, length, end) for s in sequences]
    starts = [b * length + start for b, s in enumerate(sequences) for start in s.pieces]
    cu_seq_lens = np.asarray([*starts, len(sequences) * length], dtype=np.int32)
    lengths = np.diff(cu_seq_lens).astype(np.int64)
    labels = np.stack([s.labels_S for s in sequences])
    padding = np.asarray([s.padding for s in sequences])
    pairs = (lengths * (lengths + 1) // 2).sum() - (padding * (padding + 1) // 2).sum()
    return {
        "tokens_BS": torch.from_numpy(np.stack([s.tokens_S for s in sequences])),
        "labels_BS": torch.from_numpy(labels),
        "positions_BS": torch.from_numpy(np.stack([s.positions_S for s in sequences])),
        "sources_BS": torch.tensor([s.source for s in sequences])[:, None],
        "cu_seq_lens": torch.from_numpy(cu_seq_lens),
        "max_length": int(lengths.max()),
        "count": int((labels != IGNORED).sum()),
        "padding": int(padding.sum()),
        "pairs": int(pairs),
    }


def _padded(sequence: Sequence_S, length: int, end: int) -> Sequence_S:
    """The sequence with padding up to `length` tokens; it has none yet if it is shorter."""
    used = len(sequence.tokens_S)
    if used == length:
        return sequence
    assert sequence.padding == 0
    more = length - used
    return replace(
        sequence,
        tokens_S=np.append(sequence.tokens_S, np.full(more, end)),
        labels_S=np.append(sequence.labels_S, np.full(more, IGNORED)),
        positions_S=np.append(sequence.positions_S, np.arange(more)),
        pieces=[*sequence.pieces, used],
        padding=more,
    )

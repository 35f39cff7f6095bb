"""Documents packed into sequences of one length, with their boundaries kept.

Legend: B sequences in the batch, S tokens a sequence.

    documents   [a a a a a] [b b] [c c c c c c c c] ...      shuffled once, by the seed
    sequences   [a a a a a b b c c c] [c c c c c d ...]      S tokens each, no gaps
    positions    0 1 2 3 4 0 1 0 1 2   0 1 2 3 4 0           restart at every piece
    labels       a a a a - b - c c c   c c c c - d           the next token of the same document

A token attends to the earlier tokens of its own piece only. Each document ends with the
tokenizer's end id, which is learnt as a label and has no label itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recipes.text.tokens import TokenFile

IGNORED = -100
"""The label that no loss counts."""


@dataclass(frozen=True)
class Sequence_S:  # noqa: N801
    """One packed sequence; `pieces` are where its document pieces start, `0` first."""

    tokens_S: NDArray[np.int64]
    labels_S: NDArray[np.int64]
    positions_S: NDArray[np.int64]
    pieces: list[int]


class PackedSequences:
    """A map-style dataset over a `TokenFile`: sequence `i` holds tokens `[i*S, (i+1)*S)`.

    The last sequence is filled up with ignored labels, so even one short document gives a sequence.
    """

    def __init__(self, part: TokenFile, length: int, end: int, seed: int | None) -> None:
        self.part, self.length, self.end = part, length, end
        documents = len(part.starts) - 1
        self.order = np.arange(documents)
        if seed is not None:
            self.order = np.random.default_rng(seed).permutation(documents)
        sizes = np.diff(part.starts)[self.order]
        self.stream_starts = np.concatenate([[0], np.cumsum(sizes)])
        """Where each document starts in the shuffled stream."""

    def __len__(self) -> int:
        return int(-(-self.stream_starts[-1] // self.length))

    def __getitem__(self, index: int) -> Sequence_S:
        begin = index * self.length
        end = min(begin + self.length, int(self.stream_starts[-1]))
        tokens = np.full(self.length, self.end, dtype=np.int64)
        labels = np.full(self.length, IGNORED, dtype=np.int64)
        positions = np.arange(self.length)
        pieces = []
        slot = int(np.searchsorted(self.stream_starts, begin, side="right")) - 1
        at = 0
        while at < end - begin:
            document = self.order[slot]
            first = int(self.part.starts[document] + begin + at - self.stream_starts[slot])
            last = min(int(self.part.starts[document + 1]), first + end - begin - at)
            n = last - first
            tokens[at : at + n] = self.part.tokens[first:last]
            after = self.part.tokens[first + 1 : min(last + 1, self.part.starts[document + 1])]
            labels[at : at + len(after)] = after
            positions[at : at + n] = np.arange(n)
            pieces.append(at)
            at, slot = at + n, slot + 1
        if at < self.length:  # the filling is a piece of its own, so nothing attends to it
            positions[at:] = np.arange(self.length - at)
            pieces.append(at)
        return Sequence_S(tokens, labels, positions, pieces)


def collate(sequences: Sequence[Sequence_S]) -> dict[str, Any]:
    """Join sequences into a batch.

    `tokens_BS`, `labels_BS`, `positions_BS` are int64; `cu_seq_lens` is int32 and bounds the pieces
    in the flattened B*S tokens. Plain numbers: `max_length` of a piece, `count` of labels, `pairs`
    of a query with a key that it may see.
    """
    length = len(sequences[0].tokens_S)
    starts = [b * length + start for b, s in enumerate(sequences) for start in s.pieces]
    cu_seq_lens = np.asarray([*starts, len(sequences) * length], dtype=np.int32)
    lengths = np.diff(cu_seq_lens).astype(np.int64)
    labels = np.stack([s.labels_S for s in sequences])
    return {
        "tokens_BS": torch.from_numpy(np.stack([s.tokens_S for s in sequences])),
        "labels_BS": torch.from_numpy(labels),
        "positions_BS": torch.from_numpy(np.stack([s.positions_S for s in sequences])),
        "cu_seq_lens": torch.from_numpy(cu_seq_lens),
        "max_length": int(lengths.max()),
        "count": int((labels != IGNORED).sum()),
        "pairs": int((lengths * (lengths + 1) // 2).sum()),
    }

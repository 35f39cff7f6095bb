"""Sequences end to end, without their padding: for models whose rows are in one dimension.

Legend: T tokens of all sequences.

    sequences    [a a a a a b b .] [c c c . . . . .]
    joined       [a a a a a b b c c c]                lengths 5 2 3
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from recipes.text.packing import IGNORED, Sequence_S


def join(sequences: Sequence[Sequence_S]) -> dict[str, Any]:
    """`tokens_T`, `labels_T` and `sources_T` are int64; `cu_seq_lens` is int32 and bounds the pieces.

    Plain numbers: `lengths` of the pieces, and `count` of labels.
    """
    used = [len(s.tokens_S) - s.padding for s in sequences]
    lengths = [
        end - begin
        for s, size in zip(sequences, used, strict=True)
        for begin, end in pairwise([*(start for start in s.pieces if start < size), size])
    ]
    tokens, labels, sources = (
        np.concatenate([part[:size] for part, size in zip(parts, used, strict=True)])
        for parts in (
            [s.tokens_S for s in sequences],
            [s.labels_S for s in sequences],
            [np.full(len(s.tokens_S), s.source) for s in sequences],
        )
    )
    return {
        "tokens_T": torch.from_numpy(tokens),
        "labels_T": torch.from_numpy(labels),
        "sources_T": torch.from_numpy(sources),
        "cu_seq_lens": torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)),
        "lengths": tuple(lengths),
        "count": int((labels != IGNORED).sum()),
    }

"""Histories as a decoder reads them: the newest items, padded on the left."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from models.slide.attention import Cache
from models.slide.build import Decoder
from models.slide.ids import Ints
from models.slide.model import BEGIN
from models.slide.trie import Trie

NOTHING = -1
"""In place of an item where there is none."""


def pad_left(histories: Sequence[Sequence[int] | Ints], length: int) -> Tensor:
    """The newest `length` items of each history, oldest first, NOTHING before them: (B, length)."""
    items_BH = np.full((len(histories), length), NOTHING, dtype=np.int64)
    for row, history in zip(items_BH, histories, strict=True):
        newest = np.asarray(history[max(len(history) - length, 0) :], dtype=np.int64)
        row[length - len(newest) :] = newest
    return torch.from_numpy(items_BH)


def read_history(model: Decoder, trie: Trie, items_BH: Tensor, places: int) -> tuple[Cache, Tensor]:
    """A cache with room for `places` codes a beam, and logits of the next first code (B, 1, C)."""
    tokens_BP, cache = tokens_of(model, trie, items_BH, places)
    return cache, model(tokens_BP, None, cache)[0]


def tokens_of(model: Decoder, trie: Trie, items_BH: Tensor, places: int) -> tuple[Tensor, Cache]:
    """What a model reads (B, P), and an empty cache with room for `places` codes a beam."""
    H, L = model.config.max_history, trie.levels
    items_BH = items_BH[:, -H:]
    there_BH = items_BH != NOTHING
    codes_BP = trie.tokens_IL[items_BH.clamp(min=0)].flatten(1)
    begin_B1 = codes_BP.new_full((len(codes_BP), 1), BEGIN)
    tokens_BP = torch.cat([begin_B1, codes_BP], dim=1)
    # `begin` stands right before the oldest item, so everything moves up where items are missing
    missing_B = (~there_BH).sum(1) * L
    place_P = torch.arange(tokens_BP.shape[1], device=tokens_BP.device)
    tokens_BP = tokens_BP.masked_fill(place_P <= missing_B[:, None], BEGIN)
    valid_BP = place_P >= missing_B[:, None]
    return tokens_BP, Cache(valid_BP, places)

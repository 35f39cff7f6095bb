"""A batch whose tokens several ranks share: all sequences as one stream, of which each has a part.

Labels were shifted when the sequences were made, and positions count inside the pieces, so a part needs
nothing of its neighbours but their keys and values.

Legend: T tokens of the batch, t of this rank, P ranks.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parallel.repacking.layout import Layout, stream
from parallel.sequence import SequenceRanks
from recipes.text.packing import IGNORED


def own_part(batch: Mapping[str, Any], ranks: SequenceRanks, end: int) -> dict[str, Any]:
    """This rank's tokens of a batch of `recipes.text.packing.collate`, as one row: (1, t).

    `layout` says where all tokens are; `cu_seq_lens` and `max_length` are still those of the whole
    stream. Padding and pairs are shares of the batch's, so that they add up. Fewer tokens than ranks
    are padded with `end`, for a model has to be given some.
    """
    batch = _at_least(batch, ranks.size, end)
    layout = _layout(batch["cu_seq_lens"], ranks.size)
    low, high = layout.bounds[ranks.rank : ranks.rank + 2].tolist()

    def part(whole: Tensor) -> Tensor:
        return whole.flatten()[None, low:high].clone()

    labels = part(batch["labels_BS"])
    sources = batch["sources_BS"].expand(batch["labels_BS"].shape)
    return {
        **batch,
        "tokens_BS": part(batch["tokens_BS"]),
        "labels_BS": labels,
        "positions_BS": part(batch["positions_BS"]),
        "sources_BS": part(sources),
        "layout": layout,
        "count": int((labels != IGNORED).sum()),
        "padding": batch["padding"] / ranks.size,
        "pairs": batch["pairs"] / ranks.size,
    }


def _layout(cu_seq_lens: Tensor, P: int) -> Layout:
    lengths = np.diff(cu_seq_lens.numpy()).astype(np.int64)
    return stream([np.arange(len(lengths))], [lengths], [P])


def _at_least(batch: Mapping[str, Any], P: int, end: int) -> Mapping[str, Any]:
    """The batch with at least P tokens; others become one row with a piece of padding behind them."""
    T = batch["tokens_BS"].numel()
    more = P - T
    if more <= 0:
        return batch

    def longer(name: str, values: Tensor) -> Tensor:
        return torch.cat([batch[name].expand(batch["tokens_BS"].shape).flatten(), values])[None]

    return {
        **batch,
        "tokens_BS": longer("tokens_BS", torch.full((more,), end)),
        "labels_BS": longer("labels_BS", torch.full((more,), IGNORED)),
        "positions_BS": longer("positions_BS", torch.arange(more)),
        "sources_BS": longer("sources_BS", torch.zeros(more, dtype=torch.int64)),
        "cu_seq_lens": torch.cat([batch["cu_seq_lens"], torch.tensor([P], dtype=torch.int32)]),
        "max_length": max(batch["max_length"], more),
        "padding": batch["padding"] + more,
    }

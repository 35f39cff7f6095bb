"""A decoder with one place for an item: the layers run once, and small heads predict its codes.

B users, N items, L levels, C codes, W beams, D hidden size, V rows of the tables

    places    begin   a    b    c        an item is the sum of its codes' vectors
    predicts    a     b    c    d        code by code: each head sees what the layers made of the past,
                                         and the codes of the item that are already chosen

A list of K items takes K passes of the layers, not K * L, and a beam search one. What is predicted is a
distribution of the same kind as `Slide`'s, so both are decoded alike, and take the same inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from models.slide.attention import Cache, Layer, turn_for
from models.slide.config import SlideConfig
from models.slide.model import BEGIN, offsets


@dataclass(frozen=True)
class Written:
    """Where each beam stands in the item that it writes."""

    hidden_BWD: Tensor
    """What the layers made of all items before."""
    chosen_BWD: Tensor
    """What the heads are told of the codes that the item has."""
    item_BWD: Tensor
    """The sum of those codes' vectors."""
    level: int
    """How many codes it has."""
    begun_BWD: Tensor
    """`hidden` after the history, for those who begin again."""

    def keep(self, parents_BW: Tensor) -> "Written":
        """See `Cache.keep`."""
        moved = {
            name: getattr(self, name).take_along_dim(parents_BW[..., None], dim=1)
            for name in ("hidden_BWD", "chosen_BWD", "item_BWD")
        }
        return replace(self, **moved)

    def forget(self) -> "Written":
        """See `Cache.forget`."""
        nothing_BWD = torch.zeros_like(self.begun_BWD)
        return Written(self.begun_BWD, nothing_BWD, nothing_BWD, 0, self.begun_BWD)


class SlideHeads(nn.Module):
    """See the module's text; `forward` is that of `models.slide.model.Slide`."""

    def __init__(self, config: SlideConfig, sizes: Sequence[int]) -> None:
        super().__init__()
        self.config, self.sizes = config, tuple(sizes)
        self.offsets = offsets(sizes)
        D, V = config.hidden_size, 1 + sum(self.sizes)
        self.tokens_VD = nn.Parameter(torch.empty(V, D))
        self.chosen_VD = nn.Parameter(torch.empty(V, D))
        self.out_VD = None if config.tied else nn.Parameter(torch.empty(V, D))
        self.slots_KD = (
            nn.Parameter(torch.empty(config.list_length, D)) if config.list_length else None
        )
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            Layer(number, D, config.num_heads, config.dropout)
            for number in range(config.num_layers)
        )
        # parameters of this module, not modules of their own: they are always used together
        self.up_LDD = nn.Parameter(torch.empty(len(self.sizes), D, D))
        self.down_LDD = nn.Parameter(torch.empty(len(self.sizes), D, D))

    def forward(
        self, tokens_BT: Tensor, slots_BT: Tensor | None = None, cache: Cache | None = None
    ) -> list[Tensor]:
        """Logits over the codes of a level; see `Slide.forward`."""
        if cache is None:
            return self._all(tokens_BT, slots_BT)
        if not cache.prefix:
            return [self._logits(self.read_history(tokens_BT, cache), 0)]
        assert slots_BT is not None
        return [self._write(tokens_BT, slots_BT, cache)]

    def _all(self, tokens_BT: Tensor, slots_BT: Tensor | None) -> list[Tensor]:
        """Of all levels, for whole sequences: place n of the layers has read the items before item n."""
        L = len(self.sizes)
        before_BNLD = nn.functional.embedding(tokens_BT[:, 1 : 1 - L or None], self.tokens_VD)
        begin_B1D = self._begin(tokens_BT)
        x_BND = torch.cat([begin_B1D, before_BNLD.unflatten(1, (-1, L)).sum(2)], dim=1)
        if slots_BT is not None:
            x_BND = x_BND + self._slots(slots_BT[:, ::L])  # the last code of each item read
        x_BND = self._layers(x_BND, None)
        # the codes of item n, but for the last: the heads may see those before theirs
        padded_BT = torch.cat([tokens_BT[:, 1:], tokens_BT[:, :1]], dim=1)
        chosen_BNLD = nn.functional.embedding(padded_BT, self.chosen_VD).unflatten(1, (-1, L))
        logits = []
        for level in range(L):
            logits.append(self._logits(x_BND, level))
            x_BND = x_BND + chosen_BNLD[:, :, level]
        return logits

    def read_history(self, tokens_BP: Tensor, cache: Cache) -> Tensor:
        """What the layers make of histories, whose places become those of items in the cache, too.

        (B, 1, D).
        """
        L = len(self.sizes)
        tokens_BHL = tokens_BP[:, 1:].unflatten(1, (-1, L))
        items_BHD = nn.functional.embedding(tokens_BHL, self.tokens_VD).sum(2)
        begin_B1D = self._begin(tokens_BP)
        no_item_BH1 = (tokens_BHL[..., -1] == BEGIN)[..., None]
        x_BPD = torch.cat([begin_B1D, torch.where(no_item_BH1, begin_B1D, items_BHD)], dim=1)
        cache.valid_BP, cache.places = cache.valid_BP[:, ::L], cache.places // L
        hidden_B1D = self._layers(x_BPD, cache)[:, -1:]
        nothing_B1D = torch.zeros_like(hidden_B1D)
        cache.written = Written(hidden_B1D, nothing_B1D, nothing_B1D, 0, hidden_B1D)
        return hidden_B1D

    def _write(self, tokens_BW: Tensor, slots_BW: Tensor, cache: Cache) -> Tensor:
        """A code more: of the same item, or the layers read the item that it completes. (B, W, C)."""
        at: Written = cache.written
        item_BWD = at.item_BWD + nn.functional.embedding(tokens_BW, self.tokens_VD)
        level = at.level + 1
        if level < len(self.sizes):
            chosen_BWD = at.chosen_BWD + nn.functional.embedding(tokens_BW, self.chosen_VD)
            cache.written = replace(at, chosen_BWD=chosen_BWD, item_BWD=item_BWD, level=level)
            return self._logits(at.hidden_BWD + chosen_BWD, level)
        hidden_BWD = self.read_item(item_BWD + self._slots(slots_BW), cache)
        nothing_BWD = torch.zeros_like(hidden_BWD)
        cache.written = Written(hidden_BWD, nothing_BWD, nothing_BWD, 0, at.begun_BWD)
        return self._logits(hidden_BWD, 0)

    def read_item(self, item_BWD: Tensor, cache: Cache) -> Tensor:
        """What the layers make of all before, and of items: their codes' and slots' vectors added."""
        hidden_BWD = self._layers(item_BWD, cache)
        cache.filled += 1
        return hidden_BWD

    def slot_vectors(self, length: int) -> Tensor:
        """What is added to the items of a list, from the first on, (length, D) or (length, 1)."""
        numbers_1K = torch.arange(1, length + 1, device=self.tokens_VD.device)[None]
        slots = self._slots(numbers_1K)
        return slots[0] if isinstance(slots, Tensor) else self.tokens_VD.new_zeros(length, 1)

    def _begin(self, tokens_BT: Tensor) -> Tensor:
        begin_B1 = torch.full_like(tokens_BT[:, :1], BEGIN)
        return nn.functional.embedding(begin_B1, self.tokens_VD)

    def _slots(self, slots_BN: Tensor) -> Tensor | float:
        if self.slots_KD is None:
            return 0.0
        last = len(self.slots_KD) - 1
        slots_BND = nn.functional.embedding((slots_BN - 1).clamp(0, last), self.slots_KD)
        return slots_BND * (slots_BN > 0)[..., None]

    def _layers(self, x_BND: Tensor, cache: Cache | None) -> Tensor:
        x_BND = self.dropout(x_BND)
        turn = turn_for(x_BND, self.config.num_heads, cache)
        for layer in self.layers:
            x_BND = layer(x_BND, turn, cache)
        return x_BND

    def _logits(self, x_BND: Tensor, level: int) -> Tensor:
        """One level's head: a small network, and the rows of the level's codes."""
        x_BND = nn.functional.rms_norm(x_BND, x_BND.shape[-1:])
        x_BND = x_BND + nn.functional.gelu(x_BND @ self.up_LDD[level]) @ self.down_LDD[level]
        table_VD = self.tokens_VD if self.out_VD is None else self.out_VD
        begin = self.offsets[level]
        return x_BND @ table_VD[begin : begin + self.sizes[level]].T

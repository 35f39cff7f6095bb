"""The decoder: a history of semantic IDs in, the codes of what comes next out.

B users, N items, L levels, T = N * L tokens, P = 1 + (places of a history) * L, W beams, D hidden size,
V rows of the table: 0 begins a sequence, then the codes of each level

    tokens   begin  a1 a2 a3  b1 b2 b3  c1 c2          ...
    predicts  a1    a2 a3 b1  b2 b3 c1  c2 c3          place p: an item's level p % L

Training is one causal pass over whole sequences. To decode, the history is read once, padded on the
left, and what follows is written a code at a time, in one place for all beams. Both give the same
numbers, since positions are rotary. A list is the items that follow a history; which of them an item is
(its slot) is added to its codes, so a list can be told from a history.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from models.slide.attention import Cache, Layer, turn_for
from models.slide.config import SlideConfig

BEGIN = 0
STD = 0.02


class Slide(nn.Module):
    """See the module's text."""

    def __init__(self, config: SlideConfig, sizes: Sequence[int]) -> None:
        super().__init__()
        self.config, self.sizes = config, tuple(sizes)
        self.offsets = offsets(sizes)
        D = config.hidden_size
        self.tokens_VD = nn.Parameter(torch.empty(1 + sum(self.sizes), D))
        self.out_VD = None if config.tied else nn.Parameter(torch.empty_like(self.tokens_VD))
        self.slots_KD = (
            nn.Parameter(torch.empty(config.list_length, D)) if config.list_length else None
        )
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            Layer(number, D, config.num_heads, config.dropout)
            for number in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(D)

    def forward(
        self, tokens_BT: Tensor, slots_BT: Tensor | None = None, cache: Cache | None = None
    ) -> list[Tensor]:
        """Logits over the codes of a level.

        Without a cache: T = N * L tokens, of each level (B, N, C). With an empty one: P tokens of a
        history, of level 0 (B, 1, C). Then: the W tokens that beams have just chosen, of the next level
        (B, W, C). `slots` say of which item of the list a token is, from 1 on; 0: of the history.
        """
        x_BTD = nn.functional.embedding(tokens_BT, self.tokens_VD)
        if slots_BT is not None and self.slots_KD is not None:
            last = len(self.slots_KD) - 1  # padding and longer lists than were learnt
            slots_BTD = nn.functional.embedding((slots_BT - 1).clamp(0, last), self.slots_KD)
            x_BTD = x_BTD + slots_BTD * (slots_BT > 0)[..., None]
        x_BTD = self.dropout(x_BTD)
        reads_history = cache is not None and not cache.prefix
        turn = turn_for(x_BTD, self.config.num_heads, cache)
        for layer in self.layers:
            x_BTD = layer(x_BTD, turn, cache)
        if cache is None:
            levels = len(self.sizes)
            x_BNLD = self.norm(x_BTD).unflatten(1, (-1, levels))
            return [self._logits(x_BNLD[:, :, level], level) for level in range(levels)]
        if reads_history:
            return [self._logits(self.norm(x_BTD[:, -1:]), 0)]
        cache.filled += 1
        return [self._logits(self.norm(x_BTD), cache.filled % len(self.sizes))]

    def _logits(self, x_BND: Tensor, level: int) -> Tensor:
        """By the rows that the level's codes have as inputs, or others (`tied`)."""
        table_VD = self.tokens_VD if self.out_VD is None else self.out_VD
        begin = self.offsets[level]
        return x_BND @ table_VD[begin : begin + self.sizes[level]].T


def offsets(sizes: Sequence[int]) -> list[int]:
    """The table's row of code 0 at each level."""
    return [1 + begin for begin in accumulate(sizes, initial=0)][:-1]


def training_inputs(
    codes_BNL: Tensor, sizes: Sequence[int], lists_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What `Slide.forward` reads to predict every code of `codes`: tokens and slots (B, T).

    `lists` has for each user the number of the item at which the list begins; None: there is none.
    """
    levels = zip(codes_BNL.unbind(2), offsets(sizes), strict=True)  # no copy from the host
    tokens_BT = torch.stack([codes_BN + begin for codes_BN, begin in levels], dim=2).flatten(1)
    begin_B1 = tokens_BT.new_full((len(tokens_BT), 1), BEGIN)
    tokens_BT = torch.cat([begin_B1, tokens_BT[:, :-1]], dim=1)
    if lists_B is None:
        return tokens_BT, torch.zeros_like(tokens_BT)
    place_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
    item_T = (place_T - 1).div(len(sizes), rounding_mode="floor")  # of the input; -1: begin
    return tokens_BT, (item_T - lists_B[:, None] + 1).clamp(min=0)

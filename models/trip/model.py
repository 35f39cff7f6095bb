"""The whole model: items, their places and times, group-causal layers, summaries, and the head.

    B histories, N items (oldest first, padded on the left with item 0), D hidden size, H heads,
    A behaviours, G groups, S summaries a group, M hidden items, V items of the catalogue, K keys

       items + places + times  ->  token layers (group-causal)  ->  summaries of the groups
                                          |                               |
                                   reconstruction            upper layers (with the target)
                                          |                               |
                                          +--------------> head <---------+

Item embeddings are one plain table, sharded like every other parameter.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.trip.attention import Layer, Visibility
from models.trip.config import TripConfig
from models.trip.encodings import EMBEDDING_STD, TargetRelativeTimeEncoding, rank_encoding

PADDING, UNSEEN = 0, 1
"""Rows of the item table that are no items: nothing, and any item that training never saw.

Both stay zero: no training sample has them, and reconstruction leaves them out.
"""


class Output(NamedTuple):
    """What one forward pass gives."""

    logits_B: Tensor
    """Log-odds of a click."""
    weights_BN: Tensor
    """How much the head looks at each item itself (not at summaries), averaged over its heads."""
    item_logits_BMV: Tensor | None
    """Scores of all items for the hidden places, if there were any."""


class Trip(nn.Module):
    """Click logits of targets, given histories as whole numbers (`models.trip.history`)."""

    def __init__(
        self, config: TripConfig, num_items: int, num_behaviours: int, groups: int
    ) -> None:
        super().__init__()
        D, H = config.hidden_size, config.num_heads
        self.config = config
        self.items_VD = nn.Parameter(torch.empty(num_items, D))
        self.behaviours_AD = nn.Parameter(torch.empty(num_behaviours + 1, D))
        self.rank = rank_encoding(config)
        self.time = (
            TargetRelativeTimeEncoding(config.time_octaves, config.time_fine, D)
            if config.time == "trte"
            else None
        )
        rope = config.relative == "rope"
        self.layers = nn.ModuleList(
            Layer(D, H, config.dropout, rope) for _ in range(config.token_layers)
        )
        self.summaries = GroupSummaries(groups, config.summaries, D) if config.summaries else None
        self.upper = nn.ModuleList(
            Layer(D, H, config.dropout, rope=False)
            for _ in range(config.upper_layers if config.summaries else 0)
        )
        self.reconstruct = Reconstruction(D) if config.reconstruction else None
        self.head = Head(D, H, config.dropout, config.pooling)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        items_BN: Tensor,
        behaviours_BN: Tensor,
        buckets_BN: Tensor,
        groups_BN: Tensor,
        targets_B: Tensor,
        masked_BM: Tensor | None = None,
    ) -> Output:
        """Score `targets_B`; with `masked_BM` (-1: none), hide the items there in a second pass.

        The second pass shares the first one's layer calls, as more rows: what the click is predicted
        from stays whole, and each layer's weights are gathered once.
        """
        valid_BN = items_BN != PADDING
        plain_BND = self._items(items_BN) + nn.functional.embedding(
            behaviours_BN, self.behaviours_AD
        )
        placed_BND = self._placed(plain_BND, buckets_BN)
        sees = self._visibility(groups_BN, valid_BN)
        item_logits_BMV = None
        if masked_BM is None:
            tokens_BND = self._layers(placed_BND, sees)
        else:
            assert self.reconstruct is not None
            hidden_BND = self._placed(self.reconstruct.hide(plain_BND, masked_BM), buckets_BN)
            twice = Visibility(sees.order_BN.repeat(2, 1), valid_BN.repeat(2, 1), sees.alibi)
            both = self._layers(torch.cat([placed_BND, hidden_BND]), twice)
            tokens_BND, guessed_BND = both.chunk(2)
            item_logits_BMV = self.reconstruct(guessed_BND, masked_BM, self.items_VD)
        target_BD = self._items(targets_B)
        keys_BKD, shown_BK = tokens_BND, valid_BN
        if self.summaries is not None:
            summary_BKD, there_BK = self.summaries(tokens_BND, groups_BN, valid_BN)
            summary_BKD, target_BD = self._upper(summary_BKD, there_BK, target_BD)
            keys_BKD = torch.cat([keys_BKD, summary_BKD], dim=1)
            shown_BK = torch.cat([shown_BK, there_BK], dim=1)
        logits_B, weights_BK = self.head(keys_BKD, shown_BK, target_BD)
        # a copy: FSDP2 warns of views among the results, which in-place changes would break
        weights_BN = weights_BK[:, : items_BN.shape[1]].clone()
        return Output(logits_B, weights_BN, item_logits_BMV)

    def _items(self, items: Tensor) -> Tensor:
        return nn.functional.embedding(items, self.items_VD)

    def _placed(self, items_BND: Tensor, buckets_BN: Tensor) -> Tensor:
        if self.rank is not None:
            items_BND = items_BND + self.rank(items_BND.shape[1])
        if self.time is not None:
            items_BND = items_BND + self.time(buckets_BN)
        return items_BND

    def _visibility(self, groups_BN: Tensor, valid_BN: Tensor) -> Visibility:
        if self.config.mask == "group":
            order_BN = groups_BN
        elif self.config.mask == "causal":
            N = groups_BN.shape[1]
            order_BN = torch.arange(N - 1, -1, -1, device=groups_BN.device).expand_as(groups_BN)
        else:
            order_BN = torch.zeros_like(groups_BN)
        return Visibility(order_BN, valid_BN, self.config.relative == "alibi")

    def _layers(self, x_BND: Tensor, sees: Visibility) -> Tensor:
        x_BND = self.dropout(x_BND)
        for layer in self.layers:
            x_BND = layer(x_BND, sees)
        return x_BND

    def _upper(
        self, summary_BKD: Tensor, there_BK: Tensor, target_BD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Layers over the summaries, newest group first, and the target, which sees all of them."""
        B, K, _ = summary_BKD.shape
        order_K = torch.arange(K, device=there_BK.device) // self.config.summaries
        order_BK = torch.cat([order_K, order_K.new_full((1,), -1)]).expand(B, -1)
        sees = Visibility(order_BK, torch.cat([there_BK, there_BK.new_ones(B, 1)], dim=1))
        x_BKD = torch.cat([summary_BKD, target_BD[:, None]], dim=1)
        for layer in self.upper:
            x_BKD = layer(x_BKD, sees)
        return x_BKD[:, :-1], x_BKD[:, -1]


class GroupSummaries(nn.Module):
    """S vectors for each group: what S learned queries find among its items."""

    def __init__(self, groups: int, summaries: int, hidden_size: int) -> None:
        super().__init__()
        self.groups, self.summaries = groups, summaries
        self.queries_SD = nn.Parameter(torch.empty(summaries, hidden_size))
        self.ages_GD = nn.Parameter(torch.empty(groups, hidden_size))
        self.norm = nn.LayerNorm(hidden_size)

    def reset_parameters(self) -> None:
        """Small normal numbers."""
        for table in (self.queries_SD, self.ages_GD):
            nn.init.normal_(table, std=EMBEDDING_STD)

    def forward(self, x_BND: Tensor, groups_BN: Tensor, valid_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Summaries (B, G*S, D), newest group first, and which of them have items (B, G*S).

        Those of empty groups are the group's own vector, and nobody sees them.
        """
        G, S, D = self.groups, self.summaries, x_BND.shape[2]
        number_G = torch.arange(G, device=groups_BN.device)
        member_BGN = (groups_BN[:, None] == number_G[:, None]) & valid_BN[:, None]
        scores_BSN = self.queries_SD @ self.norm(x_BND).transpose(1, 2) / D**0.5
        scores_BGSN = scores_BSN[:, None].expand(-1, G, -1, -1)
        # finite, so that an empty group has a softmax, which the product below takes to zero
        low = torch.finfo(scores_BGSN.dtype).min
        weights_BGSN = scores_BGSN.masked_fill(~member_BGN[:, :, None], low).softmax(3)
        weights_BGSN = weights_BGSN * member_BGN[:, :, None]
        summary_BGSD = weights_BGSN @ x_BND[:, None] + self.ages_GD[:, None]
        there_BGS = member_BGN.any(2)[:, :, None].expand(-1, -1, S)
        return summary_BGSD.flatten(1, 2), there_BGS.flatten(1)


class Reconstruction(nn.Module):
    """Hides items, and scores all items for each hidden place, by the table they come from."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.mask_D = nn.Parameter(torch.empty(hidden_size))
        self.norm = nn.LayerNorm(hidden_size)
        self.project = nn.Linear(hidden_size, hidden_size)

    def reset_parameters(self) -> None:
        """As for items."""
        nn.init.normal_(self.mask_D, std=EMBEDDING_STD)

    def hide(self, items_BND: Tensor, masked_BM: Tensor) -> Tensor:
        """The same with one vector at all places of `masked_BM`, before places and times are added."""
        N = items_BND.shape[1]
        masked_BN = (masked_BM[:, :, None] == torch.arange(N, device=masked_BM.device)).any(1)
        return torch.where(masked_BN[..., None], self.mask_D, items_BND)

    def forward(self, x_BND: Tensor, masked_BM: Tensor, items_VD: Tensor) -> Tensor:
        """(B, M, V); what are no items cannot be guessed."""
        there_BMD = x_BND.take_along_dim(masked_BM.clamp(min=0)[..., None], dim=1)
        guessed_BMD = self.project(self.norm(there_BMD).flatten(0, 1)).view_as(there_BMD)
        logits_BMV = guessed_BMD @ items_VD.T
        none_V = torch.arange(len(items_VD), device=items_VD.device) <= UNSEEN
        return logits_BMV.masked_fill(none_V, torch.finfo(logits_BMV.dtype).min)


class Head(nn.Module):
    """What the target makes of the history, and the click's log-odds."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float, pooling: str) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.nothing_D = nn.Parameter(torch.empty(hidden_size))
        self.key_norm = nn.LayerNorm(hidden_size)
        self.target_norm = nn.LayerNorm(hidden_size)
        self.query = nn.Linear(hidden_size, hidden_size) if pooling == "target" else None
        self.key_value = nn.Linear(hidden_size, 2 * hidden_size)
        self.up = nn.Linear(3 * hidden_size, 2 * hidden_size)
        self.down = nn.Linear(2 * hidden_size, 1)
        self.dropout = nn.Dropout(dropout)

    def reset_parameters(self) -> None:
        """As for items."""
        nn.init.normal_(self.nothing_D, std=EMBEDDING_STD)

    def forward(
        self, keys_BKD: Tensor, shown_BK: Tensor, target_BD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits (B,), and the weights of the keys averaged over heads (B, K).

        One more key, learnt, stands for nothing: a history may be empty.
        """
        B, K, D = keys_BKD.shape
        keys_BKD = torch.cat([keys_BKD, self.nothing_D.expand(B, 1, D)], dim=1)
        shown_BK = torch.cat([shown_BK, shown_BK.new_ones(B, 1)], dim=1)
        target_BD = self.target_norm(target_BD)
        # rows in one dimension: a linear layer of more gives a view (see `Trip.forward`)
        key_value = self.key_value(self.key_norm(keys_BKD).flatten(0, 1))
        key_BKHE, value_BKHE = key_value.view(B, K + 1, 2, self.num_heads, -1).unbind(2)
        if self.query is None:  # every key weighs the same
            scores_BKH = key_BKHE.new_zeros(key_BKHE.shape[:3])
        else:
            query_BHE = self.query(target_BD).unflatten(1, (self.num_heads, -1))
            scores_BKH = (key_BKHE * query_BHE[:, None]).sum(3) / query_BHE.shape[2] ** 0.5
        scores_BKH = scores_BKH.masked_fill(~shown_BK[..., None], float("-inf"))
        weights_BKH = scores_BKH.softmax(1)
        seen_BD = (weights_BKH[..., None] * value_BKHE).sum(1).flatten(1)
        joined = torch.cat([seen_BD, target_BD, seen_BD * target_BD], dim=1)
        hidden = self.dropout(nn.functional.gelu(self.up(joined)))
        return self.down(hidden).sum(1), weights_BKH.mean(2)[:, :K]


def init_weights(module: nn.Module) -> None:
    """Initialise the direct parameters of one module of the model."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
    elif isinstance(module, Trip):
        nn.init.normal_(module.items_VD, std=EMBEDDING_STD)
        nn.init.normal_(module.behaviours_AD, std=EMBEDDING_STD)
        with torch.no_grad():
            module.items_VD[: UNSEEN + 1] = 0
            module.behaviours_AD[0] = 0
    else:
        module.reset_parameters()  # type: ignore[operator]

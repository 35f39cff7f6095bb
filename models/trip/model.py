"""The whole model: items, their places and times, token layers, summaries, and the head.

    B histories, N items (oldest first, padded on the left with item 0), D hidden size, H heads,
    A behaviours, F features of an item (of W values in all), G groups, S summaries a group, R of the
    histories with M hidden items each, V items of the catalogue, K keys

       items + places + times  ->  token layers (group-causal)  ->  summaries of the groups
                |                         |                               |
                |                  reconstruction            upper layers (with the target)
                |                         |                               |
                +-------------------------+--------------> head <---------+

The item table is read once for all that a forward pass needs of it (`models.trip.table`).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.trip.attention import Visibility
from models.trip.config import APPENDING, TripConfig
from models.trip.encodings import (
    EMBEDDING_STD,
    CoarseTimeEncoding,
    rank_encoding,
    time_encoding,
)
from models.trip.heads import make_head
from models.trip.history import PADDING
from models.trip.layers import Layer, token_layer
from models.trip.reconstruction import (
    Candidates,
    Reconstruction,
    everything,
    reconstruction_loss,
)
from models.trip.summaries import GroupSummaries
from models.trip.table import ItemTable


class Output(NamedTuple):
    """What one forward pass gives."""

    logits_B: Tensor
    """Log-odds of a click."""
    weights_BN: Tensor
    """How much the head looks at each item, before or after the layers (not at summaries)."""
    nats_R: Tensor | None
    """The reconstruction loss of each history of which something was to be hidden."""


class Trip(nn.Module):
    """Click logits of targets, given histories as whole numbers (`models.trip.history`)."""

    def __init__(
        self,
        config: TripConfig,
        num_items: int,
        num_behaviours: int,
        groups: int,
        num_features: int = 0,
    ) -> None:
        super().__init__()
        D = config.hidden_size
        self.config = config
        self.items = ItemTable(num_items, D)
        self.behaviours_AD = (
            nn.Parameter(torch.empty(num_behaviours + 1, D)) if config.behaviours else None
        )
        self.features_WD = nn.Parameter(torch.empty(num_features + 1, D)) if num_features else None
        self.rank = rank_encoding(config)
        self.time = time_encoding(config)
        self.layers = nn.ModuleList(token_layer(config) for _ in range(config.token_layers))
        self.summaries = GroupSummaries(groups, config.summaries, D) if config.summaries else None
        self.upper = nn.ModuleList(
            Layer(config, plain=True) for _ in range(config.upper_layers if config.summaries else 0)
        )
        self.reconstruct = Reconstruction(D) if config.reconstruction else None
        self.head = make_head(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        items_BN: Tensor,
        behaviours_BN: Tensor,
        ages_BN: Tensor,
        buckets_BN: Tensor,
        groups_BN: Tensor,
        targets_B: Tensor,
        masked_RM: Tensor | None = None,
        candidates: Candidates | None = None,
        features_BNF: Tensor | None = None,
        target_features_BF: Tensor | None = None,
    ) -> Output:
        """Score `targets_B`; with `masked_RM` (-1: none), hide the items there in a second pass.

        That is of the first R histories. What is hidden is told from `candidates`, or from the whole
        catalogue.
        """
        N = items_BN.shape[1]
        target_BD, rows_BND, candidates_KD = self._look_up(targets_B, items_BN, candidates)
        target_BD = self._told(target_BD, target_features_BF)
        if isinstance(self.time, CoarseTimeEncoding):
            # by a call, as FSDP2 may have sharded what is read past it
            target_BD = target_BD + self.time(torch.zeros_like(targets_B))
        plain_BND = self._told(rows_BND, features_BNF)
        if self.behaviours_AD is not None:
            plain_BND = plain_BND + nn.functional.embedding(behaviours_BN, self.behaviours_AD)
        placed_BND = self._placed(plain_BND, buckets_BN, target_BD)
        hidden_RND, R = None, 0 if masked_RM is None else len(masked_RM)
        if masked_RM is not None:
            assert self.reconstruct is not None
            hidden_RND = self._placed(
                self.reconstruct.hide(plain_BND[:R], masked_RM), buckets_BN[:R], target_BD[:R]
            )
        sees = self._visibility(groups_BN, ages_BN, items_BN != PADDING)
        if self.config.pooling in APPENDING:
            placed_BND = torch.cat([placed_BND, target_BD[:, None]], dim=1)
        tokens_BND, guessed_RND = self._tokens(placed_BND, hidden_RND, sees)
        nats_R = None
        if masked_RM is not None and self.reconstruct is not None and guessed_RND is not None:
            places_RM = masked_RM.clamp(min=0)
            nats_R = reconstruction_loss(
                self.reconstruct(guessed_RND, masked_RM),
                rows_BND[:R].take_along_dim(places_RM[..., None], dim=1),
                items_BN[:R].gather(1, places_RM),
                masked_RM >= 0,
                targets_B[:R],
                self._others(candidates, candidates_KD, items_BN.device),
            )
        keys: dict[str, tuple[Tensor, Tensor]] = {}
        told_BD, used = target_BD, self.config.keys_used
        if "items" in used:
            keys["items"] = self.dropout(placed_BND), sees.valid_BN
        if tokens_BND is not None:
            keys["tokens"] = tokens_BND, sees.valid_BN
            if self.summaries is not None:
                summary_BKD, there_BK = self.summaries(tokens_BND, groups_BN, sees.valid_BN)
                summary_BKD, told_BD = self._upper(summary_BKD, there_BK, target_BD)
                keys["summaries"] = summary_BKD, there_BK
        if self.config.read == "together":
            keys_BKD, shown_BK = (
                torch.cat(x, dim=1) for x in zip(*(keys[u] for u in used), strict=True)
            )
            logits_B, weights_BK = self.head(keys_BKD, shown_BK, told_BD)
        else:
            logits_B, weights_BK = self.head(keys, target_BD, told_BD)
        lengths = [keys[u][1].shape[1] for u in used]
        looks = zip(used, weights_BK.split(lengths, dim=1), strict=True)
        at_items = [weights[:, :N] for name, weights in looks if name != "summaries"]
        # a sum is a copy: FSDP2 warns of views among the results, which in-place changes would break
        weights_BN = sum(at_items, torch.zeros_like(items_BN, dtype=weights_BK.dtype))
        return Output(logits_B, weights_BN, nats_R)

    def _look_up(
        self, targets_B: Tensor, items_BN: Tensor, candidates: Candidates | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of all of these, in one call, which may go to other processes."""
        wanted = [targets_B, items_BN.flatten()]
        wanted.append(candidates.items_K if candidates is not None else targets_B[:0])
        rows = self.items(torch.cat(wanted)).split([len(each) for each in wanted])
        return rows[0], rows[1].unflatten(0, items_BN.shape), rows[2]

    def _others(
        self, candidates: Candidates | None, candidates_KD: Tensor, device: torch.device
    ) -> Iterator[tuple[Candidates, Tensor]]:
        """What hidden items are told from, with its rows: the candidates, or all items, part by part."""
        if candidates is not None:
            yield candidates, candidates_KD
        else:
            for part in everything(self.items.num_items, device):
                yield part, self.items(part.items_K)

    def _told(self, x: Tensor, features: Tensor | None) -> Tensor:
        """Rows of items plus what is known of these, in a last dimension of `features`."""
        if self.features_WD is None:
            return x
        assert features is not None, "this model reads features of items"
        return x + nn.functional.embedding(features, self.features_WD).sum(-2)

    def _placed(self, items_BND: Tensor, buckets_BN: Tensor, target_BD: Tensor) -> Tensor:
        if self.rank is not None:
            items_BND = items_BND + self.rank(items_BND.shape[1], target_BD)
        if self.time is not None:
            items_BND = items_BND + self.time(buckets_BN)
        return items_BND

    def _visibility(self, groups_BN: Tensor, ages_BN: Tensor, valid_BN: Tensor) -> Visibility:
        if self.config.pooling in APPENDING:  # the target is the newest, and sees all
            one = (0, 1)
            groups_BN = nn.functional.pad(groups_BN, one, value=-1)
            ages_BN = nn.functional.pad(ages_BN, one)
            valid_BN = nn.functional.pad(valid_BN, one, value=True)
        if self.config.mask == "group":
            order_BN = groups_BN
        elif self.config.mask == "causal":
            N = groups_BN.shape[1]
            order_BN = torch.arange(N - 1, -1, -1, device=groups_BN.device).expand_as(groups_BN)
        else:
            order_BN = torch.zeros_like(groups_BN)
        return Visibility(order_BN, valid_BN, groups_BN, ages_BN)

    def _tokens(
        self, placed_BND: Tensor, hidden_RND: Tensor | None, sees: Visibility
    ) -> tuple[Tensor | None, Tensor | None]:
        """The layers' states of the whole history, if the click depends on them, and of the hidden one.

        Both go through each layer in one call, as more rows: what the click is predicted from stays
        whole, and each layer's weights are gathered once.
        """
        passes = [placed_BND] if self.config.reads_tokens else []
        passes += [hidden_RND] if hidden_RND is not None else []
        if not passes:
            return None, None
        counts = [len(each) for each in passes]
        x, sees = self.dropout(torch.cat(passes)), sees.of_passes(counts)
        for layer in self.layers:
            x = layer(x, sees)
        if len(passes) == 2:
            whole_BND, hidden_RND = x.split(counts)
            return whole_BND, hidden_RND
        return (x, None) if hidden_RND is None else (None, x)

    def _upper(
        self, summary_BKD: Tensor, there_BK: Tensor, target_BD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Layers over the summaries, newest group first, and the target, which sees all of them."""
        B, K, _ = summary_BKD.shape
        order_K = torch.arange(K, device=there_BK.device) // self.config.summaries
        order_BK = torch.cat([order_K, order_K.new_full((1,), -1)]).expand(B, -1)
        there_BK = torch.cat([there_BK, there_BK.new_ones(B, 1)], dim=1)
        sees = Visibility(order_BK, there_BK, order_BK, torch.zeros_like(order_BK))
        x_BKD = torch.cat([summary_BKD, target_BD[:, None]], dim=1)
        for layer in self.upper:
            x_BKD = layer(x_BKD, sees)
        return x_BKD[:, :-1], x_BKD[:, -1]


def init_weights(module: nn.Module) -> None:
    """Initialise the direct parameters of one module of the model."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, Trip):
        with torch.no_grad():
            if module.behaviours_AD is not None:
                nn.init.normal_(module.behaviours_AD, std=EMBEDDING_STD)[0] = 0
            if module.features_WD is not None:
                nn.init.normal_(module.features_WD, std=EMBEDDING_STD)[0] = 0
    else:
        module.reset_parameters()  # type: ignore[operator]

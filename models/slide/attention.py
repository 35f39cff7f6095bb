"""Attention of a decoder whose history is read once and shared by everything that is written after it.

B users, H heads, T tokens, E head size, P places of the history, W beams of a user,
G places that a beam may write, g those that it has
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from models.slide import launches


@dataclass
class Cache:
    """Keys and values: of the histories, one for all beams, and of what each beam has written."""

    valid_BP: Tensor
    """False for padding, which is on the left."""
    places: int
    """G."""
    filled: int = 0
    """g; a number of the host, for it is the same in every run of a decoder."""
    prefix: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(B, H, P, E) each, by layer."""
    own: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(B, H, W, G, E) each, by layer."""
    seen_B1PP: Tensor | None = None
    """What is added to the histories' scores, once the first layer has asked."""
    turns: "Turn | None" = None
    """Of all places, once the first layer has asked."""
    written: Any = None
    """Where beams stand in an item, of a model with heads (`models.slide.heads.Written`)."""

    def keep(self, parents_BW: Tensor) -> None:
        """Go on with these of the beams; a beam may be there several times, or not at all."""
        self.own = [(_select(k, parents_BW), _select(v, parents_BW)) for k, v in self.own]
        if self.written is not None:
            self.written = self.written.keep(parents_BW)

    def forget(self) -> None:
        """What was written is gone; the histories stay."""
        self.filled = 0
        if self.written is not None:
            self.written = self.written.forget()


def _select(x_BHWGE: Tensor, parents_BW: Tensor) -> Tensor:
    return x_BHWGE.take_along_dim(parents_BW[:, None, :, None, None], dim=2)


class Turn(NamedTuple):
    """What turns keys and queries by their places, computed once for all layers."""

    cos_TE: Tensor
    sin_TE: Tensor
    """Of the first half of the numbers with a minus."""


def turn_from(first: int, T: int, E: int, like: Tensor) -> Turn:
    """Rotary positions (Su et al. 2021) first, first + 1, ...: only differences count."""
    rates = 10000.0 ** (-torch.arange(0, E, 2, device=like.device) / E)
    angles = torch.arange(first, first + T, device=like.device)[:, None] * rates
    cos, sin = angles.cos().to(like.dtype), angles.sin().to(like.dtype)
    return Turn(torch.cat([cos, cos], dim=1), torch.cat([-sin, sin], dim=1))


def turn_for(x_BTD: Tensor, num_heads: int, cache: Cache | None) -> Turn:
    """For the places of `x`: from the first on, or the one place that all beams write."""
    T, E = x_BTD.shape[1], x_BTD.shape[2] // num_heads
    if cache is None:
        return turn_from(0, T, E, x_BTD)
    P = cache.valid_BP.shape[1]
    if cache.turns is None:
        cache.turns = turn_from(0, P + cache.places, E, x_BTD)
    first, count = (P + cache.filled, 1) if cache.prefix else (0, T)
    return Turn(*(table[first : first + count] for table in cache.turns))


def rotate(x_BHTE: Tensor, turn: Turn) -> Tensor:
    """Each place's numbers, turned."""
    swapped_BHTE = x_BHTE.roll(x_BHTE.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_BHTE * turn.cos_TE, swapped_BHTE, turn.sin_TE)


def seen_from(valid_BP: Tensor, like: Tensor) -> Tensor:
    """0 for the valid places up to each place, -inf for others (B, 1, P, P).

    Padding sees itself, since a softmax needs one key.
    """
    P = valid_BP.shape[1]
    causal_PP = torch.ones(P, P, dtype=torch.bool, device=valid_BP.device).tril()
    itself_PP = torch.eye(P, dtype=torch.bool, device=valid_BP.device)
    seen_B1PP = ((causal_PP & valid_BP[:, None]) | itself_PP)[:, None]
    return like.new_zeros(seen_B1PP.shape).masked_fill(~seen_B1PP, float("-inf"))


def attend_cached(
    q_BHWE: Tensor,
    prefix: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    valid_BP: Tensor,
    g: int,
) -> Tensor:
    """One token of each beam over the user's history and the beam's own first `g` places: (B, H, W, E).

    The beams are queries of the same keys, so the history is read once for all of them, not copied.
    """
    (k_BHPE, v_BHPE), (k_BHWGE, v_BHWGE) = prefix, own
    P, E = k_BHPE.shape[2:]
    scores_BHWP = q_BHWE @ k_BHPE.transpose(2, 3)
    scores_BHWP = scores_BHWP.masked_fill(~valid_BP[:, None, None], float("-inf"))
    scores_BHWg = (k_BHWGE[:, :, :, :g] @ q_BHWE[..., None]).squeeze(-1)
    weights = (torch.cat([scores_BHWP, scores_BHWg], dim=3) / E**0.5).softmax(3)
    weights_BHWP, weights_BHWg = weights.split([P, g], dim=3)
    of_own_BHWE = (weights_BHWg[..., None, :] @ v_BHWGE[:, :, :, :g]).squeeze(-2)
    return weights_BHWP @ v_BHPE + of_own_BHWE


class Layer(nn.Module):
    """A transformer layer with normalization first."""

    def __init__(self, number: int, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.number, self.num_heads = number, num_heads
        self.attention_norm = nn.RMSNorm(hidden_size)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden_size)
        self.up = nn.Linear(hidden_size, 4 * hidden_size, bias=False)
        self.down = nn.Linear(4 * hidden_size, hidden_size, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor, turn: Turn, cache: Cache | None) -> Tensor:
        """(B, T, D): training without a cache, the history if the cache lacks it, else W beams."""
        if cache is not None and len(cache.prefix) > self.number:
            seen_BTD = self._look_back(x_BTD, turn, cache)
        else:
            seen_BTD = self._look_along(x_BTD, turn, cache)
        if launches.finish(x_BTD) and not self.training:
            from models.slide.layer_triton import finish_layer

            return finish_layer(self, x_BTD, seen_BTD)
        x_BTD = x_BTD + self.dropout(self.out(seen_BTD))
        hidden = nn.functional.gelu(self.up(self.mlp_norm(x_BTD)))
        return x_BTD + self.dropout(self.down(hidden))

    def _look_along(self, x_BTD: Tensor, turn: Turn, cache: Cache | None) -> Tensor:
        """Each token sees those before it; a history stays in the cache."""
        q_BHTE, k_BHTE, v_BHTE = self._split(self.qkv(self.attention_norm(x_BTD)), turn)
        if cache is None:
            seen_BHTE = nn.functional.scaled_dot_product_attention(
                q_BHTE, k_BHTE, v_BHTE, is_causal=True
            )
        else:
            cache.prefix.append((k_BHTE, v_BHTE))
            if cache.seen_B1PP is None:
                cache.seen_B1PP = seen_from(cache.valid_BP, q_BHTE)
            seen_BHTE = nn.functional.scaled_dot_product_attention(
                q_BHTE, k_BHTE, v_BHTE, attn_mask=cache.seen_B1PP
            )
        return seen_BHTE.transpose(1, 2).flatten(2)

    def _look_back(self, x_BWD: Tensor, turn: Turn, cache: Cache) -> Tensor:
        """Put key and value of each beam's token at its next place, and attend from there."""
        keys, values = self._own(cache, x_BWD.shape[1])
        prefix, g = cache.prefix[self.number], cache.filled
        P, E = prefix[0].shape[2:]
        if launches.begin(x_BWD, E, max(P, cache.places)):
            from models.slide.layer_triton import attend_token

            return attend_token(self, x_BWD, turn, cache, keys, values)
        qkv_BWF = self.qkv(self.attention_norm(x_BWD))
        if launches.attend(qkv_BWF, E):
            from models.slide.attend_triton import attend_next

            return attend_next(qkv_BWF, turn, cache, self.number, keys, values)
        q_BHWE, keys[:, :, :, g], values[:, :, :, g] = self._split(qkv_BWF, turn)
        seen_BHWE = attend_cached(q_BHWE, prefix, (keys, values), cache.valid_BP, g + 1)
        return seen_BHWE.transpose(1, 2).flatten(2)

    def _split(self, qkv_BTF: Tensor, turn: Turn) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, H, T, E), the former turned by their places."""
        qkv_B3HTE = qkv_BTF.unflatten(2, (3, self.num_heads, -1))
        qkv_3BHTE = qkv_B3HTE.permute(2, 0, 3, 1, 4)
        q_BHTE, k_BHTE = rotate(qkv_3BHTE[:2], turn)
        return q_BHTE, k_BHTE, qkv_3BHTE[2]

    def _own(self, cache: Cache, beams: int) -> tuple[Tensor, Tensor]:
        """Where this layer keeps what beams write; made at the first token."""
        if len(cache.own) == self.number:
            k_BHPE = cache.prefix[self.number][0]
            B, H, _, E = k_BHPE.shape
            shape = (B, H, beams, cache.places, E)
            cache.own.append((k_BHPE.new_empty(shape), k_BHPE.new_empty(shape)))
        return cache.own[self.number]

"""Temporal group-causal attention, with a dense mask or, for long histories, by flex attention.

    B histories, H heads, N items, E head size, D = H * E

Everything that a mask here can say is said by one number an item, its *order*: a query sees the keys
whose order is not below its own, so newer groups (lower numbers) never reach older ones. Groups as
order give group-causal attention, places from the newest give causal, zeros bidirectional.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

FLEX_ABOVE = 512
"""Histories longer than this use flex attention, on a GPU: a dense mask has N * N entries a row."""


@dataclass(frozen=True)
class Visibility:
    """Who sees whom in a batch."""

    order_BN: Tensor
    valid_BN: Tensor
    """False for padding, which nobody sees but itself (a softmax needs one key)."""
    alibi: bool = False
    """Subtract a slope of the head's, times how far query and key are apart."""

    @cached_property
    def dense(self) -> Tensor:
        """(B, 1, N, N), True where a query (row) sees a key (column); made once for all layers."""
        N = self.order_BN.shape[1]
        seen_BNN = self.order_BN[:, None, :] >= self.order_BN[:, :, None]
        itself_NN = torch.eye(N, dtype=torch.bool, device=self.order_BN.device)
        return ((seen_BNN & self.valid_BN[:, None, :]) | itself_NN)[:, None]

    def bias(self, H: int, dtype: torch.dtype) -> Tensor:
        """`dense` as numbers to add to scores, with ALiBi's penalties: (B, H, N, N)."""
        place_N = torch.arange(self.order_BN.shape[1], device=self.order_BN.device)
        apart_NN = (place_N[:, None] - place_N).abs()
        penalty_HNN = -alibi_slopes(H, place_N.device)[:, None, None] * apart_NN
        return torch.where(self.dense, penalty_HNN.to(dtype), float("-inf"))

    @cached_property
    def block_mask(self) -> Any:
        """The same for `flex_attention`."""
        from torch.nn.attention.flex_attention import create_block_mask

        order_BN, valid_BN = self.order_BN, self.valid_BN

        def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            del h
            return ((order_BN[b, k] >= order_BN[b, q]) & valid_BN[b, k]) | (q == k)

        B, N = order_BN.shape
        return create_block_mask(sees, B, None, N, N, device=str(order_BN.device))

    def score_mod(self, H: int) -> Any:
        """ALiBi's penalties for `flex_attention`, or None."""
        slopes_H = alibi_slopes(H, self.order_BN.device)
        return (lambda s, b, h, q, k: s - slopes_H[h] * (q - k).abs()) if self.alibi else None


def attend(q_BHNE: Tensor, k_BHNE: Tensor, v_BHNE: Tensor, sees: Visibility) -> Tensor:
    """Softmax attention under `sees`: (B, H, N, E)."""
    if q_BHNE.device.type == "cuda" and q_BHNE.shape[2] > FLEX_ABOVE:
        return attend_flex(q_BHNE, k_BHNE, v_BHNE, sees)
    return attend_dense(q_BHNE, k_BHNE, v_BHNE, sees)


def attend_dense(q_BHNE: Tensor, k_BHNE: Tensor, v_BHNE: Tensor, sees: Visibility) -> Tensor:
    """With a mask of B * N * N entries."""
    mask = sees.bias(q_BHNE.shape[1], q_BHNE.dtype) if sees.alibi else sees.dense
    return nn.functional.scaled_dot_product_attention(q_BHNE, k_BHNE, v_BHNE, attn_mask=mask)


def attend_flex(q_BHNE: Tensor, k_BHNE: Tensor, v_BHNE: Tensor, sees: Visibility) -> Tensor:
    """With blocks of the mask that are skipped where they are empty; compiled on a GPU."""
    flex: Any = _flex(q_BHNE.device.type == "cuda")
    score_mod = sees.score_mod(q_BHNE.shape[1])
    out: Tensor = flex(q_BHNE, k_BHNE, v_BHNE, score_mod=score_mod, block_mask=sees.block_mask)
    return out


@cache
def _flex(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if compiled else flex_attention


def alibi_slopes(H: int, device: torch.device) -> Tensor:
    """Slopes of ALiBi (Press et al. 2022): a geometric series from 2^(-8/H) down to 2^-8."""
    return 2.0 ** (-8.0 * torch.arange(1, H + 1, device=device) / H)


def rotate(x_BHNE: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021), by place in the padded history: only differences count."""
    N, E = x_BHNE.shape[2:]
    rates = 10000.0 ** (-torch.arange(0, E, 2, device=x_BHNE.device) / E)
    angles = torch.arange(N, device=x_BHNE.device)[:, None] * rates
    cos, sin = angles.cos().to(x_BHNE.dtype), angles.sin().to(x_BHNE.dtype)
    first, second = x_BHNE.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Layer(nn.Module):
    """A transformer layer with normalization first."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float, rope: bool) -> None:
        super().__init__()
        self.num_heads, self.rope = num_heads, rope
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)
        self.mlp_norm = nn.LayerNorm(hidden_size)
        self.up = nn.Linear(hidden_size, 4 * hidden_size)
        self.down = nn.Linear(4 * hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BND: Tensor, sees: Visibility) -> Tensor:
        """(B, N, D)."""
        qkv_B3HNE = self.qkv(self.attention_norm(x_BND)).unflatten(2, (3, self.num_heads, -1))
        q_BHNE, k_BHNE, v_BHNE = qkv_B3HNE.permute(2, 0, 3, 1, 4)
        if self.rope:
            q_BHNE, k_BHNE = rotate(q_BHNE), rotate(k_BHNE)
        seen_BND = attend(q_BHNE, k_BHNE, v_BHNE, sees).transpose(1, 2).flatten(2)
        x_BND = x_BND + self.dropout(self.out(seen_BND))
        hidden = nn.functional.gelu(self.up(self.mlp_norm(x_BND)))
        return x_BND + self.dropout(self.down(hidden))

"""Temporal group-causal attention, with a dense mask or, for long histories, by flex attention.

    B histories, H heads, N items, E head size

Everything that a mask here can say is said by one number an item, its *order*: a query sees the keys
whose order is not below its own, so newer groups (lower numbers) never reach older ones. Groups as
order give group-causal attention, places from the newest give causal, zeros bidirectional. What is
added to the scores besides (`models.trip.biases`) is a function of history, head, query and key.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

LEAST = 16
"""Numbers of a head that the compiled kernel wants."""
BLOCK = 128
"""Queries and keys of a block of the mask."""
FLEX_ABOVE = 512
"""Histories longer than this use flex attention, on a GPU: a dense mask has N * N entries a row."""

Score = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""What to add to a score: a function of the numbers of history, head, query and key."""


@dataclass(frozen=True)
class Visibility:
    """Who sees whom in a batch, and what biases know of it."""

    order_BN: Tensor
    valid_BN: Tensor
    """False for padding, which nobody sees but itself (a softmax needs one key)."""
    groups_BN: Tensor
    """Temporal groups, 0 the newest."""
    ages_BN: Tensor
    """Seconds before the target."""

    def of_passes(self, counts: Sequence[int]) -> "Visibility":
        """For as many of the first histories as each pass has, one pass behind the other."""
        if list(counts) == [len(self.order_BN)]:
            return self
        fields = [getattr(self, name) for name in self.__annotations__]
        return Visibility(*(torch.cat([x[:count] for count in counts]) for x in fields))

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Whether a query sees a key."""
        del h
        order_BN = self.order_BN
        return ((order_BN[b, k] >= order_BN[b, q]) & self.valid_BN[b, k]) | (q == k)

    @cached_property
    def dense(self) -> Tensor:
        """(B, 1, N, N), True where a query (row) sees a key (column); made once for all layers.

        What `sees` says, but by comparing rows with columns: nothing of N * N whole numbers is made.
        """
        itself_NN = torch.eye(self.order_BN.shape[1], dtype=torch.bool, device=self.order_BN.device)
        seen_BNN = self.order_BN[:, None] >= self.order_BN[:, :, None]
        return ((seen_BNN & self.valid_BN[:, None]) | itself_NN)[:, None]

    def scores(self, score: Score, H: int) -> Tensor:
        """What `score` adds, of a shape that broadcasts to (B, H, N, N)."""
        return score(*self._numbers(H))

    def _numbers(self, H: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        (B, N), device = self.order_BN.shape, self.order_BN.device
        b, h, n = (torch.arange(size, device=device) for size in (B, H, N))
        return b[:, None, None, None], h[:, None, None], n[:, None], n

    @cached_property
    def block_mask(self) -> Any:
        """The mask for `flex_attention`: blocks with nothing to see, with all, and with some of it.

        A block of keys is seen in part if its highest order is not below the lowest of the queries,
        and in whole if its lowest is not below their highest. So nothing of N * N is made, where
        `create_block_mask` asks for every pair.
        """
        from torch.nn.attention.flex_attention import BlockMask

        N = self.order_BN.shape[1]
        # past the end are queries and keys that nobody asks for: blocks with them are never whole
        over = (0, -N % BLOCK)
        order_BN = self.order_BN.to(torch.int32)
        most = torch.iinfo(torch.int32).max
        pad = nn.functional.pad
        keys_BN = torch.where(self.valid_BN, order_BN, -most)  # padding is below all
        low_key, high_key = _ends(pad(keys_BN, over, value=-most))
        low_query, high_query = _ends(pad(order_BN, over, value=most))
        itself = torch.eye(low_key.shape[1], dtype=torch.bool, device=order_BN.device)
        some = (high_key[:, None] >= low_query[:, :, None]) | itself
        whole = low_key[:, None] >= high_query[:, :, None]
        # a function: the arguments of a method are counted with `self`
        rule = lambda b, h, q, k: self.sees(b, h, q, k)  # noqa: E731
        return BlockMask.from_kv_blocks(
            *_listed(some & ~whole), *_listed(whole), BLOCK_SIZE=BLOCK, mask_mod=rule,
            seq_lengths=(N, N),
        )  # fmt: skip


def _ends(order_BN: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest and the highest order of each block."""
    low, high = order_BN.unflatten(1, (-1, BLOCK)).aminmax(dim=2)
    return low, high


def _listed(blocks_BQK: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys there are for each of queries, and which: those first, then the others."""
    listed = blocks_BQK.int().argsort(dim=2, descending=True, stable=True)
    return blocks_BQK.sum(2, dtype=torch.int32)[:, None], listed.int()[:, None]


def attend(
    q_BHNE: Tensor, k_BHNE: Tensor, v_BHNE: Tensor, sees: Visibility, score: Score | None = None
) -> Tensor:
    """Softmax attention under `sees`: (B, H, N, E)."""
    if q_BHNE.device.type == "cuda" and q_BHNE.shape[2] > FLEX_ABOVE:
        return attend_flex(q_BHNE, k_BHNE, v_BHNE, sees, score)
    return attend_dense(q_BHNE, k_BHNE, v_BHNE, sees, score)


def attend_dense(
    q_BHNE: Tensor, k_BHNE: Tensor, v_BHNE: Tensor, sees: Visibility, score: Score | None = None
) -> Tensor:
    """With a mask of B * N * N entries, or a bias of up to H times as many."""
    mask = sees.dense
    if score is not None:
        added = sees.scores(score, q_BHNE.shape[1]).to(q_BHNE.dtype)
        mask = torch.where(mask, added, float("-inf"))
    return nn.functional.scaled_dot_product_attention(q_BHNE, k_BHNE, v_BHNE, attn_mask=mask)


def attend_flex(
    q_BHNE: Tensor, k_BHNE: Tensor, v_BHNE: Tensor, sees: Visibility, score: Score | None = None
) -> Tensor:
    """With blocks of the mask that are skipped where they are empty; compiled on a GPU."""
    flex: Any = _flex(q_BHNE.device.type == "cuda")
    score_mod = None if score is None else lambda s, b, h, q, k: s + score(b, h, q, k)
    E = q_BHNE.shape[3]
    more = max(LEAST - E, 0)  # zeros, which change no product
    q_BHNE, k_BHNE, v_BHNE = (nn.functional.pad(x, (0, more)) for x in (q_BHNE, k_BHNE, v_BHNE))
    out: Tensor = flex(
        q_BHNE, k_BHNE, v_BHNE, score_mod=score_mod, block_mask=sees.block_mask, scale=E**-0.5
    )
    return out[..., :E]


@cache
def _flex(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # `fullgraph`: too many shapes are an error, not dense attention without a word
    return torch.compile(flex_attention, fullgraph=True) if compiled else flex_attention


def attend_silu(
    q_BHNE: Tensor, k_BHNE: Tensor, v_BHNE: Tensor, sees: Visibility, score: Score | None,
    divisor: int,
) -> Tensor:  # fmt: skip
    """HSTU's attention (Zhai et al. 2024): SiLU of each score over a fixed number, no softmax."""
    scores_BHNN = q_BHNE @ k_BHNE.transpose(2, 3)
    if score is not None:
        scores_BHNN = scores_BHNN + sees.scores(score, q_BHNE.shape[1])
    weights_BHNN = nn.functional.silu(scores_BHNN) / divisor
    return torch.where(sees.dense, weights_BHNN, 0.0) @ v_BHNE


def rotate(x_BHNE: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021), by place in the padded history: only differences count."""
    N, E = x_BHNE.shape[2:]
    rates = 10000.0 ** (-torch.arange(0, E, 2, device=x_BHNE.device) / E)
    angles = torch.arange(N, device=x_BHNE.device)[:, None] * rates
    cos, sin = angles.cos().to(x_BHNE.dtype), angles.sin().to(x_BHNE.dtype)
    first, second = x_BHNE.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

"""The exchange, carried out: from rows with all heads to all rows of some heads, and back.

    shards = Shards(layout, rank, group)                  # once a step
    q_ThD, k_TkD, v_TkD = to_heads(q_tHD, k_tKD, v_tKD, shards)
    out_tHD = to_rows(attention(q_ThD, k_TkD, v_TkD), H, shards)

Two all-to-alls a layer and pass, whose sizes follow from the plan (`sizes.py`). The same for a parent,
where the rows of all children meet, for a child, and for a wide group (Ulysses: Jacobs et al. 2023),
with any number of heads. What arrives at the first is already in order, so queries, keys and values are
views of it. The backward pass is the transpose: gradients of a key/value head that several ranks used
are added up in the order of the ranks. Nothing is kept for it but the plan.

Legend: t rows of this rank, T rows of the group, H query heads, K key/value heads, h and k those of this
rank, D head dim, P ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel.repacking.heads import HeadMap
from parallel.repacking.layout import Ints, Layout
from parallel.repacking.packing import pack, unpack
from parallel.repacking.sizes import Sizes, exchange_sizes
from parallel.waits import waiting


@dataclass(frozen=True, eq=False)
class Shards:
    """The rows of a group of ranks in one step, and this rank's place among them."""

    layout: Layout
    rank: int
    """In the group."""
    group: dist.ProcessGroup | None = None
    """None: all ranks; not used where the layout is one rank wide."""
    _sizes: dict[HeadMap, Sizes] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows of this rank, t."""
        return int(self.layout.rows_per_rank[self.rank])

    def sizes(self, heads: HeadMap) -> Sizes:
        """Of both all-to-alls; worked out once."""
        if heads not in self._sizes:
            self._sizes[heads] = exchange_sizes(self.layout, heads, self.rank)
        return self._sizes[heads]


def to_heads(
    q_tHD: Tensor, k_tKD: Tensor, v_tKD: Tensor, shards: Shards
) -> tuple[Tensor, Tensor, Tensor]:
    """All rows of this rank's query heads, and of the key/value heads that these use.

    (T, h, D), (T, k, D) and (T, k, D); query head `i` uses key/value head `HeadMap.kv_of_q(rank)[i]`.
    Every rank of the group calls it, one without rows, too. Raises `ValueError` for tensors that do not
    belong together.
    """
    _check(q_tHD, k_tKD, v_tKD, shards)
    if shards.layout.width == 1:
        return q_tHD, k_tKD, v_tKD
    heads = head_map(q_tHD.shape[1], k_tKD.shape[1], shards.layout.width)
    q_ThD, k_TkD, v_TkD = _Exchange.apply(shards, heads, True, q_tHD, k_tKD, v_tKD)
    return q_ThD, k_TkD, v_TkD


def to_rows(out_ThD: Tensor, num_heads: int, shards: Shards) -> Tensor:
    """This rank's rows of all `num_heads` query heads, (t, H, D); every rank of the group calls it."""
    if shards.layout.width == 1:
        return out_ThD
    heads = head_map(num_heads, 1, shards.layout.width)  # keys and values stay
    (out_tHD,) = _Exchange.apply(shards, heads, False, out_ThD)
    return out_tHD


class _Exchange(torch.autograd.Function):
    """Either direction, with the other one as its gradient."""

    @staticmethod
    def forward(
        context: Any, shards: Shards, heads: HeadMap, to_heads: bool, *parts: Tensor
    ) -> tuple[Tensor, ...]:
        context.plan = shards, heads, to_heads
        return _moved(parts, shards, heads, to_heads)

    @staticmethod
    @once_differentiable
    def backward(context: Any, *grads: Tensor) -> tuple[Any, ...]:
        shards, heads, to_heads = context.plan
        return None, None, None, *_moved(grads, shards, heads, not to_heads)


def _moved(
    parts: Sequence[Tensor], shards: Shards, heads: HeadMap, to_heads: bool
) -> tuple[Tensor, ...]:
    """Queries, keys and values, or outputs; from rows to heads, or from heads to rows."""
    sizes, D = shards.sizes(heads), parts[0].shape[2]
    if len(parts) == 3:
        blocks = heads.qkv_blocks
        by_rows, by_heads = sizes.to_heads.sends, sizes.to_heads.receives
    else:
        blocks = heads.q_blocks
        by_heads, by_rows = sizes.to_rows.sends, sizes.to_rows.receives
    if to_heads:
        arrived = all_to_all(pack(parts, blocks), by_rows * D, by_heads * D, shards.group)
        own = [end - begin for begin, end in blocks[shards.rank]]
        return arrived.view(sizes.all_rows, sum(own), D).split(own, dim=1)
    sent = torch.cat(list(parts), dim=1) if len(parts) > 1 else parts[0].contiguous()
    arrived = all_to_all(sent.view(-1), by_heads * D, by_rows * D, shards.group)
    return tuple(unpack(arrived, blocks, sizes.rows, D))


def all_to_all(
    sent: Tensor, sends: Ints, receives: Ints, group: dist.ProcessGroup | None
) -> Tensor:
    """What the ranks of `group` have for this one, in their order; nothing travels on meta."""
    arrived = sent.new_empty(int(receives.sum()))
    if sent.device.type != "meta":
        with waiting():
            dist.all_to_all_single(arrived, sent, receives.tolist(), sends.tolist(), group=group)
    return arrived


@cache
def head_map(num_q: int, num_kv: int, width: int) -> HeadMap:
    """One for all layers and steps, since it remembers its blocks."""
    return HeadMap(num_q, num_kv, width)


def _check(q_tHD: Tensor, k_tKD: Tensor, v_tKD: Tensor, shards: Shards) -> None:
    t, D, K = shards.num_rows, q_tHD.shape[2], k_tKD.shape[1]
    if q_tHD.shape[0] != t or k_tKD.shape != (t, K, D) or v_tKD.shape != (t, K, D):
        shapes = ", ".join(str(tuple(part.shape)) for part in (q_tHD, k_tKD, v_tKD))
        raise ValueError(
            f"queries, keys and values {shapes}: the rank has {t} rows, and all three one head dim"
        )
    if not q_tHD.dtype == k_tKD.dtype == v_tKD.dtype:
        raise ValueError(
            f"queries, keys and values of {q_tHD.dtype}, {k_tKD.dtype} and {v_tKD.dtype} cannot "
            "travel together: give them one type"
        )

"""Bytes that a plan sends in a forward pass, inside nodes and across them.

Every rank sends to every other of its group: rows of its own to the ranks of their heads, and back. What
a rank keeps for itself does not travel. The backward pass sends the same once more, and so does a
forward pass that is done again.
"""

from dataclasses import dataclass

import numpy as np

from parallel.repacking.heads import HeadMap
from parallel.repacking.layout import Ints, Layout
from parallel.repacking.plan import Plan
from parallel.repacking.shape import ModelShape
from parallel.repacking.sizes import site1_counts, site2_counts


@dataclass(frozen=True)
class Traffic:
    """Bytes of all ranks together."""

    inside: float
    """Between ranks of one node."""
    across: float
    """Between ranks of different nodes."""

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.inside + other.inside, self.across + other.across)

    def times(self, number: float) -> "Traffic":
        """So many times as much."""
        return Traffic(self.inside * number, self.across * number)


def traffic(plan: Plan, shape: ModelShape) -> Traffic:
    """Of one forward pass of a model over the plan's samples."""
    total, width = Traffic(0, 0), shape.head_dim * shape.dtype_bytes
    for parent in plan.parents:
        layout = plan.layout(parent)
        full = exchanged(layout, shape.heads, parent.first_rank, plan.node_size)
        total += full.times(shape.full_layers * width)
        for child in parent.children:
            first = child.first_rank - parent.first_rank
            part = layout.part(first, first + child.width)
            sparse = exchanged(part, shape.sparse_heads, child.first_rank, plan.node_size)
            total += sparse.times(shape.sparse_layers * width)
    return total


def exchanged(layout: Layout, heads: tuple[int, int], first_rank: int, node_size: int) -> Traffic:
    """Heads of rows that the two all-to-alls of one layer send, in a group from `first_rank` on."""
    return split(_counts(layout, heads), first_rank, node_size)


def _counts(layout: Layout, heads: tuple[int, int]) -> Ints:
    """(P, P) from rank (row) to rank (column), at both sites."""
    q, kv = heads
    map_ = HeadMap(q, kv, layout.width)
    return site1_counts(layout, map_) + site2_counts(layout, map_)


def split(counts_PP: Ints, first_rank: int, node_size: int) -> Traffic:
    """What the table says is sent, by where it goes; a rank sends itself nothing."""
    rank = np.arange(len(counts_PP))
    node = (first_rank + rank) // node_size
    same = node[:, None] == node[None, :]
    own = float(np.trace(counts_PP))
    inside = float(counts_PP[same].sum()) - own
    return Traffic(inside, float(counts_PP[~same].sum()))

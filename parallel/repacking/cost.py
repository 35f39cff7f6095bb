"""How long the layers of a step take, by layer kind and place, and how much memory a rank needs.

Times are forward and backward together, summed over the layers of a model. The model is linear where it
can be, so that solvers can add samples up:

    row by row           linear(L)             the ranks of a child share its rows
    sparse attention     sparse(L)             the ranks of a child share its heads
    full attention       full(L)               the ranks of a parent share its heads
    all-to-all, width c  latency(c) + rows * bytes(c) / rate(c)

A group is as fast as its compute plus what of its communication is not hidden: of the communication at
most the share `overlap`, and no more than there is compute to hide it behind. A parent waits for its
slowest child at every full layer; a step for its slowest parent at the end.

Legend: L length of a sample, rows: those of one rank, c or P width of a group.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parallel.repacking.calibration import Calibration
from parallel.repacking.heads import HeadMap
from parallel.repacking.layout import Floats, Ints
from parallel.repacking.shape import BACKWARD, ModelShape


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank."""

    capacity: float = float("inf")
    """What a rank may use."""
    static: float = 0.0
    """Weights, gradients, optimizer, and what collectives keep."""
    per_row: float = 0.0
    """Activations of one row, over all layers."""
    rows: float = float("inf")
    """Rows that a rank may hold, whatever they take."""


class Work(NamedTuple):
    """Samples, longest first and by id where lengths are equal: (n,) each, seconds on one rank."""

    ids: Ints
    lengths: Ints
    full: Floats
    """Full attention."""
    sparse: Floats
    """Sparse attention."""
    alone: Floats
    """(n, 2) with the best child of a node to itself: its seconds, and its rows on a rank."""

    @property
    def quantities(self) -> Floats:
        """(n, 3) rows, full attention, sparse attention."""
        return np.stack([self.lengths.astype(np.float64), self.full, self.sparse], axis=1)

    def take(self, chosen: NDArray[np.bool_] | Ints) -> "Work":
        """Some of the samples, in the order given."""
        return Work(
            self.ids[chosen], self.lengths[chosen], self.full[chosen], self.sparse[chosen],
            self.alone[chosen]
        )  # fmt: skip


@dataclass(frozen=True)
class CostModel:
    """A model's shape on a device's calibration, with nodes of `node_size` ranks."""

    shape: ModelShape
    calibration: Calibration
    node_size: int = 8
    overlap: float = 0.0
    """Share of the communication that can hide behind compute, 0 to 1."""
    fixed: float = 0.0
    """Seconds of a step that no plan changes."""
    memory: Memory = Memory()

    def __post_init__(self) -> None:
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap={self.overlap} is not between 0 and 1")
        if self.node_size < 1 or self.node_size & (self.node_size - 1):
            raise ValueError(
                f"parallel.node_size={self.node_size} is no power of two, but children are: set "
                "parallel.node_size to 1, 2, 4, 8, ..."
            )

    # What compute costs, in seconds on one rank.

    @property
    def passes(self) -> int:
        """Forward passes that the compute of a step amounts to."""
        return BACKWARD + self.shape.recompute

    @cached_property
    def linear(self) -> float:
        """Of one row."""
        flops, at = self.shape.linear_flops(), self.calibration
        return self.passes * (flops["dense"] / at.dense_flops + flops["moe"] / at.moe_flops)

    def full(self, lengths: Ints) -> Floats:
        """Full attention of each sample: short samples are slower for each operation."""
        at, shape = self.calibration, self.shape
        flops = 4 * shape.q_heads * shape.head_dim * shape.full_layers * shape.pairs(lengths)
        slower = 1 + at.full_attention_half_length / np.maximum(lengths, 1)
        return self.passes * flops * slower / at.full_attention_flops

    def sparse(self, lengths: Ints) -> Floats:
        """Sparse attention of each sample, the choice of blocks included."""
        at, shape = self.calibration, self.shape
        rate = at.topk_attention_flops if shape.sparse == "topk" else at.window_attention_flops
        attend = self.passes * 4 * shape.sparse_pairs(lengths) / rate
        choose = (1 + shape.recompute) * 2 * shape.score_pairs(lengths) / at.topk_scores_flops
        return shape.sparse_heads[0] * shape.head_dim * shape.sparse_layers * (attend + choose)

    def work(self, ids: Ints, lengths: Ints) -> Work:
        """The samples as solvers want them. Their order depends on lengths and ids alone."""
        order = np.lexsort((ids, -lengths))
        ids, lengths = ids[order], lengths[order]
        rows, sparse = lengths.astype(np.float64), self.sparse(lengths)
        widths = (1 << k for k in range(self.node_size.bit_length()))
        alone = [self.sparse_side(c).seconds(self.visible, rows, sparse) for c in widths]
        at_best = np.stack([np.min(alone, axis=0), rows / self.node_size], axis=1)
        return Work(ids, lengths, self.full(lengths), sparse, at_best)

    def share(self, heads: int, width: int) -> float:
        """The part of all heads that the busiest rank of a group computes."""
        return -(-heads // width) / heads

    # What communication costs, in seconds, of all layers of a kind.

    @property
    def calls(self) -> int:
        """Times that a layer's two all-to-alls run: forwards, backwards, and when recomputed."""
        return 2 + self.shape.recompute

    def row_bytes(self, heads: tuple[int, int], width: int) -> float:
        """Bytes of one row that leave its rank in the two all-to-alls of a layer, once."""
        q, kv = heads
        sent = 2 * q + 2 * float(HeadMap(q, kv, width).kv_per_rank.sum())
        return sent * self.shape.head_dim * self.shape.dtype_bytes * (width - 1) / width

    def link(self, width: int) -> tuple[float, float]:
        """Seconds to start an all-to-all over `width` ranks, and bytes per second and rank."""
        at = self.calibration
        if width <= self.node_size:
            return at.start_seconds(width), at.rate(width)
        return at.across_seconds, at.rate(self.node_size) / at.across_ratio

    def exchange(self, heads: tuple[int, int], layers: int, width: int) -> tuple[float, float]:
        """Seconds for each call's start, and for each row of a rank, of `layers` layers."""
        if width == 1:
            return 0.0, 0.0
        start, rate = self.link(width)
        per_row = self.row_bytes(heads, width) / rate
        return self.calls * layers * 2 * start, self.calls * layers * per_row

    def visible(self, compute: Floats, communication: Floats) -> Floats:
        """Both together, less what overlaps."""
        hidden = np.minimum(self.overlap * communication, compute)
        return compute + communication - hidden

    # Groups.

    def sparse_side(self, width: int) -> "Side":
        """All that a child of this width does."""
        if width not in self._sides:
            start, per_row = self.exchange(self.shape.sparse_heads, self.shape.sparse_layers, width)
            self._sides[width] = Side(
                self.linear / width, self.share(self.shape.sparse_heads[0], width),
                per_row / width, start, self.shape.layers * self.calibration.layer_seconds,
            )  # fmt: skip
        return self._sides[width]

    def full_side(self, width: int) -> "Side":
        """Full attention of a parent, for rows that are spread evenly."""
        if -width not in self._sides:
            start, per_row = self.exchange(self.shape.heads, self.shape.full_layers, width)
            self._sides[-width] = Side(
                0.0, self.share(self.shape.q_heads, width), per_row / width, start, 0.0
            )
        return self._sides[-width]

    @cached_property
    def _sides(self) -> dict[int, "Side"]:
        return {}

    def child_seconds(self, width: int, rows: float, sparse: float) -> float:
        """A child with `rows` rows in all and `sparse` seconds of attention; 0 if it is empty."""
        return float(
            self.sparse_side(width).seconds(self.visible, np.float64(rows), np.float64(sparse))
        )

    def full_seconds(self, width: int, rows_per_rank: float, full: float) -> float:
        """Full attention of a parent whose fullest rank has `rows_per_rank` rows."""
        side = self.full_side(width)
        return float(
            side.seconds(self.visible, np.float64(rows_per_rank * width), np.float64(full))
        )

    def wide_seconds(self, width: int, work: Work) -> float:
        """A group that keeps its own layout in all layers."""
        rows = float(work.lengths.sum())
        return self.full_seconds(width, rows / width, float(work.full.sum())) + self.child_seconds(
            width, rows, float(work.sparse.sum())
        )

    # Memory.

    @cached_property
    def bytes_per_row(self) -> float:
        """Activations that a row keeps: as given, or each layer's input and one layer's insides."""
        shape = self.shape
        if self.memory.per_row:
            return self.memory.per_row
        inside = 8 * shape.hidden + 2 * shape.experts_per_token * (
            shape.hidden + shape.expert_hidden
        )
        kept = shape.layers if shape.recompute else 8 * shape.layers
        return shape.dtype_bytes * (kept * shape.hidden + inside)

    def head_bytes(self, width: int) -> float:
        """Bytes of one row of a parent while its heads are spread: query, output, keys and values."""
        heads = HeadMap(*self.shape.heads, width)
        most = int((heads.qkv_per_rank + heads.q_per_rank).max())
        return most * self.shape.head_dim * self.shape.dtype_bytes

    def rank_bytes(self, rows: float, parent_rows: float, width: int) -> float:
        """Memory of a rank with `rows` rows in a parent of `width` with `parent_rows`."""
        return self.memory.static + rows * self.bytes_per_row + parent_rows * self.head_bytes(width)

    def parent_limit(self, width: int) -> float:
        """Rows that a parent may hold if they are spread evenly."""
        if width not in self._parent_limits:
            left = max(self.memory.capacity - self.memory.static, 0.0)
            each = self.bytes_per_row / width + self.head_bytes(width)
            self._parent_limits[width] = min(left / each, self.memory.rows * width)
        return self._parent_limits[width]

    @cached_property
    def _parent_limits(self) -> dict[int, float]:
        return {}

    def row_limit(self, parent_rows: float, width: int) -> float:
        """Rows that a rank may hold."""
        if self.memory.capacity == float("inf"):
            return self.memory.rows
        left = self.memory.capacity - self.rank_bytes(0, parent_rows, width)
        return min(max(left, 0.0) / self.bytes_per_row, self.memory.rows)


class Side(NamedTuple):
    """One kind of layer of a group: what its rows and its attention, summed over samples, cost."""

    row: float
    """Compute seconds for each row of the group."""
    share: float
    """Of attention seconds."""
    row_comm: float
    """Communication seconds for each row of the group."""
    start_comm: float
    start: float
    """Compute seconds of a group that is not empty."""

    def seconds(
        self,
        visible: Callable[[Floats, Floats], Floats],
        rows: Floats | np.float64,
        attention: Floats | np.float64,
    ) -> Floats:
        """Of groups with so many rows and so much attention; nothing without rows."""
        compute = np.asarray(self.row * rows + self.share * attention + self.start)
        busy = rows > 0
        return np.where(
            busy, visible(compute, np.asarray(self.row_comm * rows + self.start_comm)), 0.0
        )

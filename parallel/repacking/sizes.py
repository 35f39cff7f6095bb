"""Sizes of the two all-to-alls of a layer: from rows with all heads to all rows of some heads, and back.

    site 1   rank s: its rows, of every head     ->  rank r: all rows, of r's heads
    site 2   rank r: all rows, of r's heads      ->  rank s: its rows, of every head

The same for a parent (full attention, where the children's rows meet), for a child (sparse attention)
and for a wide group; `exchange.py` carries both out. Counts are in heads: multiply by the head dim for
elements. Every rank has the plan, so no sizes travel.

What a rank sends at site 1 is, for each destination r, a block (t, N_r, D); what arrives from all, in
the order of ranks, is (T, N_r, D) in stream order. At site 2 a rank sends its (T, H_r, D) as it is;
what arrives is a block (t, H_r, D) from each rank.

Legend as in `heads.py`.
"""

from dataclasses import dataclass

import numpy as np

from parallel.repacking.heads import HeadMap
from parallel.repacking.layout import Ints, Layout, row_order


@dataclass(frozen=True, eq=False)
class Site:
    """One all-to-all as one rank sees it: `all_to_all_single` with these sizes, times the head dim."""

    sends: Ints
    """(P,) heads to each rank."""
    receives: Ints
    """(P,) heads from each rank."""


@dataclass(frozen=True, eq=False)
class Sizes:
    """Both sites of one rank, and the index maps that packing needs."""

    rows: int
    """Rows that the rank holds before site 1, t."""
    all_rows: int
    """Rows of the group, T."""
    to_heads: Site
    to_rows: Site
    heads: Ints
    """Heads to send at site 1 (`HeadMap.sent`)."""
    kv_of_q: Ints
    """Which received key/value head each received query head uses."""
    order: Ints | None = None
    """Rows to send at site 2, rank by rank; None: all, as they are."""


def site1_counts(layout: Layout, heads: HeadMap) -> Ints:
    """(P, P) heads that rank s (row) sends to rank r (column) at site 1."""
    return np.outer(layout.rows_per_rank, heads.qkv_per_rank)


def site2_counts(layout: Layout, heads: HeadMap) -> Ints:
    """(P, P) heads that rank r (row) sends to rank s (column) at site 2."""
    return np.outer(heads.q_per_rank, layout.rows_per_rank)


def exchange_sizes(layout: Layout, heads: HeadMap, rank: int, after: Layout | None = None) -> Sizes:
    """Both sites of `rank`; `after`: the layout to return to, where that is another one."""
    if heads.width != layout.width:
        raise ValueError(f"heads over {heads.width} ranks, but rows over {layout.width}")
    rows, back = layout.rows_per_rank, (after or layout).rows_per_rank
    qkv, q = heads.qkv_per_rank, heads.q_per_rank
    order = None
    if after is not None and not np.array_equal(after.samples, layout.samples):
        order = np.concatenate([row_order(layout, after, other) for other in range(layout.width)])
    return Sizes(
        rows=int(rows[rank]),
        all_rows=layout.num_rows,
        to_heads=Site(sends=rows[rank] * qkv, receives=rows * qkv[rank]),
        to_rows=Site(sends=back * q[rank], receives=back[rank] * q),
        heads=heads.sent(),
        kv_of_q=heads.kv_of_q(rank),
        order=order,
    )


@dataclass(frozen=True, eq=False)
class Redistribution:
    """A pass that moves rows from one layout to another: what repacking does without.

    Also the residual's part of site 1 where layouts change from block to block. Counts are in rows.
    """

    sends: Ints
    """(P,) rows to each rank."""
    receives: Ints
    order: Ints
    """Which own rows to send, rank by rank."""
    place: Ints
    """Where each received row goes."""


def redistribution(source: Layout, target: Layout, rank: int) -> Redistribution:
    """What `rank` sends and receives on the way from `source` to `target`, of the same samples."""
    low, high = source.bounds[rank], source.bounds[rank + 1]
    order, sends = [], np.zeros(source.width, np.int64)
    for other in range(source.width):
        wanted = row_order(source, target, other)
        mine = wanted[(wanted >= low) & (wanted < high)] - low
        order.append(mine)
        sends[other] = len(mine)
    arriving = row_order(source, target, rank)
    owner = np.searchsorted(source.bounds, arriving, side="right") - 1
    return Redistribution(
        sends, np.bincount(owner, minlength=source.width).astype(np.int64),
        np.concatenate(order), np.argsort(owner, kind="stable"),
    )  # fmt: skip

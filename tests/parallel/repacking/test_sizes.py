"""Both all-to-alls, carried out by hand from what each rank knows, against plain indexing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.repacking.heads import HeadMap
from parallel.repacking.layout import stream
from parallel.repacking.sizes import (
    exchange_sizes,
    redistribution,
    site1_counts,
    site2_counts,
)
from tests.parallel.repacking.test_layout import CHILDREN, layout_of

HEADS = st.integers(1, 40).flatmap(lambda q: st.tuples(st.just(q), st.integers(1, q)))
"""Any numbers of query and key/value heads, dividing each other and the ranks or not."""


def all_to_all(sent, exchanges, site):
    """`sent[r]`: flat buffers. Every rank cuts by its own sizes; they must fit each other's."""
    P = len(sent)
    cuts = [np.split(sent[r], np.cumsum(getattr(exchanges[r], site).sends)[:-1]) for r in range(P)]
    received = []
    for r in range(P):
        blocks = [cuts[s][r] for s in range(P)]
        assert [len(b) for b in blocks] == getattr(exchanges[r], site).receives.tolist()
        received.append(np.concatenate(blocks))
    return received


@given(CHILDREN, HEADS)
def test_site_1_and_2_move_every_row_and_head_to_where_it_belongs(children, counts):
    layout = layout_of(children)
    P, T, (H, K) = layout.width, layout.num_rows, counts
    heads = HeadMap(H, K, P)
    rng = np.random.default_rng(0)
    qkv = rng.integers(0, 1 << 30, (T, H + 2 * K))  # D = 1
    every = [exchange_sizes(layout, heads, r) for r in range(P)]
    packed = []
    for r, e in enumerate(every):
        mine = qkv[layout.bounds[r] : layout.bounds[r + 1]]
        cuts = np.split(e.heads, np.cumsum(heads.qkv_per_rank)[:-1])
        packed.append(np.concatenate([mine[:, cut].ravel() for cut in cuts]))
    arrived = all_to_all(packed, every, "to_heads")
    outputs = []
    for r, e in enumerate(every):
        q, kv = heads.q_per_rank[r], heads.kv_per_rank[r]
        rows = arrived[r].reshape(T, -1) if T else np.zeros((0, q + 2 * kv), np.int64)
        assert np.array_equal(rows[:, :q], qkv[:, slice(*heads.q_range(r))])
        low, high = heads.kv_range(r)
        assert np.array_equal(rows[:, q : q + kv], qkv[:, H + low : H + high])
        assert np.array_equal(rows[:, q + kv :], qkv[:, H + K + low : H + K + high])
        # Expanding locally gives each query head the key/value head that it shares.
        used = np.arange(*heads.q_range(r)) * K // H
        assert np.array_equal(rows[:, q + e.kv_of_q], qkv[:, H + used])
        outputs.append(rows[:, :q])
    back = all_to_all([o.ravel() for o in outputs], every, "to_rows")
    for r in range(P):
        blocks = np.split(back[r], np.cumsum(every[r].to_rows.receives)[:-1])
        rows = np.concatenate([b.reshape(every[r].rows, -1) if b.size else b.reshape(
            every[r].rows, heads.q_per_rank[i]) for i, b in enumerate(blocks)], axis=1)  # fmt: skip
        assert np.array_equal(rows, qkv[layout.bounds[r] : layout.bounds[r + 1], :H])


@given(CHILDREN, HEADS)
def test_the_tables_of_all_ranks_agree_with_each_rank(children, counts):
    layout = layout_of(children)
    heads = HeadMap(*counts, layout.width)
    one, two = site1_counts(layout, heads), site2_counts(layout, heads)
    for r in range(layout.width):
        e = exchange_sizes(layout, heads, r)
        assert e.to_heads.sends.tolist() == one[r].tolist()
        assert e.to_heads.receives.tolist() == one[:, r].tolist()
        assert e.to_rows.sends.tolist() == two[r].tolist()
        assert e.to_rows.receives.tolist() == two[:, r].tolist()


@given(CHILDREN, st.randoms(use_true_random=False))
def test_a_layout_that_changes_is_reached_by_site_2_or_by_a_pass_of_its_own(children, random):
    before = layout_of(children)
    lengths = np.diff(before.offsets)
    order = list(range(len(lengths)))
    random.shuffle(order)
    order = np.array(order, np.int64)
    after = stream([order], [lengths[order]], [before.width])
    P, T = before.width, before.num_rows
    rows = np.arange(T)
    expected = [np.concatenate([np.zeros(0, int), *(
        np.arange(before.offsets[s] + lo, before.offsets[s] + hi)
        for s, lo, hi in zip(order[t.sample], t.begin, t.end, strict=True)
    )]) for t in (after.segments(r) for r in range(P))]  # fmt: skip

    heads = HeadMap(P, 1, P)
    every = [exchange_sizes(before, heads, r, after) for r in range(P)]
    sent = [rows if e.order is None else rows[e.order] for e in every]
    arrived = all_to_all(sent, every, "to_rows")
    for r in range(P):
        for block in np.split(arrived[r], P):
            assert block.tolist() == expected[r].tolist()

    passes = [redistribution(before, after, r) for r in range(P)]
    cut = [
        np.split(rows[before.bounds[r] : before.bounds[r + 1]][p.order], np.cumsum(p.sends)[:-1])
        for r, p in enumerate(passes)
    ]
    for r, p in enumerate(passes):
        blocks = [cut[s][r] for s in range(P)]
        assert [len(b) for b in blocks] == p.receives.tolist()
        placed = np.empty(len(p.place), np.int64)
        placed[p.place] = np.concatenate(blocks)
        assert placed.tolist() == expected[r].tolist()


def test_sizes_that_do_not_belong_together_are_refused():
    with pytest.raises(ValueError, match="heads over 4 ranks, but rows over 2"):
        exchange_sizes(layout_of([(2, [5])]), HeadMap(8, 8, 4), 0)
    with pytest.raises(ValueError, match="4 query heads cannot share 5"):
        HeadMap(4, 5, 2)

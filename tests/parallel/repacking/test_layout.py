"""Layouts against a table written out row by row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.repacking.layout import row_order, stream

CHILDREN = st.lists(
    st.tuples(st.sampled_from([1, 2, 4, 8]), st.lists(st.integers(1, 30), max_size=6)),
    min_size=1, max_size=5,
)  # fmt: skip
"""Widths and lengths."""


def layout_of(children, order=None):
    counts = [len(lengths) for _, lengths in children]
    ids = np.arange(sum(counts)) if order is None else order
    return stream(
        np.split(ids, np.cumsum(counts)[:-1]),
        [np.array(lengths, np.int64) for _, lengths in children],
        [width for width, _ in children],
    )


def written_out(children):
    """(rank, sample, position) of every row, the plainest way."""
    rows, rank, sample = [], 0, 0
    for width, lengths in children:
        mine = [(sample + i, p) for i, length in enumerate(lengths) for p in range(length)]
        for k in range(width):
            part = mine[k * len(mine) // width : (k + 1) * len(mine) // width]
            rows += [(rank + k, s, p) for s, p in part]
        rank, sample = rank + width, sample + len(lengths)
    return rows


@given(CHILDREN)
def test_every_row_has_one_owner_and_the_right_position(children):
    layout = layout_of(children)
    expected = written_out(children)
    table = layout.segments()
    assert np.all(table.end > table.begin)
    found = [
        (r, s, p)
        for r, s, lo, hi in zip(*(c.tolist() for c in table), strict=True)
        for p in range(lo, hi)
    ]
    assert found == expected
    for rank in range(layout.width):
        mine = [(s, p) for r, s, p in expected if r == rank]
        assert layout.rows_per_rank[rank] == len(mine)
        assert layout.positions(rank).tolist() == [p for _, p in mine]
        own = layout.segments(rank)
        assert [(s, p) for s, lo, hi in zip(own.sample, own.begin, own.end, strict=True)
                for p in range(lo, hi)] == mine  # fmt: skip


@given(CHILDREN)
def test_the_ranks_of_a_child_differ_by_one_row_at_most(children):
    layout, rank = layout_of(children), 0
    for width, lengths in children:
        rows = layout.rows_per_rank[rank : rank + width]
        assert rows.sum() == sum(lengths)
        assert rows.max() - rows.min() <= 1
        child = layout.part(rank, rank + width)
        assert child.num_rows == sum(lengths)
        assert np.diff(child.offsets).tolist() == lengths
        rank += width


def test_a_part_that_shares_samples_is_refused():
    with pytest.raises(ValueError, match="share samples"):
        layout_of([(2, [5])]).part(0, 1)


@given(CHILDREN, st.randoms(use_true_random=False))
def test_rows_are_found_again_in_another_layout(children, random):
    """The target has the same samples in another order, cut otherwise."""
    source = layout_of(children)
    lengths = np.diff(source.offsets)
    order = list(range(len(lengths)))
    random.shuffle(order)
    order = np.array(order, np.int64)
    target = stream([order], [lengths[order]], [source.width])
    named = np.array([(s, p) for _, s, p in written_out(children)], np.int64).reshape(-1, 2)
    rows = np.concatenate([row_order(source, target, rank) for rank in range(target.width)])
    expected = [(s, p) for s in order for p in range(lengths[s])]
    assert [tuple(pair) for pair in named[rows].tolist()] == expected

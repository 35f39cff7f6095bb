"""The halo against rows looked up one by one."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.repacking.exchange import Shards
from parallel.repacking.halo import halo_of, with_halo
from tests.parallel.repacking.test_exchange import rows_of, whole_numbers
from tests.parallel.repacking.test_layout import layout_of
from tests.parallel.repacking.virtual import Meeting, together

LAYOUTS = st.tuples(st.integers(1, 9), st.lists(st.integers(1, 12), max_size=6)).map(
    lambda case: layout_of([case])
)
K, D = 2, 3


def seen(layout, rank, window):
    """Rows that the queries of `rank` see and that others hold, the plainest way."""
    low, high = layout.bounds[rank : rank + 2].tolist()
    found = set()
    for row in range(low, high):
        document = max(i for i, begin in enumerate(layout.offsets[:-1]) if begin <= row)
        found |= set(range(max(row - window + 1, int(layout.offsets[document])), row + 1))
    return sorted(found - set(range(low, high)))


@given(LAYOUTS, st.integers(1, 30))
def test_exactly_the_rows_that_are_seen_are_fetched(layout, window):
    P = layout.width
    every = [halo_of(layout, rank, window) for rank in range(P)]
    for rank, halo in enumerate(every):
        rows = [
            row
            for other in range(P)
            for row in range(*(every[other].sends[rank] + layout.bounds[other]).tolist())
        ]
        assert rows == seen(layout, rank, window)
        assert halo.receives.tolist() == [every[other].counts[rank] for other in range(P)]
        own = layout.segments(rank)
        assert halo.queries.tolist() == (own.end - own.begin).tolist()
        assert halo.keys.sum() == halo.queries.sum() + len(rows)
        assert halo.keys[1:].tolist() == halo.queries[1:].tolist()


@settings(max_examples=50)
@given(LAYOUTS, st.integers(1, 30))
def test_values_and_gradients_are_those_of_a_gather(layout, window):
    P, T = layout.width, layout.num_rows
    wholes = whole_numbers(T, K, D), whole_numbers(T, K, D, seed=1)

    def one(rank, leaves):
        shards = Shards(layout, rank, group)
        parts = with_halo(*leaves, halo_of(layout, rank, window), shards)
        grads = [whole_numbers(len(part), K, D, seed=2 + rank + i) for i, part in enumerate(parts)]
        return [part.detach() for part in parts], grads, torch.autograd.grad(parts, leaves, grads)

    group = Meeting(P)
    results = together(P, one, rows_of(layout, *wholes))
    totals = [torch.zeros_like(whole) for whole in wholes]
    for rank, (parts, grads, _) in enumerate(results):
        rows = [*seen(layout, rank, window), *range(*layout.bounds[rank : rank + 2].tolist())]
        for part, grad, whole, total in zip(parts, grads, wholes, totals, strict=True):
            assert torch.equal(part, whole[rows])
            total[rows] += grad
    for i, total in enumerate(totals):
        assert torch.equal(torch.cat([found[i] for *_, found in results]), total)


def test_gradients_are_added_in_fp32_and_in_the_order_of_the_ranks():
    layout, window, P = layout_of([(8, [16])]), 16, 8
    whole = torch.zeros(16, 1, D, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(2 * rank + 2, 1, D, generator=generator).bfloat16() for rank in range(P)]

    def one(rank, leaves):
        parts = with_halo(*leaves, halo_of(layout, rank, window), Shards(layout, rank, group))
        return torch.autograd.grad(parts, leaves, [grads[rank]] * 2)

    group = Meeting(P)
    found = together(P, one, rows_of(layout, whole, whole))
    total = torch.zeros(16, 1, D)
    for rank in range(P):
        total[: 2 * rank + 2] += grads[rank]
    for i in range(2):
        assert torch.equal(torch.cat([parts[i] for parts in found]), total.bfloat16())


def test_a_window_of_one_row_fetches_nothing():
    layout = layout_of([(4, [9, 3])])
    assert all(halo_of(layout, rank, 1).receives.sum() == 0 for rank in range(4))

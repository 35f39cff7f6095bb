"""Solvers against exact ones, brute force and bounds."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.repacking.baselines import homogeneous, mixed, width_for
from parallel.repacking.children import (
    lower_bound,
    powers,
    solve_children,
    split,
    width_sets,
)
from parallel.repacking.cost import Memory
from parallel.repacking.exact import solve_exactly
from parallel.repacking.groups import Groups, longest_of, sums_of
from parallel.repacking.parents import Limit
from parallel.repacking.spread import pour, shares, water_level
from tests.parallel.repacking.cases import COST, cost, planner, random_lengths

HALF, ALL = cost(overlap=0.5), cost(overlap=1.0)


def work_of(lengths, of=COST):
    lengths = np.asarray(lengths, np.int64)
    return of.work(np.arange(len(lengths)), lengths)


def plain_seconds(work, parent, widths, owner, of):
    """The parent's time, sample by sample."""
    rows, tau = [0.0], [0.0]
    for j, width in enumerate(widths):
        mine = [i for i in range(len(work.ids)) if owner[i] == j]
        held = sum(int(work.lengths[i]) for i in mine)
        rows.append(held / width)
        tau.append(of.child_seconds(int(width), held, sum(float(work.sparse[i]) for i in mine)))
    return of.full_seconds(parent, max(rows), float(work.full.sum())) + max(tau)


def brute_force(work, parent, of):
    best = float("inf")
    for widths in width_sets(parent, powers(min(parent, of.node_size))):
        widths = widths[widths > 0]
        for owner in itertools.product(range(len(widths)), repeat=len(work.ids)):
            best = min(best, plain_seconds(work, parent, widths, owner, of))
    return best


@pytest.mark.parametrize("of", [COST, HALF, ALL], ids=["bare", "half", "all"])
def test_the_exact_model_is_brute_force(of):
    rng = np.random.default_rng(1)
    for n, parent in ((1, 4), (3, 4), (4, 4), (5, 2), (3, 8)):
        work = work_of(random_lengths(rng, n), of)
        optimum = solve_exactly(work, [parent], of)
        assert optimum.seconds == pytest.approx(brute_force(work, parent, of), rel=1e-3)
        assert optimum.bound <= optimum.seconds * (1 + 1e-6)


@pytest.mark.parametrize("of", [COST, HALF, ALL], ids=["bare", "half", "all"])
def test_the_child_solver_is_close_to_the_optimum_and_never_below_the_bound(of):
    rng = np.random.default_rng(2)
    gaps = []
    for case in range(20):
        parent, n = (8, 16, 32)[case % 3], int(rng.integers(1, 10))
        work = work_of(random_lengths(rng, n), of)
        found = solve_children(work, parent, of)
        assert found.seconds == pytest.approx(
            plain_seconds(work, parent, found.widths, found.owner, of)
        )
        optimum = solve_exactly(work, [parent], of, seconds=10)
        assert lower_bound(work, parent, of) <= optimum.seconds * (1 + 1e-4)
        gaps.append(found.seconds / optimum.bound - 1)
    assert min(gaps) >= -1e-3
    assert np.mean(gaps) <= 0.01
    assert max(gaps) <= 0.06


def test_the_parent_solver_is_close_to_every_membership_tried():
    """Two parents: each membership with the exact children, or wide."""
    rng = np.random.default_rng(3)
    how = planner(32, 16, several_widths=False)
    gaps = []
    for _ in range(4):
        lengths = random_lengths(rng, 6, typical=15_000)
        work = work_of(lengths)
        single = {}
        for subset in itertools.product([False, True], repeat=len(lengths)):
            some = work.take(np.array(subset))
            wide = COST.wide_seconds(16, some)
            exact = solve_exactly(some, [16], COST, seconds=10).bound
            single[subset] = min(wide, exact) if any(subset) else 0.0
        best = min(max(single[s], single[tuple(not x for x in s)]) for s in single)
        gaps.append(how.plan(lengths).seconds / best - 1)
        both = solve_exactly(work, [16, 16], COST, may_stay_wide=True, seconds=20)
        assert both.seconds == pytest.approx(best, rel=1e-3)
    assert min(gaps) >= -1e-3
    assert np.mean(gaps) <= 0.02


def test_merging_the_children_of_a_node_is_never_slower_without_communication():
    """The balance lemma: widths below the node's only save communication."""
    rng = np.random.default_rng(4)
    for _ in range(50):
        loads = rng.random(8)
        for widths in width_sets(8, (1, 2, 4, 8)):
            widths = widths[widths > 0]
            owner = rng.integers(0, len(widths), 8)
            slowest = max(loads[owner == j].sum() / w for j, w in enumerate(widths))
            assert loads.sum() / 8 <= slowest + 1e-12


def test_memory_limits_children():
    of = cost(memory=Memory(capacity=80e9, static=50e9))
    work = work_of([200_000, 1000, 1000], of)
    found = solve_children(work, 16, of)
    rows = np.bincount(found.owner, work.lengths, minlength=len(found.widths)) / found.widths
    assert rows.max() <= of.row_limit(202_000, 16)
    assert solve_children(work_of([3_000_000], of), 16, of) is None


def test_each_sample_is_in_one_child():
    work = work_of([5, 900, 31, 7000, 4])
    found = solve_children(work, 16, COST)
    assert sorted(np.concatenate(split(work, found)).tolist()) == [0, 1, 2, 3, 4]
    assert found.widths.sum() == 16


@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=8),
    st.lists(st.floats(0.1, 10), min_size=8, max_size=8),
)
def test_water_finds_its_level(levels, rises):
    levels, rises = np.array(levels), np.array(rises[: len(levels)])
    level = water_level(levels[None], rises[None])[0]
    taken = np.clip(level - levels, 0, None) / rises
    assert taken.sum() == pytest.approx(1)
    same = shares(np.stack([levels, levels - 1]), np.stack([rises, rises]))
    assert same == pytest.approx(np.minimum(taken, 1), abs=1e-6)


def test_pouring_fills_bins_evenly():
    rng = np.random.default_rng(5)
    small = np.sort(rng.pareto(1.5, (4000, 1)) + 0.01, axis=0)[::-1]
    small = small[small[:, 0] < 30]
    start = np.array([[0.0, 50.0, 10.0, 0.0, 1e6]])
    rates = np.array([1, 1, 0.5, 2, 1.0])[None, :, None]
    levels = start[0] + rates[0, :, 0] * np.bincount(
        pour(start, rates, small), small[:, 0], minlength=5
    )
    assert levels[4] == 1e6
    assert np.ptp(levels[:4]) < 0.02 * levels[:4].max()


@pytest.mark.parametrize("of", [COST, HALF, ALL], ids=["bare", "half", "all"])
@pytest.mark.parametrize("repacked", [False, True])
def test_the_pieces_of_groups_are_the_cost_model(of, repacked):
    """Exact without repacking and inside a node, a lower bound where a group may be repacked."""
    rng = np.random.default_rng(6)
    work = work_of(random_lengths(rng, 30), of)
    widths = np.array([32, 16, 8, 4, 1])
    owner = rng.integers(0, 5, 30)
    groups = Groups(widths, of, 8 if repacked else np.inf)
    found = groups.seconds(sums_of(work.quantities, owner, 5), longest_of(work.alone, owner, 5))
    for k, width in enumerate(widths):
        some = work.take(owner == k)
        wide = of.wide_seconds(int(width), some)
        if repacked and width > 8:
            best = min(wide, solve_children(some, int(width), of).seconds)
            assert found[k] <= best * (1 + 1e-9)
        else:
            assert found[k] == pytest.approx(wide)


def test_the_width_of_a_sample():
    assert [width_for(n, 16384, 32) for n in (1, 16384, 16385, 131072, 131073, 10**7)] == [
        1, 1, 2, 8, 16, 32,
    ]  # fmt: skip


def test_baselines():
    work = work_of([200_000, *[2000] * 3000])
    even = homogeneous(work, 64, COST, rows_per_rank=16384, widest=32)
    assert even.widths.tolist() == [16] * 4
    tokens = homogeneous(work, 64, COST, rows_per_rank=16384, widest=32, fit="rows")
    rows = np.bincount(tokens.owner, work.lengths)
    assert np.ptp(rows) <= 2000
    several = mixed(work, 64, COST, widest=32)
    assert several.widths.sum() == 64
    assert np.all(np.diff(several.widths) <= 0)
    slowest = [
        Groups(m.widths, COST).seconds(
            sums_of(work.quantities, m.owner, len(m.widths)),
            longest_of(work.alone, m.owner, len(m.widths)),
        ).max()
        for m in (several, even, tokens)
    ]  # fmt: skip
    assert slowest[0] < slowest[1] < slowest[2]


def test_a_search_ends_by_count_or_by_the_clock():
    now = [0.0]
    limit = Limit(parents=2, seconds=0.5, clock=lambda: now[0])
    assert not limit.reached
    limit.count(10**6)
    assert not limit.reached
    now[0] = 0.5
    assert limit.reached
    assert limit.fresh().reached
    counted = Limit(parents=2)
    counted.count(1)
    assert not counted.reached
    counted.count(1)
    assert counted.reached
    assert not counted.fresh().reached


def test_a_longer_search_is_never_worse():
    rng = np.random.default_rng(7)
    for _ in range(5):
        lengths = random_lengths(rng, 12, typical=20_000)
        none, some = (planner(64, 16, search_parents=k).plan(lengths).seconds for k in (0, 64))
        assert some <= none * (1 + 1e-12)


@given(st.integers(1, 60_000), st.integers(1, 64))
@settings(max_examples=20)
def test_equal_lengths_gain_nothing_where_no_group_crosses_nodes(length, n):
    lengths = [length] * n
    off = planner(32, 8, rows_per_rank=16384, enabled=False).plan(lengths).seconds
    how = planner(32, 8, rows_per_rank=16384, several_widths=False, inside_nodes=False)
    on = how.plan(lengths).seconds
    assert on == pytest.approx(off, rel=5e-3)
    assert on <= off * (1 + 1e-12)

"""Properties that every plan has, whatever the lengths, the configuration and the cost."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.repacking.cost import Memory
from parallel.repacking.drawing import draw
from parallel.repacking.plan import MEMORY, NARROW, Plan, check
from parallel.repacking.planner import Planner
from tests.parallel.repacking.cases import COST, LENGTHS, SHAPE, cost, planner

SETTINGS = [
    planner(),
    planner(baseline="mixed"),
    planner(several_widths=False, fit="rows", inside_nodes=False),
    planner(parent_solver=False, min_child=2, max_child=4),
    planner(32, 32, of=cost(overlap=0.5)),
    planner(16, 8, of=cost(node_size=2)),
    planner(8, 4, of=cost(node_size=1)),
    planner(enabled=False),
    planner(64, 32, of=cost(memory=Memory(capacity=100e9, static=50e9))),
]


@given(LENGTHS, st.sampled_from(SETTINGS))
@settings(max_examples=120)
def test_plans_keep_the_rules(lengths, how):
    plan = how.plan(lengths)
    check(plan)  # aligned, inside nodes, side by side, every sample once
    assert plan.lengths.tolist() == lengths
    assert plan.seconds == pytest.approx(how.seconds(plan))
    for parent in plan.parents:
        layout, wide = plan.layout(parent), plan.wide_layout(parent)
        assert layout.samples.tolist() == wide.samples.tolist()
        assert layout.num_rows == wide.num_rows == plan.lengths_of(parent.samples).sum()
        assert layout.width == wide.width == parent.width
        if parent.fallback:
            assert (parent.fallback == NARROW) == (parent.width <= plan.node_size)
        elif not how.config.inside_nodes:
            assert parent.width > plan.node_size
        if not parent.fallback:
            assert all(child.width in how.child_widths for child in parent.children)


@given(LENGTHS, st.randoms(use_true_random=False), st.sampled_from(SETTINGS))
@settings(max_examples=60)
def test_the_plan_does_not_depend_on_the_order_of_the_input(lengths, random, how):
    ids = list(range(100, 100 + len(lengths)))
    plan = how.plan(lengths, ids)
    order = list(range(len(lengths)))
    random.shuffle(order)
    again = how.plan([lengths[i] for i in order], [ids[i] for i in order])
    assert plan.digest == again.digest
    assert plan.to_json() == again.to_json()


@given(LENGTHS, st.sampled_from(SETTINGS))
@settings(max_examples=60)
def test_never_worse_than_without_repacking(lengths, how):
    plain = Planner(how.cost, how.num_ranks, how.max_parent,
                    type(how.config)(enabled=False, baseline=how.config.baseline,
                                     fit=how.config.fit, rows_per_rank=1))  # fmt: skip
    off = Planner(how.cost, how.num_ranks, how.max_parent,
                  type(how.config)(parent_solver=False, baseline=how.config.baseline,
                                   fit=how.config.fit, rows_per_rank=1))  # fmt: skip
    baseline = plain.plan(lengths).seconds
    repacked = off.plan(lengths).seconds
    assert repacked <= baseline * (1 + 1e-12)
    if how.config.enabled and how.child_widths == off.child_widths:
        assert how.plan(lengths).seconds <= repacked * (1 + 1e-12)


@given(LENGTHS)
@settings(max_examples=30)
def test_plans_survive_json(lengths):
    plan = planner().plan(lengths)
    again = Plan.from_json(plan.to_json())
    assert again.digest == plan.digest
    assert again.seconds == plan.seconds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.update(format=0), "format 0, but this reads format 1"),
        (lambda p: p.pop("ids"), "not a plan: KeyError"),
        (lambda p: p["ids"].pop(), "each once"),
        (lambda p: p["parents"].pop(), "parents for 16 ranks, but there are 32"),
        (lambda p: p["parents"][1].update(first_rank=8), "should begin at rank 16"),
        (lambda p: p["parents"][0]["children"].pop(), "has children up to rank"),
        (lambda p: p["parents"][0].update(fallback="x"), "unknown fallback 'x'"),
        (lambda p: p["parents"][0].update(fallback="memory"), "falls back, but has"),
        (lambda p: p.update(node_size=1), "lies on two nodes of 1"),
        (lambda p: p["lengths"].__setitem__(0, 0), "lengths of at least 1"),
    ],
)
def test_what_is_no_plan_is_refused(change, message):
    plan = planner(parent_solver=False).plan([9000] * 60)
    assert not plan.parents[0].fallback
    data = json.loads(plan.to_json())
    change(data)
    with pytest.raises(ValueError, match=message):
        Plan.from_json(json.dumps(data))


def test_the_digest_covers_everything_that_ranks_must_agree_about():
    plan = planner(parent_solver=False).plan([9000] * 60)
    changed = []
    for change in (
        lambda p: p.update(node_size=16),
        lambda p: p["lengths"].__setitem__(0, 1),
        lambda p: p["parents"][0]["children"][0]["samples"].reverse(),
    ):
        data = json.loads(plan.to_json())
        change(data)
        changed.append(Plan.from_json(json.dumps(data)).digest)
    assert len({plan.digest, *changed}) == 4


def test_who_is_where():
    plan = planner(parent_solver=False).plan([9000] * 60)
    for rank in range(32):
        parent, child = plan.parent_of(rank), plan.child_of(rank)
        assert rank in parent.ranks
        assert child.first_rank <= rank < child.first_rank + child.width
        assert child in parent.children


def test_a_sample_that_no_child_can_hold_keeps_its_parent_wide():
    """A row limit of about 80,000: 1,500,000 tokens fit on 32 ranks, but not on 8."""
    how = planner(64, 32, of=cost(memory=Memory(capacity=100e9, static=50e9)), parent_solver=False)
    plan = how.plan([1_500_000] + [1000] * 500)
    giant = next(p for p in plan.parents if 0 in p.samples)
    assert giant.fallback == MEMORY
    assert len(giant.children) == 1


def test_no_rank_holds_more_than_memory_allows():
    how = planner(32, 16, of=cost(memory=Memory(capacity=66e9, static=50e9)))
    rng = np.random.default_rng(0)
    for _ in range(20):
        plan = how.plan(rng.integers(1, 60_000, 12))
        for parent in plan.parents:
            layout = plan.layout(parent)
            used = how.cost.rank_bytes(
                int(layout.rows_per_rank.max()), layout.num_rows, parent.width
            )
            assert used <= 66e9 * (1 + 1e-6)


@pytest.mark.parametrize(
    ("lengths", "ids", "message"),
    [
        ([5, 0], None, "has length 0"),
        ([5, 6], [1, 1], "same id"),
        ([5, 6], [1], "1 ids for 2 lengths"),
        ([40_000_000], None, "do not fit into the memory of 64 ranks.*trainer.micro_batch_size"),
    ],
)
def test_steps_that_cannot_be_planned(lengths, ids, message):
    how = planner(64, 32, of=cost(memory=Memory(capacity=100e9, static=50e9)))
    with pytest.raises(ValueError, match=message):
        how.plan(lengths, ids)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: planner(24, 16), "max_parent=16 must be a power of two that divides the 24.*to 8"),
        (lambda: planner(32, 12), "max_parent=12"),
        (lambda: planner(min_child=16), "no child is 16 to None"),
        (
            lambda: planner(baseline="mixd"),
            "baseline=mixd .* set parallel.repacking.baseline=mixed",
        ),
        (lambda: planner(rows_per_rank=0), "rows_per_rank=0 is too small"),
        (lambda: planner(max_rows=0), "max_rows=0 is too small"),
        (lambda: planner(search_seconds=-1), "search_seconds=-1"),
        (lambda: cost(node_size=6), "node_size=6 is no power of two"),
        (lambda: cost(overlap=1.5), "overlap=1.5"),
    ],
)
def test_settings_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_drawing_names_every_rank_and_reason():
    plan = planner(several_widths=False).plan([300_000] + [900] * 300)
    text = draw(plan)
    assert "parent SP16, ranks 0 to 15, " in text
    assert text.count("|") >= 32 * 3
    assert "1 more parent" in draw(plan, parents=1)
    assert draw(planner().plan([])).startswith("0 samples")


def test_shapes_of_the_same_step_are_planned_alike_by_pickled_planners():
    import pickle

    lengths = [3000, 90_000, 17, 17, 4096]
    copy = pickle.loads(pickle.dumps(planner()))
    assert copy.plan(lengths).digest == planner().plan(lengths).digest
    assert copy.cost == COST
    assert copy.cost.shape == SHAPE

"""What is reported of plans: figures of an interval, panels, and lines."""

import numpy as np
import pytest

from parallel.repacking.config import RepackingConfig
from parallel.repacking.planner import parent_seconds, rank_seconds
from parallel.repacking.ranks import PlannedRanks
from parallel.repacking.traffic import traffic
from recipes.plans import PlanWatch, foreseen, fullest, settings_in_words
from recipes.repacking import model_shape
from tests.parallel.repacking.cases import planner, random_lengths
from tests.recipes.repacked import SLOW_LINKS
from tests.recipes.test_hybrid import task
from trainer.watch.page.panels import write_panel

LENGTHS = [90, 40, 17, 9, 5, 3, 1, 1]


def small(**config):
    config = {"rows_per_rank": 1, "several_widths": False, "calibration": SLOW_LINKS, **config}
    ranks = PlannedRanks(size=8, node_size=2, config=RepackingConfig(**config), recompute=True)
    return ranks.planner(model_shape(task().shape, ranks))


def test_seconds_of_ranks_are_those_of_their_parents():
    for how in (planner(32, 16), planner(32, 32, enabled=False)):
        plan = how.plan(random_lengths(np.random.default_rng(0), 120))
        seconds = rank_seconds(how.cost, plan)
        assert seconds.shape == (32,)
        for parent in plan.parents:
            of_ranks = seconds[list(parent.ranks)]
            assert of_ranks.max() <= parent_seconds(how.cost, plan, parent) * (
                1 + 1e-6
            )  # rows are whole
        assert seconds.max() == pytest.approx(how.seconds(plan) - how.cost.fixed, rel=0.01)


def test_ranks_without_heads_have_less_to_do():
    how = small(enabled=False)  # four heads on eight ranks
    plan = how.plan([90])
    seconds = rank_seconds(how.cost, plan)
    busy = how.cost.full(np.array([90]))[0] / 4
    assert (seconds > busy).tolist() == [False, True] * 4


def test_figures_are_of_the_steps_since_the_last_report():
    how = small()
    watch, plans = (
        PlanWatch(how),
        [how.plan(LENGTHS), how.plan([5, 5]), how.plan(LENGTHS), how.plan([9])],
    )
    for plan in plans:
        watch.note(plan, 0.25)
    found = watch.figures(10, 2, [1.0] * 7 + [3.0])
    sent = [traffic(plan, how.cost.shape) for plan in plans]
    assert found["repack_gb_across"] == pytest.approx(3 * sum(t.across for t in sent) / 2 / 1e9)
    assert found["repack_gb_inside"] == pytest.approx(3 * sum(t.inside for t in sent) / 2 / 1e9)
    predicted = sum(rank_seconds(how.cost, plan) for plan in plans) / 2
    assert found["rank_seconds_predicted"] == pytest.approx(predicted, abs=1e-6)
    assert found["balance_measured"] == pytest.approx(3 / 1.25)
    assert found["solver_seconds"] == 0.25
    wide = [p for plan in plans for p in plan.parents if len(p.samples)]
    assert found["repack_parents"] == sum(len(p.children) > 1 for p in wide) / 2 > 0
    assert sum(v for k, v in found.items() if k.startswith("plan_parents_")) == len(wide) / 2
    assert f"{found['repack_gb_across']:.2f} across" in found["plan"]
    assert watch.figures(20, 2, [1.0] * 8) == {}  # nothing was noted
    watch.note(how.plan([1]), 0.1)
    assert watch.figures(20, 1, [1.0] * 8)["solver_seconds"] == 0.1

    step, drawn = watch.drawn
    assert step == 10  # the newest that repacked something
    assert any(len(p.children) > 1 for p in drawn.parents)
    titles = [panel["title"] for panel in watch.panels()]
    assert titles[-1] == "The layout of a micro-batch of step 10"
    for panel in watch.panels():
        assert panel["title"] in str(write_panel(panel))


def test_words_for_the_header_and_the_dry_run():
    assert "not repacked" in settings_in_words(small(enabled=False))
    assert "children of 1, 2; parent solver on, 32" in settings_in_words(small())
    how = small(max_rows=40)
    assert "at most 40 rows" in settings_in_words(how)
    assert fullest(how, how.plan(LENGTHS)) == (40, 8)
    rows, width = fullest(small(), small().plan(LENGTHS))
    assert rows * width >= sum(LENGTHS)
    lines = foreseen(how, how.plan(LENGTHS))
    assert "8 documents, 166 tokens" in lines["first micro-batch"]

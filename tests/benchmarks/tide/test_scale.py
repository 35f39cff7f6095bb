"""The model of a step: its simulator against brute force, its inputs, and what it says of two GPUs."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.tide.scale.__main__ import RATES
from benchmarks.tide.scale.fluid import Task, run
from benchmarks.tide.scale.rates import load
from benchmarks.tide.scale.step import Cluster, Group, passes, stock, tide
from benchmarks.tide.scale.workloads import SHAPES, groups_of, measurements


@st.composite
def some_tasks(draw):
    """Tasks on three streams, each of which may need earlier ones."""
    tasks = []
    for number in range(draw(st.integers(1, 9))):
        needs = draw(st.lists(st.sampled_from(tasks), max_size=2)) if tasks else []
        stream, kind = draw(st.sampled_from("abc")), draw(st.sampled_from(("layer", "wire")))
        tasks.append(Task(str(number), stream, kind, draw(st.integers(0, 20)) / 4, needs))
    return tasks


@settings(deadline=None)
@given(some_tasks())
def test_without_sharing_time_is_the_longest_path(tasks):
    over = run(tasks, lambda kinds: [1.0] * len(kinds))
    expected, last = {}, {}
    for task in tasks:
        before = [expected[need] for need in task.needs] + [last.get(task.stream, 0.0)]
        expected[task] = last[task.stream] = max(before) + task.seconds
    assert over == pytest.approx(max(expected.values()))
    for task in tasks:
        assert task.end == pytest.approx(expected[task])


@settings(deadline=None)
@given(some_tasks())
def test_what_shares_a_processor_does_its_work_no_faster_than_one_after_the_other(tasks):
    rates = load(RATES)
    over = run(tasks, rates.speeds)
    on_processors = sum(task.seconds for task in tasks if task.kind == "layer")
    assert over >= on_processors - 1e-9
    assert over <= sum(task.seconds for task in tasks) / (1 - rates.wire_share) + 1e-9


def test_two_equal_tasks_beside_each_other_take_twice_as_long():
    tasks = [Task(name, name, "layer", 1.0) for name in "ab"]
    assert run(tasks, load(RATES).speeds) == pytest.approx(2.0)
    with_nccl = [Task("a", "a", "layer", 1.0), Task("b", "b", "nccl", 0.5)]
    share = load(RATES).nccl_share
    assert run(with_nccl, load(RATES).speeds) == pytest.approx(0.5 + 1 - 0.5 * (1 - share))


def test_tasks_that_wait_for_each_other_are_named():
    first = Task("first", "a", "layer", 1.0)
    second = Task("second", "b", "layer", 1.0, [first])
    first.needs = [second]
    with pytest.raises(ValueError, match="first, second"):
        run([first, second], lambda kinds: [1.0] * len(kinds))


@pytest.mark.parametrize("damage", ["missing", "source"])
def test_rates_say_where_they_are_from(damage, tmp_path):
    content = json.loads(RATES.read_text())
    if damage == "missing":
        del content["rates"]["sums"]
    else:
        content["rates"]["sums"]["source"] = "somebody"
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="sums"):
        load(file)


@pytest.mark.parametrize("ranks", [2, 8, 16, 64])
def test_every_group_is_gathered_used_and_reduced_in_order(ranks):
    groups = [
        Group("first", 100, 0.0, 0.0, stays=True),
        *(Group(f"block {n}", 1000, 1e-3, 2e-3) for n in range(5)),
    ]
    cluster, rates = Cluster(ranks, min(ranks, 8)), load(RATES)
    for tasks in (stock(groups, cluster, rates), tide(groups, cluster, rates)):
        run(tasks, rates.speeds)
        ends = {}
        for task in tasks:
            ends.setdefault(task.name, []).append(task)
        for group in groups:
            forward, backward = ends[f"forward {group.name}"][0], ends[f"backward {group.name}"][0]
            gathers = ends[f"gather {group.name}"]
            assert len(gathers) == (1 if group.stays else 2)
            assert gathers[0].end <= forward.begin
            assert gathers[-1].end <= backward.begin
            assert ends[f"scatter {group.name}"][0].begin >= backward.end


def test_a_model_without_transfers_takes_what_its_kernels_take():
    groups = [Group("block", 0, 1.0, 2.0)]
    for kind in ("stock", "symmetric", "tide"):
        assert passes(kind, groups, Cluster(2, 2), load(RATES)) == pytest.approx(3.0, abs=1e-2)


def test_predictions_for_two_gpus_are_within_eight_percent_but_for_one():
    """The one: kernels so small that there are gaps between them."""
    rates, off = load(RATES), []
    for shape in SHAPES:
        for found in measurements(shape):
            for kind, seconds in found.passes.items():
                said = passes(kind, groups_of(found), Cluster(2, 2), rates)
                if abs(said / seconds - 1) > 0.08:
                    off.append((shape.title, found.tokens, kind))
    assert off == [("Qwen3-30B-A3B", 4096, "tide")]

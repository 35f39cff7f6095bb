"""The simulator: its lengths, its ways, its statistics and its commands."""

import dataclasses
import json
import sys

import numpy as np
import pytest

from benchmarks.repacking import __main__ as command
from benchmarks.repacking.simulate import (
    gain,
    oracle,
    simulate_step,
    step_seconds,
    with_halo,
    with_passes,
)
from benchmarks.repacking.workloads import (
    WIKIPEDIA,
    cost_model,
    planner_of,
    read_constants,
    steps_of,
    steps_of_file,
    wikipedia,
)
from tests.test_benchmarks import KEYS

CONSTANTS = read_constants()
TOKENS = [5.5, 7.8, 11.6, 15.4, 16.7, 15.5, 12.3, 7.6, 4.5, 2.0, 1.1]
"""Percent of all tokens by bin, as published; only the percent of samples is put in."""
WAYS = ("repack", "parent", "inside", "sp8", "pass", "halo", "oracle", "mixed", "widths", "bound")


def wide_step(constants=CONSTANTS):
    """A step with one giant, smaller than the workload's."""
    rng = np.random.default_rng(0)
    return np.concatenate([[200_000], wikipedia(rng, 300)])


def test_lengths_like_wikipedias():
    lengths = wikipedia(np.random.default_rng(0), 1_000_000)
    edges = [1, *(high for _, high, _ in WIKIPEDIA[:-1]), 2_000_000]
    samples, _ = np.histogram(lengths, edges)
    tokens, _ = np.histogram(lengths, edges, weights=lengths)
    expected = [percent for _, _, percent in WIKIPEDIA]
    assert np.allclose(100 * samples / len(lengths), expected, rtol=0.03, atol=0.01)
    assert np.allclose(100 * tokens / tokens.sum(), TOKENS, rtol=0.3)
    assert lengths.mean() == pytest.approx(1014, rel=0.05)
    assert lengths.max() <= 1_823_777


def test_steps_are_the_same_however_many_are_drawn():
    few, many = (list(steps_of("lognormal", CONSTANTS, n)) for n in (2, 5))
    assert [s.tolist() for s in few] == [s.tolist() for s in many[:2]]


def test_every_workload_can_be_drawn():
    for name, settings in CONSTANTS["workloads"].items():
        lengths = next(steps_of(name, CONSTANTS, 1))
        assert len(lengths) == settings["samples"]
        assert lengths.min() >= 1
        assert lengths.max() <= settings.get("longest", 1_823_777)


def test_lengths_of_a_user(tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("5\n70\n9\n")
    [step] = steps_of_file(file, 8, 1, 0)
    assert set(step.tolist()) <= {5, 70, 9}
    file.write_text("5\nmany\n")
    with pytest.raises(SystemExit, match="one whole number on each line"):
        list(steps_of_file(file, 8, 1, 0))
    file.write_text("5\n0\n")
    with pytest.raises(SystemExit, match="below 1"):
        list(steps_of_file(file, 8, 1, 0))


@pytest.mark.parametrize(
    "changes", [{}, {"overlap": 0.5}, {"sparse": "window"}, {"across_ratio": 1}]
)
def test_ways_in_their_order(changes):
    cost = cost_model(CONSTANTS, **changes)
    ways = tuple(w for w in WAYS if w != "halo" or cost.shape.sparse == "window")
    row = simulate_step(CONSTANTS, cost, wide_step(), ways)
    s = row["seconds"]
    assert row["wide"]
    assert row["width"] == 16
    for way in ("repack", "sp8", "pass"):
        assert s["oracle"] <= s[way] * (1 + 1e-9)
        assert s[way] <= s["baseline"] * (1 + 1e-9)
    assert s["repack"] <= s["sp8"] * (1 + 1e-9)
    assert s["repack"] <= s["pass"] * (1 + 1e-9)
    assert s["parent"] <= s["repack"] * (1 + 1e-9)
    assert s["inside"] <= s["repack"] * (1 + 1e-9)
    assert s["widths"] <= s["parent"] * (1 + 1e-9)
    for way in ("oracle", "mixed", "widths"):
        assert s["bound"] <= s[way] * (1 + 1e-9)
    if "halo" in s:
        assert s["halo"] < s["baseline"]
    assert all(row["per_layer"][way] >= s[way] * (1 - 1e-9) for way in row["per_layer"])


def test_everything_is_counted_from_the_plan_alone():
    cost = cost_model(CONSTANTS)
    for settings in ({}, {"parent_solver": False}, {"enabled": False}):
        plan = planner_of(CONSTANTS, cost, **settings).plan(wide_step())
        assert step_seconds(cost, plan) == pytest.approx(plan.seconds)


def test_passes_cost_the_hidden_states_both_ways():
    """One parent that is its samples' only one: by hand."""
    constants = {**CONSTANTS, "ranks": 16, "max_parent": 16}
    cost = cost_model(constants)
    lengths = np.array([150_000, *[1000] * 200])
    plan = planner_of(constants, cost, parent_solver=False).plan(lengths)
    assert not plan.parents[0].fallback
    layout = plan.layout(plan.parents[0])
    start, rate = cost.link(16)
    row = 4096 * 2 * 15 / 16 / rate
    moved = 2 * 3 * 11 * (start + layout.rows_per_rank.max() * row)
    work = cost.work(plan.ids, plan.lengths)
    even = cost.full_seconds(16, lengths.sum() / 16, work.full.sum())
    uneven = cost.full_seconds(16, layout.rows_per_rank.max(), work.full.sum())
    wide = cost.wide_seconds(16, work) + cost.fixed
    expected = min(plan.seconds - uneven + even + moved, wide)
    assert with_passes(cost, plan) == pytest.approx(expected, rel=1e-6)


def test_the_halo_is_the_window_and_no_more():
    cost = cost_model({**CONSTANTS, "ranks": 16, "max_parent": 16}, sparse="window")
    cost = dataclasses.replace(cost, fixed=0.0)
    plan = planner_of({**CONSTANTS, "ranks": 16, "max_parent": 16}, cost, enabled=False).plan(
        [160_000]
    )
    work = cost.work(plan.ids, plan.lengths)
    start, rate = cost.link(16)
    halo = 3 * 33 * (start + 511 * 2 * 8 * 128 * 2 / rate)
    without = cost.full_seconds(16, 10_000, work.full[0])
    without += (cost.linear * 160_000 + work.sparse[0]) / 16 + 44 * cost.calibration.layer_seconds
    assert with_halo(cost, plan) == pytest.approx(without + halo)


def test_the_oracle_is_below_every_plan_of_its_width():
    cost = cost_model(CONSTANTS)
    lengths = wide_step()
    plan = planner_of(CONSTANTS, cost, several_widths=False).plan(lengths)
    assert oracle(cost, 64, 16, lengths) <= plan.seconds


def test_gains_and_their_intervals():
    rows = [{"seconds": {"baseline": 10.0 + k, "w": 9.0 + k}, "flops": 100.0} for k in range(20)]
    found = gain(rows, "w", 100.0, 500)
    assert found.time == pytest.approx(1 / 19.5)
    assert found.time_low < found.time < found.time_high
    assert found.mfu == pytest.approx(
        100 * np.mean([1 / (9 + k) - 1 / (10 + k) for k in range(20)])
    )
    assert gain([], "w", 1.0, 10) is None


def test_the_command_writes_the_agreed_schema(tmp_path, monkeypatch, capsys):
    out = tmp_path / "r.json"
    monkeypatch.setattr(
        sys, "argv", ["x", "--quick", "--steps", "1", "--workload", "uniform", "--json", str(out)]
    )
    command.main()
    result = json.loads(out.read_text())
    assert result.keys() == KEYS
    assert result["command"].startswith("python -m benchmarks.repacking --quick")
    assert result["summary"]["wide_steps"] == 0
    assert abs(result["summary"]["time_gain_all_parent"]) < 0.005
    assert "| repack |" in capsys.readouterr().out


def test_the_command_takes_a_file_of_lengths(tmp_path, monkeypatch, capsys):
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(["300000", *["700"] * 200]))
    monkeypatch.setattr(
        sys, "argv", ["x", "--quick", "--steps", "1", "--lengths", str(file), "--samples", "300"]
    )
    command.main()
    assert "1 of 1 steps have wide parents" in capsys.readouterr().out


def test_one_step_as_text_and_as_a_picture(tmp_path, monkeypatch, capsys):
    out = tmp_path / "balance.svg"
    monkeypatch.setattr(
        sys, "argv", ["x", "--workload", "pareto", "--step", "0", "--picture", str(out)]
    )
    command.main()
    assert "parent SP" in capsys.readouterr().out
    assert out.read_text().startswith("<?xml")
    monkeypatch.setattr(sys, "argv", ["x", "--workload", "wikipedai"])
    with pytest.raises(SystemExit, match="wikipedai is not one of wikipedia, "):
        command.main()

"""Where the time of a step goes, from a run's own lines; and how many operators it has."""

import pytest

from benchmarks.lelora.cost import parts
from benchmarks.lelora.operators import count
from benchmarks.lelora.page import tables


def lines(step_ms=10.0, decision_ms=300.0, save_ms=50.0, pause_ms=200.0, every=10, steps=100):
    """A run that decides after steps 30, 60 and 90, and saves after step 50."""
    found, time = [], 0.0
    for step in range(every, steps + 1, every):
        ms = step_ms * every + decision_ms * (step % 30 == 0) + save_ms * (step == 60)
        time += (ms + pause_ms * (step == 60)) / 1e3
        found.append(
            {"kind": "train", "step": step, "time": time, "step_seconds": ms / 1e3 / every}
        )
    return [*found, {"kind": "save", "step": 50, "time": 0.0}]


def test_a_step_is_told_from_decisions_and_checkpoints():
    found = parts(lines(), [30, 60, 90])
    assert found["plain"] == pytest.approx(10.0)
    assert found["decision"] == pytest.approx(300.0)
    assert found["milliseconds"] == pytest.approx(10 + (3 * 300 + 50 + 200) / 90)
    assert parts(lines(decision_ms=0.0), [])["decision"] is None


def op(name, ts, dur, tid=1):
    return {"cat": "cpu_op", "name": name, "ts": ts, "dur": dur, "tid": tid}


def test_operators_are_counted_once_and_views_not_at_all():
    events = [
        {"cat": "user_annotation", "name": "step 1", "ts": 0, "dur": 100, "tid": 1},
        op("aten::linear", 0, 50), op("aten::t", 1, 5), op("aten::mm", 10, 20),
        op("aten::resolve_conj", 11, 2), op("aten::_foreach_add_", 60, 20), op("aten::add_", 61, 3),
        op("aten::add_", 65, 3), op("aten::add", 70, 5, tid=2), op("SomeBackward", 80, 10),
        op("aten::mul", 120, 5), op("aten::clone", 130, 9), op("aten::copy_", 131, 5),
        {"cat": "user_annotation", "name": "step 2", "ts": 200, "dur": 100, "tid": 1},
        op("aten::mm", 210, 5), op("aten::view", 220, 5),
    ]  # fmt: skip
    assert count(events[:13]) == (3, 0)
    assert count(events) == (2, 2)


def test_what_a_decision_and_a_step_are_made_of_is_tabled():
    rows = [
        {"kind": "step", "method": "lora", "milliseconds": 10.0, "plain": 9.0, "decision": None,
         "steps": 100, "decisions": 0},
        {"kind": "step", "method": "lelora", "milliseconds": 11.0, "plain": 8.1, "decision": 250.4,
         "steps": 100, "decisions": 2},
        {"kind": "operators", "method": "lora", "step": 1000, "decision": None},
        {"kind": "operators", "method": "lelora", "step": 900, "decision": 5432},
    ]  # fmt: skip
    page = tables([{"name": "lelora.cost", "machine": {"device": "some GPU"}, "rows": rows}])
    assert "| lora | 10.00 | 1.00 | 9.00 | 1.00 |  |" in page
    assert "| lelora | 11.00 | 1.10 | 8.10 | 0.90 | 250 (2 in 100 steps) |" in page
    assert "| lelora | 900 | 0.90 | 5,432 |" in page

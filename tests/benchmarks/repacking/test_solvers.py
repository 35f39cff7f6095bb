"""Published schedulers, the benchmark of solvers, calibration, and the page."""

import itertools
import json
import sys

import numpy as np
import pytest

from benchmarks.repacking import calibrate, public, solvers
from benchmarks.repacking.workloads import cost_model, planner_of, read_constants
from parallel.repacking.calibration import load
from tests.test_benchmarks import KEYS

CONSTANTS = read_constants()
COST = cost_model(CONSTANTS)


def work_of(lengths):
    return COST.work(np.arange(len(lengths)), np.asarray(lengths, np.int64))


@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_buckets_overestimate_as_little_as_can_be(most):
    rng = np.random.default_rng(most)
    for _ in range(10):
        lengths = np.sort(rng.integers(1, 60, 9))[::-1]
        bucket = public._buckets(lengths, most)
        assert np.all(np.diff(bucket) >= 0)
        waste = sum(lengths[bucket == b].max() * (bucket == b).sum() for b in set(bucket.tolist()))
        least = min(
            sum(part.max() * len(part) for part in np.split(lengths, list(cuts)))
            for k in range(min(most, len(lengths)))
            for cuts in itertools.combinations(range(1, len(lengths)), k)
        )
        assert waste == least


def test_published_schedulers_are_between_the_bound_and_doing_nothing():
    rng = np.random.default_rng(0)
    for lengths in (
        rng.integers(1, 40_000, 60),
        np.r_[200_000, rng.integers(1, 4000, 300)],
        [70_000],
    ):
        work = work_of(lengths)
        bound = planner_of(CONSTANTS, COST).step_bound(work)
        alone = sum(COST.wide_seconds(64, work.take(np.array([i]))) for i in range(len(work.ids)))
        for found in (
            public.flexsp(work, 64, COST, 16384, 32, 0.2), public.megatron(work, 64, COST, 16384),
            public.magi(work, 64, COST, 32),
        ):  # fmt: skip
            assert bound <= found.seconds
            assert found.seconds < max(3 * alone, 100 * bound)


def test_the_mixed_integer_model_of_flexsp_finds_the_best_groups_of_a_small_step():
    """Two samples of one bucket each on two ranks: together on both, or one each."""
    work = work_of([16_000, 15_000])
    found = public.flexsp(work, 2, COST, 1 << 60, 2, 5.0)
    together = COST.wide_seconds(2, work)
    apart = max(COST.wide_seconds(1, work.take(np.array([i]))) for i in range(2))
    assert not found.limited
    assert found.seconds == pytest.approx(min(together, apart))


def test_megatrons_micro_batches_hold_every_sample_once():
    rng = np.random.default_rng(1)
    for _ in range(20):
        lengths = np.sort(
            np.exp(rng.normal(8, 1.5, int(rng.integers(1, 80)))).astype(np.int64) + 1
        )[::-1]
        work = work_of(lengths)
        needed = [public._needed(int(n), 16384, 64) for n in work.lengths]
        left, seen = list(range(len(lengths))), []
        while left:
            groups, after = public._micro_batch(work, needed, left, 64)
            assert sum(g.width for g in groups) <= 64
            held = [i for g in groups for i in g.samples]
            assert sorted(held + after) == left
            assert all(g.width >= needed[i] for g in groups for i in g.samples)
            left = after
            seen += held
        assert sorted(seen) == list(range(len(lengths)))


def test_chunks_of_one_sample_on_one_node_are_even():
    """A single sample cut into chunks: each rank has the same rows, and nearly the same area."""
    work = work_of([128_000])
    seconds = public._magi_group(work, 8, COST)
    even = (COST.linear * 128_000 + work.sparse[0] + work.full[0]) / 8
    assert even < seconds < 1.1 * even + 0.2


def test_the_benchmark_of_solvers_writes_the_agreed_schema(tmp_path, monkeypatch):
    out = tmp_path / "r.json"
    for name, cases in (("child", 3), ("worse", 12), ("public", 1)):
        arguments = ["x", "--only", name, "--cases", str(cases), "--json", str(out)]
        monkeypatch.setattr(sys, "argv", arguments)
        solvers.main()
    result = json.loads(out.read_text())
    assert result.keys() == KEYS
    assert {row["part"] for row in result["rows"]} == {"child", "worse", "public"}
    assert result["summary"]["child_gap_max"] <= 0.06
    assert result["summary"]["worse_than_baseline"] == 0
    assert result["summary"]["win_rate_vs_public"] == 1


def test_a_plan_with_everything_that_a_rank_needs():
    planner = planner_of(CONSTANTS, COST, parent_solver=False)
    lengths = np.r_[200_000, np.full(300, 900)]
    for rank in (0, 17, 63):
        plan = solvers.everything_that_a_rank_needs(planner, lengths, COST.shape.heads, rank)
        assert len(plan.ids) == 301


def test_calibration_on_this_machine(tmp_path, monkeypatch):
    """Small sizes of everything: the file can be read back, and says what was measured."""
    small = {
        "hidden": 256,
        "head_dim": 16,
        "window": 32,
        "block": 16,
        "top_k": 2,
        "expert_hidden": 64,
    }
    constants = {**CONSTANTS, "shape": {**CONSTANTS["shape"], **small}}
    (tmp_path / "constants.json").write_text(json.dumps(constants))
    monkeypatch.setitem(calibrate.ATTENTION_LENGTHS, "cpu", (32, 64, 128))
    monkeypatch.setitem(calibrate.SPARSE_LENGTH, "cpu", 128)
    monkeypatch.setitem(calibrate.ROWS, "cpu", 16)
    out = tmp_path / "c.json"
    monkeypatch.setattr(sys, "argv", ["x", "--device", "cpu", "--quick", "--out", str(out),
                                      "--constants", str(tmp_path / "constants.json")])  # fmt: skip
    calibrate.main()
    found = load(out)
    assert found.dense_flops > 0
    entries = json.loads(out.read_text())["coefficients"]
    measured = {name for name, entry in entries.items() if entry["source"] == "measured"}
    assert measured >= {"full_attention_flops", "topk_scores_flops", "moe_flops", "layer_seconds"}
    assert entries["across_ratio"]["source"] == "given"

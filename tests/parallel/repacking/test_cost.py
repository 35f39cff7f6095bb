"""The cost model against formulas written out, and calibration files."""

import json

import numpy as np
import pytest

from parallel.repacking.calibration import Calibration, load, names, read
from parallel.repacking.cost import CostModel, Memory
from parallel.repacking.shape import ModelShape
from tests.parallel.repacking.cases import COST, SHAPE, cost

SMALL = ModelShape(
    hidden=8, head_dim=4, q_heads=6, kv_heads=2, full_layers=1, sparse_layers=2, block=2, top_k=2,
    expert_hidden=16, experts_per_token=2, dense_layers=1, dense_hidden=32, vocab=10,
)  # fmt: skip


def test_operations_counted_one_by_one():
    lengths = np.array([1, 3, 9])
    rows = 13
    projections = 3 * 2 * 8 * 4 * (6 + 2 * 2 + 6)
    feed_forward = 2 * 6 * 8 * 16 * 2 + 6 * 8 * 32
    full = sum(4 * 6 * 4 * q for n in lengths for q in range(1, n + 1))
    seen = sum(4 * 6 * 4 * min(q, 4) for n in lengths for q in range(1, n + 1))
    scores = sum(2 * 6 * 4 * q / 2 for n in lengths for q in range(1, n + 1))
    trained = rows * (projections + feed_forward + 2 * 8 * 10) + full + 2 * seen
    expected = 3 * trained + 2 * scores  # no gradient flows through the choice of blocks
    assert SMALL.flops(lengths) == pytest.approx(expected)


def test_a_window_needs_no_scores():
    window = ModelShape(hidden=8, head_dim=4, q_heads=6, kv_heads=2, full_layers=0, sparse_layers=1,
                        sparse="window", window=3)  # fmt: skip
    seen = sum(min(q, 3) for q in range(1, 10))
    assert window.flops(np.array([9])) == pytest.approx(
        3 * (4 * 6 * 4 * seen + 9 * 2 * 8 * 4 * (6 + 4 + 6))
    )


def test_time_is_operations_by_rate():
    """On one rank, with everything at one rate and nothing to start."""
    flat = Calibration(
        full_attention_flops=1e12, full_attention_half_length=0, window_attention_flops=1e12,
        topk_attention_flops=1e12, topk_scores_flops=1e12, dense_flops=1e12, moe_flops=1e12,
        layer_seconds=0, peak_flops=1e12, all_to_all_rate={2: 1e9}, all_to_all_start={2: 0},
        across_ratio=7, across_seconds=0,
    )  # fmt: skip
    of = CostModel(SMALL, flat)
    lengths = np.array([1, 3, 9])
    work = of.work(np.arange(3), lengths)
    assert of.wide_seconds(1, work) == pytest.approx(SMALL.flops(lengths) / 1e12)


def test_bytes_of_the_all_to_alls():
    """Site 1: query, key and value heads that leave a rank; site 2: outputs that return to it."""
    shape = ModelShape(hidden=8, head_dim=4, q_heads=8, kv_heads=2, full_layers=1, sparse_layers=1)
    of = CostModel(shape, load("h200"), node_size=4)
    assert of.row_bytes((8, 2), 2) == pytest.approx((8 + 2 * 2 + 8) * 4 * 2 / 2)
    # Over four ranks each of the two key/value heads goes to two of them.
    assert of.row_bytes((8, 2), 4) == pytest.approx((8 + 2 * 4 + 8) * 4 * 2 * 3 / 4)
    inside, across = of.exchange((8, 2), 1, 4)[1], of.exchange((8, 2), 1, 8)[1]
    bytes_ratio = of.row_bytes((8, 2), 8) / of.row_bytes((8, 2), 4)
    assert across / inside == pytest.approx(7.0 * bytes_ratio)
    assert of.exchange((8, 2), 1, 1) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("overlap", "compute", "communication", "seen"),
    [(0, 3, 2, 5), (0.5, 3, 2, 4), (1, 3, 2, 3), (1, 1, 2, 2), (0.5, 1, 4, 4)],
)
def test_overlap_hides_a_share_and_no_more_than_the_compute(overlap, compute, communication, seen):
    assert cost(overlap=overlap).visible(np.float64(compute), np.float64(communication)) == seen


def test_the_busiest_rank_counts_where_heads_do_not_divide():
    assert COST.share(64, 32) == 1 / 32
    assert COST.share(40, 16) == 3 / 40
    assert COST.share(4, 8) == 1 / 4


def test_memory():
    of = cost(memory=Memory(capacity=1e9, static=4e8, per_row=1000))
    heads = (64 // 16 + 2 * 1 + 64 // 16) * 128 * 2
    assert of.rank_bytes(100, 1600, 16) == 4e8 + 100 * 1000 + 1600 * heads
    assert of.rank_bytes(of.row_limit(1600, 16), 1600, 16) == pytest.approx(1e9)
    most = of.parent_limit(16)
    assert of.rank_bytes(most / 16, most, 16) == pytest.approx(1e9)
    assert cost().row_limit(1, 1) == float("inf")


def test_shapes_that_cannot_be():
    with pytest.raises(ValueError, match="sparse=ring"):
        ModelShape(
            hidden=1,
            head_dim=1,
            q_heads=1,
            kv_heads=1,
            full_layers=1,
            sparse_layers=1,
            sparse="ring",
        )
    with pytest.raises(ValueError, match="dense_layers=3 of 2"):
        ModelShape(
            hidden=1,
            head_dim=1,
            q_heads=1,
            kv_heads=1,
            full_layers=1,
            sparse_layers=1,
            dense_layers=3,
        )


@pytest.mark.parametrize("name", names())
def test_calibrations_that_come_with_the_package_can_be_read(name):
    found = load(name)
    assert found.dense_flops > 0
    assert found.rate(1024) > 0
    entries = json.loads(read(name))["coefficients"]
    assert all(entry.get("note") for entry in entries.values() if entry["source"] == "derived")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["coefficients"].pop("moe_flops"), r"missing or unknown .*\['moe_flops'\]"),
        (
            lambda c: c["coefficients"]["moe_flops"].update(source="felt"),
            "source of moe_flops is 'felt'",
        ),
        (lambda c: c["coefficients"]["moe_flops"].update(value=-1), "moe_flops=-1 is below 0"),
        (lambda c: c.pop("coefficients"), "is no calibration file"),
    ],
)
def test_calibrations_that_cannot_be(change, message, tmp_path):
    data = json.loads(read("h200"))
    change(data)
    (tmp_path / "c.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "c.json")


def test_a_calibration_that_is_not_there():
    with pytest.raises(ValueError, match="no calibration a100: give a file, or one of"):
        load("a100")


def test_the_width_that_is_nearest_stands_in():
    found = load("h200")
    assert found.rate(64) == found.rate(8)
    assert SHAPE.sparse_heads == (64, 8)

"""The exchange's benchmark on two CPU ranks."""

import json
from argparse import Namespace

import pytest

from tests.ranks import run_ranks
from tests.test_benchmarks import KEYS


def measured(path):
    from benchmarks.repacking import exchange

    exchange.REPEATS, exchange.ROWS["cpu"] = 1, 64
    options = Namespace(
        device="cpu", quick=False, longs=2, checkpointing=False, calibration=None, json=path
    )
    return exchange.measure(options)


@pytest.mark.slow
def test_the_benchmark_of_the_exchange(tmp_path):
    rows, others = run_ranks(2, measured, tmp_path / "r.json")
    assert [row["what"] for row in rows] == ["exchange", "packing", "model"]
    assert [row["what"] for row in others] == [row["what"] for row in rows]
    result = json.loads((tmp_path / "r.json").read_text())
    assert result.keys() == KEYS
    assert set(rows[0]["seconds"]) == {"ours", "separate", "padded"}
    assert rows[0]["padded_rows_a_rank"] > rows[0]["rows_a_rank"] == 64
    assert 0 < rows[1]["share"] < 1
    assert rows[2]["predicted_seconds"] > 0

"""Every benchmark runs with --quick and writes the agreed schema."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

KEYS = {"name", "date", "command", "machine", "versions", "config", "rows", "summary"}


@pytest.mark.slow
def test_the_trunks_benchmark(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.trunk", "--device", "cpu", "--quick", "--json", tmp_path / "r.json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert result.keys() == KEYS
    assert {row["kind"] for row in result["rows"]} == {"plain", "ours"}
    assert result["summary"]["ours_tokens_per_second"] > 0


@pytest.mark.slow
def test_the_benchmark_of_tide_counts_what_the_layout_costs(tmp_path):
    """Of P parameters in bf16 on two ranks, gathered twice: 4P packed, 8P copied out, 6P packed."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tide", "--device", "cpu", "--quick", "--json", tmp_path / "r.json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert result.keys() == KEYS
    stock, tide = (result["summary"]["kinds"][kind]["bytes"] for kind in ("stock", "tide"))
    parameters = stock["gradients packed and cast"] / 6
    assert 1.6e6 < parameters < 1.65e6
    for cause, bytes_each in {
        "own shards packed for the all-gather": 4,
        "gathered, copied to parameters": 8,
        "moved by the reduce-scatter": 2,
    }.items():  # the root, a small part, is gathered once
        assert stock[cause] == pytest.approx(bytes_each * parameters, rel=0.03), cause
    layout = ("own shards packed for the all-gather", "gathered, copied to parameters",
              "gradients packed and cast", "own gradients staged")  # fmt: skip
    assert not any(cause in tide for cause in layout)
    assert tide["moved by the reduce-scatter"] == pytest.approx(parameters, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("name", ["host --quick", "network"])
def test_what_is_measured_on_gpus_runs_on_the_cpu(name, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "-m", *f"benchmarks.tide.{name}".split(), "--device", "cpu", "--json", tmp_path / "r.json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert result.keys() == KEYS
    assert "--nproc-per-node=2" in result["command"]


def test_the_page_of_figures_is_up_to_date():
    from benchmarks.performance import PAGE, page

    assert PAGE.read_text() == page()


def test_committed_results_have_the_schema():
    files = list((Path(__file__).parent.parent / "benchmarks" / "results").glob("*.json"))
    for file in files:
        assert json.loads(file.read_text()).keys() == KEYS, file

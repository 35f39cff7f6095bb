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


def test_the_page_of_figures_is_up_to_date():
    from benchmarks.performance import PAGE, page

    assert PAGE.read_text() == page()


def test_committed_results_have_the_schema():
    files = list((Path(__file__).parent.parent / "benchmarks" / "results").glob("*.json"))
    for file in files:
        assert json.loads(file.read_text()).keys() == KEYS, file
